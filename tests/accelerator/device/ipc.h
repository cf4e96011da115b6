// Memory of this device that other processes open by a handle, by the functions of CUDA's driver: the library has the driver's name.
//
// A block that is lent becomes a file without a name, at the same address; before its bytes lies who has it open.
#pragma once
#include "kernels.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <fstream>

namespace sim {
enum Result { SUCCESS = 0, INVALID_VALUE = 1, INVALID_CONTEXT = 201, PEER_ACCESS_UNSUPPORTED = 217, INVALID_HANDLE = 400 };
constexpr int MOST_OPENERS = 16;

struct Handle {
  uint64_t id;
  int process, file;
  uint64_t size;
  char rest[64 - 24];
};
static_assert(sizeof(Handle) == 64);
struct Header {
  uint64_t id;
  std::atomic<int> openers[MOST_OPENERS];  // processes
};
static_assert(sizeof(Header) <= PAGE);

struct OpenedBlock {
  BlockP block;
  Header* header;
  int count;
};
inline std::map<uint64_t, OpenedBlock> opened;  // by address

inline bool forbids(const char* what) {
  auto value = std::getenv(what);
  return value && *value == '0';
}

// Whether a process has memory: one that has ended has none, although its parent may not have asked for it yet.
inline bool has_memory(int process) {
  std::ifstream file("/proc/" + std::to_string(process) + "/statm");
  int64_t pages = 0;
  return file >> pages && pages;
}
inline void check_not_open(Block& block) {  // under G: its memory is about to be freed
  auto* header = reinterpret_cast<Header*>(block.memory.get());
  for (auto& opener : header->openers)
    if (int process = opener; checking && process && has_memory(process))
      reports.push_back({"reuse", "block " + std::to_string(block.id) + " is freed while process " + std::to_string(process) + " has it open", ""});
}

inline int lend(BlockP block, Handle& handle) {
  size_t total = size_with_page(block->size), from;
  bool found = false;
  if (forbids("SIMULATED_HANDLES")) return INVALID_VALUE;
  {
    std::lock_guard<std::mutex> lock(G);
    from = reports.size();
    for (auto& access : block->accesses)
      if (checking && time_of(host_clock(), access.place) < access.when) {
        found = true;
        reports.push_back({"race", "block " + std::to_string(block->id) + " is lent while " + access.operation + " on " + name_of(access.place) +
                                       " may still use it", ""});
      }
  }
  if (found) explain(from);
  std::lock_guard<std::mutex> lock(G);
  if (!block->file) {
    int file = memfd_create("simulated device", MFD_CLOEXEC);
    char* begin = block->memory.get();
    if (file < 0 || ftruncate(file, (off_t)total) || pwrite(file, begin, total, 0) != (ssize_t)total) return INVALID_VALUE;
    if (mmap(begin, total, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) == MAP_FAILED) return INVALID_VALUE;
    block->memory = std::shared_ptr<char>(begin, [own = block->memory, total, file](char* pointer) {
      mmap(pointer, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
      close(file);
    });
    block->file = file;
    auto* header = new (begin) Header{(uint64_t)getpid() << 32 | block->id, {}};
    (void)header;
  }
  handle = {reinterpret_cast<Header*>(block->memory.get())->id, getpid(), block->file, block->size, {}};
  return SUCCESS;
}

inline int open_handle(uint64_t& address, const Handle& handle, unsigned flags) {
  if (flags != 1) return INVALID_VALUE;
  if (handle.process == getpid()) return INVALID_CONTEXT;
  if (forbids("SIMULATED_PEERS")) return PEER_ACCESS_UNSUPPORTED;
  auto path = "/proc/" + std::to_string(handle.process) + "/fd/" + std::to_string(handle.file);
  int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) return INVALID_HANDLE;
  size_t total = size_with_page(handle.size);
  auto memory = mmap(nullptr, total, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (memory == MAP_FAILED) return INVALID_HANDLE;
  auto* header = static_cast<Header*>(memory);
  if (header->id != handle.id) {
    munmap(memory, total);
    return INVALID_HANDLE;
  }
  std::lock_guard<std::mutex> lock(G);
  for (auto& [known, one] : opened)
    if (one.header->id == handle.id) {
      munmap(memory, total);
      ++one.count;
      address = known;
      return SUCCESS;
    }
  for (auto& opener : header->openers) {
    int nobody = 0;
    if (opener.compare_exchange_strong(nobody, getpid())) break;
  }
  auto block = std::make_shared<Block>();
  block->memory = std::shared_ptr<char>(static_cast<char*>(memory), [total](char* pointer) { munmap(pointer, total); });
  block->begin = block->memory.get() + PAGE;
  block->size = handle.size;
  block->stream = current_stream(current_device);
  block->is_pinned = false;
  block->id = next_block++;
  live[block->id] = block;
  address = reinterpret_cast<uint64_t>(memory);
  opened[address] = {block, header, 1};
  return SUCCESS;
}

inline int close_handle(uint64_t address) {
  std::lock_guard<std::mutex> lock(G);
  auto found = opened.find(address);
  if (found == opened.end()) return INVALID_VALUE;
  auto& [block, header, count] = found->second;
  if (--count) return SUCCESS;
  for (auto& access : block->accesses)
    if (checking && time_of(host_clock(), access.place) < access.when)
      reports.push_back({"reuse", "block " + std::to_string(block->id) + " of another process is closed while " + access.operation + " on " +
                                      name_of(access.place) + " may still use it", ""});
  for (auto& opener : header->openers) {
    int own = getpid();
    opener.compare_exchange_strong(own, 0);
  }
  live.erase(block->id);
  opened.erase(found);
  return SUCCESS;
}

inline BlockP block_with_base(uint64_t base) {
  std::lock_guard<std::mutex> lock(G);
  for (auto& [id, block] : live)
    if (!block->is_pinned && block->memory && reinterpret_cast<uint64_t>(block->memory.get()) == base) return block;
  return nullptr;
}
}  // namespace sim

extern "C" {
int cuMemGetAddressRange_v2(uint64_t* base, size_t* size, uint64_t pointer) {
  auto block = sim::block_at(reinterpret_cast<void*>(pointer));
  if (!block) return sim::INVALID_VALUE;
  if (base) *base = reinterpret_cast<uint64_t>(block->memory.get());
  if (size) *size = sim::size_with_page(block->size);
  return sim::SUCCESS;
}
int cuIpcGetMemHandle(sim::Handle* handle, uint64_t base) {
  auto block = sim::block_with_base(base);
  return block ? sim::lend(block, *handle) : sim::INVALID_VALUE;
}
int cuIpcOpenMemHandle_v2(uint64_t* address, sim::Handle handle, unsigned flags) { return sim::open_handle(*address, handle, flags); }
int cuIpcCloseMemHandle(uint64_t address) { return sim::close_handle(address); }
int cuGetErrorName(int code, const char** name) {
  *name = code == sim::PEER_ACCESS_UNSUPPORTED ? "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED"
          : code == sim::INVALID_VALUE         ? "CUDA_ERROR_INVALID_VALUE"
          : code == sim::INVALID_CONTEXT       ? "CUDA_ERROR_INVALID_CONTEXT"
                                               : "CUDA_ERROR_INVALID_HANDLE";
  return sim::SUCCESS;
}
}
