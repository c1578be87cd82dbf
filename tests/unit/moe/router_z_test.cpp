// The z-loss: value and gradient against finite differences of the definition, however the step is cut.
#include <pleat/moe/router_z.hpp>

#include <cmath>
#include <random>
#include <type_traits>
#include <vector>

#include <doctest/doctest.h>

#include <pleat/comm/thread_arena.hpp>
#include <pleat/core/host/buffer.hpp>
#include <pleat/core/host/leaf.hpp>
#include <pleat/moe.hpp>
#include <pleat/moe/host/leaf.hpp>

namespace {

using namespace pleat;

static_assert(std::is_trivially_copyable_v<moe::RouterZPlan>, "kernels take it by value");
static_assert(std::is_trivially_copyable_v<moe::LoadBalancePlan>, "kernels take it by value");
static_assert(std::is_trivially_copyable_v<moe::RouterPlan>, "kernels take it by value");
static_assert(std::is_trivially_copyable_v<moe::ExpertPlan>, "kernels take it by value");

constexpr int experts = 6, k = 2;
constexpr std::int64_t tokens = 12;

struct Batch {
  std::vector<double> logits = std::vector<double>(tokens * experts);
  std::vector<std::int32_t> ids = std::vector<std::int32_t>(tokens * k);
  explicit Batch(unsigned seed) {
    std::mt19937 random(seed);
    for (double& logit : logits) logit = std::normal_distribution<double>(0, 2)(random);
    for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = i / k % 3 == 1 ? -1 : static_cast<std::int32_t>(i % 5);
  }
  bool routed(std::int64_t t) const { return t % 3 != 1; }
  double routed_tokens() const { return 8; }
  double loss(double coefficient) const {
    double sum = 0;
    for (std::int64_t t = 0; t < tokens; ++t) {
      double z = 0;
      for (int e = 0; e < experts; ++e) z += std::exp(logits[static_cast<std::size_t>(t * experts + e)]);
      if (routed(t)) sum += std::pow(std::log(z), 2);
    }
    return coefficient * sum / routed_tokens();
  }
};

TEST_CASE("value and gradient, added to what is there, whatever the cut into micro-batches") {
  Batch batch(11);
  const double coefficient = 0.03, targets = 7;
  const moe::RouterZPlan plan = moe::plan(moe::RouterZShape{experts, k, DType::f64}, {coefficient});
  const HostBuffer scratch(plan.footprint().scratch, 0xff);
  const auto op = moe::bind(plan, HostExecutor{}, Memory<HostArena>{scratch.block()});
  const moe::StepTokens step{.targets = targets, .routed = batch.routed_tokens()};
  for (const std::int64_t cut : {std::int64_t{1}, std::int64_t{4}, tokens}) {
    std::vector<double> dlogits(batch.logits.size(), 0.5);
    double value = 1;
    for (std::int64_t t = 0; t < tokens; t += cut) {
      op.backward({}, TensorRef(batch.logits.data() + t * experts, {cut, experts}),
                  TensorRef(batch.ids.data() + t * k, {cut, k}), &step,
                  TensorRef(dlogits.data() + t * experts, {cut, experts}), TensorRef(&value, {1}));
    }
    CHECK(value == doctest::Approx(1 + batch.loss(coefficient)).epsilon(1e-13));
    for (std::size_t i = 0; i < batch.logits.size(); ++i) {
      const double kept = batch.logits[i], h = 1e-5;
      batch.logits[i] = kept + h;
      const double above = batch.loss(coefficient);
      batch.logits[i] = kept - h;
      const double below = batch.loss(coefficient);
      batch.logits[i] = kept;
      CHECK(std::abs(dlogits[i] - 0.5 - targets * (above - below) / (2 * h)) < 1e-8);
    }
  }
}

TEST_CASE("large logits do not overflow; a step without routed tokens adds nothing") {
  Batch batch(5);
  for (double& logit : batch.logits) logit += 900;
  const moe::RouterZPlan plan = moe::plan(moe::RouterZShape{experts, k, DType::f64}, {1.0});
  const HostBuffer scratch(plan.footprint().scratch, 0xff);
  const auto op = moe::bind(plan, HostExecutor{}, Memory<HostArena>{scratch.block()});
  std::vector<double> dlogits(batch.logits.size(), 0.0);
  double value = 0;
  const auto backward = [&](const moe::StepTokens& step) {
    op.backward({}, TensorRef(batch.logits.data(), {tokens, experts}), TensorRef(batch.ids.data(), {tokens, k}), &step,
                TensorRef(dlogits.data(), {tokens, experts}), TensorRef(&value, {1}));
  };
  backward({.targets = 8, .routed = 8});
  CHECK(value > 900.0 * 900);
  CHECK(std::isfinite(value));
  for (const double d : dlogits) CHECK(std::isfinite(d));
  std::fill(batch.ids.begin(), batch.ids.end(), experts);
  const std::vector<double> before = dlogits;
  value = 0;
  backward({.targets = 8, .routed = 0});
  CHECK(value == 0);
  CHECK(dlogits == before);
  CHECK_THROWS_WITH_AS(moe::plan(moe::RouterZShape{4, 5}),
                       "pleat[E02]: k=5 distinct experts of experts=4 cannot be chosen; valid k: 1 .. 4", shape_error);
}

}  // namespace
