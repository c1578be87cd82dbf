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
        passed_{executor.make_event(), executor.make_event()} {
    // Of a span two runs at most have a sum: the ends of documents that reach out of it.
    const auto most = static_cast<std::size_t>(2 * plan_->shape.batch * 2 * TokenSpans::capacity);
    sends_.reserve(most);
    receives_.reserve(most);
  }

  void post(int step, const StreamPair& s) {
    if (step == 1) this->copy(whole(0), this->own_, s.comm);
    executor_.wait(s.comm, released_[slot_of(step)]);
    const TokenSpan out{0, tokens_of(step - 1)}, in{0, tokens_of(step)};
    exchange(whole(step - 1), {{&out, 1}, out}, whole(step), {{&in, 1}, in}, plan_->shape.dtype, s.comm);
    executor_.record(arrived_[slot_of(step)], s.comm);
  }
  void arrive(int step, const StreamPair& s) { executor_.wait(s.compute, arrived_[slot_of(step)]); }
  KeyValueBlock part(int step, TokenSpan keys) const { return rows_of(whole(step), keys); }
  void release(int step, const StreamPair& s) { executor_.record(released_[slot_of(step)], s.compute); }

  KeyValueBlock sums(int step) const { return this->sums_in(slots_, step, owner(step)); }
  void arrive_sums(int step, int slice, const StreamPair& s) {
    if (step > 1) executor_.wait(s.compute, passed_[slice]);
  }
  void pass(int step, int slice, const StreamPair& s) {
    executor_.record(computed_, s.compute);
    executor_.wait(s.comm, computed_);
    const auto rows = [&](int of) { return Rows{work_->summed_keys(of, step), work_->slice(of, slice)}; };
    exchange(sums(step), rows(owner(step)), sums(step + 1), rows(owner(step + 1)), accumulator_of(*plan_), s.comm);
    executor_.record(passed_[slice], s.comm);
  }
  void drop_sums(const StreamPair&) {}

 private:
  std::int64_t tokens_of(int step) const { return plan_->local_tokens(owner(step)); }
  KeyValueBlock whole(int step) const { return this->block_in(slots_, step, tokens_of(step)); }

  /// Some runs of rows, as far as they lie within others.
  struct Rows {
    std::span<const TokenSpan> runs;
    TokenSpan within;
  };
  /// Sends some rows of a block and receives some of another.
  void exchange(const KeyValueBlock& out, const Rows& out_rows, const KeyValueBlock& in, const Rows& in_rows,
                DType dtype, typename Base::stream_type s) {
    sends_.clear();
    receives_.clear();
    const auto for_each_run = [](const KeyValueBlock& block, const Rows& rows, auto f) {
      for (const TokenSpan& span : rows.runs) {
        const KeyValueBlock moved = rows_of(block, intersection(span, rows.within));
        for (const TensorRef& tensor : {moved.keys, moved.values}) {
          for (std::int64_t i = 0; i < run_count(tensor); ++i) f(run_of(tensor, i));
        }
      }
    };
    for_each_run(out, out_rows, [&](const Run& run) { sends_.push_back({run.data, run.elems, this->next()}); });
    for_each_run(in, in_rows, [&](const Run& run) { receives_.push_back({run.data, run.elems, this->previous()}); });
    if (!sends_.empty() || !receives_.empty()) group_.exchange(sends_, receives_, dtype, s);
  }

  using Event = typename Base::Event;
  GroupComm<Comm> group_;
  std::vector<Send> sends_;
  std::vector<Recv> receives_;
  Event arrived_[Slots::count];   // comm: the block of the slot is there
  Event released_[Slots::count];  // compute: the block of the slot is no longer read
  Event computed_;                // compute: the sum that is passed next is complete
  Event passed_[2];               // comm: a slice of the next sum is there
};

}  // namespace pleat::inline v0::ring::detail
