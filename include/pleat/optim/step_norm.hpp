// StepNorm: the one reduction of a training step: gradient norm, clip coefficient, losses, token count and status.
#pragma once

#include <cmath>
#include <cstddef>
#include <span>
#include <vector>

#include <pleat/comm/group_comm.hpp>
#include <pleat/comm/memory.hpp>
#include <pleat/core/carve.hpp>
#include <pleat/core/footprint.hpp>
#include <pleat/core/streams.hpp>
#include <pleat/optim/leaf.hpp>

namespace pleat::inline v0::optim {

/// Status words of operations: device memory that is 0 until an operation fails on this rank.
using StatusWords = std::span<const std::int64_t* const>;

/// The plan of a StepNorm over a world of `world_size` ranks, which reads `status_words` on this one.
struct StepNormPlan {
  int world_size = 1;
  int status_words = 0;

  /// What a StepNorm keeps in its persistent memory.
  struct Buffers {
    StepResult* result;
    StepPartial* partial;           // mine
    StepPartial* partials;          // [world_size]
    double* squares;                // [square_partials]
    const std::int64_t** statuses;  // [status_words]
  };
  Buffers carve(Carver& persistent) const {
    return {persistent.take<StepResult>(1), persistent.take<StepPartial>(1),
            persistent.take<StepPartial>(static_cast<std::size_t>(world_size)),
            persistent.take<double>(square_partials),
            persistent.take<const std::int64_t*>(static_cast<std::size_t>(status_words))};
  }
  Footprint footprint() const {
    Carver persistent;
    carve(persistent);
    return {.persistent = persistent.used_bytes()};
  }
};
/// Errors: shape_error F16 for sizes that cannot be.
inline StepNormPlan plan_step_norm(int world_size, int status_words = 0) {
  if (world_size < 1 || status_words < 0) {
    fail<shape_error>("pleat[F16]: a norm over ", world_size, " ranks that reads ", status_words,
                      " status words; ranks are 1 or more, words 0 or more");
  }
  return {world_size, status_words};
}

/// The reduction of a step. Made by `bind`.
template <executor Executor, communicator Comm>
class StepNorm {
 public:
  using stream_type = typename Executor::stream_type;
  using leaf = optim_leaf<typename Executor::device_type>;

  StepNorm(const StepNormPlan& plan, Executor executor, GroupComm<Comm> world, Block persistent, StatusWords statuses,
           stream_type s)
      : executor_(executor), world_(world), statuses_(statuses.begin(), statuses.end()) {
    preload_leaves<leaf>();
    Carver memory(persistent);
    buffers_ = plan.carve(memory);
    executor_.zero(persistent.data, memory.used_bytes(), s);
    executor_.copy(buffers_.statuses, statuses_.data(), statuses_.size() * sizeof(const std::int64_t*), s);
  }

  /// This rank's part of the step, in device memory: work of the micro-batches adds to it, in the order of the stream
  /// of `run`. Zero after bind and after each run.
  StepSums* sums() const { return &buffers_.partial->sums; }

  /// Reduces the step over the world, after the last gradient is summed; every rank calls. `shards` are this rank's; a
  /// `max_norm` of 0 does not clip. Moves 40 bytes per rank. Returns what `result()` points to, written in the order of
  /// `s`. Norm^2 = sum over ranks and pieces of norm_weight * g^2: partial sums in float64, added in rank order.
  /// Errors: shape_error F16 for a max_norm below 0 or NaN.
  StepResult* run(std::span<const fsdp::ShardMemory> shards, double max_norm, stream_type s) {
    if (!(max_norm >= 0)) {
      fail<shape_error>("pleat[F16]: gradients clipped to a norm of ", max_norm, "; it is 0, for none, or more");
    }
    executor_.zero(buffers_.squares, square_partials * sizeof(double), s);
    for (const fsdp::ShardMemory& shard : shards) leaf::add_squares(buffers_.squares, shard, s);
    leaf::finish_partial(buffers_.partial, buffers_.squares, buffers_.statuses, static_cast<int>(statuses_.size()), s);
    world_.all_gather(buffers_.partial, buffers_.partials, sizeof(StepPartial) / sizeof(double), DType::f64, s);
    executor_.zero(buffers_.partial, sizeof(StepPartial), s);
    leaf::finish_step(buffers_.result, buffers_.partials, world_.size(), max_norm, s);
    return buffers_.result;
  }

  /// The newest step; device memory, owned by this operation's block.
  StepResult* result() const { return buffers_.result; }

  /// Goes on after a checkpoint, in the order of `s`: as if that many steps had been applied and left out. AdamW's
  /// correction of its moments counts them. Errors: shape_error F16 for numbers below 0.
  void resume(std::int64_t steps, std::int64_t skipped, stream_type s) {
    static_assert(offsetof(StepResult, skipped) == offsetof(StepResult, steps) + sizeof(std::int64_t));
    if (steps < 0 || skipped < 0) {
      fail<shape_error>("pleat[F16]: a norm that goes on after ", steps, " steps and ", skipped,
                        " that were left out; both are 0 or more");
    }
    resumed_ = {steps, skipped};
    executor_.copy(&buffers_.result->steps, resumed_.data(), resumed_.size() * sizeof(std::int64_t), s);
  }

 private:
  Executor executor_;
  GroupComm<Comm> world_;
  // Copied to the device in the order of a stream:
  std::vector<const std::int64_t*> statuses_;
  std::vector<std::int64_t> resumed_;
  StepNormPlan::Buffers buffers_;
};

/// Binds a plan to `world`, all ranks of the job. `memory.persistent` is zeroed in the order of `s`: the stream of
/// `run`, or one that comes before it. `statuses`: of the operations whose failure must reach every rank, such as
/// moe::Dispatch::status_words; borrowed. Errors: shape_error F05 when the plan is for another number of ranks or of
/// words, T02; static T10.
template <executor Executor, communicator Comm, class Arena>
StepNorm<Executor, Comm> bind(const StepNormPlan& plan, Executor executor, GroupComm<Comm> world,
                              const Memory<Arena>& memory, StatusWords statuses,
                              typename Executor::stream_type s = only_stream<typename Executor::stream_type>()) {
  if (world.size() != plan.world_size || static_cast<int>(statuses.size()) != plan.status_words) {
    fail<shape_error>("pleat[F05]: the norm is planned for ", plan.world_size, " ranks and ", plan.status_words,
                      " status words, and bound to a world of ", world.size(), " and ", statuses.size(),
                      " words; plan_step_norm takes the size of the world and the number of words");
  }
  return {plan, executor, world, memory.persistent, statuses, s};
}
/// The same without status words.
template <executor Executor, communicator Comm, class Arena>
StepNorm<Executor, Comm> bind(const StepNormPlan& plan, Executor executor, GroupComm<Comm> world,
                              const Memory<Arena>& memory,
                              typename Executor::stream_type s = only_stream<typename Executor::stream_type>()) {
  return bind(plan, executor, world, memory, StatusWords{}, s);
}

/// Throws on what every rank must hear of, given the result copied to the host; the same on every rank.
/// Errors: shape_error F19 for a learning rate in device memory that cannot be (when the result is copied after the
/// optimizer's step), F18 when an operation failed on some rank, F06 when the global batch has no target token or a
/// number of them that cannot be.
inline void check(const StepResult& result) {
  if (result.status == bad_rate) {
    fail<shape_error>(
        "pleat[F19]: a learning rate in device memory is below 0 or not finite in this step; nothing was updated");
  }
  if (result.status != 0) {
    fail<shape_error>("pleat[F18]: an operation failed in this step, whose status is ", result.status,
                      "; nothing was updated. check() of the operation says more on the ranks of its group");
  }
  if (!(std::isfinite(result.tokens) && result.tokens > 0)) {
    fail<shape_error>("pleat[F06]: the ranks had ", result.tokens,
                      " target tokens in this step, so nothing was updated; the global batch needs some");
  }
}

}  // namespace pleat::inline v0::optim
