// The bias that balances experts without a loss: it moves the choice, never the weights.
#pragma once

#include <algorithm>
#include <array>

#include <pleat/comm/memory.hpp>
#include <pleat/comm/ordered_sum.hpp>
#include <pleat/comm/plan_digest.hpp>
#include <pleat/core/footprint.hpp>
#include <pleat/core/streams.hpp>
#include <pleat/moe/leaf.hpp>
#include <pleat/moe/operand.hpp>
#include <pleat/moe/plan_checks.hpp>

namespace pleat::inline v0::moe {

/// Sizes of the bias.
struct SelectionBiasShape {
  int experts = 0;
  int k = 0;
  /// Of the model; the bias is of its accumulator.
  DType dtype = DType::f32;
};

/// Made by `plan_selection_bias`; read its members freely.
struct SelectionBiasPlan {
  SelectionBiasShape shape;
  int ranks = 1;

  /// As in losses.hpp: choices of each expert, then routed tokens; exact in float64.
  constexpr std::size_t counters() const { return static_cast<std::size_t>(shape.experts) + 1; }
  Footprint footprint() const {
    Carver persistent;
    persistent.take<double>(counters());
    return {.scratch = std::max(all_reduce_scratch_bytes(counters(), ranks, DType::f64), agreement_bytes(ranks)),
            .persistent = persistent.used_bytes()};
  }
};

/// `ranks` is the size of the group that counts are summed over. Errors: shape_error T01, E02, E07.
inline SelectionBiasPlan plan(int ranks, const SelectionBiasShape& shape) {
  check_choice(shape.experts, shape.k);
  check_float(shape.dtype);
  check_counted(ranks, 1, shape.experts);
  return {shape, ranks};
}

/// The selection bias of one layer. source: arXiv 2408.15664. Work is ordered on `streams.compute`.
template <executor Executor, communicator Comm>
class SelectionBias {
 public:
  using device_type = typename Executor::device_type;
  using stream_type = typename Executor::stream_type;
  static constexpr KnownDevice<device_type> kind{};

  /// See `bind`.
  SelectionBias(const SelectionBiasPlan& plan, GroupComm<Comm> counted_over, Block scratch, Block persistent,
                stream_type s)
      : plan_(plan), counted_over_(counted_over), scratch_(scratch) {
    preload_leaves<core_leaf<device_type>, moe_leaf<device_type>>();
    Carver memory(persistent);
    counts_ = memory.take<double>(plan.counters());
    const std::array fields{PlanField{"experts", plan.shape.experts}, PlanField{"k", plan.shape.k},
                            PlanField{"dtype", plan.shape.dtype}};
    agree_on("moe selection bias", fields, counted_over_, scratch_, s);
  }

  /// Counts the choices ids [tokens, k] i32 of a micro-batch. Local. Errors: shape_error T07, E01.
  template <class Ids>
  void count(const Streams<stream_type>& streams, const Ids& ids) {
    const TensorRef chosen = dense("ids", ids, DType::i32, kind, {any_extent, plan_.shape.k});
    moe_leaf<device_type>::count_choices(plan_.shape.experts, plan_.shape.k, 1, chosen.extent(0),
                                         chosen.template as<std::int32_t>(), started_, counts_, streams.compute);
    started_ = true;
  }

  /// bias [experts] acc += rate * sign(mean count - count), from all counts since the last update; forgets them.
  /// Collective over the group; `count` was called at least once.
  template <class Bias>
  void update(const Streams<stream_type>& streams, double rate, const Bias& bias) {
    const TensorRef b = dense("bias", bias, accumulator(plan_.shape.dtype), kind, {plan_.shape.experts});
    all_reduce_ordered(counted_over_, counts_, plan_.counters(), DType::f64, scratch_, streams.compute);
    moe_leaf<device_type>::update_bias(plan_.shape.experts, b.dtype(), counts_, rate, b.data(), streams.compute);
    started_ = false;
  }

 private:
  SelectionBiasPlan plan_;
  GroupComm<Comm> counted_over_;
  Block scratch_;
  double* counts_ = nullptr;
  bool started_ = false;
};

/// `counted_over` is dp x cp of the stage: its ranks compare their plans. What it writes is ordered on `s`. Errors:
/// shape_error T02; comm_error C36 on every rank, E06.
template <executor Executor, communicator Comm, class Arena>
SelectionBias<Executor, Comm> bind(const SelectionBiasPlan& plan, const Executor&, GroupComm<Comm> counted_over,
                                   const Memory<Arena>& memory,
                                   typename Executor::stream_type s = only_stream<typename Executor::stream_type>()) {
  check_group(counted_over.size(), plan.ranks);
  return {plan, counted_over, memory.scratch, memory.persistent, s};
}

}  // namespace pleat::inline v0::moe
