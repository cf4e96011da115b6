// What torch asks of a make of device beside that: the hooks for CUDA, or those for one that it does not know.
#pragma once
#include "kernels.h"

#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>

namespace sim {

template <typename Interface>
struct Hooks : Interface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return (DeviceIndex)num_devices; }
  DeviceIndex getCurrentDevice() const override { return (DeviceIndex)sim::current_device; }
  void setCurrentDevice(DeviceIndex device) const override { Guard().setDevice({DEVICE, device}); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override { return Guard().exchangeDevice({DEVICE, device}).index(); }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
    return default_generator(device < 0 ? sim::current_device : device);
  }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<Random>(device < 0 ? sim::current_device : device);
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  c10::Device getDeviceFromPtr(void* pointer) const override {
    auto block = block_at(pointer);
    TORCH_CHECK(block && !block->is_pinned, "The specified pointer resides on host memory and is not registered with the device.");
    std::lock_guard<std::mutex> lock(G);
    return {DEVICE, (DeviceIndex)stream_of(block->stream)->device};
  }
};

struct CUDAHooks final : Hooks<at::CUDAHooksInterface> {
  bool hasCUDA() const override { return true; }
  int getNumGPUs() const override { return num_devices; }
  DeviceIndex current_device() const override { return (DeviceIndex)sim::current_device; }
  at::Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
  void deviceSynchronize(DeviceIndex device) const override { Guard().synchronizeDevice(device); }
};

struct PrivateUse1Hooks final : Hooks<at::PrivateUse1HooksInterface> {
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    resize_storage(storage.unsafeGetStorageImpl(), size);
  }
};

// Before torch looks for CUDA, which it finds by these.
inline void register_hooks() {
  if constexpr (DEVICE == DeviceType::CUDA)
    at::CUDAHooksRegistry()->Register("CUDAHooks", [](at::CUDAHooksArgs) -> std::unique_ptr<at::CUDAHooksInterface> {
      return std::make_unique<CUDAHooks>();
    });
  else
    at::RegisterPrivateUse1HooksInterface(new PrivateUse1Hooks);
}

}  // namespace sim
