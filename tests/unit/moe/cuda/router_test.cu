// The router's leaves and the losses on the GPU against those of the host, rows of logits nobody wants among them.
#include <pleat/moe/cuda/losses.cuh>
#include <pleat/moe/cuda/routing.cuh>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <set>
#include <string>
#include <vector>

#include <pleat/moe/host/leaf.hpp>

#include <doctest/doctest.h>

#include "managed.hpp"

namespace {

using namespace pleat;
using namespace moe_testing;
using moe::IdSource;
using moe::RouterOptions;
using moe::RouterPlan;
using moe::Scoring;
using host_leaf = moe_leaf<host_device>;
struct leaf : moe::detail::CudaRouterLeaf, moe::detail::CudaLossLeaf {};

template <class Acc>
struct Routing {
  Routing(const RouterPlan& plan, std::size_t tokens)
      : ids(tokens * static_cast<std::size_t>(plan.shape.k)),
        weights(ids.size()),
        probs(tokens * static_cast<std::size_t>(plan.shape.experts)),
        dlogits(probs.size()) {}
  Managed<std::int32_t> ids;
  Managed<Acc> weights, probs, dlogits;
};

template <class Acc>
double difference(const Managed<Acc>& a, const Managed<Acc>& b) {
  double most = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double u = static_cast<double>(a[i]), v = static_cast<double>(b[i]);
    if (std::isnan(u) != std::isnan(v)) return HUGE_VAL;
    if (!std::isnan(v) && u != v) most = std::fmax(most, std::fabs(u - v) / std::fmax(1.0, std::fabs(v)));
  }
  return most;
}
template <class Acc>
constexpr double tolerance = std::is_same_v<Acc, double> ? 1e-13 : 4e-6;

template <class Acc>
Managed<Acc> draw(std::size_t count, std::mt19937& random, double spread) {
  Managed<Acc> values(count);
  for (Acc& value : values) value = static_cast<Acc>(std::normal_distribution<double>(0, spread)(random));
  return values;
}

/// Logits without near ties of scores, and rows of NaN, infinities and ties where those may be.
template <class Acc>
Managed<Acc> draw_logits(const RouterPlan& plan, std::int64_t tokens, std::mt19937& random, bool with_odd_rows) {
  const auto experts = static_cast<std::size_t>(plan.shape.experts);
  Managed<Acc> logits(static_cast<std::size_t>(tokens) * experts);
  for (std::int64_t t = 0; t < tokens; ++t) {
    Acc* const row = logits.data() + static_cast<std::size_t>(t) * experts;
    for (std::size_t e = 0; e < experts; ++e) row[e] = static_cast<Acc>(static_cast<double>(e) * 0.03 - 3);
    std::shuffle(row, row + experts, random);
    if (!with_odd_rows || t % 3 != 1) continue;
    constexpr Acc infinity = std::numeric_limits<Acc>::infinity(), nan = std::numeric_limits<Acc>::quiet_NaN();
    for (std::size_t e = 0; e < experts; ++e) {
      switch (t % 5) {
        case 0:
          row[e] = 1;
          break;
        case 1:
          row[e] = nan;
          break;
        case 2:
          row[e] = e % 2 == 0 ? nan : -infinity;
          break;
        case 3:
          row[e] = e % 7 == 3 ? infinity : e % 2 == 0 ? Acc{0} : -Acc{0};
          break;
        default:
          if (e % 4 == 0) row[e] = nan;
      }
    }
  }
  return logits;
}

template <class Acc>
void check_router(const moe::RouterShape& shape, const RouterOptions& options, bool with_bias, unsigned seed) {
  const RouterPlan plan = moe::plan(shape, options);
  CAPTURE(shape.experts);
  CAPTURE(shape.k);
  CAPTURE(static_cast<int>(options.scoring));
  CAPTURE(options.expert_groups);
  CAPTURE(with_bias);
  std::mt19937 random(seed);
  constexpr std::int64_t tokens = 77, groups = 7;
  const bool scores_choose = with_bias || options.group_top > 1;  // rounding decides between odd ones
  const auto logits = draw_logits<Acc>(plan, tokens, random, !scores_choose);
  const auto experts = static_cast<std::size_t>(shape.experts), k = static_cast<std::size_t>(shape.k);
  Managed<Acc> bias(experts);
  for (std::size_t e = 0; e < experts; ++e) bias[e] = static_cast<Acc>(static_cast<double>(e % 5) * 0.25);
  Managed<std::uint8_t> routed(tokens);
  for (std::size_t t = 0; t < tokens; ++t) routed[t] = t % 11 != 4;
  const Acc* const b = with_bias ? bias.data() : nullptr;

  Routing<Acc> expected(plan, tokens), result(plan, tokens);
  const IdSource source = options.force_balance ? IdSource::balance : IdSource::logits;
  host_leaf::route(plan, source, tokens, logits.data(), b, routed.data(), expected.ids.data(), expected.weights.data(),
                   expected.probs.data(), {});
  leaf::route(plan, source, tokens, logits.data(), b, routed.data(), result.ids.data(), result.weights.data(),
              result.probs.data(), nullptr);
  finish();
  CHECK(std::equal(result.ids.begin(), result.ids.end(), expected.ids.begin()));
  CHECK(difference(result.weights, expected.weights) < tolerance<Acc>);
  CHECK(difference(result.probs, expected.probs) < tolerance<Acc>);
  for (std::size_t t = 0; t < tokens; ++t) {
    if (routed[t] == 0) continue;
    const std::set<std::int32_t> distinct(result.ids.data() + t * k, result.ids.data() + (t + 1) * k);
    CHECK(distinct.size() == k);
    CHECK(*distinct.begin() >= 0);
    CHECK(*distinct.rbegin() < shape.experts);
  }

  // ids of the caller, unrouted and repeated ones among them, on ordinary logits
  const auto plain = draw<Acc>(tokens * experts, random, 1.5);
  for (std::size_t i = 0; i < expected.ids.size(); ++i) {
    if (random() % 6 == 0) expected.ids[i] = random() % 2 == 0 ? -1 : expected.ids[i / k * k];
    result.ids[i] = expected.ids[i];
  }
  host_leaf::route(plan, IdSource::caller, tokens, plain.data(), nullptr, nullptr, expected.ids.data(),
                   expected.weights.data(), expected.probs.data(), {});
  leaf::route(plan, IdSource::caller, tokens, plain.data(), nullptr, nullptr, result.ids.data(), result.weights.data(),
              result.probs.data(), nullptr);
  finish();
  CHECK(difference(result.weights, expected.weights) < tolerance<Acc>);
  const auto dweights = draw<Acc>(tokens * k, random, 1), dprobs = draw<Acc>(groups * experts, random, 1);
  for (const Acc* dp : {static_cast<const Acc*>(nullptr), static_cast<const Acc*>(dprobs.data())}) {
    host_leaf::route_backward(plan, tokens, plain.data(), expected.ids.data(), expected.probs.data(), dweights.data(),
                              dp, dp == nullptr ? 1 : groups, expected.dlogits.data(), {});
    leaf::route_backward(plan, tokens, plain.data(), expected.ids.data(), expected.probs.data(), dweights.data(), dp,
                         dp == nullptr ? 1 : groups, result.dlogits.data(), nullptr);
    finish();
    CHECK(difference(result.dlogits, expected.dlogits) < tolerance<Acc>);
  }
}

template <class Acc>
void check_options(const moe::RouterShape& shape) {
  unsigned seed = 0;
  for (const Scoring scoring : {Scoring::softmax_topk, Scoring::topk_softmax, Scoring::sigmoid_topk}) {
    for (const bool renormalize : {false, true}) {
      for (const bool with_bias : {false, true}) {
        RouterOptions options{.scoring = scoring, .renormalize = renormalize, .scale = 2.5};
        check_router<Acc>(shape, options, with_bias, ++seed);
        options.expert_groups = 4;
        options.kept_groups = 3;
        check_router<Acc>(shape, options, with_bias, ++seed);
        options.group_top = 2;
        check_router<Acc>(shape, options, with_bias, ++seed);
      }
    }
  }
  check_router<Acc>(shape, {.force_balance = true}, false, ++seed);
}

TEST_CASE("all ways of scoring: f32") {
  check_options<float>({16, 4, DType::bf16});
  check_options<float>({132, 8, DType::f32});
}
TEST_CASE("all ways of scoring: f64") {
  check_options<double>({132, 8, DType::f64});
  check_router<double>({40, 36, DType::f64}, {}, false, 7);
  check_router<double>({1, 1, DType::f64}, {}, false, 8);
}

TEST_CASE("more experts than a CTA's memory has room for are refused") {
  const RouterPlan plan = moe::plan(moe::RouterShape{12288, 2, DType::f32});
  const Managed<float> logits(12288);
  Routing<float> result(plan, 1);
  try {
    leaf::route(plan, IdSource::logits, 1, logits.data(), nullptr, nullptr, result.ids.data(), result.weights.data(),
                result.probs.data(), nullptr);
    FAIL("no error");
  } catch (const shape_error& e) {
    CHECK(std::string(e.what()).find("pleat[E13]: experts=12288 groups=1 are too many") == 0);
  }
}

template <class Acc>
void check_losses(int experts, int k) {
  CAPTURE(experts);
  std::mt19937 random(static_cast<unsigned>(experts));
  constexpr std::int64_t tokens = 3 * 700;
  Managed<std::int32_t> ids(static_cast<std::size_t>(tokens * k));
  for (std::int32_t& id : ids) {
    id = random() % 4 == 0 ? -1 : static_cast<std::int32_t>(random() % static_cast<unsigned>(experts));
  }
  std::fill_n(ids.data() + 5 * k, 4 * k, -1);
  const auto probs = draw<Acc>(static_cast<std::size_t>(tokens * experts), random, 1);
  Managed<moe::StepTokens> step(std::vector<moe::StepTokens>{{.targets = 5000, .routed = 4321}});
  const Managed<double> scratch(moe::loss_partials);
  for (const std::int64_t groups : {1, 3}) {
    const auto counters = static_cast<std::size_t>(groups * (experts + 1));
    Managed<double> expected(counters), counts(counters);
    for (const bool accumulate : {false, true}) {
      host_leaf::count_choices(experts, k, groups, tokens, ids.data(), accumulate, expected.data(), {});
      leaf::count_choices(experts, k, groups, tokens, ids.data(), accumulate, counts.data(), nullptr);
      finish();
      CHECK(std::equal(counts.begin(), counts.end(), expected.begin()));
    }
    leaf::count_choices(experts, k, groups, 0, ids.data(), false, counts.data(), nullptr);
    finish();
    CHECK(std::count(counts.begin(), counts.end(), 0.0) == static_cast<std::ptrdiff_t>(counters));

    const auto plan = moe::plan(1, moe::LoadBalanceShape{experts, k, dtype_of<Acc>, groups}, {.alpha = 0.01});
    Managed<Acc> host_slope(static_cast<std::size_t>(groups * experts)), slope(host_slope.size());
    Managed<double> host_value(std::vector<double>{2}), value(std::vector<double>{2});
    host_leaf::load_balance(plan, groups, tokens, ids.data(), probs.data(), expected.data(), step.data(),
                            host_slope.data(), host_value.data(), nullptr, {});
    leaf::load_balance(plan, groups, tokens, ids.data(), probs.data(), expected.data(), step.data(), slope.data(),
                       value.data(), scratch.data(), nullptr);
    finish();
    CHECK(difference(slope, host_slope) < 1e-15);
    CHECK(value[0] == doctest::Approx(host_value[0]).epsilon(1e-12));

    Managed<Acc> host_bias(static_cast<std::size_t>(experts)), bias(host_bias.size());
    std::fill(host_bias.begin(), host_bias.end(), Acc{0.5});
    std::fill(bias.begin(), bias.end(), Acc{0.5});
    host_leaf::update_bias(experts, dtype_of<Acc>, expected.data(), 0.125, host_bias.data(), {});
    leaf::update_bias(experts, dtype_of<Acc>, expected.data(), 0.125, bias.data(), nullptr);
    finish();
    CHECK(std::equal(bias.begin(), bias.end(), host_bias.begin()));
  }
  const auto z_plan = moe::plan(moe::RouterZShape{experts, k, dtype_of<Acc>}, {.coefficient = 0.1});
  Managed<Acc> host_dlogits = draw<Acc>(probs.size(), random, 1), dlogits(probs.size());
  std::copy(host_dlogits.begin(), host_dlogits.end(), dlogits.begin());
  Managed<double> host_value(std::vector<double>{2}), value(std::vector<double>{2});
  host_leaf::router_z(z_plan, tokens, probs.data(), ids.data(), step.data(), host_dlogits.data(), host_value.data(),
                      nullptr, {});
  leaf::router_z(z_plan, tokens, probs.data(), ids.data(), step.data(), dlogits.data(), value.data(), scratch.data(),
                 nullptr);
  finish();
  CHECK(difference(dlogits, host_dlogits) < tolerance<Acc>);
  CHECK(value[0] == doctest::Approx(host_value[0]).epsilon(std::is_same_v<Acc, double> ? 1e-12 : 1e-6));
}

TEST_CASE("losses: counts are exact, slopes equal the host's, values to rounding") {
  check_losses<float>(8, 2);
  check_losses<double>(8, 2);
  check_losses<float>(256, 8);
  check_losses<double>(33, 5);
}

}  // namespace
