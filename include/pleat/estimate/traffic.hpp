// What a step sends: bytes of one rank, by what they are for and the link that they take.
#pragma once

#include <pleat/estimate/mesh_plans.hpp>

namespace pleat::inline v0::estimate {

/// What sends bytes in a step.
enum class Use : unsigned char { gathers, sums, ring, experts, stages };
inline constexpr int use_count = 5;
constexpr const char* name_of(Use use) {
  constexpr const char* names[use_count] = {"gathers", "sums", "ring", "experts", "stages"};
  return names[static_cast<int>(use)];
}
/// Bytes that one rank sends in a step.
struct Traffic {
  std::array<Bytes, use_count> bytes{};

  Bytes& operator[](Use use) { return bytes[static_cast<std::size_t>(use)]; }
  const Bytes& operator[](Use use) const { return bytes[static_cast<std::size_t>(use)]; }
  /// Of all uses.
  Bytes total() const { return std::accumulate(bytes.begin(), bytes.end(), Bytes{}); }
  friend Traffic operator+(const Traffic& a, const Traffic& b) { return combine(a, b, 1); }
  friend Traffic operator-(const Traffic& a, const Traffic& b) { return combine(a, b, -1); }
  friend Traffic operator*(double x, const Traffic& a) { return combine({}, a, x); }

 private:
  static Traffic combine(const Traffic& a, const Traffic& b, double x) {
    Traffic sum;
    for (std::size_t i = 0; i < use_count; ++i) sum.bytes[i] = a.bytes[i] + x * b.bytes[i];
    return sum;
  }
};

/// Of a pipeline rank, which runs `chunks`.
inline Traffic traffic_of(const Job& job, const MeshPlans& all, Schedules& schedules, int stage,
                          std::span<const Chunk> chunks) {
  const RankUnits units(chunks, all.units);
  const Links links(all.mesh, job.domain);
  const auto over_step = [&](auto f) {
    return schedules.over_step(job.schedule_of(all.mesh), all.mesh.pp, job.micro_batches(all.mesh), f);
  };
  const auto micro_batches = static_cast<double>(job.micro_batches(all.mesh));
  const auto part_of = [&](const UnitSize& unit, double bytes) {
    const int ranks = all.shards.groups().of(unit.kind);
    return links.to_all(unit.kind == Param::dense ? GroupUse::dense_shard : GroupUse::expert_shard,
                        bytes * unit.elems * (ranks - 1) / ranks);
  };
  Traffic traffic;
  const std::array<fsdp::KindPlan, 2> buffers = all.shards.buffers(chunks);
  const std::array<int, 2> slots{buffers[0].slots, buffers[1].slots};
  traffic[Use::gathers] = over_step([&](const pipeline::Schedule& part) {
    const auto& program = part.programs[static_cast<std::size_t>(stage)];
    const auto counts = GatherReplay(units.sizes, slots, job.prefetch).run(unit_uses(program, units));
    Bytes sum;
    for (std::size_t u = 0; u < counts.size(); ++u) {
      sum =
          sum + static_cast<double>(counts[u]) * part_of(units.sizes[u], static_cast<double>(size_bytes(job.compute)));
    }
    return sum;
  });
  for (const UnitSize& unit : units.sizes) {
    const int ranks = all.shards.groups().of(unit.kind), replicas = all.mesh.replicas;
    traffic[Use::sums] = traffic[Use::sums] +
                         micro_batches * part_of(unit, static_cast<double>(size_bytes(job.gradient))) +
                         links.to_all(GroupUse::replica, 4.0 * 2 * (replicas - 1) / replicas * unit.elems / ranks);
  }
  for (const Chunk& chunk : chunks) {
    for (const UnitWork& work : all.work.units(chunk, all.units)) {
      const Pass& forward = work.passes.forward;
      const Pass& backward = work.passes.input_gradient;
      traffic[Use::ring] = traffic[Use::ring] + micro_batches * (forward.ring + backward.ring);
      traffic[Use::experts] = traffic[Use::experts] + micro_batches * (forward.experts + backward.experts);
    }
  }
  traffic[Use::stages] = over_step([&](const pipeline::Schedule& part) {
    return static_cast<double>(sends(part.programs[static_cast<std::size_t>(stage)])) * all.work.boundary();
  });
  return traffic;
}

}  // namespace pleat::inline v0::estimate
