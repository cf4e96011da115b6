// A device that is not there, for torch's CPU wheel: see README.md one folder up.
#include <torch/extension.h>

#include "autocast.h"
#include "collectives.h"
#include "hooks.h"
#include "ipc.h"
#include "peers.h"
#include "values.h"

namespace sim {

TORCH_LIBRARY_IMPL(_, SIMULATED_MAKE, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, SIMULATED_MAKE, library) {
  library.impl("empty.memory_format", &empty_memory_format);
  library.impl("empty_strided", &empty_strided);
  library.impl("resize_", &resize_);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("as_strided", &as_strided);
  library.impl("view", &view);
  library.impl("_reshape_alias", &reshape_alias);
  library.impl("unfold", &unfold);
  library.impl("_local_scalar_dense", &item);
  library.impl("record_stream", &record_stream_);
  library.impl("copy_", &copy_);
  library.impl("native_dropout", &native_dropout);
}

// Where the CPU has a kernel of its own beside a composite one, ours is the CPU's: the same bits.
static bool as_on_cpu = [] {
  using c10::DispatchKey;
  auto library = new torch::Library(torch::Library::IMPL, "aten", KEY, __FILE__, __LINE__);
  for (auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    auto operation = c10::Dispatcher::singleton().findOp(name);
    if (!operation || !operation->hasSchema()) continue;
    if (!operation->hasKernelForDispatchKey(DispatchKey::CPU) || operation->hasKernelForDispatchKey(KEY)) continue;
    if (!operation->hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd)) continue;
    bool is_view = false;
    for (auto& one : operation->schema().returns()) is_view |= one.alias_info() && !one.alias_info()->isWrite();
    if (is_view) continue;
    auto full = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
  return true;
}();

C10_REGISTER_GUARD_IMPL(SIMULATED_MAKE, Guard)
static bool is_registered = [] {
  if (auto devices = std::getenv("SIMULATED_DEVICES")) num_devices = std::max(1, std::atoi(devices));
  c10::SetAllocator(DEVICE, &device_allocator);
  register_hooks();
  register_symmetric_memory();
  return true;
}();

static std::map<std::string, int64_t> statistics(int device) {
  std::lock_guard<std::mutex> lock(G);
  auto& memory = memory_of[device];
  return {{"allocated", memory.allocated},   {"deferred", memory.deferred}, {"peak", memory.peak},
          {"peak_held", memory.peak_held},   {"capacity", memory.capacity}, {"retries", memory.retries},
          {"pinned", memory.pinned},         {"asked", memory.asked},       {"symmetric", memory.symmetric},
          {"host_waits", num_host_waits},    {"operations", num_operations}, {"streams", (int64_t)streams.size()}};
}

// The host reads or writes a tensor's bytes itself, as gloo does with pinned memory.
static void host_touch(const at::Tensor& tensor, bool is_write, const std::string& operation) {
  if (!tensor.numel() || !block_of(tensor)) return;
  auto touched = touch_of(tensor, is_write);
  bool found;
  size_t from;
  {
    std::lock_guard<std::mutex> lock(G);
    from = reports.size();
    tick(host_clock(), host_thread().place);
    found = checking && touch(touched, host_thread().place, host_clock(), operation);
  }
  if (found) explain(from);
}

// A kernel in Python, such as one of NCCL; it gets aliases on the CPU.
static void enqueue_python(int stream, const std::string& name, const std::vector<at::Tensor>& reads,
                           const std::vector<at::Tensor>& writes, py::function function) {
  std::vector<Touch> touches;
  std::vector<at::Tensor> aliases;
  auto add = [&](const at::Tensor& tensor, bool is_write) {
    if (tensor.numel()) touches.push_back(touch_of(tensor, is_write));
    aliases.push_back(is_ours(tensor) ? alias_of(tensor) : tensor);
  };
  for (auto& tensor : reads) add(tensor, false);
  for (auto& tensor : writes) add(tensor, true);
  auto drop = [](py::function* held) {
    py::gil_scoped_acquire gil;
    delete held;
  };
  auto held = std::shared_ptr<py::function>(new py::function(std::move(function)), drop);
  py::gil_scoped_release release;
  enqueue(stream, name, touches, [held, aliases] {
    py::gil_scoped_acquire gil;
    (*held)(aliases);
  });
}

static void configure(bool check, int most_delay, double share, unsigned new_seed) {
  std::lock_guard<std::mutex> lock(G);
  checking = check;
  most_delay_us = most_delay;
  delayed_share = share;
  seed = new_seed;
  for (auto* stream : streams) stream->random.seed(seed * 7919 + stream->number);
}

}  // namespace sim
PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace sim;
  py::class_<Event>(module, "Event")
      .def(py::init<>())
      .def("record", &Event::record)
      .def("block", &Event::block)
      .def("query", &Event::query)
      .def("peek", &Event::peek)
      .def("synchronize", &Event::synchronize)
      .def("milliseconds_to", &Event::milliseconds_to);
  module.attr("device_type") = (int)DEVICE;
  module.def("collectives", [](BackendP gloo) -> BackendP { return c10::make_intrusive<Collectives>(std::move(gloo)); });
  module.def("num_devices", [] { return num_devices; });
  module.def("current_device", [] { return current_device; });
  module.def("set_device", [](int device) { Guard().setDevice({DEVICE, (DeviceIndex)device}); });
  module.def("new_stream", &new_stream);
  module.def("current_stream", &current_stream);
  module.def("set_current_stream", &set_current_stream);
  module.def("device_of_stream", [](int number) { return Guard::as_stream(number).device_index(); });
  module.def("synchronize_stream", &synchronize);
  module.def("synchronize_device", &synchronize_device);
  module.def("is_idle", &is_idle);
  module.def("resize_storage", [](const at::Storage& storage, size_t size) { resize_storage(storage.unsafeGetStorageImpl(), size); });
  module.def("default_generator", [](int device) { return default_generator(device); });
  module.def("next_of", [](const at::Generator& generator) { return static_cast<Random*>(generator.unsafeGetGeneratorImpl())->next(); });
  module.def("record_stream", [](const at::Tensor& tensor, int number) { record_stream(tensor.storage().data_ptr(), number); });
  module.def("begin_thread", &begin_thread);
  module.def("known_here", &known_here);
  module.def("learn", [](const Known& known) { learn(known); });
  module.def("told", &told);
  module.def("hear", &hear);
  module.def("host_touch", &host_touch);
  module.def("pin", &pin);
  module.def("unpin", &unpin);
  module.def("enqueue", &enqueue_python);
  module.def("configure", &configure, py::arg("check"), py::arg("most_delay_us"), py::arg("delayed_share"), py::arg("seed"));
  module.def("set_connections", [](int count) {
    std::lock_guard<std::mutex> lock(G);
    TORCH_CHECK(streams.empty(), "set the number of hardware queues before the first stream");
    num_connections = count;
  });
  module.def("set_capacity", [](int device, int64_t size) {
    std::lock_guard<std::mutex> lock(G);
    memory_of[device].capacity = size;
  });
  module.def("statistics", &statistics);
  module.def("reset_peak", [](int device) {
    std::lock_guard<std::mutex> lock(G);
    auto& memory = memory_of[device];
    memory.peak = memory.allocated;
    memory.peak_held = memory.allocated + memory.deferred;
  });
  module.def("reports", [] {
    std::lock_guard<std::mutex> lock(G);
    std::vector<std::tuple<std::string, std::string, std::string>> all;
    for (auto& one : reports) all.emplace_back(one.kind, one.text, one.stack);
    return all;
  });
  module.def("clear_reports", [] {
    std::lock_guard<std::mutex> lock(G);
    reports.clear();
  });
  module.def("running", [] {
    std::lock_guard<std::mutex> lock(G);
    return running;
  });
}
