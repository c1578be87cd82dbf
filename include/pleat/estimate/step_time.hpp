// How long a step takes: at least, from what a machine cannot pass, and as it is expected, from what operations reach.
#pragma once

#include <pleat/estimate/unit_streams.hpp>

namespace pleat::inline v0::estimate {

/// What bounds a step.
enum class Limit : unsigned char { passes, nvlink, network };
constexpr const char* name_of(Limit limit) {
  return limit == Limit::passes ? "passes" : limit == Limit::nvlink ? "NVLink" : "network";
}

/// How long a step takes, and what bounds it.
struct StepTime {
  Seconds seconds = {};
  Limit limit = Limit::passes;  ///< of the bound
  double bubble_share = 0;      ///< of the bound's passes, on the rank that waits most
};

/// Plays the schedules of a mesh. All is borrowed.
class StepClock {
 public:
  StepClock(const Job& job, const MeshPlans& all, Schedules& schedules) : job_(job), all_(all), schedules_(schedules) {
    for (int stage = 0; stage < all.mesh.pp; ++stage) {
      const std::vector<Chunk> chunks = all.chunks(stage);
      std::vector<ChunkTimes>& of_stage = times_.emplace_back();
      room_.push_back(all.shards.buffers(chunks));
      for (const Chunk& chunk : chunks) of_stage.push_back(times_of(chunk, room_.back()));
    }
  }

  /// A step takes as long as its passes one after the other, or as a link needs for all that it carries; then shards
  /// are updated. `sent`: of the rank that sends most; `shards`: of the stages.
  StepTime time(const Bytes& sent, std::span<const ShardBytes> shards) const {
    const Machine& machine = job_.machine;
    double bubble = 0;
    const double passes = makespan(&Seconds::bound, bubble),
                 expected = all_.mesh.pp == 1 ? played() : makespan(&Seconds::expected, bubble) + ends();
    Seconds updates;
    for (const ShardBytes& of_stage : shards) {
      const Seconds own = seconds_of_updates(of_stage);
      updates = {std::max(updates.bound, own.bound), std::max(updates.expected, own.expected)};
    }
    const double bounds[] = {passes, sent.nvlink / machine.nvlink, sent.network / machine.network};
    const double* const longest = std::max_element(std::begin(bounds), std::end(bounds));
    const double bound = *longest + updates.bound;
    return {{bound, std::max(bound, expected + updates.expected + behind())},
            static_cast<Limit>(longest - bounds),
            passes > 0 ? bubble / passes : 0};
  }

 private:
  /// Of a pipeline, what nothing hides: the gather of the first unit and the sum of the last.
  double ends() const {
    double most = 0;
    for (int stage = 0; stage < all_.mesh.pp; ++stage) {
      const std::vector<Chunk> chunks = all_.chunks(stage);
      const UnitStep first = step_of(all_.work.units(chunks.front(), all_.units).front(), 0, true, true);
      most = std::max(most, first.gather + first.sum);
    }
    return most;
  }
  /// After the passes: sums over replicas, and the host's part.
  double behind() const {
    double most = 0;
    for (int stage = 0; stage < all_.mesh.pp; ++stage) {
      most = std::max(most, seconds_of_replicas(RankUnits(all_.chunks(stage), all_.units).sizes));
    }
    return most + job_.machine.rates.step;
  }
  /// All passes of a rank without a pipeline, one after the other.
  double played() const {
    return schedules_.over_step(job_.schedule_of(all_.mesh), 1, job_.micro_batches(all_.mesh),
                                [&](const pipeline::Schedule& part) {
                                  std::vector<UnitStep> steps;
                                  const auto append = [&](const std::vector<UnitStep>& more) {
                                    steps.insert(steps.end(), more.begin(), more.end());
                                  };
                                  const ChunkTimes& times = times_.front().front();
                                  for (const pipeline::Op& op : part.programs.front().ops) {
                                    if (op.has_forward()) append(times.forward_steps);
                                    if (op.has_input_gradient()) append(times.backward_steps);
                                    if (op.kind == pipeline::OpKind::overlapped)
                                      steps.back().compute -= hidden(times, times);
                                  }
                                  return play(steps, room_.front(), PlayedPart::whole);
                                });
  }
  double seconds_of_replicas(std::span<const UnitSize> units) const {
    Bytes sent;
    for (const UnitSize& unit : units) {
      const int replicas = all_.mesh.replicas;
      const auto width = static_cast<double>(size_bytes(accumulator(job_.compute)));
      sent = sent + Links(all_.mesh, job_.domain)
                        .to_all(GroupUse::replica, width * 2 * (replicas - 1) / replicas * unit.elems / ranks_of(unit));
    }
    return std::max(sent.nvlink / job_.machine.rates.replicas, sent.network / job_.machine.network);
  }
  double makespan(double Seconds::*which, double& bubble) const {
    return schedules_.over_step(
        job_.schedule_of(all_.mesh), all_.mesh.pp, job_.micro_batches(all_.mesh), [&](const pipeline::Schedule& part) {
          const auto cost = [&](int rank, const pipeline::Op& op) { return seconds(rank, op).*which; };
          const pipeline::Timeline run = simulate(part, cost, pipeline::TransferModel::instant);
          if (which == &Seconds::bound) bubble = std::max(bubble, run.max_bubble());
          return run.makespan;
        });
  }

  /// Updates move 30 bytes per element of AdamW and 26 of Muon, which also multiplies. source: docs/benchmarks.md.
  Seconds seconds_of_updates(const ShardBytes& shards) const {
    const double moved = shards.adamw / 8 * 30 + shards.muon / 4 * 26, normed = shards.gradients;
    const Machine& machine = job_.machine;
    return {moved / machine.memory + shards.muon_flops / machine.gemm,
            (moved + normed) / machine.rates.shards + shards.muon_flops / machine.rates.newton_schulz};
  }

  /// Of a chunk.
  struct ChunkTimes {
    Passes passes;                                                              // bounds
    double forward = 0, input_gradient = 0, weight_gradient = 0, backward = 0;  // expected
    std::vector<UnitStep> forward_steps = {}, backward_steps = {};
  };

  /// The bounds of a chunk's passes, with what they move in memory besides products: activations are written and read
  /// once; gradients are written as units, read by those that sum them, and added to shards, or written in the shards
  /// and added to what is there.
  Passes bounds_of(const Chunk& chunk, std::span<const UnitWork> units) const {
    const double rate = job_.machine.memory, held = all_.bytes_held(chunk) / rate;
    Passes passes;
    passes.forward.compute.bound = passes.input_gradient.compute.bound = held;
    for (const UnitWork& work : units) {
      passes = passes + work.passes;
      const auto unit_bytes = 2 * static_cast<double>(size_bytes(job_.gradient));
      const auto shard_bytes = 2 * static_cast<double>(size_bytes(accumulator(job_.compute))) / ranks_of(work.unit);
      const double bytes =
          all_.shards.writes_shards(work.unit.kind) ? shard_bytes * (1 + added()) / 2 : unit_bytes + shard_bytes;
      passes.weight_gradient.compute.bound += work.unit.elems * bytes / rate;
    }
    return passes;
  }
  ChunkTimes times_of(const Chunk& chunk, const std::array<fsdp::KindPlan, 2>& room) const {
    const std::vector<UnitWork> units = all_.work.units(chunk, all_.units);
    ChunkTimes times{bounds_of(chunk, units)};
    std::vector<UnitStep> forward, inputs, weights, both;
    const Machine& machine = job_.machine;
    for (const UnitWork& work : units) {
      const bool is_head = work.passes.forward.compute.expected == 0;
      if (!is_head) forward.push_back(step_of(work, work.passes.forward.seconds(machine).expected, true, false));
    }
    for (auto work = units.rbegin(); work != units.rend(); ++work) {
      const double input = work->passes.input_gradient.seconds(machine).expected,
                   weight = work->passes.weight_gradient.seconds(machine).expected;
      const bool is_embedding = input == 0;
      inputs.push_back(step_of(*work, input, !is_embedding, false));
      weights.push_back(step_of(*work, weight, false, true));
      both.push_back(step_of(*work, input + weight, !is_embedding, true));
    }
    times.forward = play(forward, room);
    times.input_gradient = play(inputs, room);
    times.weight_gradient = play(weights, room);
    times.backward = play(both, room);
    times.forward_steps = std::move(forward);
    times.backward_steps = std::move(both);
    return times;
  }
  int ranks_of(const UnitSize& unit) const { return all_.shards.groups().of(unit.kind); }
  /// The part of a step's gradients that are added to others: all but the first micro-batch's.
  double added() const { return 1 - 1 / static_cast<double>(job_.micro_batches(all_.mesh)); }
  UnitStep step_of(const UnitWork& work, double compute, bool gathers, bool sums) const {
    const int ranks = ranks_of(work.unit);
    const Rates& rates = job_.machine.rates;
    const auto width = static_cast<double>(size_bytes(job_.compute)),
               sum_width = static_cast<double>(size_bytes(job_.gradient));
    UnitStep step{work.unit.kind, compute};
    if (ranks == 1) {
      // In a shard, products read what they are added to; into it, a sum reads gradients too, and writes.
      const double moved = all_.shards.writes_shards(work.unit.kind) ? added() : 2 + added();
      if (sums) step.compute += moved * work.unit.elems * sum_width / rates.local_sums;
      return step;
    }
    const Links links(all_.mesh, job_.domain);
    const GroupUse use = work.unit.kind == Param::dense ? GroupUse::dense_shard : GroupUse::expert_shard;
    const auto seconds = [&](double bytes, double rate) {
      const Bytes sent = links.to_all(use, bytes * work.unit.elems * (ranks - 1) / ranks);
      return std::max(sent.nvlink / rate, sent.network / job_.machine.network) + rates.meeting;
    };
    if (gathers) step.gather = seconds(width, rates.gathers);
    if (sums) step.sum = seconds(sum_width, rates.sums / (1 + added() * rates.adding));
    // What moves beside takes bandwidth of memory, and multiprocessors.
    step.compute += rates.disturbed * (step.gather + step.sum);
    return step;
  }

  Seconds seconds(int rank, const pipeline::Op& op) const {
    const Machine& machine = job_.machine;
    const auto of = [&](const pipeline::Part& part) -> const ChunkTimes& {
      return times_[static_cast<std::size_t>(rank)][static_cast<std::size_t>(part.chunk)];
    };
    const auto bound = [&](const Pass& pass) { return pass.seconds(machine).bound; };
    switch (op.kind) {
      case pipeline::OpKind::forward:
        return {bound(of(op.forward).passes.forward), of(op.forward).forward};
      case pipeline::OpKind::input_backward:
        return {bound(of(op.backward).passes.input_gradient), of(op.backward).input_gradient};
      case pipeline::OpKind::weight_backward:
        return {bound(of(op.backward).passes.weight_gradient), of(op.backward).weight_gradient};
      case pipeline::OpKind::backward: {
        const ChunkTimes& times = of(op.backward);
        return {bound(times.passes.input_gradient + times.passes.weight_gradient), times.backward};
      }
      case pipeline::OpKind::overlapped:
        break;
    }
    const ChunkTimes &forward = of(op.forward), &backward = of(op.backward);
    const Pass both = backward.passes.input_gradient + backward.passes.weight_gradient;
    return {overlapped_seconds(forward.passes.forward, both, machine),
            forward.forward + backward.backward - hidden(forward, backward)};
  }
  /// Of two passes side by side: a part of what they would wait for alone.
  double hidden(const ChunkTimes& forward, const ChunkTimes& backward) const {
    const Bytes sent = forward.passes.forward.experts + backward.passes.input_gradient.experts;
    return job_.machine.rates.hidden * sent.seconds(job_.machine) * job_.machine.nvlink / job_.machine.rates.wire;
  }

  const Job& job_;
  const MeshPlans& all_;
  Schedules& schedules_;
  std::vector<std::array<fsdp::KindPlan, 2>> room_;  // [stage]
  std::vector<std::vector<ChunkTimes>> times_;       // [stage][chunk]
};

}  // namespace pleat::inline v0::estimate
