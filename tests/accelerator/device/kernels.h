// Kernels: those of the CPU, queued. Shapes come from the meta kernels, at once.
#pragma once
#include "torch_side.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

namespace sim {
using c10::IValue;
using Values = std::vector<IValue>;
using OfTensor = std::function<at::Tensor(const at::Tensor&)>;

inline bool is_ours(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == DEVICE; }
inline int stream_for(const at::Tensor& tensor) { return current_stream(tensor.device().index()); }

inline Touch touch_of(const at::Tensor& tensor, bool is_write) {
  auto begin = static_cast<const char*>(tensor.const_data_ptr());
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  return {block_of(tensor), begin, begin + (last + 1) * tensor.element_size(), is_write};
}

// A tensor of the device as one of the CPU, over the same memory, which it keeps whoever frees it.
inline at::Tensor alias_of(const at::Tensor& tensor) {
  auto options = tensor.options().device(at::kCPU);
  if (!tensor.numel()) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  BlockP block = block_of(tensor);
  TORCH_CHECK(block, "a tensor of the simulated device without a block of its own");
  auto alias = at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), [block](void*) {}, options);
  if (tensor.is_conj()) alias._set_conj(true);
  if (tensor.is_neg()) alias._set_neg(true);
  return alias;
}
inline at::Tensor meta_of(const at::Tensor& tensor) {
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
}

// A number of the host, as it is when the kernel is queued; one that Python gave has no say in the result's type.
inline at::Tensor number_of(const at::Tensor& tensor) {
  auto number = tensor.clone();
  number.unsafeGetTensorImpl()->set_wrapped_number(tensor.unsafeGetTensorImpl()->is_wrapped_number());
  return number;
}

// A value with each of its tensors replaced, and the device.
inline IValue replaced(const IValue& value, c10::Device device, const OfTensor& of) {
  auto one = [&](const at::Tensor& tensor) { return tensor.defined() ? of(tensor) : tensor; };
  if (value.isTensor()) return one(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (at::Tensor tensor : value.toTensorList()) list.push_back(one(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (std::optional<at::Tensor> tensor : value.toOptionalTensorList())
      list.push_back(tensor && tensor->defined() ? std::optional<at::Tensor>(of(*tensor)) : tensor);
    return list;
  }
  if (value.isDevice() && value.toDevice().type() == DEVICE) return device;
  return value;
}

// What the CPU's kernel takes otherwise than CUDA's: the statistics of a layer's normalisation have the input's type there, and are
// of single precision here.
inline void adapt(const std::string& name, Values& values) {
  if (name != "native_layer_norm_backward") return;
  auto type = values[1].toTensor().scalar_type();
  for (size_t i : {3, 4}) values[i] = values[i].toTensor().to(type);
}

// All that the shapes of an operation's results follow from, as a text; none where an argument is of a kind that is rare.
inline std::optional<std::string> key_of(const c10::OperatorHandle& operation, const Values& arguments) {
  std::ostringstream key;
  auto shape = [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return void(key << 'u');
    key << tensor.sizes() << tensor.strides() << tensor.scalar_type() << tensor.device().type() << tensor.is_conj() << tensor.is_neg()
        << tensor.unsafeGetTensorImpl()->is_wrapped_number();
  };
  key << &operation.schema() << at::get_default_dtype().name() << at::globalContext().deterministicAlgorithms();
  for (auto& one : arguments) {
    key << '|' << one.tagKind() << ' ';
    if (one.isTensor()) {
      shape(one.toTensor());
    } else if (one.isTensorList()) {
      for (at::Tensor tensor : one.toTensorList()) shape(tensor);
    } else if (one.isOptionalTensorList()) {
      for (std::optional<at::Tensor> tensor : one.toOptionalTensorList()) shape(tensor.value_or(at::Tensor()));
    } else if (one.isInt() || one.isDouble() || one.isBool() || one.isIntList() || one.isDoubleList() || one.isBoolList() ||
               one.isString() || one.isDevice()) {
      key << std::hexfloat << one;
    } else if (!one.isNone() && !one.isGenerator()) {
      return std::nullopt;
    }
  }
  return key.str();
}

// The meta kernels of some operations are Python's, as that of a layer's normalisation, and take longer than all else here.
class KnownShapes {
 public:
  std::optional<Values> find(const std::string& key) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = shapes_.find(key);
    return found == shapes_.end() ? std::nullopt : std::optional<Values>(found->second);
  }
  void keep(const std::string& key, const Values& shapes) {
    std::lock_guard<std::mutex> lock(mutex_);
    shapes_.emplace(key, shapes);
  }

 private:
  std::mutex mutex_;
  std::unordered_map<std::string, Values> shapes_;
};
inline auto& known_shapes = *new KnownShapes;  // never destroyed: threads of streams outlive what is

// One call of an operation, from its arguments on torch's stack to its results there.
class Call {
 public:
  Call(const c10::OperatorHandle& operation, torch::jit::Stack* stack)
      : operation_(operation),
        schema_(operation.schema()),
        name_(schema_.name().substr(6)),
        stack_(stack),
        begin_(stack->size() - schema_.arguments().size()),
        arguments_(stack->begin() + begin_, stack->end()),
        guard_(device_of_arguments()),
        stream_(current_stream(current_device)) {}

  void run() {
    size_outputs();
    take_arguments();
    if (writes_ && returns_tensors())
      run_in_place();
    else if (auto shapes = shapes_of_results())
      run_with_shapes(*shapes);
    else
      run_and_wait();
  }

 private:
  const c10::OperatorHandle& operation_;
  const c10::FunctionSchema& schema_;
  std::string name_;
  torch::jit::Stack* stack_;
  size_t begin_;
  Values arguments_;
  c10::DeviceGuard guard_;
  int stream_;
  Values on_host_;  // the arguments as the kernel gets them
  std::vector<Touch> touches_;
  bool writes_ = false;

  // As kernels of CUDA: tensors of one device, and that of the first tensor is the current one meanwhile.
  c10::Device device_of_arguments() const {
    std::optional<c10::Device> device;
    auto look = [&](const at::Tensor& tensor) {
      if (is_ours(tensor)) {
        TORCH_CHECK(!device || *device == tensor.device() || name_ == "copy_", "Expected all tensors to be on the same device, but found ",
                    *device, " and ", tensor.device(), " in ", name_);
        if (!device) device = tensor.device();
      }
      return tensor;
    };
    for (auto& argument : arguments_) replaced(argument, c10::Device(DeviceType::CPU), look);
    for (auto& argument : arguments_)
      if (!device && argument.isDevice() && argument.toDevice().has_index()) device = argument.toDevice();
    return device ? *device : c10::Device(DEVICE, (DeviceIndex)current_device);
  }
  bool is_out(size_t i) const {
    auto& argument = schema_.arguments()[i];
    return argument.kwarg_only() && argument.alias_info() && argument.alias_info()->isWrite();
  }
  bool returns_tensors() const {
    bool all = true;
    for (auto& one : schema_.returns())
      all &= one.type()->isSubtypeOf(*c10::TensorType::get()) || one.type()->isSubtypeOf(*c10::ListType::ofTensors());
    return all;
  }
  Values as_meta() const {
    Values metas;
    for (auto& argument : arguments_) {
      auto meta = replaced(argument, c10::Device(DeviceType::Meta), [](const at::Tensor& t) { return is_ours(t) ? meta_of(t) : t; });
      metas.push_back(meta.isGenerator() ? IValue() : meta);
    }
    return metas;
  }
  static Values call(const c10::OperatorHandle& operation, Values values) {
    adapt(operation.schema().name().substr(6), values);
    torch::jit::Stack stack(std::move(values));
    operation.callBoxed(&stack);
    return stack;
  }
  void give(Values results) {
    stack_->erase(stack_->begin() + begin_, stack_->end());
    for (auto& result : results) stack_->push_back(std::move(result));
  }

  // out= of no elements gets the size of the result.
  void size_outputs() {
    bool is_needed = false;
    for (size_t i = 0; i < arguments_.size(); ++i) is_needed |= is_out(i) && arguments_[i].isTensor() && !arguments_[i].toTensor().numel();
    if (!is_needed) return;
    Values metas = as_meta();
    call(operation_, metas);
    for (size_t i = 0; i < arguments_.size(); ++i) {
      if (!is_out(i) || !arguments_[i].isTensor() || !is_ours(arguments_[i].toTensor())) continue;
      auto& ours = arguments_[i].toTensor();
      auto& meta = metas[i].toTensor();
      if (ours.sizes().equals(meta.sizes())) continue;
      ours.resize_(meta.sizes());
      ours.unsafeGetTensorImpl()->set_sizes_and_strides(meta.sizes(), meta.strides());
    }
  }
  void take_arguments() {
    for (size_t i = 0; i < arguments_.size(); ++i) {
      auto info = schema_.arguments()[i].alias_info();
      bool is_written = info && info->isWrite();
      writes_ |= is_written;
      on_host_.push_back(replaced(arguments_[i], c10::Device(DeviceType::CPU), [&](const at::Tensor& tensor) {
        if (!is_ours(tensor)) return number_of(tensor);
        if (tensor.numel()) touches_.push_back(touch_of(tensor, is_written));
        return alias_of(tensor);
      }));
      bool is_default = arguments_[i].isNone() && schema_.arguments()[i].name() == "generator";
      if (arguments_[i].isGenerator() || is_default) {
        auto generator = is_default ? default_generator(current_device) : arguments_[i].toGenerator();
        on_host_[i] = static_cast<Random*>(generator.unsafeGetGeneratorImpl())->next();
      }
    }
    for (auto& one : schema_.returns())
      TORCH_CHECK(!one.alias_info() || one.alias_info()->isWrite(), "simulated device: no kernel for the view ", name_);
  }

  // In place, or out=: what is returned is what was given. A kernel may resize what it gets as out=: it gets another tensor.
  void run_in_place() {
    std::vector<size_t> outs;
    for (size_t i = 0; i < arguments_.size(); ++i)
      if (is_out(i) && on_host_[i].isTensor()) outs.push_back(i);
    enqueue(stream_, name_, touches_, [operation = operation_, on_host = on_host_, outs] {
      Values given = on_host;
      for (auto i : outs) given[i] = at::empty({0}, on_host[i].toTensor().options());
      Values kept = given;
      call(operation, given);
      for (auto i : outs) on_host[i].toTensor().copy_(kept[i].toTensor());
    });
    Values results;
    for (auto& one : schema_.returns())
      for (size_t i = 0; i < arguments_.size(); ++i) {
        auto info = schema_.arguments()[i].alias_info();
        if (info && one.alias_info() && info->beforeSets() == one.alias_info()->beforeSets()) {
          results.push_back(arguments_[i]);
          break;
        }
      }
    TORCH_CHECK(results.size() == schema_.returns().size(), "simulated device: what does ", name_, " return?");
    give(std::move(results));
  }
  std::optional<Values> shapes_of_results() const {
    if (!returns_tensors()) return std::nullopt;
    auto key = key_of(operation_, arguments_);
    if (auto known = key ? known_shapes.find(*key) : std::nullopt) return known;
    try {
      auto shapes = call(operation_, as_meta());
      if (key) known_shapes.keep(*key, shapes);
      return shapes;
    } catch (const std::exception&) {
      return std::nullopt;  // its shape depends on its data
    }
  }
  void run_with_shapes(const Values& shapes) {
    Values results;
    std::vector<at::Tensor> targets;
    c10::Device device(DEVICE, (DeviceIndex)current_device);
    for (auto& shape : shapes)
      results.push_back(replaced(shape, device, [&](const at::Tensor& meta) {
        auto made = at::empty_strided(meta.sizes(), meta.strides(), meta.options().device(device));
        if (made.numel()) touches_.push_back(touch_of(made, true));
        targets.push_back(alias_of(made));
        return made;
      }));
    enqueue(stream_, name_, touches_, [operation = operation_, on_host = on_host_, targets] {
      size_t i = 0;
      auto fill = [&](const at::Tensor& result) {
        if (!result.defined()) return result;
        at::Tensor target = targets[i++];
        target.copy_(result);
        return result;
      };
      for (auto& value : call(operation, on_host)) replaced(value, c10::Device(DeviceType::CPU), fill);
    });
    give(std::move(results));
  }
  // The host has to know the result, or its shape: it waits.
  void run_and_wait() {
    enqueue(stream_, name_, touches_, [] {});
    synchronize(stream_);
    c10::Device device(DEVICE, (DeviceIndex)current_device);
    Values results;
    for (auto& value : call(operation_, on_host_))
      results.push_back(replaced(value, device, [&](const at::Tensor& tensor) { return tensor.to(device); }));
    give(std::move(results));
  }
};

inline void fallback(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  Call(operation, stack).run();
}

// Operations that the CPU's kernel cannot do for us

inline c10::DispatchKeySet keys() { return c10::DispatchKeySet(KEY); }
inline c10::Device device_or_current(std::optional<c10::Device> device) {
  return device && device->has_index() ? *device : c10::Device(DEVICE, (DeviceIndex)current_device);
}
inline at::Tensor empty_memory_format(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                                      std::optional<c10::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device_or_current(device));
  return at::detail::empty_generic(size, &device_allocator, keys(), c10::dtype_or_default(dtype), format);
}
inline at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                                std::optional<at::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device_or_current(device));
  return at::detail::empty_strided_generic(size, stride, &device_allocator, keys(), c10::dtype_or_default(dtype));
}
inline void resize_storage(c10::StorageImpl* storage, size_t size) {
  TORCH_CHECK(storage->resizable(), "Trying to resize storage that is not resizable");
  c10::DeviceGuard guard(storage->device());
  c10::DataPtr fresh = device_allocator.allocate(size);
  if (size_t common = std::min(size, storage->nbytes())) {
    BlockP from = block_of(storage), to = block_of(fresh);
    enqueue(current_stream(current_device), "resize_",
            {{from, from->begin, from->begin + common, false}, {to, to->begin, to->begin + common, true}},
            [from, to, common] { memcpy(to->begin, from->begin, common); });
  }
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(size);
}
inline const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  int64_t count = 1;
  for (auto extent : size) count *= extent;
  size_t needed = (count + self.storage_offset()) * self.element_size();
  if (self.storage().nbytes() < needed) resize_storage(self.storage().unsafeGetStorageImpl(), needed);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}
inline at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(source);
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return self;
}
inline at::Tensor as_strided(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}
inline at::Tensor view(const at::Tensor& self, c10::IntArrayRef size) { return at::native::view(self, size); }
inline at::Tensor reshape_alias(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}
inline at::Tensor unfold(const at::Tensor& self, int64_t dim, int64_t size, int64_t step) { return at::native::unfold(self, dim, size, step); }
inline at::Scalar item(const at::Tensor& self) {
  int stream = stream_for(self);
  enqueue(stream, "item", {touch_of(self, false)}, [] {});
  synchronize(stream);
  return alias_of(self).item();
}
inline void record_stream_(at::Tensor& self, Stream stream) { record_stream(self.storage().data_ptr(), (int)stream.id()); }

// Between devices, and to and from the host: pageable memory of the host is read at once and written before this returns.
inline at::Tensor& copy_(at::Tensor& self, const at::Tensor& from, bool non_blocking) {
  if (!self.numel()) return self;
  at::Tensor source = from.expand_as(self);
  at::Tensor target = is_ours(self) ? alias_of(self) : self;
  bool is_pageable_source = !block_of(source), is_pageable_target = !block_of(self);
  std::vector<Touch> touches;
  if (!is_pageable_source) touches.push_back(touch_of(source, false));
  if (!is_pageable_target) touches.push_back(touch_of(self, true));
  source = is_ours(source) ? alias_of(source) : is_pageable_source ? source.clone() : source;
  bool is_on_device = is_ours(self) && is_ours(from);
  auto name = is_on_device ? "copy_" : is_ours(self) ? "copy_ (from host)" : "copy_ (to host)";
  int stream = stream_for(is_ours(from) ? from : self);
  int other = stream_for(self);
  bool is_across = is_on_device && self.device() != from.device();
  auto order = [](int before, int after) {
    Event event;
    event.record(before);
    event.block(after);
  };
  if (is_across) order(other, stream);  // as CUDA's: the current streams of both devices wait for each other
  enqueue(stream, name, touches, [target, source]() mutable { target.copy_(source); });
  if (is_across) order(stream, other);
  if (!is_on_device && (!non_blocking || is_pageable_target)) synchronize(stream);
  return self;
}
inline std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool>) {
  auto mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {input * mask * (p < 1 ? 1 / (1 - p) : 0.0), mask};
}

}  // namespace sim
