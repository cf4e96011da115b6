// Collectives by ProcessGroupNCCL's rules: each is a kernel that gloo's collective carries out on aliases of the CPU.
#pragma once
#include "kernels.h"

#include <ATen/core/ivalue.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace sim {
using Tensors = std::vector<at::Tensor>;
using WorkP = c10::intrusive_ptr<c10d::Work>;
using BackendP = c10::intrusive_ptr<c10d::Backend>;
using Carry = std::function<WorkP(c10d::Backend& gloo, Tensors& reads, Tensors& writes)>;

// One operation, as it was called.
struct Posted {
  std::string name;
  Tensors reads, writes;
  Carry carry;
};

// The tensors of a collective, which nobody may hand out again before it is waited for.
struct Shelf {
  int stream;
  Event end;
  Tensors tensors;

  bool is_ordered_before(int other) const {  // as some event says, and not as it happens to be
    std::lock_guard<std::mutex> lock(G);
    Clock clock = stream_of(other)->clock;
    join(clock, host_clock());
    return time_of(clock, place_of_stream(stream)) >= time_of(end.moment->clock, place_of_stream(stream));
  }
};

// What an asynchronous collective returns: `wait` makes the current stream wait, and not the host.
class CollectiveWork final : public c10d::Work {
 public:
  CollectiveWork(std::shared_ptr<Shelf> shelf, int stream, c10::Device device, Tensors outputs)
      : shelf_(std::move(shelf)), device_(device), outputs_(std::move(outputs)) {
    std::vector<c10::Device> devices{device};
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
    c10::StreamGuard guard(Guard::as_stream(stream));
    future_->markCompleted(IValue(outputs_));  // which is when its event comes
  }
  bool wait(std::chrono::milliseconds = kNoTimeout) override {
    shelf_->end.block(current_stream(device_.index()));
    shelf_->tensors.clear();
    return true;
  }
  void synchronize() override { wait(); }
  bool isCompleted() override { return shelf_->end.peek(); }
  bool isSuccess() const override { return true; }
  Tensors result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  std::shared_ptr<Shelf> shelf_;
  c10::Device device_;
  Tensors outputs_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// A barrier's `wait` is the host's.
class BarrierWork final : public c10d::Work {
 public:
  explicit BarrierWork(int stream) : stream_(stream) {}
  bool wait(std::chrono::milliseconds = kNoTimeout) override {
    sim::synchronize(stream_);
    return true;
  }

 private:
  int stream_;
};

class Collectives final : public c10d::Backend {
 public:
  explicit Collectives(BackendP gloo) : c10d::Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}
  const std::string getBackendName() const override { return "simulated"; }

  // What is called in between is one kernel.
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override { is_coalescing_ = true; }
  WorkP endCoalescing() override {
    is_coalescing_ = false;
    return start(std::exchange(together_, {}), is_together_async_);
  }

  WorkP allreduce(Tensors& tensors, const c10d::AllreduceOptions& how) override {
    return run("all_reduce", {}, tensors, how.asyncOp, [how](auto& gloo, auto&, auto& writes) { return gloo.allreduce(writes, how); });
  }
  WorkP allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& how) override {
    return run("all_reduce", {}, tensors, how.asyncOp,
               [how](auto& gloo, auto&, auto& writes) { return gloo.allreduce_coalesced(writes, how); });
  }
  WorkP broadcast(Tensors& tensors, const c10d::BroadcastOptions& how) override {
    bool reads = how.rootRank == rank_;
    return run("broadcast", reads ? tensors : Tensors(), reads ? Tensors() : tensors, how.asyncOp,
               [how](auto& gloo, auto& from, auto& into) { return gloo.broadcast(from.empty() ? into : from, how); });
  }
  WorkP reduce(Tensors& tensors, const c10d::ReduceOptions& how) override {
    return run("reduce", {}, tensors, how.asyncOp, [how](auto& gloo, auto&, auto& writes) { return gloo.reduce(writes, how); });
  }
  WorkP allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& how) override {
    return run("all_gather", inputs, outputs.at(0), how.asyncOp, [how](auto& gloo, auto& reads, auto& writes) {
      std::vector<Tensors> lists{writes};
      return gloo.allgather(lists, reads, how);
    });
  }
  WorkP _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& how) override {
    return run("all_gather", {input}, {output}, how.asyncOp,
               [how](auto& gloo, auto& reads, auto& writes) { return gloo._allgather_base(writes[0], reads[0], how); });
  }
  WorkP allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& how) override {
    return run("all_gather", inputs, outputs, how.asyncOp,
               [how](auto& gloo, auto& reads, auto& writes) { return gloo.allgather_into_tensor_coalesced(writes, reads, how); });
  }
  WorkP _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& how) override {
    return run("reduce_scatter", {input}, {output}, how.asyncOp,
               [how](auto& gloo, auto& reads, auto& writes) { return gloo._reduce_scatter_base(writes[0], reads[0], how); });
  }
  WorkP reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& how) override {
    return run("reduce_scatter", inputs, outputs, how.asyncOp,
               [how](auto& gloo, auto& reads, auto& writes) { return gloo.reduce_scatter_tensor_coalesced(writes, reads, how); });
  }
  WorkP alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& out_sizes, std::vector<int64_t>& in_sizes,
                      const c10d::AllToAllOptions& how) override {
    return run("all_to_all", {input}, {output}, how.asyncOp, [=](auto& gloo, auto& reads, auto& writes) mutable {
      return gloo.alltoall_base(writes[0], reads[0], out_sizes, in_sizes, how);
    });
  }
  WorkP scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& how) override {
    return run("scatter", inputs.empty() ? Tensors() : inputs[0], outputs, how.asyncOp, [how](auto& gloo, auto& reads, auto& writes) {
      std::vector<Tensors> lists(reads.empty() ? 0 : 1, reads);
      return gloo.scatter(writes, lists, how);
    });
  }
  WorkP send(Tensors& tensors, int to, int tag) override {
    TORCH_CHECK(is_coalescing_, "the simulated device has batch_isend_irecv, and no send by itself");
    return run("send", tensors, {}, true, [=](auto& gloo, auto& reads, auto&) { return gloo.send(reads, to, tag); });
  }
  WorkP recv(Tensors& tensors, int from, int tag) override {
    TORCH_CHECK(is_coalescing_, "the simulated device has batch_isend_irecv, and no receive by itself");
    return run("recv", {}, tensors, true, [=](auto& gloo, auto&, auto& writes) { return gloo.recv(writes, from, tag); });
  }
  WorkP barrier(const c10d::BarrierOptions& how) override {
    int stream = stream_of_device(current_device);
    wait_for(current_stream(current_device), stream);
    queue(stream, {{"barrier", {}, {}, [how](auto& gloo, auto&, auto&) { return gloo.barrier(how); }}});
    return c10::make_intrusive<BarrierWork>(stream);
  }

 private:
  BackendP gloo_;
  std::map<int, int> streams_;                   // the group's own, by device
  std::vector<std::shared_ptr<Shelf>> shelves_;  // of what was not waited for
  MomentP last_;                                 // when the group's last kernel is over
  bool is_coalescing_ = false, is_together_async_ = false;
  std::vector<Posted> together_;

  static void wait_for(int before, int after) {
    Event event;
    event.record(before);
    event.block(after);
  }
  int stream_of_device(int device) {
    if (!streams_.count(device)) streams_[device] = new_stream(device);
    return streams_[device];
  }

  WorkP run(const char* name, const Tensors& reads, const Tensors& writes, bool is_async, Carry carry) {
    Posted posted{name, reads, writes, std::move(carry)};
    if (!is_coalescing_) return start({posted}, is_async);
    together_.push_back(std::move(posted));
    is_together_async_ = is_async;
    return nullptr;
  }

  // As ProcessGroupNCCL: on the group's stream, behind the current one; or, where the caller waits anyway, on the current stream.
  WorkP start(const std::vector<Posted>& all, bool is_async) {
    Tensors tensors, outputs;
    for (auto& one : all) {
      tensors.insert(tensors.end(), one.reads.begin(), one.reads.end());
      outputs.insert(outputs.end(), one.writes.begin(), one.writes.end());
    }
    tensors.insert(tensors.end(), outputs.begin(), outputs.end());
    auto device = tensors.at(0).device();
    c10::DeviceGuard guard(device);
    int current = current_stream(device.index()), stream = is_async ? stream_of_device(device.index()) : current;
    sweep(current);
    if (is_async) wait_for(current, stream);
    queue(stream, all);
    if (!is_async) return nullptr;
    auto shelf = std::make_shared<Shelf>(stream, Event(), tensors);
    shelf->end.record(stream);
    shelves_.push_back(shelf);
    return c10::make_intrusive<CollectiveWork>(shelf, stream, device, outputs.empty() ? tensors : outputs);
  }

  // A group's kernels run one after the other, on whichever streams: as in NCCL, that is no order on which anybody may rely.
  void queue(int stream, std::vector<Posted> all) {
    std::vector<Touch> touches;
    auto take = [&](Tensors& tensors, bool is_write) {
      for (auto& tensor : tensors) {
        TORCH_CHECK(is_ours(tensor) && tensor.is_non_overlapping_and_dense(), "a collective takes dense tensors of the device");
        if (tensor.numel()) touches.push_back(touch_of(tensor, is_write));
        tensor = alias_of(tensor.detach());
      }
    };
    for (auto& one : all) {
      take(one.reads, false);
      take(one.writes, true);
    }
    auto before = last_, over = last_ = std::make_shared<Moment>();
    enqueue(stream, all.at(0).name, touches, [gloo = gloo_, before, over, all]() mutable {
      struct Over {
        Moment& moment;
        ~Over() { moment.reach(); }
      } at_the_end{*over};
      if (before) before->wait();
      std::vector<WorkP> works;
      for (auto& one : all) works.push_back(one.carry(*gloo, one.reads, one.writes));
      for (auto& work : works) work->wait();
    });
  }

  // Let go of the tensors of collectives whose work was dropped without a wait, as DDP's are, which waits for the futures.
  void sweep(int current) {
    std::erase_if(shelves_, [&](auto& shelf) {
      return shelf->tensors.empty() || (shelf.use_count() == 1 && shelf->is_ordered_before(current));
    });
  }
};

}  // namespace sim
