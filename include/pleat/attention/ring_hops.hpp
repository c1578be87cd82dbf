// The ring's collective transport: whole blocks hop from rank to rank, each exchange a step ahead of the kernel.
#pragma once

#include <vector>

#include <pleat/attention/ring_side.hpp>
#include <pleat/comm/group_comm.hpp>

namespace pleat::inline v0::ring::detail {

/// See RingSide for what the members mean. A rank sends to the next one of the group and receives from the previous
/// one; per step 1 block of keys and values each way, in backward also 1 block of gradients.
template <executor Executor, communicator Comm>
class RingHops : public RingSide<Executor> {
  using Base = RingSide<Executor>;
  using Base::slot_of, Base::owner, Base::rank_, Base::work_, Base::executor_, Base::slots_, Base::plan_;

 public:
  using typename Base::StreamPair;

  RingHops(std::shared_ptr<const Plan> plan, const Executor& executor, const GroupComm<Comm>& group, const Slots& slots)
      : Base(std::move(plan), executor, group.rank(), slots),
        group_(group),
        arrived_{executor.make_event(), executor.make_event()},
        released_{executor.make_event(), executor.make_event()},
        computed_(executor.make_event()),
        passed_(executor.make_event()) {
    const auto most = static_cast<std::size_t>(2 * plan_->shape.batch);
    sends_.reserve(most);
    receives_.reserve(most);
  }

  void post(int step, const StreamPair& s) {
    if (step == 1) this->copy(whole(0), this->own_, s.comm);
    executor_.wait(s.comm, released_[slot_of(step)]);
    exchange(whole(step - 1), whole(step), plan_->shape.dtype, s.comm);
    executor_.record(arrived_[slot_of(step)], s.comm);
  }
  KeyValueBlock arrive(int step, const StreamPair& s) {
    executor_.wait(s.compute, arrived_[slot_of(step)]);
    return rows_of(whole(step), work_->at(rank_, step).keys);
  }
  void release(int step, const StreamPair& s) { executor_.record(released_[slot_of(step)], s.compute); }

  KeyValueBlock sums(int step, const StreamPair& s) {
    if (step > 1) executor_.wait(s.compute, passed_);
    return whole_sums(step);
  }
  void pass(int step, const StreamPair& s) {
    executor_.record(computed_, s.compute);
    executor_.wait(s.comm, computed_);
    exchange(summed(step, step), summed(step + 1, step), accumulator_of(*plan_), s.comm);
    executor_.record(passed_, s.comm);
  }
  void drop_sums(const StreamPair&) {}

 private:
  KeyValueBlock whole(int step) const { return this->block_in(slots_, step, plan_->local_tokens(owner(step))); }
  KeyValueBlock whole_sums(int step) const { return this->sums_in(slots_, step, owner(step)); }
  /// The gradients in the slot of `step`, as far as the readers of steps 1 .. `readers` have filled them.
  KeyValueBlock summed(int step, int readers) const {
    return rows_of(whole_sums(step), work_->summed_keys(owner(step), readers));
  }

  void exchange(const KeyValueBlock& out, const KeyValueBlock& in, DType dtype, typename Base::stream_type s) {
    sends_.clear();
    receives_.clear();
    for (const TensorRef& part : {out.keys, out.values}) {
      for (std::int64_t i = 0; i < run_count(part); ++i) {
        sends_.push_back({run_of(part, i).data, run_of(part, i).elems, this->next()});
      }
    }
    for (const TensorRef& part : {in.keys, in.values}) {
      for (std::int64_t i = 0; i < run_count(part); ++i) {
        receives_.push_back({run_of(part, i).data, run_of(part, i).elems, this->previous()});
      }
    }
    if (!sends_.empty() || !receives_.empty()) group_.exchange(sends_, receives_, dtype, s);
  }

  using Event = typename Base::Event;
  GroupComm<Comm> group_;
  std::vector<Send> sends_;
  std::vector<Recv> receives_;
  Event arrived_[Slots::count];   // comm: the block of the slot is there
  Event released_[Slots::count];  // compute: the block of the slot is no longer read
  Event computed_;                // compute: the sum that is passed next is complete
  Event passed_;                  // comm: the next sum is there
};

}  // namespace pleat::inline v0::ring::detail
