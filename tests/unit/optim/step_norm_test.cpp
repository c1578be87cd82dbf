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
using optim::StepResult;
using optim::StepSums;
using optim_testing::OwnShard;
using testing_support::Json;

Memory<> memory_of(const HostBuffer& persistent) {
  return {.persistent = persistent.block()};
}

/// Runs the reduction on `gradients.size()` ranks, one shard each; the step as rank 0 sees it. All ranks see the same
/// bits.
StepResult reduced(const std::vector<std::vector<double>>& gradients, const std::vector<StepSums>& sums,
                   double max_norm) {
  std::vector<StepResult> seen(gradients.size());
  run_ranks(static_cast<int>(gradients.size()), [&](ThreadComm& world) {
    const auto rank = static_cast<std::size_t>(world.rank());
    OwnShard<double> shard(std::vector<double>(gradients[rank].size()));
    shard.gradient = gradients[rank];
    const fsdp::ShardMemory memory = shard.memory();
    const auto plan = optim::plan_step_norm(world.size());
    const HostBuffer persistent(plan.footprint().persistent, 0xff);
    auto norm = optim::bind(plan, HostExecutor{}, GroupComm<ThreadComm>(world), memory_of(persistent));
    *norm.sums() = sums[rank];
    seen[rank] = *norm.run({&memory, 1}, max_norm, {});
  });
  for (const StepResult& other : seen) CHECK(std::memcmp(&other, &seen[0], sizeof(StepResult)) == 0);
  return seen[0];
}
const StepSums one_token{.loss = 0, .tokens = 1};

double relative(double a, double b) {
  return std::abs(a - b) / std::abs(b);
}

/// The norm of the facts' gradients over a mesh of 8 ranks, through real plans: each stage has 10 dense elements, two
/// local experts per ep rank and a parameter tied to the other stage.
StepResult norm_on_mesh(int replicas, int tied_copies, double max_norm) {
  const std::vector<double> dense[2] = {{1, 2, 3, 4, 5, 6, 7, 8, 9, 10}, {-1, 1, -2, 2, -3, 3, -4, 4, -5, 5}};
  const std::vector<double> experts[2][2] = {{{1, 1, 2, 2}, {3, 3, 4, 4}},
                                             {{2, 0, 4, 0}, {3, 3, 3, 4}}};  // [stage][ep]
  const std::vector<double> tied{3, 4};
  StepResult result;
  run_ranks(8, [&](ThreadComm& world) {
    const auto mesh = RuntimeMesh::fold({.world = 8, .pp = 2, .cp = 2, .ep = 2, .replicas = replicas});
    const MeshComms comms(mesh, world, std::array{Lane::main, Lane::gather, Lane::reduce});
    const auto groups = fsdp::groups_of(comms);
    const std::vector<fsdp::UnitSpec> units{
        {.name = "dense", .params = {{.name = "w", .shape = {10}}}},
        {.name = "experts", .kind = Param::expert, .experts_local = 2, .params = {{.name = "w", .shape = {2}}}},
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
    auto norm = optim::bind(norm_plan, HostExecutor{}, comms.world(), memory_of(norm_memory));
    norm.sums()->tokens = world.rank() == 5 ? 1.0 : 0.0;
    norm.run(op.shards(), max_norm, {});
    if (world.rank() == 0) result = *norm.result();
  });
  return result;
}

TEST_CASE("facts: the norm counts replicas, tied copies and experts once") {
  const Json fact = Json::facts("fsdp.json")["grad_norm"];
  const double expected = fact["norm"].number();
  for (const int replicas : {1, 2}) {
    for (const double max_norm : {1.0, 10.0, 100.0}) {
      const StepResult step = norm_on_mesh(replicas, 2, max_norm);
      CHECK(step.norm == expected);
      const char* key = max_norm == 1 ? "1.0" : max_norm == 10 ? "10.0" : "100.0";
      CHECK(relative(step.grad_scale, fact["clip"][key].number()) < 1e-15);
    }
  }
  // A tied parameter that does not say how many copies there are gives the facts' wrong value.
  CHECK(norm_on_mesh(1, 1, 1.0).norm == fact["wrong"]["tied_twice"].number());
  for (const auto& entry : fact["wrong"].object()) CHECK(relative(entry.second.number(), expected) > 1e-2);
}

TEST_CASE("facts: expert norms add as squares, also on ranks with other experts") {
  const Json fact = Json::facts("fsdp.json")["grad_norm_deepspeed_8475"];
  const StepResult step = reduced({{2, 4}, {6, 8}}, {one_token, {}}, 0);
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
  const StepResult step = reduced({{3}, {0}, {4}}, sums, 0);
  CHECK(step.loss == fact["global_token_mean"].number());
  CHECK(step.tokens == 4);
  CHECK(step.norm == 5.0 / 4);
  CHECK(step.grad_scale == 1.0 / 4);
  // Clipping looks at the norm of the mean gradient.
  CHECK(reduced({{3}, {0}, {4}}, sums, 2).grad_scale == 1.0 / 4);
  CHECK(relative(reduced({{3}, {0}, {4}}, sums, 1).grad_scale, 1 / (1.25 + 1e-6) / 4) < 1e-15);
}

TEST_CASE("facts: edges of the norm") {
  const Json fact = Json::facts("fsdp.json")["grad_norm_edge"];
  const StepResult zero = reduced({{0, 0}, {0}}, {one_token, {}}, 1);
  CHECK(zero.norm == fact["zero"]["norm"].number());
  CHECK(zero.grad_scale == fact["zero"]["coef_max1"].number());
  CHECK(zero.applied == 1);
  for (const double bad : {std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
    const StepResult step = reduced({{0, 1}, {bad}}, {one_token, {}}, 1);
    CHECK(step.applied == 0);
    CHECK(step.skipped == 1);
    CHECK(step.steps == 0);
  }
  const StepResult large = reduced({{1e30}, {1e30}}, {one_token, {}}, 0);
  CHECK(large.applied == 1);
  CHECK(relative(large.norm, std::sqrt(2.0) * 1e30) < 1e-15);
}

TEST_CASE("steps are counted when they are applied, and begin at zero") {
  run_ranks(2, [](ThreadComm& world) {
    OwnShard<float> shard({0, 0});
    const fsdp::ShardMemory memory = shard.memory();
    const auto plan = optim::plan_step_norm(2);
    const HostBuffer persistent(plan.footprint().persistent, 0xff);
    auto norm = optim::bind(plan, HostExecutor{}, GroupComm<ThreadComm>(world), memory_of(persistent));
    const float values[] = {1, 2, std::numeric_limits<float>::infinity(), 4};
    for (const float value : values) {
      shard.gradient[1] = value;
      norm.sums()->loss += 2;
      norm.sums()->aux_loss += 3;
      norm.sums()->tokens += 1;
      norm.run({&memory, 1}, 1, {});
      if (norm.result()->loss != 2 || norm.result()->aux_loss != 6) fail<error>("wrong losses");
    }
    const StepResult& result = *norm.result();
    if (result.steps != 3 || result.skipped != 1 || result.applied != 1) fail<error>("wrong counts");
  });
}

TEST_CASE("an operation that fails on one rank is an error on every rank, and nothing is applied") {
  const auto plan = optim::plan_step_norm(3, 2);
  run_ranks(3, [&](ThreadComm& world) {
    OwnShard<float> shard({3, 4});
    const fsdp::ShardMemory memory = shard.memory();
    const HostBuffer persistent(plan.footprint().persistent, 0xff);
    std::int64_t first = 0, second = 0;
    const std::int64_t* const words[] = {&first, &second};
    auto norm = optim::bind(plan, HostExecutor{}, GroupComm<ThreadComm>(world), memory_of(persistent), words);
    for (const int failed :
         {0, 1, 2}) {  // nothing; the second operation of rank 1; then what the caller says on rank 2
      if (failed == 1 && world.rank() == 1) second = 7;
      *norm.sums() = {.tokens = 1, .status = failed == 2 && world.rank() == 2 ? 9.0 : 0.0};
      const StepResult result = *norm.run({&memory, 1}, 1, {});
      if (result.applied != (failed == 0) || result.status != (failed == 0 ? 0 : failed == 1 ? 7 : 9)) {
        fail<error>("rank ", world.rank(), " has status ", static_cast<int>(result.status));
      }
      std::string text;
      try {
        optim::check(result);
      } catch (const shape_error& e) {
        text = e.what();
      }
      if ((text.find("pleat[F18]: an operation failed in this step, whose status is ") == 0) != (failed != 0)) {
        fail<error>("rank ", world.rank(), ": ", text.c_str());
      }
    }
  });
  const HostBuffer persistent(plan.footprint().persistent);
  CHECK_THROWS_WITH_AS(
      optim::bind(optim::plan_step_norm(1, 2), HostExecutor{}, GroupComm<ThreadComm>(), memory_of(persistent)),
      doctest::Contains("pleat[F05]: the norm is planned for 1 ranks and 2 status words, and bound to a world of 1 and "
                        "0 words"),
      shape_error);
}

TEST_CASE("a step without tokens is skipped and is an error on every rank") {
  const StepResult step = reduced({{1}, {2}}, {StepSums{}, StepSums{}}, 1);
  CHECK(step.applied == 0);
  CHECK_THROWS_WITH_AS(optim::check(step), doctest::Contains("pleat[F06]: the ranks had 0 target tokens"), shape_error);
  CHECK_NOTHROW(optim::check(reduced({{1}, {2}}, {one_token, StepSums{}}, 1)));
}

TEST_CASE("numbers of tokens and statuses that cannot be are not lost: nothing is applied, and check says so") {
  const double nan = std::numeric_limits<double>::quiet_NaN(), infinite = std::numeric_limits<double>::infinity();
  for (const auto& [tokens, text] : {std::pair{-4.0, "pleat[F06]: the ranks had -4 target tokens"},
                                     {infinite, "pleat[F06]: the ranks had inf target tokens"},
                                     {nan, "pleat[F06]: the ranks had nan target tokens"}}) {
    const StepResult step = reduced({{1}, {2}}, {{.tokens = tokens}, {}}, 1);
    CHECK(step.applied == 0);
    CHECK(step.skipped == 1);
    CHECK_THROWS_WITH_AS(optim::check(step), doctest::Contains(text), shape_error);
  }
  for (const auto& [status, text] : {std::pair{nan, "whose status is nan; "}, {-1.0, "whose status is -1; "}}) {
    for (const bool on_first : {true, false}) {
      StepSums failed = one_token, other = one_token;
      failed.status = status;
      const StepResult step =
          on_first ? reduced({{1}, {2}}, {failed, other}, 1) : reduced({{1}, {2}}, {other, failed}, 1);
      CHECK(step.applied == 0);
      CHECK_THROWS_WITH_AS(optim::check(step), doctest::Contains(text), shape_error);
    }
  }
  CHECK(reduced({{1}, {2}}, {{.tokens = 1, .status = 3}, {.tokens = 1, .status = 5}}, 1).status == 5);
}

TEST_CASE("a run that goes on counts the steps before it") {
  OwnShard<float> shard({3, 4});
  const fsdp::ShardMemory memory = shard.memory();
  const auto plan = optim::plan_step_norm(1);
  const HostBuffer persistent(plan.footprint().persistent, 0xff);
  auto norm = optim::bind(plan, HostExecutor{}, GroupComm<ThreadComm>(), memory_of(persistent));
  norm.resume(41, 2, {});
  norm.sums()->tokens = 1;
  CHECK(norm.run({&memory, 1}, 1, {})->steps == 42);
  CHECK(norm.run({&memory, 1}, 1, {})->skipped == 3);  // no tokens
  CHECK_THROWS_WITH_AS(norm.resume(-1, 2, {}),
                       doctest::Contains("pleat[F16]: a norm that goes on after -1 steps and 2"), shape_error);
}

TEST_CASE("sizes and bounds of a norm that cannot be are errors") {
  for (const auto& [ranks, words] : {std::pair{0, 0}, {-1, -2}, {1, -1}}) {
    CHECK_THROWS_WITH_AS(optim::plan_step_norm(ranks, words), doctest::Contains("pleat[F16]: a norm over "),
                         shape_error);
  }
  CHECK_THROWS_WITH_AS(reduced({{1}}, {one_token}, -1),
                       doctest::Contains("pleat[F16]: gradients clipped to a norm of -1"), shape_error);
  CHECK_THROWS_WITH_AS(reduced({{1}}, {one_token}, std::numeric_limits<double>::quiet_NaN()),
                       doctest::Contains("a norm of nan"), shape_error);
}

TEST_CASE("a plan for another world is an error") {
  const auto plan = optim::plan_step_norm(2);
  const HostBuffer persistent(plan.footprint().persistent);
  CHECK_THROWS_WITH_AS(
      optim::bind(plan, HostExecutor{}, GroupComm<ThreadComm>(), memory_of(persistent)),
      doctest::Contains("pleat[F05]: the norm is planned for 2 ranks and 0 status words, and bound to a world of 1 "),
      shape_error);
}

}  // namespace
