// Events: a moment of a stream, for which other streams and the host can wait.
#pragma once
#include "memory.h"

namespace sim {

struct Event {
  MomentP moment;  // none before it was recorded
  int device = -1;

  void record(int number) {
    std::lock_guard<std::mutex> lock(G);
    auto* stream = stream_of(number);
    if (device < 0) device = stream->device;
    TORCH_CHECK(device == stream->device, "an event of device ", device, " was recorded on a stream of device ", stream->device);
    join(stream->clock, host_clock());
    moment = end_of(number);
  }
  void block(int number) const {
    if (!moment) return;
    std::lock_guard<std::mutex> lock(G);
    auto* stream = stream_of(number);
    join(stream->clock, moment->clock);
    stream->wait_for(moment);
  }
  void ask() const {
    std::lock_guard<std::mutex> lock(G);
    if (device >= 0 && device != current_device) ++memory_of[current_device].asked;
  }
  bool query() const {
    ask();
    if (!moment) return true;
    if (!moment->was_reached()) return false;
    std::lock_guard<std::mutex> lock(G);
    learn(moment);
    return true;
  }
  // A look that teaches the host nothing: that it came in time orders nothing that comes after it.
  bool peek() const {
    ask();
    return !moment || moment->was_reached();
  }
  void synchronize() const {
    ask();
    if (!moment) return;
    auto waited = moment;
    without_python([&] { waited->wait(); });
    std::lock_guard<std::mutex> lock(G);
    learn(waited);
    ++num_host_waits;
  }
  double milliseconds_to(const Event& end) const {
    TORCH_CHECK(moment && end.moment, "Both events must be recorded before calculating elapsed time.");
    TORCH_CHECK(moment->was_reached() && end.moment->was_reached(), "Both events must be completed before calculating elapsed time.");
    return std::chrono::duration<double, std::milli>(end.moment->when - moment->when).count();
  }
};

}  // namespace sim
