// The executor of schedules: one rank's operations and transfers, in order, on the caller's streams and model.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <functional>
#include <span>
#include <utility>
#include <vector>

#include <pleat/comm/group_comm.hpp>
#include <pleat/comm/memory.hpp>
#include <pleat/comm/plan_digest.hpp>
#include <pleat/core/streams.hpp>
#include <pleat/pipeline/plan.hpp>
#include <pleat/tensor/tensor_ref.hpp>

namespace pleat::inline v0::pipeline {

/// The forward of one stage on one micro-batch: `input` [rows, hidden] -> `output` [rows, hidden]. The first stage has
/// no input (a null pointer and 0 rows) and reads the micro-batch itself; the last has no output and computes the loss.
struct ForwardCall {
  int stage = 0;
  int chunk = 0;
  int micro_batch = 0;
  TensorRef input;
  TensorRef output;
};
/// Its backward: `output_gradient` [rows, hidden] -> `input_gradient` [rows, hidden]; the last stage has no output
/// gradient, the first no input gradient. `input` and `output_gradient` stay unchanged until the call that makes the
/// gradients of the weights has been issued, so that a model may refer to them instead of keeping copies.
struct BackwardCall {
  int stage = 0;
  int chunk = 0;
  int micro_batch = 0;
  TensorRef input;
  TensorRef output_gradient;
  TensorRef input_gradient;
};

/// What a rank computes: all of its stages. Calls enqueue work on `s`, or on streams of their own that `s` waits for
/// before the call returns; outputs are overwritten, gradients of weights added to what earlier micro-batches gave.
/// - `backward`: both gradients; `input_backward` and, later, `weight_backward`: the same in two passes.
///   weight_backward has no input_gradient to write.
/// - optional `overlapped(s, f, b)`: the forward of one micro-batch beside the backward of another; the model
///   interleaves the two so that one computes while the other communicates. Without it they run one after the other.
template <class M, class Stream>
concept stage_model = requires(M& model, Stream s, const ForwardCall& f, const BackwardCall& b) {
  model.forward(s, f);
  model.backward(s, b);
  model.input_backward(s, b);
  model.weight_backward(s, b);
};

/// Sees when ops run: `before(op, s)` and `after(op, s)` with the op's index, around what it enqueues on `s`.
struct NoObserver {
  template <class Stream>
  void before(int /*op*/, Stream) const noexcept {}
  template <class Stream>
  void after(int /*op*/, Stream) const noexcept {}
};

/// A schedule bound to the pp group. Every rank of the group calls `run` in the same order. Transfers run on
/// `streams.comm`, beside the ops on `streams.compute`, which waits only for what it reads. One that was moved from may
/// be assigned to and destroyed; all else is P12.
template <executor Executor, communicator Comm>
class Pipeline {
 public:
  using stream_type = typename Executor::stream_type;

  /// See `bind`.
  Pipeline(Plan plan, const Executor& executor, const GroupComm<Comm>& pp, Block scratch, stream_type s)
      : plan_(agreed(std::move(plan), pp, scratch, s)),
        executor_(executor),
        pp_(pp),
        memory_(Carver(scratch).take_bytes(plan_.boundary_bytes)),
        computed_(executor.make_event()),
        layout_(detail::boundary_layout(plan_.schedule, plan_.shape, pp.rank())) {
    for (std::size_t i = 0; i < program().batches.size(); ++i) transferred_.push_back(executor.make_event());
  }

  /// Errors: shape_error P12 on an operation that was moved from.
  const Plan& plan() const {
    if (plan_.schedule.programs.empty()) {
      fail<shape_error>("pleat[P12]: a pipeline is used after it was moved from; use what it was moved to");
    }
    return plan_;
  }

  /// One step: all passes of all micro-batches, with the rows of the plan. `model` is called as `stage_model` says.
  /// Errors: what the model throws, and comm_error; when one rank fails, all end. After a step that threw, every
  /// further one is comm_error P11: transfers of the failed one may be under way, and another step would take them for
  /// its own. Bind anew then, to a group of new communicators. shape_error P12 after a move.
  template <stage_model<stream_type> Model, class Observer = NoObserver>
  void run(const Streams<stream_type>& streams, Model& model, Observer&& observer = {}) {
    require_whole();
    step(streams, model, observer, layout_, plan_.shape);
  }
  /// The same with other rows, the same ones on every rank, as long as they need no more memory than the plan. Errors:
  /// shape_error P04, P08, on every rank alike and before anything is sent, so that other rows may be tried; those
  /// above.
  template <stage_model<stream_type> Model, class Observer = NoObserver>
  void run(const Streams<stream_type>& streams, std::span<const std::int64_t> rows, Model& model,
           Observer&& observer = {}) {
    require_whole();
    const Shape shape{plan_.shape.hidden, plan_.shape.dtype, {rows.begin(), rows.end()}};
    detail::check_shape(plan_.schedule, shape);
    const bool is_within = std::equal(rows.begin(), rows.end(), plan_.shape.rows.begin(), std::less_equal<>());
    if (is_within) return step(streams, model, observer, layout_, shape);  // each tensor fits where it was planned
    if (const std::size_t bytes = detail::boundary_bytes(plan_.schedule, shape); bytes > plan_.boundary_bytes) {
      fail<shape_error>("pleat[P08]: tensors between stages need ", bytes,
                        " bytes with these rows, and were planned for ", plan_.boundary_bytes,
                        "; plan with the largest micro-batches");
    }
    step(streams, model, observer, detail::boundary_layout(plan_.schedule, shape, pp_.rank()), shape);
  }
  /// Throws what a call could not: nothing here depends on data, so there is no sticky status and this never throws.
  void check() const noexcept {}

 private:
  const Program& program() const { return plan_.schedule.programs[static_cast<std::size_t>(pp_.rank())]; }
  /// The plan, once all ranks of the group have shown that they have the same.
  static Plan agreed(Plan plan, const GroupComm<Comm>& pp, Block scratch, stream_type s) {
    if (pp.size() != plan.schedule.placement.ranks) {
      fail<shape_error>("pleat[P03]: a schedule of ", plan.schedule.placement.ranks,
                        " ranks was bound to a pp group of ", pp.size());
    }
    Message operation;
    operation.append("pipeline ").append(plan.schedule.name);
    agree_on(operation.c_str(), detail::agreement_of(plan), pp, scratch, s);
    return plan;
  }
  void require_whole() const {
    (void)plan();
    if (is_in_step_) {
      fail<comm_error>(
          "pleat[P11]: a step of this pipeline has failed, and its transfers may still be under way; bind ",
          "anew, to a group of new communicators");
    }
  }

  template <class Model, class Observer>
  void step(const Streams<stream_type>& streams, Model& model, Observer& observer, const detail::BoundaryLayout& layout,
            const Shape& shape) {
    is_in_step_ = true;  // and stays so when anything below throws
    connect(streams);
    const Program& mine = program();
    std::size_t batch = 0;
    const auto enter_batches = [&](std::size_t op) {
      for (; batch < mine.batches.size() && static_cast<std::size_t>(mine.batches[batch].before) <= op; ++batch) {
        exchange(streams, batch, layout, shape);
      }
    };
    for (std::size_t i = 0; i < mine.ops.size(); ++i) {
      enter_batches(i);
      if (const int needed = layout.waits_for[i]; needed >= 0) {
        executor_.wait(streams.compute, transferred_[static_cast<std::size_t>(needed)]);
      }
      observer.before(static_cast<int>(i), streams.compute);
      run_op(streams.compute, mine.ops[i], model, layout, shape);
      observer.after(static_cast<int>(i), streams.compute);
    }
    enter_batches(mine.ops.size());
    // What follows on compute may overwrite the scratch that the last sends read.
    if (!transferred_.empty()) executor_.wait(streams.compute, transferred_.back());
    is_in_step_ = false;
  }

  /// Before the first step, a byte on every way that transfers take: the first message between two ranks holds its
  /// batch back until both have come (NcclComm), and the ranks' batches differ. A peer would wait for the rest of such
  /// a batch on its device, and so perhaps never come.
  void connect(const Streams<stream_type>& streams) {
    if (std::exchange(is_connected_, true) || pp_.size() == 1) return;
    const auto ranks = static_cast<std::size_t>(pp_.size());
    std::vector<char> has_sent(ranks), has_received(ranks);
    executor_.zero(memory_, detail::connection_bytes(plan_.schedule), streams.comm);
    sends_.clear();
    receives_.clear();
    for (const Batch& batch : program().batches) {
      for (const Transfer& t : batch.transfers) {
        const auto peer = static_cast<std::size_t>(t.peer);
        if (std::exchange((t.is_send ? has_sent : has_received)[peer], 1)) continue;
        if (t.is_send) sends_.push_back({memory_ + ranks, 1, t.peer});
        if (!t.is_send) receives_.push_back({memory_ + peer, 1, t.peer});
      }
    }
    pp_.exchange(sends_, receives_, DType::u8, streams.comm);
    executor_.record(computed_, streams.comm);
    executor_.wait(streams.compute, computed_);
  }

  void exchange(const Streams<stream_type>& streams, std::size_t batch, const detail::BoundaryLayout& layout,
                const Shape& shape) {
    sends_.clear();
    receives_.clear();
    for (const Transfer& t : program().batches[batch].transfers) {
      const std::size_t elems = shape.elems(t.what.micro_batch);
      if (elems == 0) continue;  // both sides know
      std::byte* data = address(layout, t.what);
      t.is_send ? sends_.push_back({data, elems, t.peer}) : receives_.push_back({data, elems, t.peer});
    }
    // The ops so far have made what is sent, and read for the last time what is received over.
    executor_.record(computed_, streams.compute);
    executor_.wait(streams.comm, computed_);
    if (!sends_.empty() || !receives_.empty()) pp_.exchange(sends_, receives_, shape.dtype, streams.comm);
    executor_.record(transferred_[batch], streams.comm);
  }

  template <class Model>
  void run_op(stream_type s, const Op& op, Model& model, const detail::BoundaryLayout& layout, const Shape& shape) {
    const Placement& placement = plan_.schedule.placement;
    const auto tensor = [&](Payload payload, int stage, int micro_batch) {
      const Boundary what{payload, stage, micro_batch};
      const bool exists = placement.exists(what);
      const std::int64_t rows = exists ? shape.rows[static_cast<std::size_t>(micro_batch)] : 0;
      return TensorRef(exists ? address(layout, what) : nullptr, shape.dtype, {rows, shape.hidden}, executor_.device());
    };
    const auto forward = [&] {
      const auto [chunk, i] = op.forward;
      const int stage = placement.stage(pp_.rank(), chunk);
      return ForwardCall{stage, chunk, i, tensor(Payload::activation, stage - 1, i),
                         tensor(Payload::activation, stage, i)};
    };
    const auto backward = [&] {
      const auto [chunk, i] = op.backward;
      const int stage = placement.stage(pp_.rank(), chunk);
      return BackwardCall{stage,
                          chunk,
                          i,
                          tensor(Payload::activation, stage - 1, i),
                          tensor(Payload::gradient, stage + 1, i),
                          tensor(Payload::gradient, op.has_input_gradient() ? stage : -1, i)};
    };
    switch (op.kind) {
      case OpKind::forward:
        return static_cast<void>(model.forward(s, forward()));
      case OpKind::backward:
        return static_cast<void>(model.backward(s, backward()));
      case OpKind::input_backward:
        return static_cast<void>(model.input_backward(s, backward()));
      case OpKind::weight_backward:
        return static_cast<void>(model.weight_backward(s, backward()));
      case OpKind::overlapped:
        if constexpr (requires { model.overlapped(s, forward(), backward()); }) {
          model.overlapped(s, forward(), backward());
        } else {
          model.forward(s, forward());
          model.backward(s, backward());
        }
    }
  }
  std::byte* address(const detail::BoundaryLayout& layout, const Boundary& what) const {
    return memory_ + layout.offsets[static_cast<std::size_t>(plan_.schedule.index(what))];
  }

  Plan plan_;
  Executor executor_;
  GroupComm<Comm> pp_;
  std::byte* memory_;
  typename Executor::event_type computed_;
  std::vector<typename Executor::event_type> transferred_;  // [batches]
  detail::BoundaryLayout layout_;                           // of the plan's rows
  std::vector<Send> sends_;
  std::vector<Recv> receives_;
  bool is_connected_ = false;
  bool is_in_step_ = false;
};

/// Binds a plan to the pp group, whose ranks are the pipeline's in order. `pp` and `memory.scratch`, of
/// `plan.footprint().scratch` bytes, must outlive the result. Makes events. The ranks of the group compare their plans,
/// in scratch and on `s`, which is waited for. Errors: shape_error P03 (the group's size), T02 (a block too small);
/// comm_error C36 on every rank when a rank has planned otherwise; static T10 without a stream where there are several.
template <executor Executor, communicator Comm, class Arena>
Pipeline<Executor, Comm> bind(Plan plan, const Executor& executor, const GroupComm<Comm>& pp,
                              const Memory<Arena>& memory,
                              typename Executor::stream_type s = only_stream<typename Executor::stream_type>()) {
  return Pipeline<Executor, Comm>(std::move(plan), executor, pp, memory.scratch, s);
}

}  // namespace pleat::inline v0::pipeline
