// Symmetric memory: buffers that processes of one host reach in each other, and signals between their streams.
//
// An access of another process is known only when it happens. So accesses to such memory are entered when they run, into a log that lies
// beside it; of two that nothing orders, whichever comes second finds the first. What a stream knows of other processes' accesses it has
// from signals, from events and from the host, which may have been told (`told`, `hear`).
#pragma once
#include "kernels.h"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

namespace sim {
namespace symmetric = c10d::symmetric_memory;

constexpr int MOST_RANKS = 16, MOST_CHANNELS = 8, MOST_MARKS = 512, MOST_ACCESSES = 4096;

// A time of a stream or thread of some process.
struct Mark {
  int process, place;
  uint32_t when;
};

// The place in `elsewhere` clocks of a process's place, under G.
inline std::vector<std::pair<int, int>> places_elsewhere;  // the process, and its place, of each
inline int place_elsewhere(int process, int place) {
  static std::map<std::pair<int, int>, int> places;
  auto [found, is_new] = places.try_emplace({process, place}, (int)places.size());
  if (is_new) places_elsewhere.push_back(found->first);
  return found->second;
}
inline void learn_mark(Clock& elsewhere, const Mark& mark) {  // under G
  size_t place = place_elsewhere(mark.process, mark.place);
  if (elsewhere.size() <= place) elsewhere.resize(place + 1);
  elsewhere[place] = std::max(elsewhere[place], mark.when);
}
inline std::vector<Mark> marks_of(const Clock& here, const Clock& elsewhere) {  // under G
  std::vector<Mark> marks;
  for (size_t place = 0; place < here.size(); ++place)
    if (here[place]) marks.push_back({getpid(), (int)place, here[place]});
  for (size_t place = 0; place < elsewhere.size(); ++place)
    if (elsewhere[place]) marks.push_back({places_elsewhere[place].first, places_elsewhere[place].second, elsewhere[place]});
  return marks;
}

// What a thread of the host knows, to be told to another process's, and likewise heard.
inline std::vector<std::tuple<int, int, uint32_t>> told() {
  std::lock_guard<std::mutex> lock(G);
  std::vector<std::tuple<int, int, uint32_t>> all;
  for (auto& mark : marks_of(host_clock(), host_thread().elsewhere)) all.emplace_back(mark.process, mark.place, mark.when);
  return all;
}
inline void hear(const std::vector<std::tuple<int, int, uint32_t>>& all) {
  std::lock_guard<std::mutex> lock(G);
  for (auto& [process, place, when] : all) learn_mark(host_thread().elsewhere, {process, place, when});
}

// A signal of one rank to another, on one channel: there or not, and what is known when it is put.
struct Signal {
  bool is_put;
  int num_marks;
  Mark marks[MOST_MARKS];
};

struct LoggedAccess {
  Mark mark;
  bool is_write;
  size_t begin, end;
  char operation[48];
};

// What lies beside a buffer, in the memory of its owner.
struct Beside {
  pthread_mutex_t mutex;  // of all processes; one that is killed leaves it to the others
  int num_accesses;
  LoggedAccess accesses[MOST_ACCESSES];
  Signal signals[MOST_CHANNELS][MOST_RANKS];  // to the owner, by sender
};

// A rank's buffer, as this process reaches it. The file has no name: it is gone with the last process that has it.
class Segment final : public Shared {
 public:
  explicit Segment(size_t size) : Segment(memfd_create("symmetric memory", MFD_CLOEXEC), size, true) {
    pthread_mutexattr_t how;
    pthread_mutexattr_init(&how);
    pthread_mutexattr_setpshared(&how, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&how, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&beside_->mutex, &how);
    memset(begin(), POISON, size);
  }
  Segment(int process, int file, size_t size)
      : Segment(open(("/proc/" + std::to_string(process) + "/fd/" + std::to_string(file)).c_str(), O_RDWR | O_CLOEXEC), size, false) {}
  ~Segment() override {
    munmap(memory_, offset() + size_);
    close(file_);
  }
  Segment(const Segment&) = delete;

  char* begin() const { return memory_ + offset(); }
  size_t size() const { return size_; }
  int file() const { return file_; }

  bool touch(const Touch& touch, const Place& at, std::string& text) override {
    Locked locked(beside_->mutex);
    LoggedAccess access{{getpid(), at.place, time_of(at.here, at.place)}, touch.is_write, offset_of(touch.begin), offset_of(touch.end), {}};
    at.operation.copy(access.operation, sizeof access.operation - 1);
    int kept = 0;
    bool found = false;
    for (int i = 0; i < beside_->num_accesses; ++i) {
      auto& earlier = beside_->accesses[i];
      bool is_before = is_known(earlier.mark, at);
      if (earlier.begin < access.end && access.begin < earlier.end && !is_before && (access.is_write || earlier.is_write)) {
        found = true;
        text = std::string(touch.is_write ? "write" : "read") + " of " + std::to_string(access.end - access.begin) +
               " bytes that processes share by " + at.operation + " on " + name_of(at.place) + ", not ordered after the " +
               (earlier.is_write ? "write" : "read") + " by " + earlier.operation + " on " + name_of(earlier.mark.place) +
               (earlier.mark.process == getpid() ? "" : " of process " + std::to_string(earlier.mark.process));
      }
      bool is_covered = is_before && earlier.begin >= access.begin && earlier.end <= access.end && (access.is_write || !earlier.is_write);
      if (!is_covered) beside_->accesses[kept++] = earlier;
    }
    TORCH_CHECK(kept < MOST_ACCESSES, "the simulated device has room for ", MOST_ACCESSES, " accesses to a buffer that no later one covers");
    beside_->accesses[kept++] = access;
    beside_->num_accesses = kept;
    return found;
  }

  // False: the one before was not waited for yet.
  bool put(int from, int channel, const std::vector<Mark>& marks) {
    Locked locked(beside_->mutex);
    auto& signal = beside_->signals[channel][from];
    if (signal.is_put) return false;
    TORCH_CHECK(marks.size() <= MOST_MARKS, "the simulated device has room for ", MOST_MARKS, " streams and threads of all processes");
    signal.num_marks = (int)marks.size();
    std::copy(marks.begin(), marks.end(), signal.marks);
    return signal.is_put = true;
  }
  std::optional<std::vector<Mark>> take(int from, int channel) {
    Locked locked(beside_->mutex);
    auto& signal = beside_->signals[channel][from];
    if (!std::exchange(signal.is_put, false)) return std::nullopt;
    return std::vector<Mark>(signal.marks, signal.marks + signal.num_marks);
  }

 private:
  struct Locked {
    pthread_mutex_t& mutex;
    explicit Locked(pthread_mutex_t& mutex) : mutex(mutex) {
      if (pthread_mutex_lock(&mutex) == EOWNERDEAD) pthread_mutex_consistent(&mutex);
    }
    ~Locked() { pthread_mutex_unlock(&mutex); }
  };

  Segment(int file, size_t size, bool is_new) : file_(file), size_(size) {
    TORCH_CHECK(file >= 0, "no memory that processes share: ", strerror(errno));
    TORCH_CHECK(!is_new || !ftruncate(file, (off_t)(offset() + size)), "no memory that processes share: ", strerror(errno));
    auto memory = mmap(nullptr, offset() + size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    TORCH_CHECK(memory != MAP_FAILED, "no memory that processes share: ", strerror(errno));
    memory_ = static_cast<char*>(memory);
    beside_ = static_cast<Beside*>(memory);
  }
  static size_t offset() { return (sizeof(Beside) + 4095) / 4096 * 4096; }
  size_t offset_of(const char* pointer) const { return (size_t)(pointer - begin()); }
  static bool is_known(const Mark& mark, const Place& at) {
    if (mark.process == getpid() && time_of(at.here, mark.place) >= mark.when) return true;
    return time_of(at.elsewhere, place_elsewhere(mark.process, mark.place)) >= mark.when;
  }

  int file_;
  size_t size_;
  char* memory_;
  Beside* beside_;
};
using SegmentP = std::shared_ptr<Segment>;

// A buffer of each rank of a group, as this process reaches them.
class PeerMemory final : public symmetric::SymmetricMemory {
 public:
  PeerMemory(int rank, int device, std::vector<SegmentP> segments, std::vector<BlockP> blocks)
      : rank_(rank), device_(device), segments_(std::move(segments)), blocks_(std::move(blocks)) {}
  ~PeerMemory() override {
    std::lock_guard<std::mutex> lock(G);
    for (auto& block : blocks_) live.erase(block->id);
  }

  std::vector<void*> get_buffer_ptrs() override {
    std::vector<void*> all;
    for (auto& segment : segments_) all.push_back(segment->begin());
    return all;
  }
  size_t get_buffer_size() override { return segments_[rank_]->size(); }
  size_t get_offset() override { return 0; }
  int get_rank() override { return rank_; }
  int get_world_size() override { return (int)segments_.size(); }
  c10::Device get_device() override { return {DEVICE, (DeviceIndex)device_}; }
  bool world_within_direct_access() override { return true; }
  bool has_multicast_support() override { return false; }
  void* get_multicast_ptr() override { return nullptr; }
  std::vector<void*> get_signal_pad_ptrs() override { refuse(); }
  void** get_buffer_ptrs_dev() override { refuse(); }
  void** get_signal_pad_ptrs_dev() override { refuse(); }

  // Kernels of the current stream. As CUDA's: a signal is put when the one before was taken; a time of 0 ms is for ever.
  void put_signal(int to, int channel, size_t timeout_ms) override {
    check(to, channel);
    kernel("put_signal", [=, this](int stream, const Clock& here) { put(stream, here, to, channel, timeout_ms); });
  }
  void wait_signal(int from, int channel, size_t timeout_ms) override {
    check(from, channel);
    kernel("wait_signal", [=, this](int stream, const Clock&) { take(stream, from, channel, timeout_ms); });
  }
  void barrier(int channel, size_t timeout_ms) override {
    check(rank_, channel);
    kernel("barrier", [=, this](int stream, const Clock& here) {
      for (int to = 0; to < get_world_size(); ++to)
        if (to != rank_) put(stream, here, to, channel, timeout_ms);
      for (int from = 0; from < get_world_size(); ++from)
        if (from != rank_) take(stream, from, channel, timeout_ms);
    });
  }

 private:
  int rank_, device_;
  std::vector<SegmentP> segments_;
  std::vector<BlockP> blocks_;  // the other ranks' buffers, as the allocator knows them

  [[noreturn]] static void refuse() {
    TORCH_CHECK(false, "the simulated device has no kernels that take symmetric memory's pointers, and no signal pads as tensors");
  }
  void check(int rank, int channel) {
    TORCH_CHECK(rank >= 0 && rank < get_world_size() && channel >= 0 && channel < MOST_CHANNELS,
                "there are ranks below ", get_world_size(), " and channels below ", MOST_CHANNELS, ", got ", rank, " and ", channel);
  }
  void kernel(const std::string& name, std::function<void(int stream, const Clock& here)> run) {
    int stream = current_stream(device_);
    Clock here;
    {
      std::lock_guard<std::mutex> lock(G);
      here = stream_of(stream)->clock;
      join(here, host_clock());
    }
    c10::raw::intrusive_ptr::incref(this);
    auto self = c10::intrusive_ptr<PeerMemory>::reclaim(this);
    sim::enqueue(stream, name, {}, [self, run, stream, here] { run(stream, here); });
  }
  template <typename Try>
  static void until(Try attempt, const std::string& what, size_t timeout_ms) {
    auto began = std::chrono::steady_clock::now();
    while (!attempt()) {
      TORCH_CHECK(!timeout_ms || std::chrono::steady_clock::now() - began < std::chrono::milliseconds(timeout_ms), what,
                  " timed out after ", timeout_ms, " ms");
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
  void put(int stream, const Clock& here, int to, int channel, size_t timeout_ms) {
    std::vector<Mark> marks;
    {
      std::lock_guard<std::mutex> lock(G);
      marks = marks_of(here, stream_of(stream)->elsewhere);
    }
    until([&] { return segments_[to]->put(rank_, channel, marks); }, "put_signal to rank " + std::to_string(to), timeout_ms);
  }
  void take(int stream, int from, int channel, size_t timeout_ms) {
    std::optional<std::vector<Mark>> marks;
    until([&] { return bool(marks = segments_[rank_]->take(from, channel)); }, "wait_signal from rank " + std::to_string(from), timeout_ms);
    std::lock_guard<std::mutex> lock(G);
    for (auto& mark : *marks) learn_mark(stream_of(stream)->elsewhere, mark);
  }
};

class PeerAllocator final : public symmetric::SymmetricMemoryAllocator {
 public:
  void* alloc(size_t size, int device, const std::optional<std::string>&) override {
    if (device < 0) device = current_device;
    auto segment = std::make_shared<Segment>(size);
    auto block = block_over(segment, device);
    std::lock_guard<std::mutex> lock(G);
    memory_of[device].symmetric += (int64_t)size;
    own_[segment->begin()] = {segment, block, device, {}};
    return segment->begin();
  }
  void free(void* pointer) override {
    Own gone = own(pointer);
    std::lock_guard<std::mutex> lock(G);
    memory_of[gone.device].symmetric -= (int64_t)gone.segment->size();
    live.erase(gone.block->id);
    own_.erase(pointer);
  }
  size_t get_alloc_size(void* pointer) override { return own(pointer).segment->size(); }
  bool has_allocation(void* pointer) override {
    std::lock_guard<std::mutex> lock(G);
    return own_.count(pointer);
  }
  bool has_multicast_support(int) override { return false; }
  c10::DeviceType supported_device_type() override { return DEVICE; }
  std::string name() override { return "SIMULATED"; }

  c10::intrusive_ptr<symmetric::SymmetricMemory> rendezvous(void* pointer, const std::optional<std::string>& group) override {
    TORCH_CHECK(group, "a rendezvous takes the name of a group");
    Own ours = own(pointer);
    if (auto met = ours.met.find(*group); met != ours.met.end()) return met->second;
    auto ranks = c10d::resolve_process_group(*group);
    auto store = ranks->getStore();
    int me = ranks->getRank();
    TORCH_CHECK(ranks->getSize() <= MOST_RANKS, "the simulated device has symmetric memory for ", MOST_RANKS, " ranks");
    std::string key;
    {
      std::lock_guard<std::mutex> lock(G);
      key = "simulated/" + *group + "/" + std::to_string(num_met_[*group]++) + "/";
    }
    auto say = [&](const std::string& what, const std::string& text) {
      store->set(key + what + std::to_string(me), std::vector<uint8_t>(text.begin(), text.end()));
    };
    auto heard = [&](const std::string& what, int rank) {
      auto bytes = store->get(key + what + std::to_string(rank));
      return std::string(bytes.begin(), bytes.end());
    };
    size_t size = ours.segment->size();
    say("at", std::to_string(getpid()) + " " + std::to_string(ours.segment->file()) + " " + std::to_string(size));
    std::vector<SegmentP> segments;
    for (int rank = 0; rank < ranks->getSize(); ++rank) {
      int process, file;
      size_t theirs;
      std::istringstream(heard("at", rank)) >> process >> file >> theirs;
      TORCH_CHECK(theirs == size, "rank ", rank, " has ", theirs, " bytes of symmetric memory, and rank ", me, " has ", size);
      segments.push_back(rank == me ? ours.segment : std::make_shared<Segment>(process, file, size));
    }
    say("open", "");
    for (int rank = 0; rank < ranks->getSize(); ++rank) heard("open", rank);  // nobody frees its own before
    std::vector<BlockP> blocks;
    for (int rank = 0; rank < ranks->getSize(); ++rank)
      if (rank != me) blocks.push_back(block_over(segments[rank], ours.device));
    auto made = c10::make_intrusive<PeerMemory>(me, ours.device, segments, blocks);
    std::lock_guard<std::mutex> lock(G);
    own_[pointer].met[*group] = made;
    return made;
  }

 private:
  struct Own {
    SegmentP segment;
    BlockP block;
    int device = 0;
    std::map<std::string, c10::intrusive_ptr<PeerMemory>> met;  // by group
  };
  std::map<void*, Own> own_;
  std::map<std::string, int> num_met_;  // by group

  Own own(void* pointer) {
    std::lock_guard<std::mutex> lock(G);
    auto found = own_.find(pointer);
    TORCH_CHECK(found != own_.end(), "this is not the begin of a tensor of symmetric memory");
    return found->second;
  }
  static BlockP block_over(const SegmentP& segment, int device) {
    auto block = std::make_shared<Block>();
    block->memory = std::shared_ptr<char>(segment, segment->begin());
    block->begin = segment->begin();
    block->size = segment->size();
    block->is_pinned = false;
    block->shared = segment.get();
    std::lock_guard<std::mutex> lock(G);
    block->stream = device;  // its default one
    block->id = next_block++;
    live[block->id] = block;
    return block;
  }
};

inline void register_symmetric_memory() {
  static auto& kept = *new auto(c10::make_intrusive<PeerAllocator>());  // at the end of a process it outlives what it refers to
  symmetric::register_allocator(DEVICE, kept);
}

}  // namespace sim
