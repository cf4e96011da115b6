// Memory: an allocator that recycles blocks per stream, as CUDA's caching one does, and poisons them; pinned memory of the host.
#pragma once
#include "make.h"
#include "streams.h"

#include <ATen/Context.h>
#include <c10/core/Allocator.h>
#include <c10/core/StorageImpl.h>

#include <bit>
#include <cstring>

namespace sim {
constexpr size_t PAGE = 4096;
// A block is whole pages, so that it can be lent, and begins behind one, as one that was cut out of a larger allocation.
inline size_t size_with_page(size_t size) { return PAGE + (size + PAGE - 1) / PAGE * PAGE; }
constexpr int POISON = 0xFF;  // NaN in every floating-point type

// An access to memory that was freed, and that may be handed out again before the access has happened.
struct Ghost {
  uint64_t block;
  size_t size;
  Access access;
};
// Freed memory that other streams may still use, as record_stream() said: the host has to see their events first.
struct Deferred {
  int device;
  size_t size;
  std::vector<MomentP> moments;
};

struct DeviceMemory {
  int64_t allocated = 0, deferred = 0;
  int64_t peak = 0;       // of what is allocated
  int64_t peak_held = 0;  // likewise with what cannot be handed out yet
  int64_t capacity = int64_t(1) << 34;
  int64_t symmetric = 0;  // bytes of symmetric memory, of which the allocator knows nothing
  int64_t asked = 0;    // events of another device that were asked for while it was the current one: CUDA makes room for that
  int64_t pinned = 0;   // bytes of the host that were pinned while it was the current device: it keeps room for them
  int64_t retries = 0;  // how often it was full, and waited for all that runs
};
inline std::map<int, DeviceMemory> memory_of;  // by device
inline std::map<uint64_t, BlockP> live;
inline uint64_t next_block = 1;
inline std::deque<Deferred> deferred;
inline std::map<int, std::vector<Ghost>> ghosts;                                         // by the stream whose memory it is
inline std::map<std::pair<int, size_t>, std::vector<std::shared_ptr<char>>> free_memory;  // likewise, and by size

inline void check_not_open(Block& block);

inline void free_block(void* context) {
  std::unique_ptr<BlockP> holder(static_cast<BlockP*>(context));
  BlockP block = *holder;
  std::lock_guard<std::mutex> lock(G);
  live.erase(block->id);
  if (block->is_pinned) return;  // the host's caching allocator waits for the streams that copied from it
  int device = stream_of(block->stream)->device;
  auto& memory = memory_of[device];
  memory.allocated -= block->size;
  Clock clock = host_clock();  // what the thread that frees it knows to be over: then it is over for everybody who gets the memory
  for (auto& access : block->accesses)
    if (time_of(clock, access.place) < access.when && access.place != place_of_stream(block->stream) &&
        !(is_stream(access.place) && block->recorded.count(number_of(access.place))))
      ghosts[block->stream].push_back({block->id, block->size, access});
  if (block->file) check_not_open(*block);
  if (block->recorded.empty()) {
    if (!block->file) free_memory[{block->stream, block->size}].push_back(block->memory);
    return;
  }
  std::vector<MomentP> moments;
  for (int number : block->recorded) moments.push_back(stream_of(number)->mark());
  deferred.push_back({device, block->size, moments});
  memory.deferred += block->size;
}

inline void reclaim() {  // under G
  for (auto it = deferred.begin(); it != deferred.end();) {
    bool is_over = true;
    for (auto& moment : it->moments) is_over &= moment->was_reached();
    if (is_over) memory_of[it->device].deferred -= it->size;
    it = is_over ? deferred.erase(it) : it + 1;
  }
}

// Take a block's bytes from the device; true: they may be those of a block that another stream still uses.
inline bool take_memory(Block& block, int device, size_t& first_report) {
  std::unique_lock<std::mutex> lock(G);
  auto& memory = memory_of[device];
  int64_t size = block.size;
  block.id = next_block++;
  reclaim();
  auto fits = [&] { return memory.allocated + memory.deferred + memory.symmetric + size <= memory.capacity; };
  if (!fits()) {  // as cudaFree of what is cached
    ++memory.retries;
    lock.unlock();
    synchronize_device(device);
    lock.lock();
    reclaim();
  }
  TORCH_CHECK_WITH(OutOfMemoryError, fits(), "CUDA out of memory (simulated)");
  first_report = reports.size();
  memory.allocated += size;
  memory.peak = std::max(memory.peak, memory.allocated);
  memory.peak_held = std::max(memory.peak_held, memory.allocated + memory.deferred);
  auto& cached = free_memory[{block.stream, block.size}];
  if (!cached.empty()) {
    block.memory = cached.back();
    cached.pop_back();
  }
  Clock clock = stream_of(block.stream)->clock;
  join(clock, host_clock());
  bool found = false;
  std::vector<Ghost> left;
  for (auto& ghost : ghosts[block.stream]) {
    if (time_of(clock, ghost.access.place) >= ghost.access.when) continue;
    left.push_back(ghost);
    if (!checking) continue;  // whatever its size: freed blocks are split, and neighbours merged
    found = true;
    reports.push_back({"reuse",
                       std::to_string(size) + " bytes allocated on stream " + std::to_string(block.stream) + " may be those of block " +
                           std::to_string(ghost.block) + " (" + std::to_string(ghost.size) + " bytes), freed while " +
                           ghost.access.operation + " on " + name_of(ghost.access.place) + " may still " +
                           (ghost.access.is_write ? "write" : "read") + " it",
                       ""});
  }
  if (found) left.clear();  // once is enough
  ghosts[block.stream] = left;
  return found;
}

inline c10::DataPtr new_block(size_t size, bool is_pinned, int device) {
  auto block = std::make_shared<Block>();
  block->size = size;
  block->is_pinned = is_pinned;
  block->stream = current_stream(device);
  size_t first_report = 0;
  bool found = false;
  if (is_pinned) {
    std::lock_guard<std::mutex> lock(G);
    block->id = next_block++;
    memory_of[device].pinned += std::bit_ceil(size);  // as torch's allocator
  } else {
    found = take_memory(*block, device, first_report);
  }
  if (!block->memory) block->memory = std::shared_ptr<char>(static_cast<char*>(::aligned_alloc(PAGE, size_with_page(size))), ::free);
  block->begin = block->memory.get() + PAGE;
  {
    std::lock_guard<std::mutex> lock(G);
    live[block->id] = block;
  }
  if (found) explain(first_report);
  if (is_pinned)
    memset(block->begin, POISON, size);
  else
    enqueue(block->stream, "allocation", {{block, block->begin, block->begin + size, true}},
            [block] { memset(block->begin, POISON, block->size); });
  auto place = is_pinned ? c10::Device(DeviceType::CPU) : c10::Device(DEVICE, (c10::DeviceIndex)device);
  return {block->begin, new BlockP(block), &free_block, place};
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    return size ? new_block(size, false, current_device) : c10::DataPtr(nullptr, c10::Device(DEVICE, (c10::DeviceIndex)current_device));
  }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }
};
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    return size ? new_block(size, true, current_device) : c10::DataPtr(nullptr, c10::Device(DeviceType::CPU));
  }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }
};
inline DeviceAllocator device_allocator;
inline PinnedAllocator pinned_allocator;

// Memory of the host that is there already, pinned from now on.
inline std::map<char*, BlockP> pinned_blocks;
inline int pin(size_t address, size_t size, int) {
  auto block = std::make_shared<Block>();
  block->begin = reinterpret_cast<char*>(address);
  block->size = size;
  block->is_pinned = true;
  block->stream = current_stream(current_device);
  std::lock_guard<std::mutex> lock(G);
  block->id = next_block++;
  memory_of[current_device].pinned += size;
  live[block->id] = pinned_blocks[block->begin] = block;
  return 0;
}
// Whoever unpins memory must know that no stream uses it any more.
inline int unpin(size_t address) {
  std::lock_guard<std::mutex> lock(G);
  auto found = pinned_blocks.find(reinterpret_cast<char*>(address));
  if (found == pinned_blocks.end()) return 1;
  BlockP block = found->second;
  for (auto& access : block->accesses)
    if (checking && time_of(host_clock(), access.place) < access.when)
      reports.push_back({"reuse", "block " + std::to_string(block->id) + " is unpinned while " + access.operation + " on " +
                                      name_of(access.place) + " may still use it", ""});
  live.erase(block->id);
  pinned_blocks.erase(found);
  return 0;
}

// The block that a storage has from the allocator; none for an alias of memory, such as DLPack makes.
inline BlockP own_block_of(const c10::DataPtr& pointer) {
  return pointer.get_deleter() == &free_block && pointer.get_context() ? *static_cast<BlockP*>(pointer.get_context()) : nullptr;
}
inline BlockP block_at(const void* pointer) {
  std::lock_guard<std::mutex> lock(G);
  for (auto& [id, block] : live)
    if (pointer >= block->begin && pointer < block->begin + block->size) return block;
  return nullptr;
}
inline bool is_pinned(const void* pointer) {
  auto block = block_at(pointer);
  return block && block->is_pinned;
}
// The block in which a storage lies, whoever has it.
inline BlockP block_of(const c10::DataPtr& pointer) {
  auto own = own_block_of(pointer);
  return own ? own : block_at(pointer.get());
}
inline BlockP block_of(const c10::StorageImpl* storage) {
  return block_of(const_cast<c10::StorageImpl*>(storage)->_mutable_data_ptr_no_checks());
}
inline BlockP block_of(const at::Tensor& tensor) { return block_of(tensor.storage().unsafeGetStorageImpl()); }

// As CUDA's allocator: what is not its own, such as an alias, is left alone.
inline void record_stream(const c10::DataPtr& pointer, int number) {
  auto block = own_block_of(pointer);
  std::lock_guard<std::mutex> lock(G);
  if (block && block->stream != number) block->recorded.insert(number);
}

}  // namespace sim
