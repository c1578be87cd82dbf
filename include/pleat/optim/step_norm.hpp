// StepNorm: the one reduction of a training step: gradient norm, clip coefficient, loss, token count and status.
#pragma once

#include <span>

#include <pleat/comm/group_comm.hpp>
#include <pleat/comm/memory.hpp>
#include <pleat/core/carve.hpp>
#include <pleat/core/footprint.hpp>
#include <pleat/core/streams.hpp>
#include <pleat/optim/leaf.hpp>

namespace pleat::inline v0::optim {

/// The plan of a StepNorm over a world of `world_size` ranks.
struct StepNormPlan {
  int world_size = 1;

  struct Buffers {
    StepScale* scale;
    StepPartial* partial;   // mine
    StepPartial* partials;  // [world_size]
    double* squares;        // [square_partials]
  };
  Buffers carve(Carver& persistent) const {
    return {persistent.take<StepScale>(1), persistent.take<StepPartial>(1),
            persistent.take<StepPartial>(static_cast<std::size_t>(world_size)),
            persistent.take<double>(square_partials)};
  }
  Footprint footprint() const {
    Carver persistent;
    carve(persistent);
    return {.persistent = persistent.used_bytes()};
  }
};
inline StepNormPlan plan_step_norm(int world_size) {
  return {world_size};
}

template <executor Executor, communicator Comm>
class StepNorm {
 public:
  using stream_type = typename Executor::stream_type;
  using leaf = optim_leaf<typename Executor::device_type>;

  StepNorm(const StepNormPlan& plan, Executor executor, GroupComm<Comm> world, Block persistent, stream_type s)
      : executor_(executor), world_(world) {
    preload_leaves<leaf>();
    Carver memory(persistent);
    buffers_ = plan.carve(memory);
    executor_.zero(persistent.data, memory.used_bytes(), s);
  }

  /// Reduces the step over the world, after the last gradient is summed; every rank calls. `shards` are this rank's;
  /// `sums` is its part in device memory; a `max_norm` of 0 does not clip. Moves 32 bytes per rank.
  /// Returns what `scale()` points to, written in the order of `s`.
  /// Norm^2 = sum over ranks and pieces of norm_weight * g^2: partial sums in float64, added in rank order.
  const StepScale* run(std::span<const fsdp::ShardMemory> shards, const StepSums* sums, double max_norm,
                       stream_type s) {
    executor_.zero(buffers_.squares, square_partials * sizeof(double), s);
    for (const fsdp::ShardMemory& shard : shards) leaf::add_squares(buffers_.squares, shard, s);
    leaf::sum_partials(&buffers_.partial->sum_of_squares, buffers_.squares, s);
    executor_.copy(&buffers_.partial->sums, sums, sizeof(StepSums), s);
    world_.all_gather(buffers_.partial, buffers_.partials, sizeof(StepPartial) / sizeof(double), DType::f64, s);
    leaf::finish_step(buffers_.scale, buffers_.partials, world_.size(), max_norm, s);
    return buffers_.scale;
  }

  /// The newest step; device memory, owned by this operation's block.
  const StepScale* scale() const { return buffers_.scale; }

 private:
  Executor executor_;
  GroupComm<Comm> world_;
  StepNormPlan::Buffers buffers_;
};

/// Binds a plan to `world`, all ranks of the job. `persistent` has footprint().persistent bytes and is borrowed.
/// It is zeroed in the order of `s`: the stream of `run`, or one that comes before it.
/// Errors: shape_error F05 when the plan is for another number of ranks; static T10.
template <executor Executor, communicator Comm>
StepNorm<Executor, Comm> bind(const StepNormPlan& plan, Executor executor, GroupComm<Comm> world, Block persistent,
                              typename Executor::stream_type s = only_stream<typename Executor::stream_type>()) {
  if (world.size() != plan.world_size) {
    fail<shape_error>("pleat[F05]: the norm is planned for ", plan.world_size, " ranks and bound to a world of ",
                      world.size(), "; plan_step_norm takes the size of the world");
  }
  return {plan, executor, world, persistent, s};
}

/// Throws on what every rank must hear of, given the step copied to the host; the same on every rank.
/// Errors: shape_error F06 when the global batch has no target token.
inline void check(const StepScale& step) {
  if (step.tokens == 0) {
    fail<shape_error>("pleat[F06]: no rank had a target token in this step; the global batch needs at least 1");
  }
}

}  // namespace pleat::inline v0::optim
