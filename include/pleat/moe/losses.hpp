// The load-balance loss L = alpha * experts * sum_i f_i * P_i, the same on every mesh.
#pragma once

#include <algorithm>
#include <array>
#include <utility>

#include <pleat/comm/memory.hpp>
#include <pleat/comm/ordered_sum.hpp>
#include <pleat/comm/plan_digest.hpp>
#include <pleat/core/footprint.hpp>
#include <pleat/core/streams.hpp>
#include <pleat/moe/leaf.hpp>
#include <pleat/moe/operand.hpp>
#include <pleat/moe/plan_checks.hpp>
#include <pleat/moe/step_tokens.hpp>

namespace pleat::inline v0::moe {

/// Over which tokens f_i = counts_i / (k * routed tokens) is taken.
enum class BalanceScope : unsigned char {
  micro_batch,   ///< the tokens of one micro-batch on all ranks of the stage (dp x cp)
  global_batch,  ///< those of all micro-batches of the step so far; depends on how the step is cut into micro-batches
  sequence,      ///< those of one sequence, which the ranks of a cp group hold together
};
constexpr const char* name_of(BalanceScope scope) {
  return scope == BalanceScope::micro_batch    ? "micro_batch"
         : scope == BalanceScope::global_batch ? "global_batch"
                                               : "sequence";
}

/// What a caller may choose of the loss; all ranks choose alike.
struct LoadBalanceOptions {
  double alpha = 1e-3;
  BalanceScope scope = BalanceScope::micro_batch;
};

/// Sizes of the loss, the same on every rank.
struct LoadBalanceShape {
  int experts = 0;
  int k = 0;
  /// Of the model; probabilities are of its accumulator.
  DType dtype = DType::f32;
  /// Most sequences in a micro-batch, for BalanceScope::sequence.
  std::int64_t max_sequences = 1;
};

/// Made by `plan_load_balance`; read its members freely.
struct LoadBalancePlan {
  LoadBalanceShape shape;
  LoadBalanceOptions options;
  int ranks = 1;

  PLEAT_HD constexpr DType accumulator() const { return pleat::accumulator(shape.dtype); }
  /// Rows of dprobs: one per group of tokens whose choices are counted together.
  constexpr std::int64_t rows(std::int64_t sequences) const {
    return options.scope == BalanceScope::sequence ? sequences : 1;
  }
  /// Counts of one group of tokens: [0, experts) choices of each expert, [experts] routed tokens; exact in float64.
  PLEAT_HD constexpr std::size_t counters() const { return static_cast<std::size_t>(shape.experts) + 1; }
  constexpr std::size_t max_counters() const {
    return counters() * static_cast<std::size_t>(rows(shape.max_sequences));
  }

  /// What an expert's probabilities, summed over the routed tokens of a group, weigh in L: from its count, the group's
  /// routed tokens, and those of the step.
  PLEAT_HD constexpr double weight(double count, double group_routed, double step_routed) const {
    if (group_routed == 0 || step_routed == 0) return 0;
    return options.alpha * shape.experts * (count / (shape.k * group_routed)) / step_routed;
  }

  /// The operation's own: the sum over ranks may run beside what the caller computes.
  struct Arrays {
    double* running;   // [counters] of the step so far, for BalanceScope::global_batch
    double* counts;    // [max_counters]
    double* partials;  // [loss_partials] of the value
    Block reduction;
  };
  Arrays carve_persistent(Carver& memory) const {
    double* running = memory.take<double>(options.scope == BalanceScope::global_batch ? counters() : 0);
    double* counts = memory.take<double>(max_counters());
    double* partials = memory.take<double>(loss_partials);
    const std::size_t bytes =
        std::max(all_reduce_scratch_bytes(max_counters(), ranks, DType::f64), agreement_bytes(ranks));
    return {running, counts, partials, {memory.take_bytes(bytes), bytes}};
  }
  Footprint footprint() const {
    Carver persistent;
    carve_persistent(persistent);
    return {.persistent = persistent.used_bytes()};
  }
};

/// `ranks` is the size of the group that counts are summed over. Errors: shape_error T01, E02, E07,
/// E14.
inline LoadBalancePlan plan(int ranks, const LoadBalanceShape& shape, const LoadBalanceOptions& options = {}) {
  check_choice(shape.experts, shape.k);
  check_float(shape.dtype);
  check_enumerator("scope", options.scope, BalanceScope::sequence);
  check_number("alpha", options.alpha, true);
  check_counted(ranks, shape.max_sequences, shape.experts);
  return {shape, options, ranks};
}

/// The bound loss of one layer. Every rank of the group calls `forward`, or `begin` and `end`, once per micro-batch,
/// with any number of tokens; recomputing a forward pass does not call it again.
template <executor Executor, communicator Comm>
class LoadBalance {
 public:
  using device_type = typename Executor::device_type;
  using stream_type = typename Executor::stream_type;
  static constexpr KnownDevice<device_type> kind{};

  /// See `bind`.
  LoadBalance(const LoadBalancePlan& plan, const Executor& executor, GroupComm<Comm> counted_over, Block persistent,
              stream_type s)
      : plan_(plan),
        executor_(executor),
        counted_over_(counted_over),
        counted_(executor.make_event()),
        done_(executor.make_event()) {
    preload_leaves<core_leaf<device_type>, moe_leaf<device_type>>();
    Carver memory(persistent);
    memory_ = plan.carve_persistent(memory);
    const std::array fields{
        PlanField{"experts", plan.shape.experts}, PlanField{"k", plan.shape.k},
        PlanField{"dtype", plan.shape.dtype},     PlanField{"max_sequences", plan.shape.max_sequences},
        PlanField{"alpha", plan.options.alpha},   PlanField{"scope", plan.options.scope}};
    agree_on("moe load balance", fields, counted_over_, memory_.reduction, s);
  }

  /// ids [tokens, k] i32, probs [tokens, experts] acc -> dprobs [groups, experts] acc, overwritten: d of the step's
  /// loss with respect to the probabilities of every routed token of a group, to give to Router::backward. A group is a
  /// sequence (tokens/sequences consecutive tokens) in BalanceScope::sequence, else the micro-batch.
  ///
  /// `step` lies in device memory. The gradient is that of `step->targets * L`: summing gradients over ranks and
  /// micro-batches and dividing once by the target tokens gives grad L. Each micro-batch or sequence weighs in L by its
  /// share of `step->routed`; f has no gradient; unrouted tokens have no part. `value` [1] f64 is increased by this
  /// rank's part of L: the sum over micro-batches, and over dp x cp, is L. Ordered on `streams.compute`. Errors:
  /// shape_error T07, E01, E04, E05.
  template <class Ids, class Probs, class DProbs, class Value>
  void forward(const Streams<stream_type>& streams, const Ids& ids, const Probs& probs, std::int64_t sequences,
               const StepTokens* step, const DProbs& dprobs, const Value& value) {
    begin(streams, ids, probs, sequences, step, dprobs, value);
    end(streams);
  }

  /// `forward`, whose sum over ranks and gradients go on on `streams.comm`: dprobs is needed in the backward pass only.
  /// What it is given must stay as it is until `end`, and `value` is of `streams.comm` until then.
  template <class Ids, class Probs, class DProbs, class Value>
  void begin(const Streams<stream_type>& streams, const Ids& ids, const Probs& probs, std::int64_t sequences,
             const StepTokens* step, const DProbs& dprobs, const Value& value) {
    const std::int64_t groups = plan_.rows(sequences);
    const TensorRef chosen = dense("ids", ids, DType::i32, kind, {any_extent, plan_.shape.k});
    const std::int64_t tokens = chosen.extent(0);
    const TensorRef p = dense("probs", probs, plan_.accumulator(), kind, {tokens, plan_.shape.experts});
    const TensorRef dp = dense("dprobs", dprobs, plan_.accumulator(), kind, {groups, plan_.shape.experts});
    const TensorRef sum = dense("value", value, DType::f64, kind, {1});
    if (groups < 1 || groups > plan_.rows(plan_.shape.max_sequences)) {
      fail<shape_error>("pleat[E05]: ", sequences, " sequences in a micro-batch; valid: 1 .. ",
                        plan_.shape.max_sequences);
    }
    check_divides(tokens, groups);

    end(streams);
    const auto* chosen_ids = chosen.template as<std::int32_t>();
    const std::size_t counters = plan_.counters() * static_cast<std::size_t>(groups);
    moe_leaf<device_type>::count_choices(plan_.shape.experts, plan_.shape.k, groups, tokens, chosen_ids, false,
                                         memory_.counts, streams.compute);
    executor_.record(counted_, streams.compute);
    const stream_type s = streams.comm;
    executor_.wait(s, counted_);
    all_reduce_ordered(counted_over_, memory_.counts, counters, DType::f64, memory_.reduction, s);
    const double* counts = memory_.counts;
    if (plan_.options.scope == BalanceScope::global_batch) {
      const void* part = memory_.counts;
      core_leaf<device_type>::sum_ranks(memory_.running, DType::f64, {&part, 1}, DType::f64, counters, started_, s);
      started_ = true;
      counts = memory_.running;
    }
    moe_leaf<device_type>::load_balance(plan_, groups, tokens, chosen_ids, p.data(), counts, step, dp.data(),
                                        sum.template as<double>(), memory_.partials, s);
    executor_.record(done_, s);
    is_open_ = true;
  }
  /// What follows on `streams.compute` comes after the work of the last `begin`: before dprobs is read, and the value.
  void end(const Streams<stream_type>& streams) {
    if (std::exchange(is_open_, false)) executor_.wait(streams.compute, done_);
  }

  /// Forgets the counts of the step's micro-batches: after each optimizer step.
  void reset() { started_ = false; }

 private:
  LoadBalancePlan plan_;
  Executor executor_;
  GroupComm<Comm> counted_over_;
  typename Executor::event_type counted_, done_;
  LoadBalancePlan::Arrays memory_{};
  bool started_ = false;
  bool is_open_ = false;  // between begin and end
};

/// `counted_over` is dp x cp of the stage, cp for BalanceScope::sequence: its ranks compare their plans. What it writes
/// is ordered on `s`. Errors: shape_error T02; comm_error C36 on every rank, E06.
template <executor Executor, communicator Comm, class Arena>
LoadBalance<Executor, Comm> bind(const LoadBalancePlan& plan, const Executor& executor, GroupComm<Comm> counted_over,
                                 const Memory<Arena>& memory,
                                 typename Executor::stream_type s = only_stream<typename Executor::stream_type>()) {
  check_group(counted_over.size(), plan.ranks);
  return {plan, executor, counted_over, memory.persistent, s};
}

}  // namespace pleat::inline v0::moe
