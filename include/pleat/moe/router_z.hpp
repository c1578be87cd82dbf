// The router's z-loss L = coefficient * mean over routed tokens of logsumexp(logits)^2: it keeps logits small.
#pragma once

#include <pleat/comm/memory.hpp>
#include <pleat/core/carve.hpp>
#include <pleat/core/footprint.hpp>
#include <pleat/core/streams.hpp>
#include <pleat/moe/leaf.hpp>
#include <pleat/moe/operand.hpp>
#include <pleat/moe/plan_checks.hpp>
#include <pleat/moe/step_tokens.hpp>

namespace pleat::inline v0::moe {

/// Sizes of the loss.
struct RouterZShape {
  int experts = 0;
  int k = 0;
  /// Of the model; logits are of its accumulator.
  DType dtype = DType::f32;
};

/// What a caller may choose of the loss.
struct RouterZOptions {
  double coefficient = 1e-3;
};

/// Made by `plan_router_z`; read its members freely.
struct RouterZPlan {
  RouterZShape shape;
  RouterZOptions options;

  PLEAT_HD constexpr DType accumulator() const { return pleat::accumulator(shape.dtype); }
  double* carve_scratch(Carver& memory) const { return memory.take<double>(loss_partials); }
  Footprint footprint() const {
    Carver scratch;
    carve_scratch(scratch);
    return {.scratch = scratch.used_bytes()};
  }
};

/// Errors: shape_error T01, E02, E14.
inline RouterZPlan plan(const RouterZShape& shape, const RouterZOptions& options = {}) {
  check_choice(shape.experts, shape.k);
  check_float(shape.dtype);
  check_number("coefficient", options.coefficient, true);
  return {shape, options};
}

/// The bound loss, for all layers. source: ST-MoE (arXiv 2202.08906). Local; ordered on `streams.compute`.
template <executor Executor>
class RouterZ {
 public:
  using device_type = typename Executor::device_type;
  using stream_type = typename Executor::stream_type;
  static constexpr KnownDevice<device_type> kind{};

  /// Errors: shape_error T02.
  RouterZ(const RouterZPlan& plan, Block scratch) : plan_(plan) {
    preload_leaves<moe_leaf<device_type>>();
    Carver memory(scratch);
    partials_ = plan.carve_scratch(memory);
  }

  /// dlogits [tokens, experts] acc += d of `step->targets * L` with respect to the logits: after Router::backward, once
  /// per micro-batch. logits [tokens, experts] acc and ids [tokens, k] i32 are those of the forward call; a token
  /// without a routed id has no part. `value` [1] f64 is increased by this rank's part of L: the sum over micro-batches
  /// and dp x cp is L. `step` lies in device memory. Errors: shape_error T07, E01.
  template <class Logits, class Ids, class DLogits, class Value>
  void backward(const Streams<stream_type>& streams, const Logits& logits, const Ids& ids, const StepTokens* step,
                const DLogits& dlogits, const Value& value) const {
    const TensorRef in = dense("logits", logits, plan_.accumulator(), kind, {any_extent, plan_.shape.experts});
    const TensorRef chosen = dense("ids", ids, DType::i32, kind, {in.extent(0), plan_.shape.k});
    const TensorRef out = dense("dlogits", dlogits, plan_.accumulator(), kind, {in.extent(0), plan_.shape.experts});
    const TensorRef sum = dense("value", value, DType::f64, kind, {1});
    moe_leaf<device_type>::router_z(plan_, in.extent(0), in.data(), chosen.template as<std::int32_t>(), step,
                                    out.data(), sum.template as<double>(), partials_, streams.compute);
  }

 private:
  RouterZPlan plan_;
  double* partials_ = nullptr;
};

/// Errors: shape_error T02.
template <executor Executor, class Arena>
RouterZ<Executor> bind(const RouterZPlan& plan, const Executor&, const Memory<Arena>& memory) {
  return RouterZ<Executor>(plan, memory.scratch);
}

}  // namespace pleat::inline v0::moe
