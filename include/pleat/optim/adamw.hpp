// AdamW on shards: moments of the shard's own elements, no communication.
#pragma once

#include <span>
#include <vector>

#include <pleat/comm/memory.hpp>
#include <pleat/core/carve.hpp>
#include <pleat/core/footprint.hpp>
#include <pleat/core/streams.hpp>
#include <pleat/optim/leaf.hpp>
#include <pleat/optim/option_checks.hpp>

namespace pleat::inline v0::optim {

/// First and second moment of what AdamW updates of one unit's shard: [max_state_elems] of the master's dtype, each
/// piece's at its state_begin (fsdp::update_pieces).
struct Moments {
  void* first;
  void* second;
};

/// The plan of AdamW for units of whose shards it updates `state_elems` elements at most.
struct AdamwPlan {
  std::vector<std::int64_t> state_elems;
  DType master = DType::f32;
  AdamwOptions options;

  std::vector<Moments> carve(Carver& persistent) const {
    std::vector<Moments> moments;
    for (const std::int64_t elems : state_elems) {
      const std::size_t bytes = static_cast<std::size_t>(elems) * size_bytes(master);
      void* const first = persistent.take_bytes(bytes);
      moments.push_back({first, persistent.take_bytes(bytes)});
    }
    return moments;
  }
  Footprint footprint() const {
    Carver persistent;
    carve(persistent);
    return {.persistent = persistent.used_bytes()};
  }
};

/// Plans AdamW for the parameters of `units` that it updates, with masters of dtype `master`. Pure.
/// Errors: shape_error F16 for options that cannot be.
inline AdamwPlan plan_adamw(std::span<const fsdp::UnitLayout> units, DType master, const AdamwOptions& options = {}) {
  detail::check_master("AdamW", master);
  const auto is_beta = [](double beta) { return beta >= 0 && beta < 1; };
  if (!is_beta(options.beta1) || !is_beta(options.beta2) || !detail::is_eps(options.eps, master) ||
      !detail::is_decay(options.weight_decay)) {
    fail<shape_error>("pleat[F16]: AdamW with beta1=", options.beta1, " beta2=", options.beta2, " eps=", options.eps,
                      " weight_decay=", options.weight_decay, "; betas are 0 or more and below 1, eps is above 0 in ",
                      master, " and at most 1, weight_decay is finite and 0 or more");
  }
  AdamwPlan plan{{}, master, options};
  for (const fsdp::UnitLayout& unit : units) {
    plan.state_elems.push_back(max_state_elems(unit, fsdp::Optimizer::adamw));
  }
  return plan;
}

/// AdamW on the shards of a rank. Made by `bind`.
template <executor Executor>
class Adamw {
 public:
  using stream_type = typename Executor::stream_type;
  using leaf = optim_leaf<typename Executor::device_type>;

  Adamw(const AdamwPlan& plan, Executor executor, Block persistent, stream_type s) : plan_(plan) {
    preload_leaves<leaf>();
    Carver memory(persistent);
    moments_ = plan.carve(memory);
    executor.zero(persistent.data, memory.used_bytes(), s);
  }

  /// One step with learning rate `lr` on this rank's shards, the planned units in order: masters, moments and compute
  /// copies are updated, or left as they are where `result` (device memory) says so; it says so too when `lr` lies in
  /// device memory and cannot be. Reads and writes in the order of `s`; no communication. Errors: shape_error F05 for
  /// another number of units.
  void step(std::span<const fsdp::ShardMemory> shards, StepResult* result, LearningRate lr, stream_type s) {
    if (lr.is_in_memory()) leaf::check_rates(result, lr, lr, s);
    update(shards, result, lr, s);
  }
  /// The same with a rate that has been looked at.
  void update(std::span<const fsdp::ShardMemory> shards, const StepResult* result, LearningRate lr, stream_type s) {
    if (shards.size() != moments_.size()) {
      fail<shape_error>("pleat[F05]: AdamW is planned for ", moments_.size(), " units and given ", shards.size(),
                        "; plan_adamw takes the units of the same plan");
    }
    for (std::size_t u = 0; u < shards.size(); ++u) {
      if (plan_.state_elems[u] == 0) continue;
      leaf::adamw(shards[u], moments_[u].first, moments_[u].second, plan_.options, lr, result, s);
    }
  }

  /// The moments of each unit's shard, for checkpoints.
  std::span<const Moments> moments() const { return moments_; }

 private:
  AdamwPlan plan_;
  std::vector<Moments> moments_;
};

/// Binds a plan; `memory.persistent` is zeroed in the order of `s`: the stream of `step`, or one that comes before it.
/// Errors: shape_error T02; static T10.
template <executor Executor, class Arena>
Adamw<Executor> bind(const AdamwPlan& plan, Executor executor, const Memory<Arena>& memory,
                     typename Executor::stream_type s = only_stream<typename Executor::stream_type>()) {
  return {plan, executor, memory.persistent, s};
}

}  // namespace pleat::inline v0::optim
