// A ring's calls of its local kernel without the ring, for kernels that plan calls of known extents and strides ahead.
#pragma once

#include <pleat/attention/ring_schedule.hpp>

namespace pleat::inline v0::ring::detail {

/// The executor of a rehearsal: nothing is copied, and nothing waits.
template <executor Executor>
class IdleExecutor {
 public:
  using device_type = typename Executor::device_type;
  using stream_type = typename Executor::stream_type;
  struct event_type {};

  explicit IdleExecutor(Device device) : device_(device) {}
  Device device() const { return device_; }
  event_type make_event() const { return {}; }
  void record(event_type&, stream_type) const {}
  void wait(stream_type, event_type&) const {}
  void copy(void*, const void*, std::size_t, stream_type) const {}
  void copy_2d(void*, std::size_t, const void*, std::size_t, std::size_t, std::size_t, stream_type) const {}
  void zero(void*, std::size_t, stream_type) const {}

 private:
  Device device_;
};

/// Blocks with the extents and strides that the plan's transport gives them, at addresses that nobody reads.
template <executor Executor>
class IdleTransport : public RingSide<IdleExecutor<Executor>> {
  using Base = RingSide<IdleExecutor<Executor>>;
  using Base::plan_, Base::slots_, Base::work_, Base::rank_;

 public:
  using typename Base::StreamPair;

  IdleTransport(std::shared_ptr<const Plan> plan, Device device, int rank, std::byte* anywhere)
      : Base(std::move(plan), IdleExecutor<Executor>(device), rank, slots_at(anywhere)) {}

  void post(int, const StreamPair&) {}
  void arrive(int, const StreamPair&) {}
  KeyValueBlock part(int step, TokenSpan keys) const {
    if (plan_->transport == Transport::peer) {
      return rows_of(this->block_in(slots_, step, work_->travelling_rows(rank_, step)), {0, keys.size()});
    }
    return rows_of(this->block_in(slots_, step, plan_->local_tokens(this->owner(step))), keys);
  }
  void release(int, const StreamPair&) {}
  KeyValueBlock sums(int step) const { return this->sums_in(slots_, step, this->owner(step)); }
  void arrive_sums(int, int, const StreamPair&) {}
  void pass(int, int, const StreamPair&) {}
  void drop_sums(const StreamPair&) {}
  void gather(const StreamPair&) {}
  Arrivals arrivals(const StreamPair&) { return {}; }
  KeyValueBlock gathered() const {
    return block_of(slots_.gathered, *plan_, (plan_->cp - 1) * work_->block_rows(), plan_->shape.dtype,
                    this->executor_.device());
  }
  KeyValueBlock gathered_part(int, TokenSpan keys) const { return rows_of(gathered(), keys); }
  void end_arrivals(const StreamPair&) {}
  void release_gathered(const StreamPair&) {}

 private:
  static Slots slots_at(std::byte* anywhere) {
    Slots slots;
    for (BlockMemory& block : slots.blocks) block = {anywhere, anywhere};
    for (BlockMemory& sum : slots.sums) sum = {anywhere, anywhere};
    slots.gathered = {anywhere, anywhere};
    return slots;
  }
};

/// Prepares what it is asked to compute.
template <class Leaf>
struct PreparingLeaf {
  const Leaf* leaf;

  template <class Stream>
  void forward(const AttentionForward& call, Stream) const {
    leaf->prepare(call);
  }
  template <class Stream>
  void backward(const AttentionBackward& call, Stream) const {
    leaf->prepare(call);
  }
  template <class Stream>
  void delta(const TensorRef&, const TensorRef&, const TensorRef&, Stream) const {}
  template <class Stream>
  void store(const TensorRef&, std::span<const TensorRef>, Stream) const {}
};

/// Calls `leaf.prepare` with each call that forward and backward on these tensors make on `rank`, in their order.
/// Nothing is launched. `gradients`: dout; of the others only extents matter.
template <executor Executor, class Leaf>
void rehearse(const std::shared_ptr<const Plan>& plan, Device device, int rank, Block scratch, const Leaf& leaf,
              const PlacedWork& work, const RingTensors& tensors, const RingGradients& gradients) {
  const RingSchedule<IdleExecutor<Executor>, PreparingLeaf<Leaf>> schedule(plan, IdleExecutor<Executor>(device), rank,
                                                                           scratch, {&leaf});
  IdleTransport<Executor> transport(plan, device, rank, scratch.data);
  const typename IdleTransport<Executor>::StreamPair no_streams{};
  schedule.forward(transport, no_streams, work, tensors);
  schedule.backward(transport, no_streams, work, tensors, gradients);
}

}  // namespace pleat::inline v0::ring::detail
