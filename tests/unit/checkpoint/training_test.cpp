// Training goes on from a checkpoint as if nothing had been: shards, moments and momentum, on any mesh, bit for bit.
#include <doctest/doctest.h>

#include <thread>

#include <pleat/comm.hpp>
#include <pleat/fsdp.hpp>
#include <pleat/optim.hpp>

#include "unit/checkpoint/sample_model.hpp"

using namespace checkpoint_testing;

namespace {
constexpr int experts = 4;

std::vector<fsdp::UnitSpec> units_on(const RuntimeMesh& mesh) {
  const auto muon = fsdp::Optimizer::muon;
  std::vector<fsdp::UnitSpec> units;
  units.push_back(
      {.name = "embedding", .params = {{.name = "tokens", .shape = {13, 6}}, {.name = "scale", .shape = {}}}});
  for (const std::string layer : {"layers.0", "layers.1"}) {
    units.push_back({.name = layer + ".attention",
                     .params = {{.name = "norm", .shape = {6}, .weight_decay = false},
                                {.name = "query", .shape = {6, 9}, .optimizer = muon},
                                {.name = "adapted", .shape = {3, 5}, .frozen = true}}});
    units.push_back({.name = layer + ".experts",
                     .kind = Param::expert,
                     .experts_local = experts / mesh.ep,
                     .params = {{.name = "gate", .shape = {4, 6}, .optimizer = muon}, {.name = "bias", .shape = {5}}}});
  }
  return units;
}

float drawn(const std::string& what, std::int64_t i, std::int64_t step) {
  return static_cast<float>(static_cast<double>(value_of(what, i, step) >> 40) * 0x1p-23 - 1);
}

/// One rank's part of a run of `steps` steps over `mesh`, which begins from `load` where it is given, and saves behind
/// its last step where `save` is. Returns all parameters of this ep rank as they are then, by name.
std::map<std::string, std::vector<float>> train(ThreadComm& world, const RuntimeMesh& mesh, int first_step, int steps,
                                                const std::string& load, const std::string& save) {
  const MeshComms comms(mesh, world, std::array{Lane::main, Lane::gather, Lane::reduce});
  const auto groups = fsdp::groups_of(comms);
  const fsdp::Plan plan = fsdp::plan(units_on(mesh), groups.sizes(), {.compute = DType::bf16, .alignment_elems = 4});
  const HostBuffer persistent(plan.footprint().persistent, 0xff);
  auto op = fsdp::bind(plan, HostExecutor{}, groups, Memory<HostArena>{.persistent = persistent.block()});
  const optim::OptimizerPlan optimizer_plan =
      optim::plan_optimizer(plan.layouts, plan.kinds, plan.master, {.muon = {.product = DType::f32}});
  const Footprint needs = optimizer_plan.footprint();
  const HostBuffer state(needs.persistent, 0xff), scratch(needs.scratch, 0xff);
  auto optimizer = optim::bind(optimizer_plan, HostExecutor{}, groups.dense.reduce, groups.expert.reduce, op.shards(),
                               Memory<>{.scratch = scratch.block(), .persistent = state.block()});

  Model model{{{}}};
  for (std::size_t u = 0; u < plan.layouts.size(); ++u) {
    model.stages[0].push_back({plan.names[u], plan.kinds[u], plan.layouts[u], plan.master});
  }
  const auto memory = checkpoint::unit_memory(op.shards(), optimizer.adamw().moments(), optimizer.muon().momentum());
  const int rank = world.rank(), ep = coordinate(mesh, rank).ep;
  // Calls f(unit, param, its values on this ep rank from `value(name, i)`).
  const auto for_each = [&](auto value, auto f) {
    for (int u = 0; u < static_cast<int>(model.stages[0].size()); ++u) {
      const Unit& unit = model.stages[0][static_cast<std::size_t>(u)];
      for (int p = 0; p < static_cast<int>(unit.layout.params.size()); ++p) {
        const std::int64_t elems = unit.layout.place(p).elems;
        std::vector<float> values;
        for (std::int64_t e = 0; e < unit.layout.block_count(); ++e) {
          const std::string name = checkpoint::tensor_name(unit, p, ep * unit.layout.experts_local + e);
          for (std::int64_t i = 0; i < elems; ++i) values.push_back(value(name, i));
        }
        f(u, p, values);
      }
    }
  };
  std::map<std::string, std::int64_t> restored = {{"applied", 0}};
  if (load.empty()) {
    for_each(
        [](const std::string& name, std::int64_t i) { return drawn(name, i, 0); },
        [&](int u, int p, std::vector<float>& values) { op.load(u, p, op.full(u, p, values.data(), DType::f32), {}); });
  } else {
    const checkpoint::Catalog catalog = checkpoint::open(load);
    const HostBuffer staging(checkpoint::min_staging_bytes, 0xff);
    checkpoint::load(catalog, model, mesh, rank, memory, staging.block(), HostExecutor{}, {});
    op.weights_changed({});
    restored = catalog.values;
  }
  optim::StepResult result{.grad_scale = 0.5, .steps = restored.at("applied"), .applied = 1};
  for (int step = first_step; step < first_step + steps; ++step) {
    // One rank of those that share a parameter has a gradient: the same sum on every mesh.
    for_each([&](const std::string& name, std::int64_t i) { return drawn("gradient of " + name, i, step); },
             [&](int u, int p, std::vector<float>& values) {
               const Unit& unit = model.stages[0][static_cast<std::size_t>(u)];
               const bool writes = unit.kind == Param::dense ? rank == 0 : coordinate(mesh, rank).expert_dp == 0;
               const std::int64_t elems = unit.layout.place(p).elems;
               for (std::int64_t e = 0; e < unit.layout.block_count(); ++e) {
                 if (!writes || unit.layout.place(p).spec.frozen) continue;
                 const TensorRef to = op.gradient(u, {}).write(p, e).tensor;
                 std::copy_n(values.begin() + e * elems, elems, to.as<float>());
               }
               if (p + 1 == static_cast<int>(unit.layout.params.size())) op.reduce(u, {});
             });
    ++result.steps;
    op.finish_gradients({});
    optimizer.step(&result, {0.01, 0.02}, {});
    op.weights_changed({});
  }
  if (!save.empty()) {
    const checkpoint::Saver saver(model, mesh, rank, save, "run");
    const HostBuffer host(saver.footprint().pinned_host, 0xff);
    saver.snapshot(memory, host.block(), HostExecutor{}, {});
    std::thread([&] {
      saver.write(first_step + steps, host.block());
      if (rank == 0) saver.commit(first_step + steps, {{"applied", result.steps}}, 60);
    }).join();
    world.barrier();
  }
  std::map<std::string, std::vector<float>> parameters;
  for_each([](const std::string&, std::int64_t) { return 0.0f; },
           [&](int u, int p, std::vector<float>& values) {
             op.export_master(u, p, op.full(u, p, values.data(), DType::f32), {});
             const Unit& unit = model.stages[0][static_cast<std::size_t>(u)];
             const std::int64_t elems = unit.layout.place(p).elems;
             for (std::int64_t e = 0; e < unit.layout.block_count(); ++e) {
               parameters[checkpoint::tensor_name(unit, p, ep * unit.layout.experts_local + e)].assign(
                   values.begin() + e * elems, values.begin() + (e + 1) * elems);
             }
             // What is gathered was rounded from the master.
             const fsdp::UnitView view = op.acquire(u, {});
             for (std::int64_t e = 0; e < unit.layout.block_count(); ++e) {
               const bfloat16* const weights = view.expert(p, e).as<bfloat16>();
               for (std::int64_t i = 0; i < elems; ++i) {
                 const auto wanted = static_cast<bfloat16>(values[static_cast<std::size_t>(e * elems + i)]);
                 if (static_cast<float>(weights[i]) != static_cast<float>(wanted)) fail<error>("a stale copy");
               }
             }
             op.release(u, {});
           });
  return parameters;
}

/// The parameters of all ranks together.
std::map<std::string, std::vector<float>> run(const RuntimeMesh& mesh, int first_step, int steps,
                                              const std::string& load = {}, const std::string& save = {}) {
  std::vector<std::map<std::string, std::vector<float>>> of_rank(static_cast<std::size_t>(mesh.world_size));
  run_ranks(mesh.world_size, [&](ThreadComm& world) {
    of_rank[static_cast<std::size_t>(world.rank())] = train(world, mesh, first_step, steps, load, save);
  });
  std::map<std::string, std::vector<float>> all;
  for (const auto& some : of_rank) {
    for (const auto& [name, values] : some) {
      const auto [at, is_new] = all.emplace(name, values);
      if (!is_new) CHECK(at->second == values);
    }
  }
  return all;
}
}  // namespace

TEST_CASE("a run that resumes on another mesh has the bits of one that never stopped") {
  const RuntimeMesh one(MeshDegrees{1, 1, 1, 1, 1});
  const auto wanted = run(one, 0, 5);
  for (const MeshDegrees& first :
       {MeshDegrees{1, 4, 2, 4, 1}, MeshDegrees{1, 4, 1, 2, 2}, MeshDegrees{1, 1, 1, 1, 1}}) {
    const TemporaryFolder root;
    const std::string folder = checkpoint::step_folder(root, 3);
    run(RuntimeMesh(first), 0, 3, {}, root);
    for (const MeshDegrees& then : {first, MeshDegrees{1, 1, 1, 1, 1}, MeshDegrees{1, 3, 1, 1, 3},
                                    MeshDegrees{1, 2, 2, 4, 1}, MeshDegrees{1, 8, 1, 4, 2}}) {
      CAPTURE(message_of(RuntimeMesh(first), " to ", RuntimeMesh(then)).c_str());
      CHECK(run(RuntimeMesh(then), 3, 2, folder) == wanted);
    }
  }
}
