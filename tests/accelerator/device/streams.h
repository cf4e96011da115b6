// Streams: queues with a thread each, issued through hardware work queues where there are fewer of these.
#pragma once
#include "checker.h"

#include <c10/core/Device.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <random>
#include <thread>

namespace sim {

inline int num_devices = 2;
inline int num_connections = 0;  // hardware work queues of a device; 0: each stream has its own
inline int most_delay_us = 300;
inline double delayed_share = 0.3;  // of the operations
inline unsigned seed = 0;
inline int64_t num_host_waits = 0, num_operations = 0;

// A place in a stream that is reached when all before it has run.
struct Moment {
  std::mutex mutex;
  std::condition_variable changed;
  bool is_reached = false;
  std::chrono::steady_clock::time_point when;
  Clock clock;
  Clock elsewhere;  // once it is reached

  void reach() {
    {
      std::lock_guard<std::mutex> lock(mutex);
      is_reached = true;
      when = std::chrono::steady_clock::now();
    }
    changed.notify_all();
  }
  bool was_reached() {
    std::lock_guard<std::mutex> lock(mutex);
    return is_reached;
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return is_reached; });
  }
};
using MomentP = std::shared_ptr<Moment>;

struct StreamQueue;
using Work = std::function<void()>;

// A hardware work queue. Streams that share one are issued in one order: what has to wait, for its own stream or for an event,
// holds up what was queued behind it, whichever its stream.
class Connection {
 public:
  Connection() { std::thread([this] { run(); }).detach(); }
  void push(StreamQueue* stream, Work work, bool is_wait) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      items_.push_back({stream, std::move(work), is_wait});
    }
    changed_.notify_one();
  }

 private:
  struct Item {
    StreamQueue* stream;
    Work work;
    bool is_wait;
  };
  void run();
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Item> items_;
};

struct StreamQueue {
  int number, device;
  Clock clock;      // when all that is queued has run
  Clock elsewhere;  // what is known of other processes by what runs now, under G: it comes with signals (peers.h)
  std::mt19937 random;

  StreamQueue(int number, int device, Connection* connection)
      : number(number), device(device), random(seed * 7919 + number), connection_(connection) {
    std::thread([this] { run(); }).detach();
  }
  void push(Work work, bool is_wait = false) {
    if (connection_)
      connection_->push(this, std::move(work), is_wait);
    else
      issue(std::move(work));
  }
  void issue(Work work) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      works_.push_back(std::move(work));
    }
    changed_.notify_one();
  }
  void wait_until_idle() {
    std::unique_lock<std::mutex> lock(mutex_);
    idle_.wait(lock, [&] { return works_.empty() && !is_busy_; });
  }
  // A moment that is reached when all before has run; `known` is what whoever asks for it knows of other processes.
  MomentP mark(const Clock& known = {}) {
    auto moment = std::make_shared<Moment>();
    push([this, moment, known] {
      {
        std::lock_guard<std::mutex> lock(G);
        join(elsewhere, known);
        moment->elsewhere = elsewhere;
      }
      moment->reach();
    });
    return moment;
  }
  void wait_for(const MomentP& moment) {
    push(
        [this, moment] {
          moment->wait();
          std::lock_guard<std::mutex> lock(G);
          join(elsewhere, moment->elsewhere);
        },
        true);
  }

 private:
  void run() {
    c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
    while (true) {
      Work work;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        is_busy_ = false;
        if (works_.empty()) idle_.notify_all();
        changed_.wait(lock, [&] { return !works_.empty(); });
        work = std::move(works_.front());
        works_.pop_front();
        is_busy_ = true;
      }
      dawdle();
      try {
        work();
      } catch (const std::exception& error) {
        std::string text = error.what();
        std::lock_guard<std::mutex> lock(G);
        reports.push_back({"kernel", text.substr(0, text.find("\nException")), ""});
      }
    }
  }
  void dawdle() {
    int most;
    bool is_delayed;
    {
      std::lock_guard<std::mutex> lock(G);
      most = most_delay_us;
      is_delayed = most && std::uniform_real_distribution<>(0, 1)(random) < delayed_share;
      if (is_delayed) most = random() % most;
    }
    if (is_delayed) std::this_thread::sleep_for(std::chrono::microseconds(most));
  }
  Connection* connection_;
  std::mutex mutex_;
  std::condition_variable changed_, idle_;
  std::deque<Work> works_;
  bool is_busy_ = false;
};

inline void Connection::run() {
  while (true) {
    Item item;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [&] { return !items_.empty(); });
      item = std::move(items_.front());
      items_.pop_front();
    }
    item.stream->wait_until_idle();
    if (item.is_wait)
      item.work();
    else
      item.stream->issue(std::move(item.work));
  }
}

// Streams have numbers over all devices; the default stream of device d is d.
inline std::vector<StreamQueue*> streams;  // by number, never destroyed: their threads run to the end
// What a thread of the host knows. Those that Python starts have clocks of their own, and learn from others where they are started,
// joined, or handed a result; all others, such as autograd's, share the first one.
struct HostThread {
  int place;
  Clock clock, elsewhere;
};
inline HostThread first_thread{place_of_thread(0), {}, {}};
inline thread_local HostThread* own_thread = nullptr;
inline HostThread& host_thread() { return own_thread ? *own_thread : first_thread; }
inline Clock& host_clock() { return host_thread().clock; }
inline void begin_thread() {  // in it
  static int number = 0;
  std::lock_guard<std::mutex> lock(G);
  own_thread = new HostThread{place_of_thread(++number), {}, {}};  // a thread that has ended may still have memory in a report
}
using Known = std::pair<Clock, Clock>;  // of this process and of others
inline Known known_here() {
  std::lock_guard<std::mutex> lock(G);
  return {host_thread().clock, host_thread().elsewhere};
}
inline void learn(const Known& known) {
  std::lock_guard<std::mutex> lock(G);
  join(host_thread().clock, known.first);
  join(host_thread().elsewhere, known.second);
}
inline void learn(const MomentP& moment) {  // under G: the host has waited for it
  join(host_thread().clock, moment->clock);
  join(host_thread().elsewhere, moment->elsewhere);
}
inline std::map<int, std::string> running;  // what each stream does now
inline thread_local int current_device = 0;
inline thread_local std::map<int, int> current_streams;  // by device, where it is not the default one

inline StreamQueue* add_stream(int device) {  // under G
  static std::map<int, std::vector<Connection*>> connections;
  static std::map<int, int> num_streams;
  auto& ours = connections[device];
  while ((int)ours.size() < num_connections) ours.push_back(new Connection);
  auto* connection = ours.empty() ? nullptr : ours[num_streams[device]++ % ours.size()];
  streams.push_back(new StreamQueue((int)streams.size(), device, connection));
  return streams.back();
}
inline StreamQueue* stream_of(int number) {  // under G
  while ((int)streams.size() < num_devices) add_stream((int)streams.size());
  return streams.at(number);
}
inline int new_stream(int device) {
  std::lock_guard<std::mutex> lock(G);
  stream_of(0);
  return add_stream(device)->number;
}
inline int pooled_stream(int device) {  // as torch: one of 32 in turn, for callbacks of futures
  static std::map<int, std::vector<int>> pools;
  static std::map<int, int> turns;
  auto& pool = pools[device];
  int turn = turns[device]++ % 32;
  if (turn == (int)pool.size()) pool.push_back(new_stream(device));
  return pool[turn];
}
inline int current_stream(int device) {
  auto found = current_streams.find(device);
  return found == current_streams.end() ? device : found->second;
}
inline int set_current_stream(int number) {
  int device;
  {
    std::lock_guard<std::mutex> lock(G);
    device = stream_of(number)->device;
  }
  int before = current_stream(device);
  current_streams[device] = number;
  return before;
}

// An operation that begins with what the host knew of other processes, and enters the accesses that these see.
inline Work enters_elsewhere(StreamQueue* stream, const std::vector<Touch>& shared, Place at, const std::string& stack, Work work) {
  if (shared.empty() && at.elsewhere.empty()) return work;
  return [=, at = std::move(at)]() mutable {
    {
      std::lock_guard<std::mutex> lock(G);
      join(stream->elsewhere, at.elsewhere);
      at.elsewhere = stream->elsewhere;
      for (auto& one : shared)
        if (std::string text; one.block->shared->touch(one, at, text) && checking) reports.push_back({"race", text, stack});
    }
    work();
  };
}

// Queue an operation, and enter what it reads and writes.
inline void enqueue(int number, const std::string& operation, const std::vector<Touch>& touches, Work work) {
  auto named = [number, operation, work = std::move(work)] {
    struct Running {
      int number;
      Running(int number, const std::string& operation) : number(number) {
        std::lock_guard<std::mutex> lock(G);
        running[number] = operation;
      }
      ~Running() {
        std::lock_guard<std::mutex> lock(G);
        running.erase(number);
      }
    } now(number, operation);
    work();
  };
  bool found = false;
  size_t from;
  std::vector<Touch> shared;
  std::copy_if(touches.begin(), touches.end(), std::back_inserter(shared), [](auto& one) { return one.block->shared; });
  auto stack = shared.empty() ? std::string() : python_stack();
  {
    std::lock_guard<std::mutex> lock(G);
    auto* stream = stream_of(number);
    from = reports.size();
    ++num_operations;
    join(stream->clock, host_clock());
    tick(stream->clock, place_of_stream(number));
    if (checking)
      for (auto& one : touches) found |= !one.block->shared && touch(one, place_of_stream(number), stream->clock, operation);
    stream->push(enters_elsewhere(stream, shared, {place_of_stream(number), stream->clock, host_thread().elsewhere, operation}, stack, named));
  }
  if (found) explain(from);
}

template <typename Wait>
inline void without_python(Wait wait) {  // other threads of the host go on meanwhile
  if (PyGILState_Check()) {
    py::gil_scoped_release release;
    wait();
  } else {
    wait();
  }
}

// The moment when all that was queued on a stream has run.
inline MomentP end_of(int number) {  // under G
  auto* stream = stream_of(number);
  auto moment = stream->mark(host_thread().elsewhere);
  moment->clock = stream->clock;
  return moment;
}

// The host waits for all that was queued on a stream.
inline void synchronize(int number) {
  MomentP moment;
  {
    std::lock_guard<std::mutex> lock(G);
    moment = end_of(number);
    ++num_host_waits;
  }
  without_python([&] { moment->wait(); });
  std::lock_guard<std::mutex> lock(G);
  learn(moment);
}
inline void synchronize_device(int device) {
  std::vector<int> numbers;
  {
    std::lock_guard<std::mutex> lock(G);
    stream_of(0);
    for (auto* stream : streams)
      if (device < 0 || stream->device == device) numbers.push_back(stream->number);
  }
  for (int number : numbers) synchronize(number);
}
inline bool is_idle(int number) {
  MomentP moment;
  {
    std::lock_guard<std::mutex> lock(G);
    moment = end_of(number);
  }
  {
    std::unique_lock<std::mutex> lock(moment->mutex);
    if (!moment->changed.wait_for(lock, std::chrono::milliseconds(1), [&] { return moment->is_reached; })) return false;
  }
  std::lock_guard<std::mutex> lock(G);
  learn(moment);
  return true;
}

}  // namespace sim
