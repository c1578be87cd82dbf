// Muon on shards has the bits of Muon on whole parameters, on every mesh; who owns what, and what is moved.
#include <pleat/optim/muon.hpp>

#include <random>

#include <doctest/doctest.h>

#include <pleat/comm.hpp>
#include <pleat/optim.hpp>

#include "muon_run.hpp"

namespace {

using namespace pleat;
using optim_testing::Model;
using optim_testing::Sizes;

struct HostSite {
  HostExecutor executor = {};
  HostStream stream = {};
  HostBuffer allocate(std::size_t bytes) const { return HostBuffer(bytes, 0xff); }
  void wait(ThreadComm&) const {}
};

template <class Compute>
auto trained(const Model& model, const Sizes& sizes, const optim::OptimizerOptions& options, unsigned seed) {
  auto values = optim_testing::empty_values<accumulator_t<Compute>>(model);
  std::mutex mutex;
  run_ranks(sizes.ranks, [&](ThreadComm& world) {
    HostSite site;
    const bool agrees = optim_testing::train<Compute>(site, world, model, sizes, options, seed, 3, values, mutex);
    if (!agrees) fail<error>("ranks differ");
  });
  return values;
}

const Sizes meshes[] = {{2, 1, 1}, {3, 1, 1}, {4, 2, 2}, {5, 1, 1}, {7, 1, 1}, {8, 1, 2}, {8, 2, 4}, {8, 4, 2}};

template <class Compute>
void check_meshes(optim::MuonOptions muon) {
  const unsigned seed = std::random_device{}();
  CAPTURE(seed);
  const auto model = optim_testing::small_model();
  const auto whole = trained<Compute>(model, {}, {.muon = muon}, seed);
  for (const Sizes& sizes : meshes) {
    CAPTURE(sizes.ranks);
    CAPTURE(sizes.replicas);
    const bool equal = trained<Compute>(model, sizes, {.muon = muon}, seed) == whole;
    CHECK(equal);
  }
  muon.round_elems = 40;  // many rounds
  const bool equal = trained<Compute>(model, {3, 1, 1}, {.muon = muon}, seed) == whole;
  CHECK(equal);
}

TEST_CASE("Muon and AdamW on the shards of a mesh have the bits of one rank") {
  check_meshes<double>({.product = DType::f64});
  check_meshes<float>({.form = optim::MuonForm::moonlight, .product = DType::f32});
  check_meshes<bfloat16>({.product = DType::bf16});
  check_meshes<bfloat16>({.form = optim::MuonForm::moonlight, .nesterov = false, .iterations = 4});
}

TEST_CASE("18 rows over 8 ranks, two of them empty, equal one rank") {
  const auto model = optim_testing::rows_of_ceil_chunks();
  auto whole_model = model;
  whole_model[0].boundaries.clear();
  const optim::OptimizerOptions options{.muon = {.product = DType::f64}};
  const auto whole = trained<double>(whole_model, {}, options, 7);
  const bool equal = trained<double>(model, {8, 1, 1}, options, 7) == whole;
  CHECK(equal);
}

fsdp::ParamSpec matrix(std::int64_t rows, std::int64_t cols, fsdp::Granule granule = {}) {
  return {.name = "w", .shape = {rows, cols}, .granule = granule, .optimizer = fsdp::Optimizer::muon};
}

TEST_CASE("matrices that no shard boundary cuts are not sent") {
  const std::vector<fsdp::ParamSpec> params{matrix(8, 16, fsdp::Granule::matrix())};
  const fsdp::UnitLayout unit = fsdp::plan_unit(params, 4, {.experts_local = 8});
  const Param kind = Param::expert;
  const auto plan = optim::plan_muon({&unit, 1}, {&kind, 1}, DType::f32);
  CHECK(plan.sent_elems == 0);
  CHECK(plan.owned_elems == 2 * 128);
  for (const optim::MuonMatrix& m : plan.rounds.at(0).matrices) CHECK(m.held(unit, m.owner).elems == 128);
}

TEST_CASE("owners of cut matrices share the work: no rank has more than the mean and one matrix") {
  std::mt19937 random(std::random_device{}());
  std::uniform_int_distribution<std::int64_t> extent(1, 60);
  std::vector<fsdp::UnitLayout> units;
  std::vector<Param> kinds;
  const int ranks = 6;
  for (int u = 0; u < 20; ++u) {
    std::vector<fsdp::ParamSpec> params;
    for (int p = 0; p < 5; ++p) params.push_back(matrix(extent(random), extent(random)));
    units.push_back(fsdp::plan_unit(params, ranks, {.alignment_elems = 8}));
    kinds.push_back(Param::dense);
  }
  const auto plan = optim::plan_muon(units, kinds, DType::f32);
  REQUIRE(plan.rounds.size() == 1);
  std::vector<double> load(ranks);
  double total = 0, largest = 0;
  for (const optim::MuonMatrix& m : plan.rounds[0].matrices) {
    load[static_cast<std::size_t>(m.owner)] += m.cost();
    total += m.cost();
    largest = std::max(largest, m.cost());
  }
  CHECK(*std::max_element(load.begin(), load.end()) <= total / ranks + largest);
  const auto in_rounds = optim::plan_muon(units, kinds, DType::f32, {.round_elems = 3000});
  CHECK(in_rounds.rounds.size() > 3);
  CHECK(in_rounds.footprint().scratch < plan.footprint().scratch / 2);
  CHECK(in_rounds.state_elems == plan.state_elems);
}

TEST_CASE("each optimizer keeps state for what it updates, and no more") {
  const std::vector<fsdp::ParamSpec> params{matrix(64, 64), {.name = "norm", .shape = {64}}};
  const fsdp::UnitLayout unit = fsdp::plan_unit(params, 1);
  const Param kind = Param::dense;
  const auto plan = optim::plan_optimizer({&unit, 1}, {&kind, 1}, DType::f32);
  CHECK(plan.adamw.state_elems == std::vector<std::int64_t>{64});
  CHECK(plan.muon.state_elems == std::vector<std::int64_t>{64 * 64});
}

TEST_CASE("a step that is skipped moves bytes and changes nothing") {
  run_ranks(2, [](ThreadComm& world) {
    const std::vector<fsdp::ParamSpec> params{matrix(3, 3)};
    const fsdp::UnitLayout unit = fsdp::plan_unit(params, 2, {.alignment_elems = 1});
    const Param kind = Param::dense;
    const auto plan = optim::plan_muon({&unit, 1}, {&kind, 1}, DType::f64, {.product = DType::f64});
    const HostBuffer scratch(plan.footprint().scratch, 0xff), persistent(plan.footprint().persistent, 0xff);
    std::vector<double> master(5, 1.0);
    std::vector<double> gradient(5, std::numeric_limits<double>::infinity());
    const auto pieces = fsdp::update_pieces(unit, unit.pieces(world.rank()), 1);
    const fsdp::ShardMemory shard{master.data(), gradient.data(),
                                  nullptr,       DType::f64,
                                  DType::f64,    unit.shard_elems(world.rank()),
                                  pieces.data(), static_cast<std::int64_t>(pieces.size())};
    const GroupComm<ThreadComm> group(world);
    auto muon = optim::bind(plan, HostExecutor{}, group, GroupComm<ThreadComm>(), {&shard, 1},
                            Memory<>{scratch.block(), persistent.block()});
    optim::StepResult skipped{.grad_scale = 0, .skipped = 1, .applied = 0};
    muon.step(&skipped, 0.1, {});
    if (master != std::vector<double>(5, 1.0)) fail<error>("masters have changed");
    const auto* momentum = reinterpret_cast<const double*>(muon.momentum()[0]);
    for (int i = 0; i < 4; ++i) {
      if (momentum[i] != 0) fail<error>("the momentum has changed");
    }
  });
}

TEST_CASE("what cannot be is refused") {
  const Param kind = Param::dense;
  const std::vector<fsdp::ParamSpec> vector{{.name = "norm", .shape = {64}, .optimizer = fsdp::Optimizer::muon}};
  const fsdp::UnitLayout flat = fsdp::plan_unit(vector, 1);
  CHECK_THROWS_WITH_AS(optim::plan_muon({&flat, 1}, {&kind, 1}, DType::f32),
                       doctest::Contains("pleat[F15]: parameter norm has 1 extents"), shape_error);
  const std::vector<fsdp::ParamSpec> params{matrix(4, 4)};
  const fsdp::UnitLayout unit = fsdp::plan_unit(params, 2);
  CHECK_THROWS_WITH_AS(optim::plan_muon({&unit, 1}, {&kind, 1}, DType::f32, {.iterations = 0}),
                       doctest::Contains("pleat[F16]: Muon with 0 iterations"), shape_error);
  CHECK_THROWS_WITH_AS(optim::plan_muon({&unit, 1}, {}, DType::f32),
                       doctest::Contains("pleat[F16]: Muon with 5 iterations in rounds of 67108864 elements for 1"),
                       shape_error);
  const auto plan = optim::plan_muon({&unit, 1}, {&kind, 1}, DType::f32);
  const GroupComm<ThreadComm> alone;
  CHECK_THROWS_WITH_AS(optim::bind(plan, HostExecutor{}, alone, alone, {}, Memory<>{}),
                       doctest::Contains("pleat[F05]: Muon is planned for 1 units over 2 ranks"), shape_error);
}

}  // namespace
