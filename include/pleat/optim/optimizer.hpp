// The optimizer of a model: AdamW and Muon, each on the parameters that name it, in one step.
#pragma once

#include <array>

#include <pleat/optim/adamw.hpp>
#include <pleat/optim/muon.hpp>

namespace pleat::inline v0::optim {

/// Options of both optimizers; all ranks choose alike.
struct OptimizerOptions {
  AdamwOptions adamw = {};
  MuonOptions muon = {};
};

/// The learning rates of one step.
struct Rates {
  LearningRate adamw;
  LearningRate muon;
};

/// What every rank computes alike. A value without pointers.
struct OptimizerPlan {
  AdamwPlan adamw;
  MuonPlan muon;

  Footprint footprint() const { return adamw.footprint() + muon.footprint(); }
};

/// Plans both; see plan_adamw and plan_muon. Pure.
inline OptimizerPlan plan_optimizer(std::span<const fsdp::UnitLayout> units, std::span<const Param> kinds, DType master,
                                    const OptimizerOptions& options = {}) {
  return {plan_adamw(units, master, options.adamw), plan_muon(units, kinds, master, options.muon)};
}

/// AdamW and Muon on the shards of a rank. Made by `bind`.
template <executor Executor, communicator Comm>
class ShardOptimizer {
 public:
  using stream_type = typename Executor::stream_type;

  ShardOptimizer(Adamw<Executor> adamw, Muon<Executor, Comm> muon, std::span<const fsdp::ShardMemory> shards)
      : adamw_(std::move(adamw)), muon_(std::move(muon)), shards_(shards.begin(), shards.end()) {}

  /// One step of every trainable parameter, with both or none; both read the same `result`. See Adamw::step and
  /// Muon::step.
  void step(StepResult* result, const Rates& rates, stream_type s) {
    if (rates.adamw.is_in_memory() || rates.muon.is_in_memory()) {
      optim_leaf<typename Executor::device_type>::check_rates(result, rates.adamw, rates.muon, s);
    }
    adamw_.update(shards_, result, rates.adamw, s);
    muon_.update(result, rates.muon, s);
  }

  /// The parts, whose state checkpoints save.
  const Adamw<Executor>& adamw() const { return adamw_; }
  const Muon<Executor, Comm>& muon() const { return muon_; }

 private:
  Adamw<Executor> adamw_;
  Muon<Executor, Comm> muon_;
  std::vector<fsdp::ShardMemory> shards_;
};

/// Binds both on every rank of the groups, which compare what they have planned; see bind of MuonPlan.
template <executor Executor, communicator Comm, class Arena>
ShardOptimizer<Executor, Comm> bind(const OptimizerPlan& plan, Executor executor, const GroupComm<Comm>& dense,
                                    const GroupComm<Comm>& expert, std::span<const fsdp::ShardMemory> shards,
                                    const Memory<Arena>& memory,
                                    typename Executor::stream_type s = only_stream<typename Executor::stream_type>()) {
  const AdamwOptions& o = plan.adamw.options;
  const std::array<PlanField, 5> agreement{PlanField{"units", plan.adamw.state_elems.size()},
                                           PlanField{"beta1", o.beta1}, PlanField{"beta2", o.beta2},
                                           PlanField{"eps", o.eps}, PlanField{"weight_decay", o.weight_decay}};
  for (const Param kind : {Param::dense, Param::expert}) {
    agree_on("AdamW", agreement, kind == Param::dense ? dense : expert, memory.scratch, s);
  }
  Carver persistent(memory.persistent);
  const auto part = [&](const Footprint& needs) {
    Memory<Arena> own = memory;
    own.persistent = {persistent.take_bytes(needs.persistent), needs.persistent};
    return own;
  };
  const Memory<Arena> adamw = part(plan.adamw.footprint()), muon = part(plan.muon.footprint());
  return {bind(plan.adamw, executor, adamw, s), bind(plan.muon, executor, dense, expert, shards, muon, s), shards};
}

}  // namespace pleat::inline v0::optim
