// What torch asks of a device: its guard and its random numbers.
#pragma once
#include "events.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace sim {
using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static Stream as_stream(int number) {
    std::lock_guard<std::mutex> lock(G);
    return Stream(Stream::UNSAFE, Device(DEVICE, (DeviceIndex)stream_of(number)->device), number);
  }
  static int index_of(Device device) { return device.has_index() ? device.index() : current_device; }
  static Event* event_of(void* event) { return static_cast<Event*>(event); }

  DeviceType type() const override { return DEVICE; }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return {DEVICE, (DeviceIndex)current_device}; }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < num_devices, "CUDA error: invalid device ordinal (simulated)");
    current_device = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override { current_device = device.index(); }
  Stream getStream(Device device) const override { return as_stream(current_stream(index_of(device))); }
  Stream getDefaultStream(Device device) const override { return as_stream(index_of(device)); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return as_stream(pooled_stream(index_of(device))); }
  Stream getNewStream(Device device, int) const override { return as_stream(new_stream(index_of(device))); }
  Stream exchangeStream(Stream stream) const override { return as_stream(set_current_stream((int)stream.id())); }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete event_of(event); }
  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event;
    event_of(*event)->record((int)stream.id());
  }
  void block(void* event, const Stream& stream) const override {
    if (event) event_of(event)->block((int)stream.id());
  }
  bool queryEvent(void* event) const override { return !event || event_of(event)->query(); }
  DeviceIndex deviceCount() const noexcept override { return (DeviceIndex)num_devices; }
  bool queryStream(const Stream& stream) const override { return is_idle((int)stream.id()); }
  void synchronizeStream(const Stream& stream) const override { synchronize((int)stream.id()); }
  void synchronizeEvent(void* event) const override {
    if (event) event_of(event)->synchronize();
  }
  void synchronizeDevice(const DeviceIndex device) const override { synchronize_device(device < 0 ? current_device : device); }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const Stream& stream) const override {
    record_stream(pointer, (int)stream.id());
  }
  double elapsedTime(void* begin, void* end, const DeviceIndex) const override {
    return event_of(begin)->milliseconds_to(*event_of(end));
  }
};

// As Philox: a seed and an offset, which are taken when a kernel is queued.
struct Random final : c10::GeneratorImpl {
  uint64_t seed_value = c10::default_rng_seed_val, offset = 0;
  explicit Random(int device)
      : c10::GeneratorImpl(Device(DEVICE, (DeviceIndex)device), c10::DispatchKeySet(KEY)) {}

  // A generator of the CPU for one kernel.
  at::Generator next() {
    auto made = at::make_generator<at::CPUGeneratorImpl>(seed_value * 0x9E3779B97F4A7C15ull + offset);
    offset += 4;
    return made;
  }
  void set_current_seed(uint64_t value) override {
    seed_value = value;
    offset = 0;
  }
  void set_offset(uint64_t value) override { offset = value; }
  uint64_t get_offset() const override { return offset; }
  uint64_t current_seed() const override { return seed_value; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom(true));
    return seed_value;
  }
  void set_state(const c10::TensorImpl& state) override {
    auto words = static_cast<const uint64_t*>(state.data());
    seed_value = words[0];
    offset = words[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::empty({16}, at::kByte);
    auto words = reinterpret_cast<uint64_t*>(state.data_ptr<uint8_t>());
    words[0] = seed_value;
    words[1] = offset;
    return state.getIntrusivePtr();
  }
  Random* clone_impl() const override {
    auto copy = new Random(device().index());
    copy->seed_value = seed_value;
    copy->offset = offset;
    return copy;
  }
};

inline const at::Generator& default_generator(int device) {
  static const std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (int one = 0; one < num_devices; ++one) made.push_back(at::make_generator<Random>(one));
    return made;
  }();
  return all.at(device);
}

}  // namespace sim
