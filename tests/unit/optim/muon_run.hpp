// Trains a small model with AdamW and Muon on the shards of a mesh, without gathers: the same on every device.
#pragma once

#include <cmath>
#include <cstring>
#include <mutex>
#include <vector>

#include <pleat/comm/mesh_comms.hpp>
#include <pleat/fsdp/plan.hpp>
#include <pleat/optim/optimizer.hpp>

namespace optim_testing {

/// Units of a model; expert parameters have all experts of the model.
using Model = std::vector<pleat::fsdp::UnitSpec>;

struct Sizes {
  int ranks = 1;
  int replicas = 1;
  int ep = 1;
};

/// Matrices of all forms, which shards of few elements cut everywhere, and a vector of AdamW in between.
inline Model small_model() {
  using pleat::Param;
  using pleat::fsdp::Granule;
  using pleat::fsdp::Optimizer;
  using pleat::fsdp::UnitSpec;
  return {
      UnitSpec{.name = "layer",
               .params = {{.name = "tall", .shape = {25, 6}, .optimizer = Optimizer::muon},
                          {.name = "norm", .shape = {13}, .weight_decay = false},
                          {.name = "wide", .shape = {5, 31}, .weight_decay = false, .optimizer = Optimizer::muon},
                          {.name = "square", .shape = {9, 9}, .granule = Granule::row(), .optimizer = Optimizer::muon},
                          {.name = "frozen", .shape = {2, 2}, .frozen = true, .optimizer = Optimizer::muon},
                          {.name = "row", .shape = {1, 17}, .optimizer = Optimizer::muon},
                          {.name = "stack", .shape = {3, 4, 5}, .optimizer = Optimizer::muon}}},
      UnitSpec{.name = "experts",
               .kind = Param::expert,
               .experts_local = 8,
               .params = {{.name = "up", .shape = {6, 10}, .optimizer = Optimizer::muon},
                          {.name = "bias", .shape = {10}},
                          {.name = "down", .shape = {10, 6}, .optimizer = Optimizer::muon}}},
      UnitSpec{.name = "next", .params = {{.name = "tall", .shape = {25, 6}, .optimizer = Optimizer::muon}}},
  };
}

/// 18 rows over 8 ranks as ceil-chunks: 3 rows on each of 6 ranks, none on the last two.
inline Model rows_of_ceil_chunks() {
  return {pleat::fsdp::UnitSpec{.name = "layer",
                                .params = {{.name = "w", .shape = {18, 5}, .optimizer = pleat::fsdp::Optimizer::muon}},
                                .boundaries = {0, 15, 30, 45, 60, 75, 90, 90, 90}}};
}

/// A value in (-1, 1) that is exact in bfloat16, the same for an element wherever it lies.
inline double drawn(unsigned seed, std::size_t unit, int param, std::int64_t element, int step) {
  std::uint64_t x =
      seed +
      0x9E3779B97F4A7C15u * (unit * 1000 + static_cast<std::size_t>(param) * 100 + static_cast<std::size_t>(step + 1)) +
      0xD1B54A32D192ED03u * static_cast<std::uint64_t>(element);
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return static_cast<double>(static_cast<std::int64_t>((x ^ (x >> 31)) % 255) - 127) / 128;
}

/// [unit][param][element of all experts]
template <class T>
using Values = std::vector<std::vector<std::vector<T>>>;

template <class T>
Values<T> empty_values(const Model& model) {
  Values<T> values;
  for (const auto& unit : model) {
    values.emplace_back();
    for (const auto& param : unit.params) {
      const std::int64_t elems = pleat::fsdp::elems_of(param.shape) * std::max<std::int64_t>(unit.experts_local, 1);
      values.back().emplace_back(static_cast<std::size_t>(elems));
    }
  }
  return values;
}

/// One rank's part of `steps` steps. `site` has the device: `executor`, `stream`, `allocate(bytes)` of poisoned memory
/// and `wait(world)`. All masters come together in `out`, [model]; false when ranks that hold the same element differ,
/// or a compute copy is no copy.
template <class Compute, class Site, class Comm>
bool train(Site& site, Comm& world, Model model, const Sizes& sizes, const pleat::optim::OptimizerOptions& options,
           unsigned seed, int steps, Values<pleat::accumulator_t<Compute>>& out, std::mutex& out_mutex) {
  using namespace pleat;
  using T = accumulator_t<Compute>;
  const auto mesh = RuntimeMesh::fold({.world = sizes.ranks, .ep = sizes.ep, .replicas = sizes.replicas});
  const MeshComms<RuntimeMesh, Comm> comms(mesh, world);
  const GroupComm<Comm> dense = comms.shard(Param::dense, Lane::reduce);
  const GroupComm<Comm> expert = comms.shard(Param::expert, Lane::reduce);
  for (auto& unit : model) unit.experts_local /= sizes.ep;
  const fsdp::Plan plan =
      fsdp::plan(model, fsdp::group_sizes(mesh), {.compute = dtype_of<Compute>, .alignment_elems = 1});
  const auto ep_rank = coordinate(mesh, world.rank()).ep;

  std::vector<decltype(site.allocate(0))> memory;
  const auto on_device = [&](const auto& values) {
    memory.push_back(site.allocate(values.size() * sizeof(values[0]) + 1));
    site.executor.copy(memory.back().data(), values.data(), values.size() * sizeof(values[0]), site.stream);
    site.wait(world);
    return memory.back().data();
  };
  const auto shard_values = [&](std::size_t u, int rank, int step) {
    const fsdp::UnitLayout& layout = plan.layouts[u];
    std::vector<T> values(static_cast<std::size_t>(layout.shard_elems(rank)), std::numeric_limits<T>::quiet_NaN());
    for (const fsdp::Piece& piece : layout.pieces(rank)) {
      const fsdp::ParamPlace& place = layout.place(piece.param);
      const std::int64_t begin = ep_rank * layout.experts_local * place.elems + piece.param_begin;
      for (std::int64_t i = 0; i < piece.elems; ++i) {
        values[static_cast<std::size_t>(piece.shard_begin + i)] =
            static_cast<T>(drawn(seed, u, piece.param, begin + i, step));
      }
    }
    return values;
  };
  std::vector<fsdp::ShardMemory> shards;
  std::vector<int> ranks;
  for (std::size_t u = 0; u < model.size(); ++u) {
    const fsdp::UnitLayout& layout = plan.layouts[u];
    ranks.push_back((model[u].kind == Param::dense ? dense : expert).rank());
    const auto pieces = fsdp::update_pieces(layout, layout.pieces(ranks[u]), sizes.replicas);
    const std::vector<T> masters = shard_values(u, ranks[u], -1);
    void* const master = on_device(masters);
    void* const gradient = on_device(masters);
    void* const compute = std::is_same_v<T, Compute> ? nullptr : on_device(std::vector<Compute>(masters.size()));
    shards.push_back({master, gradient, compute, plan.master, plan.compute, layout.shard_elems(ranks[u]),
                      reinterpret_cast<const fsdp::UpdatePiece*>(on_device(pieces)),
                      static_cast<std::int64_t>(pieces.size())});
  }
  const optim::OptimizerPlan planned = optim::plan_optimizer(plan.layouts, plan.kinds, plan.master, options);
  const auto scratch = site.allocate(planned.footprint().scratch);
  const auto persistent = site.allocate(planned.footprint().persistent);
  auto optimizer = optim::bind(planned, site.executor, dense, expert, std::span<const fsdp::ShardMemory>(shards),
                               Memory<>{Memory<>{scratch.block(), persistent.block()}}, site.stream);
  for (int step = 0; step < steps; ++step) {
    for (std::size_t u = 0; u < model.size(); ++u) {
      const auto values = shard_values(u, ranks[u], step);
      site.executor.copy(shards[u].gradient, values.data(), values.size() * sizeof(T), site.stream);
      site.wait(world);
    }
    const std::vector<optim::StepResult> result{{.grad_scale = 0.5, .steps = step + 1, .applied = 1}};
    optimizer.step(reinterpret_cast<optim::StepResult*>(on_device(result)), {.adamw = 0.01, .muon = 0.02}, site.stream);
    site.wait(world);
  }

  bool agrees = true;
  const std::lock_guard lock(out_mutex);
  for (std::size_t u = 0; u < model.size(); ++u) {
    const fsdp::UnitLayout& layout = plan.layouts[u];
    std::vector<T> masters(static_cast<std::size_t>(layout.shard_elems(ranks[u])));
    std::vector<Compute> copies(masters.size());
    site.executor.copy(masters.data(), shards[u].master, masters.size() * sizeof(T), site.stream);
    if (shards[u].compute != nullptr) {
      site.executor.copy(copies.data(), shards[u].compute, copies.size() * sizeof(Compute), site.stream);
    }
    site.wait(world);
    for (const fsdp::Piece& piece : layout.pieces(ranks[u])) {
      const fsdp::ParamPlace& place = layout.place(piece.param);
      const std::int64_t begin = ep_rank * layout.experts_local * place.elems + piece.param_begin;
      T* const to = out[u][static_cast<std::size_t>(piece.param)].data() + begin;
      const auto from = static_cast<std::size_t>(piece.shard_begin), elems = static_cast<std::size_t>(piece.elems);
      for (std::size_t i = 0; i < elems; ++i) {
        const T value = masters[from + i];
        agrees = agrees && std::isfinite(value) && (to[i] == 0 || to[i] == value);
        to[i] = value;
        if (shards[u].compute == nullptr || place.spec.frozen) continue;
        const auto copy = static_cast<Compute>(value);
        agrees = agrees && std::memcmp(&copies[from + i], &copy, sizeof(Compute)) == 0;
      }
    }
  }
  return agrees;
}

}  // namespace optim_testing
