// The checker: every access to a block of memory, and reports of two that nothing orders.
#pragma once
#include "clocks.h"

#include <torch/csrc/utils/pybind.h>

#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>

namespace sim {

inline std::mutex G;  // held by whoever reads or changes what the checker, the streams and the allocator know
inline bool checking = true;

struct Report {
  std::string kind;  // "race", "reuse", "kernel", "device"
  std::string text, stack;
};
inline std::vector<Report> reports;

struct Access {
  int place;  // in the clocks
  uint32_t when;
  bool is_write;
  const char *begin, *end;
  std::string operation;
};

struct Touch;
// An operation as it runs: what its stream knows of this process, and what of others.
struct Place {
  int place;
  Clock here, elsewhere;
  std::string operation;
};
// What checks accesses to memory that several processes reach (peers.h), under G. True: a race was found, and its text is there.
struct Shared {
  virtual bool touch(const Touch& touch, const Place& at, std::string& text) = 0;
  virtual ~Shared() = default;
};

struct Block {
  std::shared_ptr<char> memory;
  char* begin;
  size_t size;
  int stream;  // on which it was allocated
  bool is_pinned;
  uint64_t id;
  std::vector<Access> accesses;
  std::set<int> recorded;  // the streams that record_stream() named
  int file = 0;  // of a block that is lent to other processes (ipc.h)
  Shared* shared = nullptr;  // by several processes: it checks in place of what follows
};
using BlockP = std::shared_ptr<Block>;

struct Touch {
  BlockP block;
  const char *begin, *end;
  bool is_write;
};

inline std::string name_of(int place) {
  if (is_stream(place)) return "stream " + std::to_string(number_of(place));
  return place ? "the host's thread " + std::to_string(number_of(place)) : "the host";
}

// Enter an access, under G. True: a race was found.
inline bool touch(const Touch& touch, int place, const Clock& clock, const std::string& operation) {
  bool found = false;
  Block& block = *touch.block;
  std::vector<Access> kept;
  for (auto& earlier : block.accesses) {
    bool is_before = time_of(clock, earlier.place) >= earlier.when;
    bool overlaps = earlier.begin < touch.end && touch.begin < earlier.end;
    if (overlaps && !is_before && earlier.place != place && (touch.is_write || earlier.is_write)) {
      found = true;
      reports.push_back({"race",
                         std::string(touch.is_write ? "write" : "read") + " of " + std::to_string(touch.end - touch.begin) +
                             " bytes of block " + std::to_string(block.id) + (block.is_pinned ? " (pinned)" : "") + " by " +
                             operation + " on " + name_of(place) + ", not ordered after the " +
                             (earlier.is_write ? "write" : "read") + " by " + earlier.operation + " on " +
                             name_of(earlier.place),
                         ""});
    }
    bool is_covered = is_before && earlier.begin >= touch.begin && earlier.end <= touch.end && (touch.is_write || !earlier.is_write);
    if (!is_covered) kept.push_back(std::move(earlier));
  }
  kept.push_back({place, time_of(clock, place), touch.is_write, touch.begin, touch.end, operation});
  block.accesses = std::move(kept);
  return found;
}

inline std::string python_stack() {
  if (!Py_IsInitialized()) return "";
  py::gil_scoped_acquire gil;
  try {
    auto frames = py::module_::import("traceback").attr("format_stack")();
    size_t count = py::len(frames);
    std::string text;
    for (size_t i = count > 9 ? count - 9 : 0; i < count; ++i) text += py::cast<std::string>(frames[py::int_(i)]);
    return text;
  } catch (...) {
    return "";
  }
}

// Add the Python stack to the reports from a certain one on; not under G, which whoever holds Python's lock may wait for.
inline void explain(size_t from) {
  auto stack = python_stack();
  std::lock_guard<std::mutex> lock(G);
  for (size_t i = from; i < reports.size(); ++i)
    if (reports[i].stack.empty()) reports[i].stack = stack;
}

}  // namespace sim
