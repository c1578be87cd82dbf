// The optimizer leaves of the host: AdamW against the facts, pieces, skipped steps, copies in bfloat16.
#include <pleat/optim/host/leaf.hpp>

#include <cmath>
#include <limits>

#include <doctest/doctest.h>

#include "../own_shard.hpp"
#include "support/json.hpp"

namespace {

using namespace pleat;
using optim_testing::OwnShard;
using testing_support::Json;
using leaf = optim_leaf<host_device>;

template <class T, class Compute>
void step(OwnShard<T, Compute>& shard, const optim::AdamwOptions& options, double lr, const optim::StepResult& result) {
  leaf::adamw(shard.memory(), shard.first.data(), shard.second.data(), options, lr, &result, {});
}

template <class T>
double largest_difference(const std::vector<T>& a, const std::vector<double>& b) {
  double largest = 0;
  for (std::size_t i = 0; i < b.size(); ++i) largest = std::max(largest, std::abs(static_cast<double>(a[i]) - b[i]));
  return largest;
}

template <class T>
void check_adamw(double tolerance) {
  const Json fact = Json::facts("fsdp.json")["adamw"];
  const optim::AdamwOptions options{fact["betas"][0].number(), fact["betas"][1].number(), fact["eps"].number(),
                                    fact["wd"].number()};
  std::vector<T> p0;
  for (const double value : fact["p0"].numbers()) p0.push_back(static_cast<T>(value));
  OwnShard<T> shard(p0);
  optim::StepResult result{.applied = 1};
  // A scale of 1/4 and gradients of four times the size: the facts' gradients.
  result.grad_scale = 0.25;
  for (std::size_t t = 0; t < fact["grads"].size(); ++t) {
    for (std::size_t i = 0; i < p0.size(); ++i) shard.gradient[i] = static_cast<T>(4 * fact["grads"][t][i].number());
    result.steps = static_cast<std::int64_t>(t) + 1;
    step(shard, options, fact["lr"].number(), result);
    const Json& expected = fact["torch_style"][t];
    CHECK(largest_difference(shard.master, expected["p"].numbers()) < tolerance);
    CHECK(largest_difference(shard.first, expected["m"].numbers()) < tolerance);
    CHECK(largest_difference(shard.second, expected["v"].numbers()) < tolerance);
    // eps inside the bias correction would be off by 3e-4 in the last parameter.
    CHECK(largest_difference(shard.master, fact["eps_before_bias_style"][t]["p"].numbers()) > 1e-4);
  }
}

TEST_CASE("AdamW equals the facts in float64 and float") {
  check_adamw<double>(1e-14);
  check_adamw<float>(1e-6);
}

TEST_CASE("only pieces are touched, and each decays as its flag says") {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  OwnShard<double> shard({1, 1, nan, 1, nan});
  shard.gradient = {0, 0, nan, 0, nan};
  shard.pieces = {shard.piece(0, 2), shard.piece(3, 1, 1.0, false)};
  step(shard, {.weight_decay = 0.5}, 0.1, {.grad_scale = 1, .steps = 1, .applied = 1});
  CHECK(shard.master[0] == 0.95);
  CHECK(shard.master[1] == 0.95);
  CHECK(shard.master[3] == 1);
  CHECK(std::isnan(shard.master[2]));
  CHECK(shard.first[2] == 0);
  CHECK(std::isnan(shard.master[4]));
}

TEST_CASE("pieces of another optimizer stay as they are, and moments lie where the piece says") {
  OwnShard<double> shard({1, 1, 1, 1});
  shard.gradient = {1, 2, 3, 4};
  shard.pieces = {shard.piece(0, 2), shard.piece(2, 2)};
  shard.pieces[0].optimizer = fsdp::Optimizer::muon;
  shard.pieces[1].state_begin = 0;
  step(shard, {.beta1 = 0.5}, 0.1, {.grad_scale = 1, .steps = 1, .applied = 1});
  CHECK(shard.master[0] == 1);
  CHECK(shard.master[1] == 1);
  CHECK(shard.master[2] < 1);
  CHECK(shard.first == std::vector<double>{1.5, 2, 0, 0});
}

TEST_CASE("a step that is skipped changes nothing") {
  OwnShard<float> shard({1, 2});
  shard.gradient = {std::numeric_limits<float>::infinity(), 1};
  step(shard, {}, 0.1, {.grad_scale = 0, .steps = 4, .skipped = 1, .applied = 0});
  CHECK(shard.master == std::vector<float>{1, 2});
  CHECK(shard.first == std::vector<float>{0, 0});
  CHECK(shard.second == std::vector<float>{0, 0});
}

TEST_CASE("updates too small for bfloat16 add up in the float master; the copy is the rounded master") {
  const Json fact = Json::facts("fsdp.json")["precision"]["bf16_param_update_lost"];
  const auto start = static_cast<float>(fact["w"].number());
  OwnShard<float, bfloat16> shard({start, -3});
  shard.gradient = {1, 1};
  const auto lr = fact["update"].number();  // a step's change, since AdamW normalizes
  for (std::int64_t t = 1; t <= 4; ++t) {
    step(shard, {.weight_decay = 0}, lr, {.grad_scale = 1, .steps = t, .applied = 1});
    CHECK(shard.master[0] == doctest::Approx(start - static_cast<double>(t) * lr));
    for (std::size_t i = 0; i < 2; ++i) CHECK(shard.compute[i].bits == bfloat16(shard.master[i]).bits);
    if (t == 1) CHECK(shard.compute[0] == static_cast<float>(fact["bf16_result"].number()));
  }
  CHECK(shard.compute[0] == 0.99609375F);  // one bfloat16 step below 1
}

TEST_CASE("squares are weighed per piece and summed in float64") {
  OwnShard<float> shard(std::vector<float>(6));
  shard.gradient = {3, 4, std::numeric_limits<float>::quiet_NaN(), 1e30F, 2, 2};
  shard.pieces = {shard.piece(0, 2, 0.5), shard.piece(4, 2)};
  std::vector<double> partials(optim::square_partials);
  partials[7] = 100;
  leaf::add_squares(partials.data(), shard.memory(), {});
  optim::StepPartial partial{std::numeric_limits<double>::quiet_NaN(), {}};
  leaf::finish_partial(&partial, partials.data(), nullptr, 0, {});
  CHECK(partial.sum_of_squares == 100 + 0.5 * 25 + 8);
  shard.pieces = {shard.piece(3, 1)};
  std::fill(partials.begin(), partials.end(), 0.0);
  leaf::add_squares(partials.data(), shard.memory(), {});
  leaf::finish_partial(&partial, partials.data(), nullptr, 0, {});
  CHECK(partial.sum_of_squares == doctest::Approx(1e60));  // past the range of float
}

TEST_CASE("a learning rate in memory is read when the step runs") {
  OwnShard<double> given({1, 2}), read({1, 2});
  double where = 0.5;
  const optim::StepResult result{.grad_scale = 1, .steps = 1, .applied = 1};
  for (OwnShard<double>* shard : {&given, &read}) shard->gradient = {0.25, -0.5};
  leaf::adamw(given.memory(), given.first.data(), given.second.data(), {}, 0.5, &result, {});
  const optim::LearningRate lr = &where;
  leaf::adamw(read.memory(), read.first.data(), read.second.data(), {}, lr, &result, {});
  CHECK(read.master == given.master);
  where = 0;  // and not before: without a rate nothing moves
  const auto before = read.master;
  leaf::adamw(read.memory(), read.first.data(), read.second.data(), {}, lr, &result, {});
  CHECK(read.master == before);
}

}  // namespace
