// A whole step on the shards of a mesh - sums of gradients, norm, clipping, AdamW and Muon - equals that of one rank.
#include <pleat/optim/optimizer.hpp>

#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include <doctest/doctest.h>

#include <pleat/comm.hpp>
#include <pleat/fsdp.hpp>
#include <pleat/optim.hpp>

namespace {

using namespace pleat;

/// Trains three steps on `ranks` ranks; every rank's gradient is its share of a given sum. Returns all masters.
template <class T>
std::vector<accumulator_t<T>> trained(int ranks, int replicas, Transport transport, unsigned seed) {
  using A = accumulator_t<T>;
  const std::vector<std::int64_t> sizes{37, 5, 1, 64};
  std::vector<A> result;
  run_ranks(ranks, [&](ThreadComm& world) {
    const auto mesh = RuntimeMesh::fold({.world = ranks, .replicas = replicas});
    const MeshComms comms(mesh, world, std::array{Lane::main, Lane::gather, Lane::reduce});
    const auto groups = fsdp::groups_of(comms);
    std::vector<fsdp::UnitSpec> units;
    for (const std::int64_t size : sizes) {
      units.push_back({.name = "unit",
                       .params = {{.name = "w", .shape = {size}},
                                  {.name = "b", .shape = {3}, .weight_decay = false},
                                  {.name = "frozen", .shape = {2}, .frozen = true},
                                  {.name = "matrix", .shape = {7, 4}, .optimizer = fsdp::Optimizer::muon}}});
    }
    const fsdp::Plan plan =
        fsdp::plan(units, groups.sizes(), {.compute = dtype_of<T>, .transport = transport, .alignment_elems = 2});
    const HostBuffer persistent(plan.footprint().persistent, 0xff);
    HostArena arena(GroupComm<ThreadComm>(world), plan.footprint().symmetric);
    auto op =
        fsdp::bind(plan, HostExecutor{}, groups, Memory<HostArena>{.persistent = persistent.block(), .arena = &arena});
    const auto optimizer_plan =
        optim::plan_optimizer(plan.layouts, plan.kinds, plan.master, {.muon = {.product = plan.master}});
    const HostBuffer scratch(optimizer_plan.footprint().scratch, 0xff);
    const HostBuffer state(optimizer_plan.footprint().persistent, 0xff);
    auto optimizer = optim::bind(optimizer_plan, HostExecutor{}, groups.dense.reduce, groups.expert.reduce, op.shards(),
                                 Memory<>{scratch.block(), state.block()});
    const auto norm_plan = optim::plan_step_norm(ranks);
    const HostBuffer norm_memory(norm_plan.footprint().persistent, 0xff);
    auto norm = optim::bind(norm_plan, HostExecutor{}, comms.world(), Memory<>{.persistent = norm_memory.block()});

    std::mt19937 random(seed);
    std::uniform_real_distribution<double> uniform(-1, 1);
    const auto draw = [&](std::int64_t elems) {
      std::vector<double> values(static_cast<std::size_t>(elems));
      for (double& value : values) value = uniform(random);
      return values;
    };
    for (int u = 0; u < 4; ++u) {
      op.load(u, 0, draw(sizes[static_cast<std::size_t>(u)]), {});
      op.load(u, 1, draw(3), {});
      op.load(u, 2, draw(2), {});
      const std::vector<double> matrix = draw(28);
      op.load(u, 3, TensorRef(matrix.data(), {7, 4}), {});
    }
    for (int step = 0; step < 3; ++step) {
      for (int u = 0; u < 4; ++u) {
        for (const int p : {0, 1, 3}) {
          const std::vector<double> gradient = draw(p == 0 ? sizes[static_cast<std::size_t>(u)] : p == 1 ? 3 : 28);
          const TensorRef tensor = op.gradient(u, {}).write(p).tensor;
          for (std::size_t i = 0; i < gradient.size(); ++i) {
            tensor.as<A>()[i] = static_cast<A>(gradient[i] * 2 * (world.rank() + 1) / (ranks * (ranks + 1)));
          }
        }
        op.reduce(u, {});
      }
      op.finish_gradients({});
      norm.sums()->tokens = 1.0 / ranks;
      optimizer.step(norm.run(op.shards(), 3, {}), {.adamw = 0.02, .muon = 0.03}, {});
      op.weights_changed({});
    }
    std::vector<A> mine;
    for (int u = 0; u < 4; ++u) {
      const fsdp::UnitView view = op.acquire(u, {});
      for (const auto& [p, elems] : {std::pair{0, sizes[static_cast<std::size_t>(u)]}, {1, 3}, {2, 2}, {3, 28}}) {
        std::vector<A> values(static_cast<std::size_t>(elems));
        if (p == 3) {
          op.export_master(u, p, TensorRef(values.data(), {7, 4}), {});
        } else {
          op.export_master(u, p, values, {});
        }
        for (std::size_t i = 0; i < values.size(); ++i) {
          const T copy = static_cast<T>(values[i]);
          if (std::memcmp(view[p].template as<T>() + i, &copy, sizeof(T)) != 0) fail<error>("the copy is no copy");
        }
        mine.insert(mine.end(), values.begin(), values.end());
      }
      op.release(u, {});
    }
    if (world.rank() == ranks - 1) result = mine;
  });
  return result;
}

template <class T>
void check_meshes(double tolerance) {
  const unsigned seed = std::random_device{}();
  CAPTURE(seed);
  const auto expected = trained<T>(1, 1, Transport::collective, seed);
  for (const auto& [ranks, replicas] : {std::pair{2, 1}, {3, 1}, {4, 2}, {5, 1}, {8, 4}}) {
    const auto sharded = trained<T>(ranks, replicas, Transport::collective, seed);
    CHECK(sharded == trained<T>(ranks, replicas, Transport::peer, seed));
    REQUIRE(sharded.size() == expected.size());
    double difference = 0, norm = 0;
    for (std::size_t i = 0; i < expected.size(); ++i) {
      difference += std::pow(static_cast<double>(sharded[i] - expected[i]), 2);
      norm += std::pow(static_cast<double>(expected[i]), 2);
    }
    CHECK(std::sqrt(difference / norm) < tolerance);
  }
}

TEST_CASE("a sharded step, with clipping, equals one rank's") {
  check_meshes<double>(1e-13);
  check_meshes<float>(1e-5);
  check_meshes<bfloat16>(1e-5);  // float masters
}

TEST_CASE("options and rates that would destroy weights are errors with the values") {
  const double nan = std::numeric_limits<double>::quiet_NaN(), infinite = std::numeric_limits<double>::infinity();
  const fsdp::ParamSpec spec{.name = "w", .shape = {4, 4}, .optimizer = fsdp::Optimizer::muon};
  const fsdp::UnitLayout unit = fsdp::plan_unit({&spec, 1}, 1);
  const Param kind = Param::dense;
  const auto refused = [&](const char* text, const optim::OptimizerOptions& options, DType master = DType::f32) {
    CHECK_THROWS_WITH_AS(optim::plan_optimizer({&unit, 1}, {&kind, 1}, master, options), doctest::Contains(text),
                         shape_error);
  };
  refused("pleat[F16]: AdamW with beta1=1 beta2=0.95 eps=1e-8 weight_decay=0.1; betas are 0 or more and below 1",
          {.adamw = {.beta1 = 1}});
  for (const double bad : {1.0, 2.0, -3.0, nan}) {
    refused("pleat[F16]: AdamW", {.adamw = {.beta1 = bad}});
    refused("pleat[F16]: AdamW", {.adamw = {.beta2 = bad}});
    refused("pleat[F16]: Muon with momentum=", {.muon = {.momentum = bad}});
  }
  for (const double bad : {0.0, -1.0, 2.0, 1e-300, nan}) {
    refused("pleat[F16]: AdamW", {.adamw = {.eps = bad}});
    refused("pleat[F16]: Muon with momentum=0.95 eps=", {.muon = {.eps = bad}});
  }
  for (const double bad : {-0.1, infinite, nan}) {
    refused("pleat[F16]: AdamW", {.adamw = {.weight_decay = bad}});
    refused("pleat[F16]: Muon with momentum=", {.muon = {.weight_decay = bad}});
    CHECK_THROWS_WITH_AS(optim::LearningRate{bad}, doctest::Contains("pleat[F16]: a learning rate of "), shape_error);
  }
  refused("pleat[F16]: Muon cannot multiply in f16; valid dtypes: f64 f32 bf16", {.muon = {.product = DType::f16}});
  refused("pleat[F16]: Muon cannot multiply in i32", {.muon = {.product = DType::i32}});
  refused("and form 7; ", {.muon = {.form = static_cast<optim::MuonForm>(7)}});
  refused("pleat[F16]: AdamW on masters of bf16; valid dtypes: f64 f32", {}, DType::bf16);
  CHECK_THROWS_WITH_AS(optim::plan_muon({&unit, 1}, {&kind, 1}, DType::i64),
                       doctest::Contains("pleat[F16]: Muon on masters of i64"), shape_error);
  CHECK_NOTHROW(optim::plan_optimizer({&unit, 1}, {&kind, 1}, DType::f64, {.adamw = {.eps = 1e-300}}));
}

TEST_CASE("C36: ranks whose optimizers differ are told so at bind") {
  const fsdp::ParamSpec spec{.name = "w", .shape = {4, 4}, .optimizer = fsdp::Optimizer::muon};
  const fsdp::UnitLayout unit = fsdp::plan_unit({&spec, 1}, 2);
  const Param kind = Param::dense;
  for (const auto& [options, text] :
       {std::pair{optim::OptimizerOptions{.adamw = {.beta2 = 0.999}},
                  "pleat[C36]: rank 1 binds AdamW with beta2=0.999, rank 0 with beta2=0.95; plan alike"},
        {optim::OptimizerOptions{.muon = {.momentum = 0.9}}, "pleat[C36]: rank 1 binds Muon with momentum=0.9, "},
        {optim::OptimizerOptions{.muon = {.product = DType::f32}}, "with dtype of products="}}) {
    run_ranks(2, [&, options = options, text = text](ThreadComm& world) {
      const auto plan = optim::plan_optimizer({&unit, 1}, {&kind, 1}, DType::f32,
                                              world.rank() == 1 ? options : optim::OptimizerOptions{});
      const HostBuffer scratch(1 << 16), state(plan.footprint().persistent);
      const GroupComm<ThreadComm> group(world), alone;
      const fsdp::ShardMemory shard{};
      CHECK_THROWS_WITH_AS(
          optim::bind(plan, HostExecutor{}, group, alone, {&shard, 1}, Memory<>{scratch.block(), state.block()}),
          doctest::Contains(text), comm_error);
    });
  }
}

TEST_CASE("a learning rate in device memory that cannot be leaves the step out, of both optimizers alike") {
  const std::vector<fsdp::ParamSpec> specs{{.name = "w", .shape = {5}},
                                           {.name = "m", .shape = {3, 3}, .optimizer = fsdp::Optimizer::muon}};
  const fsdp::UnitLayout unit = fsdp::plan_unit(specs, 1, {.alignment_elems = 1});
  const Param kind = Param::dense;
  const auto plan = optim::plan_optimizer({&unit, 1}, {&kind, 1}, DType::f64, {.muon = {.product = DType::f64}});
  std::vector<double> master(14, 1.0), gradient(14, 0.5);
  const auto pieces = fsdp::update_pieces(unit, unit.pieces(0), 1);
  const fsdp::ShardMemory shard{master.data(), gradient.data(),
                                nullptr,       DType::f64,
                                DType::f64,    14,
                                pieces.data(), static_cast<std::int64_t>(pieces.size())};
  const HostBuffer scratch(plan.footprint().scratch), state(plan.footprint().persistent);
  const GroupComm<ThreadComm> alone;
  auto optimizer =
      optim::bind(plan, HostExecutor{}, alone, alone, {&shard, 1}, Memory<>{scratch.block(), state.block()});
  const optim::StepResult step{.grad_scale = 1, .tokens = 1, .steps = 3, .applied = 1};
  const double good = 0.1;
  for (const double bad : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity(), -1.0}) {
    for (const optim::Rates& rates : {optim::Rates{&bad, &good}, {&good, &bad}, {0.1, &bad}, {&bad, 0.1}}) {
      optim::StepResult result = step;
      optimizer.step(&result, rates, {});
      CHECK(master == std::vector<double>(14, 1.0));
      CHECK(result.applied == 0);
      CHECK(result.steps == 2);
      CHECK(result.skipped == 1);
      CHECK_THROWS_WITH_AS(optim::check(result), doctest::Contains("pleat[F19]: a learning rate in device memory"),
                           shape_error);
    }
    optim::StepResult result = step;
    auto muon =
        optim::bind(plan.muon, HostExecutor{}, alone, alone, {&shard, 1}, Memory<>{scratch.block(), state.block()});
    muon.step(&result, &bad, {});
    CHECK(result.applied == 0);
  }
  optim::StepResult result = step;
  optimizer.step(&result, {&good, &good}, {});
  CHECK_NOTHROW(optim::check(result));
  CHECK(result.steps == 3);
  for (const double value : master) CHECK(value < 1);
}

TEST_CASE("units without trainable parameters take no moments") {
  const fsdp::ParamSpec frozen{.name = "w", .shape = {1000}, .frozen = true};
  const fsdp::UnitLayout unit = fsdp::plan_unit({&frozen, 1}, 2);
  CHECK(optim::plan_adamw({&unit, 1}, DType::f32).footprint() == Footprint{});
  const fsdp::ParamSpec trained{.name = "w", .shape = {1000}};
  const fsdp::UnitLayout other = fsdp::plan_unit({&trained, 1}, 2);  // two shards of 512
  CHECK(optim::plan_adamw({&other, 1}, DType::f32).footprint().persistent == 2 * 512 * 4);
}

}  // namespace
