// The plan of the MoE layer: those of its parts, and what it keeps beside them.
#pragma once

#include <pleat/moe/dispatch_plan.hpp>
#include <pleat/moe/experts.hpp>
#include <pleat/moe/router.hpp>

namespace pleat::inline v0::moe {

/// Sizes of the layer, the same on every rank.
struct LayerShape {
  /// Most tokens of one rank in one call.
  std::int64_t max_tokens = 0;
  std::int64_t hidden = 0;
  std::int64_t inner = 0;
  int experts = 0;
  int k = 0;
  DType dtype = DType::f32;
};

/// What a caller may choose of the layer's parts; all ranks choose alike.
struct LayerOptions {
  RouterOptions router{};
  DispatchOptions dispatch{};
  ExpertOptions experts{};
};

/// What the layer itself saves beside its parts: `acc` is the accumulator of the dtype.
struct LayerRecord {
  std::int32_t* ids;      // [max_tokens, k]
  std::byte* weights;     // [max_tokens, k] acc
  std::byte* probs;       // [max_tokens, experts] acc
  std::byte* expert_out;  // [capacity_rows, hidden] dtype
  Block dispatch;
  Block experts;
};

/// Made by `plan`; read its members freely.
struct LayerPlan {
  RouterPlan router;
  DispatchPlan dispatch;
  ExpertPlan experts;

  LayerRecord carve_saved(Carver& memory) const {
    const auto tokens = static_cast<std::size_t>(dispatch.shape.max_tokens);
    const std::size_t k = static_cast<std::size_t>(router.shape.k), acc_bytes = size_bytes(router.accumulator());
    const auto part = [&](std::size_t bytes) { return Block{memory.take_bytes(bytes), bytes}; };
    LayerRecord r{};
    r.ids = memory.take<std::int32_t>(tokens * k);
    r.weights = memory.take_bytes(tokens * k * acc_bytes);
    r.probs = memory.take_bytes(tokens * static_cast<std::size_t>(router.shape.experts) * acc_bytes);
    r.dispatch = part(dispatch.footprint().saved);
    if (dispatch.has_arena()) return r;
    r.expert_out = memory.take_bytes(expert_rows_bytes());
    r.experts = part(experts.footprint().saved);
    return r;
  }
  /// Rows of all experts [capacity_rows, hidden], cut out of memory.
  std::byte* take_expert_rows(Carver& memory) const { return memory.take_bytes(expert_rows_bytes()); }
  /// Gradients of the expert rows and of the weights, and what the parts need, which never run at the same time.
  struct Scratch {
    std::byte* dexpert_rows;  // [capacity_rows, hidden] dtype; with an arena they take the place of expert_out
    std::byte* dweights;      // [max_tokens, k] acc
    Block parts;
  };
  Scratch carve_scratch(Carver& memory) const {
    std::byte* rows = dispatch.has_arena() ? nullptr : memory.take_bytes(expert_rows_bytes());
    std::byte* weights = memory.take_bytes(static_cast<std::size_t>(dispatch.shape.max_tokens * router.shape.k) *
                                           size_bytes(router.accumulator()));
    const std::size_t bytes = max_scratch(dispatch.footprint(), experts.footprint()).scratch;
    return {rows, weights, {memory.take_bytes(bytes), bytes}};
  }
  /// Whether a backward pass sends the gradients of rows before it computes those of weights, beside which they travel.
  /// Collectives do not move rows before they are received; an arena has no place for both gradients of the rows.
  constexpr bool sends_before_weights() const {
    return dispatch.options.transport == Transport::peer && !dispatch.has_arena();
  }
  /// What the first half of a backward pass leaves for the second, where they are apart.
  struct Deferred {
    std::byte* dexpert_out;  // [capacity_rows, hidden] dtype
    ExpertPlan::Scratch inner;
  };
  Deferred carve_deferred(Carver& memory) const {
    std::byte* rows = memory.take_bytes(expert_rows_bytes());
    return {rows, experts.carve_scratch(memory)};
  }
  std::size_t deferred_bytes() const {
    Carver deferred;
    carve_deferred(deferred);
    return deferred.used_bytes();
  }
  Footprint footprint() const {
    Carver saved, scratch;
    carve_saved(saved);
    carve_scratch(scratch);
    Footprint all = dispatch.footprint();
    all.saved = saved.used_bytes();
    all.scratch = scratch.used_bytes();
    return all;
  }

 private:
  constexpr std::size_t expert_rows_bytes() const {
    return static_cast<std::size_t>(dispatch.capacity_rows() * dispatch.shape.hidden) *
           size_bytes(dispatch.shape.dtype);
  }
};

/// Plans for ep groups of `ranks` ranks. Errors: those of the parts: mesh_error M06, shape_error T01, E02, E03,
/// E07, E12, E14.
inline LayerPlan plan(int ranks, const LayerShape& shape, const LayerOptions& options = {}) {
  const DispatchPlan dispatch =
      plan(ranks, DispatchShape{shape.max_tokens, shape.hidden, shape.experts, shape.k, shape.dtype}, options.dispatch);
  if (!fits_product({shape.max_tokens, shape.experts})) {
    fail<shape_error>("pleat[E07]: max_tokens=", shape.max_tokens, " experts=", shape.experts,
                      " are too large: their product must stay below 2^53");
  }
  ExpertOptions experts = options.experts;
  experts.in_place = experts.in_place || dispatch.has_arena();
  return {plan(RouterShape{shape.experts, shape.k, shape.dtype}, options.router), dispatch,
          plan(ExpertShape{dispatch.experts_local(), shape.hidden, shape.inner, dispatch.capacity_rows(), shape.dtype},
               experts)};
}

}  // namespace pleat::inline v0::moe
