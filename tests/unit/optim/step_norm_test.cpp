// The step's reduction: norms of the facts on a mesh with pipeline stages and replicas, clipping, token means, and
// norms that are not finite.
#include <pleat/optim/step_norm.hpp>

#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include <doctest/doctest.h>

#include <pleat/comm.hpp>
#include <pleat/fsdp.hpp>
#include <pleat/optim.hpp>

#include "own_shard.hpp"
#include "support/json.hpp"

namespace {

using namespace pleat;
using optim::StepScale;
using optim::StepSums;
using optim_testing::OwnShard;
using testing_support::Json;

/// Runs the reduction on `gradients.size()` ranks, one shard each; the step as rank 0 sees it. All ranks see the same
/// bits.
StepScale reduced(const std::vector<std::vector<double>>& gradients, const std::vector<StepSums>& sums,
                  double max_norm) {
  std::vector<StepScale> seen(gradients.size());
  run_ranks(static_cast<int>(gradients.size()), [&](ThreadComm& world) {
    const auto rank = static_cast<std::size_t>(world.rank());
    OwnShard<double> shard(std::vector<double>(gradients[rank].size()));
    shard.gradient = gradients[rank];
    const fsdp::ShardMemory memory = shard.memory();
    const auto plan = optim::plan_step_norm(world.size());
    const HostBuffer persistent(plan.footprint().persistent, 0xff);
    auto norm = optim::bind(plan, HostExecutor{}, GroupComm<ThreadComm>(world), persistent.block());
    seen[rank] = *norm.run({&memory, 1}, &sums[rank], max_norm, {});
  });
  for (const StepScale& other : seen) CHECK(std::memcmp(&other, &seen[0], sizeof(StepScale)) == 0);
  return seen[0];
}
const StepSums one_token{.loss = 0, .tokens = 1};

double relative(double a, double b) {
  return std::abs(a - b) / std::abs(b);
}

/// The norm of the facts' gradients over a mesh of 8 ranks, through real plans: each stage has 10 dense elements, two
/// local experts per ep rank and a parameter tied to the other stage.
StepScale norm_on_mesh(int replicas, int tied_copies, double max_norm) {
  const std::vector<double> dense[2] = {{1, 2, 3, 4, 5, 6, 7, 8, 9, 10}, {-1, 1, -2, 2, -3, 3, -4, 4, -5, 5}};
  const std::vector<double> experts[2][2] = {{{1, 1, 2, 2}, {3, 3, 4, 4}},
                                             {{2, 0, 4, 0}, {3, 3, 3, 4}}};  // [stage][ep]
  const std::vector<double> tied{3, 4};
  StepScale result;
  run_ranks(8, [&](ThreadComm& world) {
    const auto mesh = RuntimeMesh::fold({.world = 8, .pp = 2, .cp = 2, .ep = 2, .replicas = replicas});
    const MeshComms comms(mesh, world, std::array{Lane::main, Lane::gather, Lane::reduce});
    const auto groups = fsdp::groups_of(comms);
    const std::vector<fsdp::UnitSpec> units{
        {.name = "dense", .params = {{.name = "w", .shape = {10}}}},
        {.name = "experts", .kind = Param::expert, .params = {{.name = "w", .shape = {2}, .experts = 2}}},
        {.name = "tied", .params = {{.name = "w", .shape = {2}, .copies = tied_copies}}}};
    const fsdp::Plan plan = fsdp::plan(units, groups.sizes(), {.compute = DType::f64, .alignment_elems = 1});
    const HostBuffer persistent(plan.footprint().persistent, 0xff);
    auto op =
        fsdp::bind(plan, HostExecutor{}, groups, Memory<HostArena>{.persistent = persistent.block(), .arena = nullptr});
    // One rank of each shard group has the whole gradient.
    const Coordinate at = coordinate(mesh, world.rank());
    const auto write = [&](int unit, const fsdp::Groups<ThreadComm>::Lanes& group, const std::vector<double>& values) {
      if (group.reduce.rank() == 0 && groups.replica.rank() == 0) {
        const TensorRef tensor = op.gradient(unit, {}).add_to(0);
        const std::int64_t row = tensor.rank() == 2 ? tensor.extent(1) : tensor.extent(0);
        for (std::size_t i = 0; i < values.size(); ++i) {
          const auto k = static_cast<std::int64_t>(i);
          tensor.as<double>()[tensor.rank() == 2 ? k / row * tensor.stride(0) + k % row : k] = values[i];
        }
      }
      op.reduce(unit, {});
    };
    write(0, groups.dense, dense[at.pp]);
    write(1, groups.expert, experts[at.pp][at.ep]);
    write(2, groups.dense, tied);
    op.finish_gradients({});
    const auto norm_plan = optim::plan_step_norm(world.size());
    const HostBuffer norm_memory(norm_plan.footprint().persistent, 0xff);
    auto norm = optim::bind(norm_plan, HostExecutor{}, comms.world(), norm_memory.block());
    const StepSums sums{.loss = 0, .tokens = world.rank() == 5 ? 1.0 : 0.0};
    const StepScale* step = norm.run(op.shards(), &sums, max_norm, {});
    if (world.rank() == 0) result = *step;
  });
  return result;
}

TEST_CASE("facts: the norm counts replicas, tied copies and experts once") {
  const Json fact = Json::facts("fsdp.json")["grad_norm"];
  const double expected = fact["norm"].number();
  for (const int replicas : {1, 2}) {
    for (const double max_norm : {1.0, 10.0, 100.0}) {
      const StepScale step = norm_on_mesh(replicas, 2, max_norm);
      CHECK(step.norm == expected);
      const char* key = max_norm == 1 ? "1.0" : max_norm == 10 ? "10.0" : "100.0";
      CHECK(relative(step.scale, fact["clip"][key].number()) < 1e-15);
    }
  }
  // A tied parameter that does not say how many copies there are gives the facts' wrong value.
  CHECK(norm_on_mesh(1, 1, 1.0).norm == fact["wrong"]["tied_twice"].number());
  for (const auto& entry : fact["wrong"].object()) CHECK(relative(entry.second.number(), expected) > 1e-2);
}

TEST_CASE("facts: expert norms add as squares, also on ranks with other experts") {
  const Json fact = Json::facts("fsdp.json")["grad_norm_deepspeed_8475"];
  const StepScale step = reduced({{2, 4}, {6, 8}}, {one_token, {}}, 0);
  CHECK(relative(step.norm, fact["correct"].number()) < 1e-15);
  CHECK(relative(step.norm, fact["wrong_mean"].number()) > 0.1);
}

TEST_CASE("facts: the mean is over the tokens of the global batch") {
  const Json fact = Json::facts("fsdp.json")["token_norm"];
  std::vector<StepSums> sums;
  for (const char* rank : {"rank0", "rank1"}) {
    StepSums mine{};
    for (const double loss : fact[rank].numbers()) {
      mine.loss += loss;
      mine.tokens += 1;
    }
    sums.push_back(mine);
  }
  sums.push_back({});  // a rank without tokens
  const StepScale step = reduced({{3}, {0}, {4}}, sums, 0);
  CHECK(step.loss == fact["global_token_mean"].number());
  CHECK(step.tokens == 4);
  CHECK(step.norm == 5.0 / 4);
  CHECK(step.scale == 1.0 / 4);
  // Clipping looks at the norm of the mean gradient.
  CHECK(reduced({{3}, {0}, {4}}, sums, 2).scale == 1.0 / 4);
  CHECK(relative(reduced({{3}, {0}, {4}}, sums, 1).scale, 1 / (1.25 + 1e-6) / 4) < 1e-15);
}

TEST_CASE("facts: edges of the norm") {
  const Json fact = Json::facts("fsdp.json")["grad_norm_edge"];
  const StepScale zero = reduced({{0, 0}, {0}}, {one_token, {}}, 1);
  CHECK(zero.norm == fact["zero"]["norm"].number());
  CHECK(zero.scale == fact["zero"]["coef_max1"].number());
  CHECK(zero.finite == 1);
  for (const double bad : {std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
    const StepScale step = reduced({{0, 1}, {bad}}, {one_token, {}}, 1);
    CHECK(step.finite == 0);
    CHECK(step.skipped == 1);
    CHECK(step.step == 0);
  }
  const StepScale large = reduced({{1e30}, {1e30}}, {one_token, {}}, 0);
  CHECK(large.finite == 1);
  CHECK(relative(large.norm, std::sqrt(2.0) * 1e30) < 1e-15);
}

TEST_CASE("steps are counted when they are applied; the largest status of any rank reaches all") {
  run_ranks(2, [](ThreadComm& world) {
    OwnShard<float> shard({0, 0});
    const fsdp::ShardMemory memory = shard.memory();
    const auto plan = optim::plan_step_norm(2);
    const HostBuffer persistent(plan.footprint().persistent, 0xff);
    auto norm = optim::bind(plan, HostExecutor{}, GroupComm<ThreadComm>(world), persistent.block());
    const float values[] = {1, 2, std::numeric_limits<float>::infinity(), 4};
    for (const float value : values) {
      shard.gradient[1] = value;
      const StepSums sums{.loss = 2, .tokens = 1, .status = world.rank() == 1 && value == 4 ? 7.0 : 0.0};
      norm.run({&memory, 1}, &sums, 1, {});
      if (norm.scale()->loss != 2) fail<error>("wrong loss");
    }
    const StepScale& step = *norm.scale();
    if (step.step != 3 || step.skipped != 1 || step.finite != 1 || step.status != 7) fail<error>("wrong counts");
  });
}

TEST_CASE("a step without tokens is skipped and is an error on every rank") {
  const StepScale step = reduced({{1}, {2}}, {StepSums{}, StepSums{}}, 1);
  CHECK(step.finite == 0);
  CHECK_THROWS_WITH_AS(optim::check(step), doctest::Contains("pleat[F06]: no rank had a target token"), shape_error);
  CHECK_NOTHROW(optim::check(reduced({{1}, {2}}, {one_token, StepSums{}}, 1)));
}

TEST_CASE("a plan for another world is an error") {
  const auto plan = optim::plan_step_norm(2);
  const HostBuffer persistent(plan.footprint().persistent);
  CHECK_THROWS_WITH_AS(optim::bind(plan, HostExecutor{}, GroupComm<ThreadComm>(), persistent.block()),
                       doctest::Contains("pleat[F05]: the norm is planned for 2 ranks and bound to a world of 1"),
                       shape_error);
}

}  // namespace
