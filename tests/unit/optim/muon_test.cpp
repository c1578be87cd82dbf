// Muon against the facts: steps of both forms, and Newton-Schulz where its result is known.
#include <pleat/optim/muon.hpp>

#include <cmath>

#include <doctest/doctest.h>

#include <pleat/comm.hpp>
#include <pleat/optim.hpp>

#include "own_shard.hpp"
#include "support/json.hpp"

namespace {

using namespace pleat;
using optim_testing::OwnShard;
using testing_support::Json;

/// All numbers of a nested list, in order.
void append_numbers(std::vector<double>& numbers, const Json& list) {
  for (const Json& item : list.array()) {
    if (item.is_number()) {
      numbers.push_back(item.number());
    } else {
      append_numbers(numbers, item);
    }
  }
}
std::vector<double> flat(const Json& list) {
  std::vector<double> numbers;
  append_numbers(numbers, list);
  return numbers;
}

template <class T>
double largest_difference(const std::vector<T>& a, const std::vector<double>& b) {
  REQUIRE(a.size() >= b.size());
  double largest = 0;
  for (std::size_t i = 0; i < b.size(); ++i) largest = std::max(largest, std::abs(static_cast<double>(a[i]) - b[i]));
  return largest;
}

/// Newton-Schulz of matrices [count, rows, cols], one after the other.
template <class P>
std::vector<double> orthogonal(const std::vector<double>& matrices, std::int64_t rows, std::int64_t cols,
                               int iterations = 5) {
  const auto elems = static_cast<std::size_t>(rows * cols), count = matrices.size() / elems;
  optim::MatrixBatch batch{nullptr, rows, cols, static_cast<std::int64_t>(count)};
  const auto stride = static_cast<std::size_t>(batch.stride_elems());
  std::vector<P> data(stride * count, static_cast<P>(std::numeric_limits<float>::quiet_NaN()));
  for (std::size_t i = 0; i < matrices.size(); ++i) {
    data[i / elems * stride + i % elems] = static_cast<P>(matrices[i]);
  }
  batch.data = data.data();
  Carver measured;
  batch.carve(measured, dtype_of<P>);
  const HostBuffer work(measured.used_bytes(), 0xff);
  const newton_schulz_leaf<host_device> leaf({&batch, 1}, {.iterations = iterations, .product = dtype_of<P>},
                                             work.block(), {});
  leaf.run(0, {});
  std::vector<double> result(matrices.size());
  for (std::size_t i = 0; i < matrices.size(); ++i) {
    result[i] = static_cast<double>(data[i / elems * stride + i % elems]);
  }
  return result;
}

struct Bounds {
  double step;
  double orthogonal;
};

template <class T>
void check_case(const Json& fact, const char* form, DType product, const Bounds& bounds) {
  std::vector<std::int64_t> shape = fact["shape"].integers();
  const std::vector<fsdp::ParamSpec> params{{.name = "w", .shape = shape, .optimizer = fsdp::Optimizer::muon}};
  const fsdp::UnitLayout unit = fsdp::plan_unit(params, 1, {.alignment_elems = 1});
  std::vector<T> start;
  for (const double w : flat(fact["W0"])) start.push_back(static_cast<T>(w));
  OwnShard<T> own(start);
  own.pieces = fsdp::update_pieces(unit, unit.pieces(0), 1);
  const fsdp::ShardMemory shard = own.memory();
  const Param kind = Param::dense;
  const bool keller = std::string(form) == "keller";
  const auto plan = optim::plan_muon({&unit, 1}, {&kind, 1}, dtype_of<T>,
                                     {.form = keller ? optim::MuonForm::keller : optim::MuonForm::moonlight,
                                      .momentum = fact["momentum"].number(),
                                      .nesterov = fact["nesterov"].boolean(),
                                      .weight_decay = fact["weight_decay"].number(),
                                      .iterations = static_cast<int>(fact["ns_steps"].integer()),
                                      .product = product});
  const HostBuffer scratch(plan.footprint().scratch, 0xff), persistent(plan.footprint().persistent, 0xff);
  const GroupComm<ThreadComm> alone;
  auto muon = optim::bind(plan, HostExecutor{}, alone, alone, {&shard, 1},
                          Memory<>{Memory<>{scratch.block(), persistent.block()}});
  const double lr = fact["lr"].number();
  for (std::size_t t = 0; t < fact["grads"].size(); ++t) {
    const std::vector<double> gradient = flat(fact["grads"][t]);
    for (std::size_t i = 0; i < gradient.size(); ++i) own.gradient[i] = static_cast<T>(4 * gradient[i]);
    optim::StepResult result{.grad_scale = 0.25, .steps = static_cast<std::int64_t>(t) + 1, .applied = 1};
    muon.step(&result, lr, {});
    const Json& expected = fact["variants"][form][t];
    const auto* momentum = reinterpret_cast<const T*>(muon.momentum()[0]);
    CHECK(largest_difference(std::vector<T>(momentum, momentum + gradient.size()), flat(expected["momentum"])) <
          bounds.step);
    CHECK(largest_difference(own.master, flat(expected["W"])) <
          bounds.step + lr * expected["scale"].number() * static_cast<double>(t + 1) * bounds.orthogonal);
    CHECK(plan.rounds.at(0).matrices.at(0).scale(plan.options.form) == doctest::Approx(expected["scale"].number()));
  }
}

TEST_CASE("facts: steps of both forms, in float64, float32 and with products in bfloat16") {
  const Json facts = Json::facts("muon.json");
  for (const Json& fact : facts["cases"].array()) {
    CAPTURE(fact["name"].text());
    for (const char* form : {"keller", "moonlight"}) {
      CAPTURE(form);
      check_case<double>(fact, form, DType::f64, {1e-13, 1e-12});
      check_case<float>(fact, form, DType::f32, {1e-6, 1e-4});
      check_case<float>(fact, form, DType::bf16, {1e-6, 0.06});
    }
  }
}

TEST_CASE("facts: the orthogonal update of the first step, within the bounds of its dtype") {
  const Json facts = Json::facts("muon.json");
  for (const Json& fact : facts["cases"].array()) {
    CAPTURE(fact["name"].text());
    const auto shape = fact["shape"].integers();
    const std::int64_t rows = shape[shape.size() - 2], cols = shape.back();
    const Json& first = fact["variants"]["keller"][0];
    const auto expected = flat(first["ortho"]);
    CHECK(largest_difference(orthogonal<double>(flat(first["pre_ns"]), rows, cols), expected) < 1e-12);
    CHECK(largest_difference(orthogonal<float>(flat(first["pre_ns"]), rows, cols), expected) < 1e-4);
    CHECK(largest_difference(orthogonal<bfloat16>(flat(first["pre_ns"]), rows, cols), expected) < 0.06);
  }
}

TEST_CASE("facts: Newton-Schulz where its result is known, and the wrong ways of sharding it") {
  const Json fact = Json::facts("muon.json")["special"];
  const auto ns = [](const Json& g, std::int64_t rows, std::int64_t cols) {
    return orthogonal<double>(flat(g), rows, cols);
  };
  const auto whole = ns(fact["G_4x6"], 4, 6);
  CHECK(largest_difference(whole, flat(fact["ns_G"])) < 1e-12);
  for (const char* wrong : {"wrong_row_shard_ns", "wrong_flat_ns"}) {
    CHECK(largest_difference(whole, flat(fact[wrong]["value"])) > 0.4);
  }
  std::vector<double> transposed(24), back(24);
  const auto g = flat(fact["G_4x6"]);
  for (std::size_t i = 0; i < 24; ++i) transposed[i % 6 * 4 + i / 6] = g[i];
  transposed = orthogonal<double>(transposed, 6, 4);
  for (std::size_t i = 0; i < 24; ++i) back[i] = transposed[i % 6 * 4 + i / 6];
  CHECK(largest_difference(back, whole) < 1e-13);

  CHECK(ns(fact["zero_grad"]["G"], 3, 4) == flat(fact["zero_grad"]["ns"]));
  CHECK(largest_difference(ns(fact["row_vector_1x4"]["G"], 1, 4), flat(fact["row_vector_1x4"]["ns"])) < 1e-12);
  CHECK(largest_difference(ns(fact["rank1_3x4"]["G"], 3, 4), flat(fact["rank1_3x4"]["ns"])) < 1e-12);
  const auto diagonal = [](const std::vector<double>& values) {
    std::vector<double> matrix(16);
    for (std::size_t i = 0; i < 4; ++i) matrix[5 * i] = values[i];
    matrix = orthogonal<double>(matrix, 4, 4);
    return std::vector<double>{matrix[0], matrix[5], matrix[10], matrix[15]};
  };
  const double identity = fact["identity_4"]["ns_diag"].number();
  CHECK(largest_difference(diagonal({1, 1, 1, 1}), std::vector<double>(4, identity)) < 1e-12);
  CHECK(largest_difference(diagonal({1, .5, .25, .125}), flat(fact["diag_1_.5_.25_.125"]["ns_diag"])) < 1e-12);

  const Json& experts = fact["experts"];
  CHECK(largest_difference(ns(experts["E_2x4x6"], 4, 6), flat(experts["per_expert_ns"])) < 1e-12);
  CHECK(largest_difference(ns(experts["E_2x4x6"], 4, 6), flat(experts["wrong_stacked_8x6_ns"])) > 0.3);

  // Padding changes nothing, so long as the scale is that of the matrix itself.
  std::vector<double> padded(64);
  for (std::size_t i = 0; i < 24; ++i) padded[i / 6 * 8 + i % 6] = g[i];
  padded = orthogonal<double>(padded, 8, 8);
  for (std::size_t i = 0; i < 24; ++i) CHECK(std::abs(padded[i / 6 * 8 + i % 6] - whole[i]) < 1e-13);
}

TEST_CASE("with no gradient, parameters decay where they are to") {
  const std::vector<fsdp::ParamSpec> params{
      {.name = "decays", .shape = {2, 2}, .optimizer = fsdp::Optimizer::muon},
      {.name = "stays", .shape = {2, 2}, .weight_decay = false, .optimizer = fsdp::Optimizer::muon}};
  const fsdp::UnitLayout unit = fsdp::plan_unit(params, 1, {.alignment_elems = 1});
  OwnShard<double> own(std::vector<double>(8, 1.0));
  own.pieces = fsdp::update_pieces(unit, unit.pieces(0), 1);
  const fsdp::ShardMemory shard = own.memory();
  const Param kind = Param::dense;
  const auto plan = optim::plan_muon({&unit, 1}, {&kind, 1}, DType::f64, {.weight_decay = 0.5, .product = DType::f64});
  const HostBuffer scratch(plan.footprint().scratch, 0xff), persistent(plan.footprint().persistent, 0xff);
  const GroupComm<ThreadComm> alone;
  auto muon = optim::bind(plan, HostExecutor{}, alone, alone, {&shard, 1},
                          Memory<>{Memory<>{scratch.block(), persistent.block()}});
  optim::StepResult result{.grad_scale = 1, .steps = 1, .applied = 1};
  muon.step(&result, 0.1, {});
  CHECK(own.master == std::vector<double>{0.95, 0.95, 0.95, 0.95, 1, 1, 1, 1});
}

TEST_CASE("facts: scales") {
  const Json scales = Json::facts("muon.json")["special"]["scales"];
  for (const Json& fact : scales.array()) {
    const optim::MuonMatrix matrix{0, 0, fact["shape"][0].integer(), fact["shape"][1].integer(), true};
    CHECK(matrix.scale(optim::MuonForm::keller) == doctest::Approx(fact["keller"].number()).epsilon(1e-15));
    CHECK(matrix.scale(optim::MuonForm::moonlight) == doctest::Approx(fact["moonlight"].number()).epsilon(1e-15));
  }
}

}  // namespace
