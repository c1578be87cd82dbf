// What micro-batches of the MoE layer keep between their calls: by themselves, or together in an arena.
#pragma once

#include <pleat/core/streams.hpp>
#include <pleat/moe/dispatch_saved.hpp>
#include <pleat/moe/layer_plan.hpp>

namespace pleat::inline v0::moe {

/// What the live micro-batches of all layers of one plan keep of their rows: see RowArena. One per micro-batch in
/// flight.
class LayerArena {
 public:
  /// Bytes of the arena's memory.
  static std::size_t bytes(const LayerPlan& plan) {
    Carver memory;
    LayerArena(plan, memory);
    return memory.used_bytes();
  }
  /// `memory` has at least `bytes(plan)` bytes, and is borrowed. Zeroes what must be, on `s`. Errors: shape_error T02.
  template <executor Executor>
  LayerArena(const LayerPlan& plan, const Executor& executor, Block memory,
             typename Executor::stream_type s = only_stream<typename Executor::stream_type>())
      : LayerArena(plan, Carver(memory)) {
    clear(executor, s);
  }
  /// Releases all: where a step was given up.
  template <executor Executor>
  void clear(const Executor& executor, typename Executor::stream_type s) {
    rows.clear(executor, s);
  }

  RowArena rows;
  std::byte* expert_out;
  ExpertRecord experts;

 private:
  LayerArena(const LayerPlan& plan, Carver&& memory) : LayerArena(plan, memory) {}
  LayerArena(const LayerPlan& plan, Carver& memory)
      : rows(plan.dispatch, memory),
        expert_out(plan.take_expert_rows(memory)),
        experts(plan.experts.carve_saved(memory)) {}
};

/// The saved state of one live micro-batch of one layer. `memory` has at least `plan.footprint().saved` bytes, and is
/// borrowed. `ids`, `weights` and `probs` are what the forward call chose, valid until its next forward call.
class LayerSaved {
 public:
  /// Errors: shape_error T02, E17 for a plan with an arena.
  LayerSaved(const LayerPlan& plan, Block memory)
      : record(carved(plan, memory)), dispatch(plan.dispatch, record.dispatch), experts(plan.experts, record.experts) {}
  /// Of a plan with arena_rows; the arena must outlive this. Errors: shape_error T02, E17.
  LayerSaved(const LayerPlan& plan, Block memory, LayerArena& arena)
      : record(carved(plan, memory)),
        dispatch(plan.dispatch, record.dispatch, &arena.rows),
        experts(plan.experts, arena.experts) {
    record.expert_out = arena.expert_out;
  }

  LayerRecord record;
  DispatchSaved dispatch;
  ExpertSaved experts;
  TensorRef ids;      // [tokens, k] i32
  TensorRef weights;  // [tokens, k] acc
  TensorRef probs;    // [tokens, experts] acc

 private:
  static LayerRecord carved(const LayerPlan& plan, Block memory) {
    Carver carver(memory);
    return plan.carve_saved(carver);
  }
};

}  // namespace pleat::inline v0::moe
