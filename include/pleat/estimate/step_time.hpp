// How long a step takes: at least, from what a machine cannot pass.
#pragma once

#include <pleat/estimate/traffic.hpp>

namespace pleat::inline v0::estimate {

/// What bounds a step.
enum class Limit : unsigned char { passes, nvlink, network };
constexpr const char* name_of(Limit limit) {
  return limit == Limit::passes ? "passes" : limit == Limit::nvlink ? "NVLink" : "network";
}

struct StepTime {
  double bound = 0;  ///< seconds
  Limit limit = Limit::passes;
  double bubble_share = 0;  ///< of the passes, on the rank that waits most
};

/// Plays the schedules of a mesh. All is borrowed.
class StepClock {
 public:
  StepClock(const Job& job, const MeshPlans& all, Schedules& schedules) : job_(job), all_(all), schedules_(schedules) {
    for (int stage = 0; stage < all.mesh.pp; ++stage) {
      std::vector<Passes>& of_chunks = passes_.emplace_back();
      for (const Chunk& chunk : all.chunks(stage)) of_chunks.push_back(passes_of(chunk));
    }
  }

  /// A step takes as long as its passes one after the other, or as a link needs for all that it carries; then shards
  /// are updated. `sent`: of the rank that sends most; `shards`: of the stages.
  StepTime time(const Bytes& sent, std::span<const ShardBytes> shards) const {
    const Machine& machine = job_.machine;
    double bubble = 0, updates = 0;
    const double makespan = schedules_.over_step(
        job_.schedule_of(all_.mesh), all_.mesh.pp, job_.micro_batches(all_.mesh), [&](const pipeline::Schedule& part) {
          const auto cost = [&](int rank, const pipeline::Op& op) { return seconds(rank, op); };
          const pipeline::Timeline run = simulate(part, cost, pipeline::TransferModel::instant);
          bubble = std::max(bubble, run.max_bubble());
          return run.makespan;
        });
    for (const ShardBytes& of_stage : shards) updates = std::max(updates, seconds_of_updates(of_stage));
    const double bounds[] = {makespan, sent.nvlink / machine.nvlink, sent.network / machine.network};
    const double* const longest = std::max_element(std::begin(bounds), std::end(bounds));
    return {*longest + updates, static_cast<Limit>(longest - bounds), makespan > 0 ? bubble / makespan : 0};
  }

 private:
  /// Updates move 30 bytes per element of AdamW and 26 of Muon, which also multiplies. source: docs/benchmarks.md.
  double seconds_of_updates(const ShardBytes& shards) const {
    return (shards.adamw / 8 * 30 + shards.muon / 4 * 26) / job_.machine.memory + shards.muon_flops / job_.machine.gemm;
  }

  /// The passes of a chunk, with what they move in memory besides products: activations are written and read once;
  /// gradients are written as units, read by those that sum them, and added to shards.
  Passes passes_of(const Chunk& chunk) const {
    Passes passes = all_.work.chunk(chunk);
    const double rate = job_.machine.memory, held = all_.bytes_held(chunk) / rate;
    passes.forward.compute += held;
    passes.input_gradient.compute += held;
    for (const UnitSize& unit : RankUnits({&chunk, 1}, all_.units).sizes) {
      const int ranks = all_.shards.groups().of(unit.kind);
      const auto unit_bytes = 2 * static_cast<double>(size_bytes(job_.gradient));
      const auto shard_bytes = 2 * static_cast<double>(size_bytes(accumulator(job_.compute))) / ranks;
      passes.weight_gradient.compute += unit.elems * (unit_bytes + shard_bytes) / rate;
    }
    return passes;
  }

  double seconds(int rank, const pipeline::Op& op) const {
    const Machine& machine = job_.machine;
    const auto of = [&](const pipeline::Part& part) -> const Passes& {
      return passes_[static_cast<std::size_t>(rank)][static_cast<std::size_t>(part.chunk)];
    };
    switch (op.kind) {
      case pipeline::OpKind::forward:
        return of(op.forward).forward.seconds(machine);
      case pipeline::OpKind::input_backward:
        return of(op.backward).input_gradient.seconds(machine);
      case pipeline::OpKind::weight_backward:
        return of(op.backward).weight_gradient.seconds(machine);
      case pipeline::OpKind::backward:
        return (of(op.backward).input_gradient + of(op.backward).weight_gradient).seconds(machine);
      case pipeline::OpKind::overlapped:
        break;
    }
    const Passes& backward = of(op.backward);
    return overlapped_seconds(of(op.forward).forward, backward.input_gradient + backward.weight_gradient, machine);
  }

  const Job& job_;
  const MeshPlans& all_;
  Schedules& schedules_;
  std::vector<std::vector<Passes>> passes_;  // [stage][chunk]
};

}  // namespace pleat::inline v0::estimate
