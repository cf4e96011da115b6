// Numbers in the host's pinned memory that streams write, and wait for, by the functions of CUDA's driver.
#pragma once
#include "ipc.h"

namespace sim {
constexpr unsigned AT_LEAST = 0;  // CU_STREAM_WAIT_VALUE_GEQ

template <typename Use>
inline int use_number(void* stream, uint64_t address, bool is_write, const char* operation, Use use) {
  using Number = std::atomic<uint64_t>;
  auto* place = reinterpret_cast<char*>(address);
  auto block = block_at(place);
  if (!block || address % sizeof(Number)) return INVALID_VALUE;
  enqueue((int)(intptr_t)stream, operation, {{block, place, place + sizeof(Number), is_write}},
          [use, place, block] { use(*reinterpret_cast<Number*>(place)); });
  return SUCCESS;
}
}  // namespace sim

extern "C" {
int cuStreamWriteValue64_v2(void* stream, uint64_t address, uint64_t value, unsigned) {
  return sim::use_number(stream, address, true, "cuStreamWriteValue64", [value](auto& number) { number.store(value); });
}
// As a kernel, it holds up what is queued behind it in its hardware queue.
int cuStreamWaitValue64_v2(void* stream, uint64_t address, uint64_t value, unsigned flags) {
  if (flags != sim::AT_LEAST) return sim::INVALID_VALUE;
  return sim::use_number(stream, address, false, "cuStreamWaitValue64", [value](auto& number) {
    while ((int64_t)(number.load() - value) < 0) std::this_thread::sleep_for(std::chrono::microseconds(50));
  });
}
int cuMemHostRegister_v2(void* host, size_t size, unsigned) {
  constexpr int ALREADY_REGISTERED = 712;
  return sim::is_pinned(host) ? ALREADY_REGISTERED : sim::pin(reinterpret_cast<size_t>(host), size, 0);
}
int cuMemHostUnregister(void* host) { return sim::unpin(reinterpret_cast<size_t>(host)) ? sim::INVALID_VALUE : sim::SUCCESS; }
int cuMemHostGetDevicePointer_v2(uint64_t* address, void* host, unsigned) {
  auto block = sim::block_at(host);
  if (!block || !block->is_pinned) return sim::INVALID_VALUE;
  *address = reinterpret_cast<uint64_t>(host);
  return sim::SUCCESS;
}
}
