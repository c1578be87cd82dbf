// What sharded parameters take on one rank: the plans of FSDP and of the optimizers, without planning every equal
// layer.
#pragma once

#include <array>

#include <pleat/estimate/layer.hpp>
#include <pleat/optim/optimizer.hpp>

namespace pleat::inline v0::estimate {

/// A whole unit, as gathers and sums move it.
struct UnitSize {
  Param kind = Param::dense;
  double elems = 0;
};
/// By what they belong to; a layer's in forward order.
struct UnitSizes {
  UnitSize embedding, head;
  std::vector<UnitSize> dense_layer, moe_layer;
};

/// Bytes on one rank, the most of any rank of a stage.
struct ShardBytes {
  double parameters = 0;  ///< fp32 masters and bf16 copies
  double gradients = 0;
  double slots = 0;           ///< gathered units
  double gradient_units = 0;  ///< whole gradients on their way to the shards
  double sums = 0;            ///< what reductions work in
  double adamw = 0;           ///< moments
  double muon = 0;            ///< momentum, and what Newton-Schulz works in
  double muon_flops = 0;      ///< of a step, on the rank that owns most

  friend ShardBytes operator+(const ShardBytes& a, const ShardBytes& b) { return combine(a, b, 1); }
  friend ShardBytes operator-(const ShardBytes& a, const ShardBytes& b) { return combine(a, b, -1); }
  friend ShardBytes operator*(double x, const ShardBytes& a) { return combine({}, a, x); }

 private:
  static ShardBytes combine(const ShardBytes& a, const ShardBytes& b, double x) {
    return {a.parameters + x * b.parameters,
            a.gradients + x * b.gradients,
            a.slots + x * b.slots,
            a.gradient_units + x * b.gradient_units,
            a.sums + x * b.sums,
            a.adamw + x * b.adamw,
            a.muon + x * b.muon,
            a.muon_flops + x * b.muon_flops};
  }
};

/// Plans the shards of the chunks of a rank. All ranks of a stage have the same plan.
class ShardPlanner {
 public:
  ShardPlanner(const Job& job, const RuntimeMesh& mesh) : job_(job), mesh_(mesh), sizes_(fsdp::group_sizes(mesh)) {
    options_.compute = job.compute;
    options_.gradient = job.gradient;
    options_.prefetch = job.prefetch;
    options_.transport = transport_of(mesh, job.domain, {GroupUse::dense_shard, GroupUse::expert_shard});
  }

  /// Layers of a kind from which on each one more adds the same: slots hold units of so many, and a round of Muon is
  /// full, or the plan has as many entries as are worth listing.
  int distinct_layers() const {
    const int windows = job_.prefetch + 3;
    if (job_.optimizer == fsdp::Optimizer::adamw) return windows;
    constexpr int most_entries = 1 << 22;
    return std::max(windows, std::min(64, most_entries / sizes_.dense));
  }

  /// Layers of the chunks that are planned one by one.
  int listed_layers(std::span<const Chunk> chunks) const {
    int count = 0;
    for (const Chunk& chunk : chunks) {
      count += std::min(chunk.dense_layers, distinct_layers()) + std::min(chunk.moe_layers, distinct_layers());
    }
    return count;
  }

  /// As if all layers were planned, which are only where there are few. Errors: those of fsdp::plan and plan_muon.
  ShardBytes bytes(std::vector<Chunk> chunks) const {
    const int most = distinct_layers();
    std::array<int, 2> cut{};  // layers left out, by kind
    for (Chunk& chunk : chunks) {
      cut[0] += std::max(0, chunk.dense_layers - most);
      cut[1] += std::max(0, chunk.moe_layers - most);
      chunk.dense_layers = std::min(chunk.dense_layers, most);
      chunk.moe_layers = std::min(chunk.moe_layers, most);
    }
    const ShardBytes few = planned_bytes(chunks);
    ShardBytes all = few;
    const auto add_more = [&](int Chunk::*layers, int left_out) {
      if (left_out == 0) return;
      std::vector<Chunk> fewer = chunks;
      const auto is_less = [&](const Chunk& a, const Chunk& b) { return a.*layers < b.*layers; };
      --((*std::max_element(fewer.begin(), fewer.end(), is_less)).*layers);
      all = all + static_cast<double>(left_out) * (few - planned_bytes(fewer));
    };
    add_more(&Chunk::dense_layers, cut[0]);
    add_more(&Chunk::moe_layers, cut[1]);
    return all;
  }

  /// Of units on whole ranks.
  UnitSizes unit_sizes() const {
    UnitSizes sizes;
    const auto size_of = [&](const fsdp::UnitSpec& unit) -> UnitSize {
      const auto layout = fsdp::plan_unit(unit.params, sizes_.of(unit.kind), {.experts_local = unit.experts_local});
      return {unit.kind, static_cast<double>(layout.total_elems())};
    };
    sizes.embedding = size_of(embedding_unit(job_.model));
    sizes.head = size_of(head_unit(job_.model));
    for (const LayerKind kind : {LayerKind::dense, LayerKind::moe}) {
      if (kind == LayerKind::dense && job_.model.dense_layers == 0) continue;
      for (const fsdp::UnitSpec& unit : units_of_layer(job_.model, kind, experts_local(), job_.optimizer)) {
        (kind == LayerKind::dense ? sizes.dense_layer : sizes.moe_layer).push_back(size_of(unit));
      }
    }
    return sizes;
  }
  /// Slots and gradient units of both kinds: see fsdp::plan.
  std::array<fsdp::KindPlan, 2> buffers(std::span<const Chunk> chunks) const {
    const std::vector<fsdp::UnitSpec> units = units_of(job_.model, chunks, experts_local(), job_.optimizer);
    // Their numbers only ask whether a group has more than one rank, and a plan for few lists least.
    const fsdp::GroupSizes few{std::min(sizes_.dense, 2), std::min(sizes_.expert, 2), 1};
    return fsdp::plan(units, few, options_).per_kind;
  }
  /// See fsdp::Plan, of which this asks one without units.
  bool writes_shards(Param kind) const { return fsdp::plan({}, sizes_, options_).writes_shards(kind); }
  const fsdp::GroupSizes& groups() const { return sizes_; }
  Transport transport() const { return options_.transport; }

 private:
  std::int64_t experts_local() const { return job_.model.experts / mesh_.ep; }

  ShardBytes planned_bytes(std::span<const Chunk> chunks) const {
    const fsdp::Plan plan = fsdp::plan(units_of(job_.model, chunks, experts_local(), job_.optimizer), sizes_, options_);
    ShardBytes bytes;
    for (const fsdp::UnitLayout& unit : plan.layouts) {
      Carver shard;
      plan.carve_shard(shard, unit);
      const auto gradient = static_cast<double>(unit.max_shard_elems()) * static_cast<double>(size_bytes(plan.master));
      bytes.gradients += gradient;
      bytes.parameters += static_cast<double>(shard.used_bytes()) - gradient;
    }
    for (const Param kind : {Param::dense, Param::expert}) {
      Carver units;
      plan.carve_units(units, kind);
      const auto slots = static_cast<double>(plan.of(kind).slots) * static_cast<double>(plan.of(kind).unit_elems) *
                         static_cast<double>(size_bytes(plan.compute));
      bytes.slots += slots;
      bytes.gradient_units += static_cast<double>(units.used_bytes()) - slots;
    }
    const Footprint all = plan.footprint();
    bytes.sums = static_cast<double>(all.persistent + all.symmetric) - bytes.parameters - bytes.gradients -
                 bytes.slots - bytes.gradient_units;
    const optim::OptimizerPlan updates =
        optim::plan_optimizer(plan.layouts, plan.kinds, plan.master, {.adamw = {}, .muon = {.product = job_.compute}});
    bytes.adamw = static_cast<double>(updates.adamw.footprint().persistent);
    const Footprint muon = updates.muon.footprint();
    bytes.muon = static_cast<double>(muon.persistent + muon.scratch);
    bytes.muon_flops = flops(updates.muon);
    return bytes;
  }

  /// Of the rank that orthogonalizes most.
  static double flops(const optim::MuonPlan& plan) {
    double most = 0;
    for (const optim::MuonRound& round : plan.rounds) {
      std::vector<double> loads;
      for (const optim::MuonMatrix& matrix : round.matrices) {
        const auto owner = static_cast<std::size_t>(matrix.owner);
        if (owner >= loads.size()) loads.resize(owner + 1);
        loads[owner] += 2 * matrix.cost() * plan.options.iterations;
      }
      most += *std::max_element(loads.begin(), loads.end());
    }
    return most;
  }

  const Job& job_;
  RuntimeMesh mesh_;
  fsdp::GroupSizes sizes_;
  fsdp::Options options_;
};

}  // namespace pleat::inline v0::estimate
