// The router against an independent float64 reference, finite differences, and rows of logits nobody wants.
#include <pleat/moe.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include <doctest/doctest.h>

#include <pleat/core/host/executor.hpp>

namespace {

using namespace pleat;
using moe::RouterOptions;
using moe::RouterShape;
using moe::Scoring;

constexpr double nan = std::numeric_limits<double>::quiet_NaN();
constexpr double infinity = std::numeric_limits<double>::infinity();

/// The router of one token in plain words.
struct Reference {
  std::vector<int> ids;
  std::vector<double> weights, probs;
};

std::vector<double> softmax(const std::vector<double>& logits) {
  std::vector<double> out(logits.size());
  const double most = *std::max_element(logits.begin(), logits.end());
  for (std::size_t e = 0; e < out.size(); ++e) out[e] = std::exp(logits[e] - most);
  const double sum = std::accumulate(out.begin(), out.end(), 0.0);
  for (double& p : out) p /= sum;
  return out;
}

Reference reference(const std::vector<double>& logits, int k, const RouterOptions& o, const std::vector<double>& bias,
                    const std::vector<int>* given = nullptr) {
  const int experts = static_cast<int>(logits.size());
  Reference r;
  std::vector<double> scores = softmax(logits);
  r.probs = scores;
  if (o.scoring == Scoring::sigmoid_topk) {
    double sum = 0;
    for (std::size_t e = 0; e < logits.size(); ++e) sum += scores[e] = 1 / (1 + std::exp(-logits[e]));
    for (std::size_t e = 0; e < logits.size(); ++e) r.probs[e] = scores[e] / sum;
  }
  if (o.scoring == Scoring::topk_softmax) scores = logits;

  std::vector<double> keys = scores;
  for (std::size_t e = 0; e < keys.size() && !bias.empty(); ++e) keys[e] += bias[e];
  const auto better = [&](const std::vector<double>& key) {
    return [&key](int a, int b) { return key[static_cast<std::size_t>(a)] > key[static_cast<std::size_t>(b)]; };
  };
  if (o.expert_groups > 1) {
    const int members = experts / o.expert_groups;
    std::vector<double> group_keys;
    std::vector<int> groups(static_cast<std::size_t>(o.expert_groups));
    std::iota(groups.begin(), groups.end(), 0);
    for (int g = 0; g < o.expert_groups; ++g) {
      std::vector<double> own(keys.begin() + g * members, keys.begin() + (g + 1) * members);
      std::sort(own.rbegin(), own.rend());
      group_keys.push_back(std::accumulate(own.begin(), own.begin() + o.group_top, 0.0));
    }
    std::stable_sort(groups.begin(), groups.end(), better(group_keys));
    for (int i = o.kept_groups; i < o.expert_groups; ++i) {
      std::fill_n(keys.begin() + groups[static_cast<std::size_t>(i)] * members, members, -infinity);
    }
  }
  std::vector<int> order(static_cast<std::size_t>(experts));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), better(keys));
  r.ids.assign(order.begin(), order.begin() + k);
  if (given != nullptr) r.ids = *given;

  for (const int id : r.ids) {
    const auto e = static_cast<std::size_t>(id);
    const bool routed = id >= 0 && id < experts;
    r.weights.push_back(!routed ? 0 : o.scoring == Scoring::topk_softmax ? std::exp(logits[e]) : scores[e]);
  }
  const double sum = std::accumulate(r.weights.begin(), r.weights.end(), 0.0);
  const bool divided = o.scoring == Scoring::topk_softmax || o.renormalize;
  for (double& w : r.weights) w = (divided && sum != 0 ? w / sum : w) * o.scale;
  return r;
}

template <class T>
struct Routed {
  std::vector<T> logits;
  std::vector<std::int32_t> ids;
  std::vector<T> weights, probs;
};

template <class T>
TensorRef matrix(std::vector<T>& values, std::int64_t cols) {
  return {values.data(), {static_cast<std::int64_t>(values.size()) / cols, cols}};
}

template <class T>
Routed<T> choose(const RouterShape& shape, const RouterOptions& options, const std::vector<T>& logits,
                 std::vector<T> bias = {}) {
  const std::size_t tokens = logits.size() / static_cast<std::size_t>(shape.experts);
  Routed<T> r{logits, std::vector<std::int32_t>(tokens * static_cast<std::size_t>(shape.k), -7),
              std::vector<T>(tokens * static_cast<std::size_t>(shape.k), static_cast<T>(nan)),
              std::vector<T>(logits.size(), static_cast<T>(nan))};
  const auto router = moe::bind(moe::plan(shape, options), HostExecutor{});
  const TensorRef bias_ref = bias.empty() ? TensorRef{} : TensorRef(bias.data(), {shape.experts});
  router.choose({}, matrix(r.logits, shape.experts), matrix(r.ids, shape.k), matrix(r.weights, shape.k),
                matrix(r.probs, shape.experts), bias_ref);
  return r;
}

std::vector<RouterOptions> all_options() {
  std::vector<RouterOptions> all;
  for (const Scoring scoring : {Scoring::softmax_topk, Scoring::topk_softmax, Scoring::sigmoid_topk}) {
    for (const bool renormalize : {false, true}) {
      all.push_back({.scoring = scoring, .renormalize = renormalize});
      all.push_back({.scoring = scoring, .renormalize = renormalize, .scale = 2.5});
      all.push_back({.scoring = scoring, .renormalize = renormalize, .expert_groups = 4, .kept_groups = 2});
      all.push_back({.scoring = scoring,
                     .renormalize = renormalize,
                     .scale = 0.5,
                     .expert_groups = 4,
                     .kept_groups = 2,
                     .group_top = 2});
    }
  }
  return all;
}

std::vector<double> random_logits(std::size_t count, std::mt19937_64& random, double spread = 2) {
  std::normal_distribution<double> normal(0, spread);
  std::vector<double> values(count);
  for (double& value : values) value = normal(random);
  return values;
}

template <class T>
void check_against_reference(double tolerance) {
  std::mt19937_64 random(11);
  const RouterShape shape{16, 4, dtype_of<T>};
  const int tokens = 23;
  for (const RouterOptions& options : all_options()) {
    for (const bool biased : {false, true}) {
      const std::vector<double> drawn = random_logits(16 * tokens, random);
      const std::vector<T> logits(drawn.begin(), drawn.end());
      const std::vector<double> drawn_bias = biased ? random_logits(16, random, 0.3) : std::vector<double>{};
      const std::vector<T> bias(drawn_bias.begin(), drawn_bias.end());
      const Routed<T> routed = choose(shape, options, logits, bias);
      for (int t = 0; t < tokens; ++t) {
        const std::vector<double> row(logits.begin() + t * 16, logits.begin() + (t + 1) * 16);
        const Reference expected = reference(row, 4, options, {bias.begin(), bias.end()});
        for (int j = 0; j < 4; ++j) {
          const auto at = static_cast<std::size_t>(t * 4 + j);
          REQUIRE(routed.ids[at] == expected.ids[static_cast<std::size_t>(j)]);
          CHECK(std::abs(routed.weights[at] - expected.weights[static_cast<std::size_t>(j)]) <= tolerance);
        }
        for (int e = 0; e < 16; ++e) {
          const auto at = static_cast<std::size_t>(t * 16 + e);
          CHECK(std::abs(routed.probs[at] - expected.probs[static_cast<std::size_t>(e)]) <= tolerance);
        }
      }
    }
  }
}

TEST_CASE("every scoring, with groups and bias, equals the reference") {
  check_against_reference<double>(1e-13);
  check_against_reference<float>(3e-6);
}

TEST_CASE("renormalized softmax equals the softmax over the chosen logits") {
  std::mt19937_64 random(3);
  for (const double spread : {1.0, 300.0}) {  // at 300 most scores round to 0, and the logits still tell them apart
    const std::vector<double> logits = random_logits(40 * 32, random, spread);
    const auto first = choose<double>({32, 8, DType::f64}, {.scoring = Scoring::softmax_topk}, logits);
    const auto second = choose<double>({32, 8, DType::f64}, {.scoring = Scoring::topk_softmax}, logits);
    CHECK(first.ids == second.ids);
    CHECK(first.weights == second.weights);
  }
}

TEST_CASE("ties go to the lowest index") {
  for (const RouterOptions& options : all_options()) {
    const auto routed = choose<float>({16, 4, DType::f32}, options, std::vector<float>(16, 1.5f));
    CHECK(routed.ids == std::vector<std::int32_t>{0, 1, 2, 3});
  }
}

TEST_CASE("rows of NaN and infinite logits give distinct experts and leave other rows alone") {
  std::mt19937_64 random(17);
  const int experts = 128, k = 8, tokens = 9;
  const std::vector<double> drawn = random_logits(experts * tokens, random);
  for (const RouterOptions& base : all_options()) {
    for (const bool biased : {false, true}) {
      std::vector<double> logits = drawn;
      const std::vector<double> bias = biased ? random_logits(experts, random) : std::vector<double>{};
      const auto clean = choose<double>({experts, k, DType::f64}, base, logits, bias);
      const auto spoil = [&](int token, auto f) {
        for (int e = 0; e < experts; ++e) logits[static_cast<std::size_t>(token * experts + e)] = f(e);
      };
      spoil(1, [](int) { return nan; });
      spoil(3, [](int e) { return e % 3 == 0 ? infinity : e % 3 == 1 ? -infinity : nan; });
      spoil(5, [](int) { return -infinity; });
      spoil(7, [](int e) { return e == 100 ? 1.0 : nan; });
      const auto routed = choose<double>({experts, k, DType::f64}, base, logits, bias);
      for (int t = 0; t < tokens; ++t) {
        const auto first = routed.ids.begin() + t * k;
        const std::set<std::int32_t> distinct(first, first + k);
        CHECK(distinct.size() == static_cast<std::size_t>(k));
        CHECK(*distinct.begin() >= 0);
        CHECK(*distinct.rbegin() < experts);
        if (t % 2 == 0) {
          CHECK(std::equal(first, first + k, clean.ids.begin() + t * k));
          CHECK(std::equal(routed.weights.begin() + t * k, routed.weights.begin() + (t + 1) * k,
                           clean.weights.begin() + t * k));
        }
      }
      if (!biased && base.group_top == 1) CHECK(routed.ids[7 * k] == 100);  // NaN ranks below everything
    }
  }
}

TEST_CASE("losing groups are out even where the kept ones hold NaN") {
  std::vector<double> logits(8, nan);
  logits[0] = 5;  // group 0 has the best expert, NaN beside it
  for (int e = 4; e < 8; ++e) logits[static_cast<std::size_t>(e)] = 1;
  const auto routed = choose<double>({8, 3, DType::f64},
                                     {.scoring = Scoring::topk_softmax, .expert_groups = 2, .kept_groups = 1}, logits);
  CHECK(routed.ids == std::vector<std::int32_t>{0, 1, 2});
}

TEST_CASE("force_balance ignores the logits and spreads evenly") {
  std::mt19937_64 random(1);
  const int experts = 12, k = 3, tokens = 24;
  const auto routed =
      choose<double>({experts, k, DType::f64}, {.force_balance = true}, random_logits(experts * tokens, random));
  std::vector<int> counts(experts, 0);
  for (int t = 0; t < tokens; ++t) {
    for (int j = 0; j < k; ++j) {
      const std::int32_t id = routed.ids[static_cast<std::size_t>(t * k + j)];
      CHECK(id == (t + j * (experts / k)) % experts);
      ++counts[static_cast<std::size_t>(id)];
    }
  }
  CHECK(counts == std::vector<int>(experts, tokens * k / experts));
}

/// A loss linear in weights and probs; its gradient by finite differences of `weigh` in float64.
void check_gradient(const RouterOptions& options, std::vector<std::int32_t> ids, std::int64_t groups,
                    bool with_dprobs) {
  std::mt19937_64 random(7 + static_cast<unsigned>(groups));
  const int experts = 8, k = 3;
  const std::int64_t tokens = static_cast<std::int64_t>(ids.size()) / k;
  std::vector<double> logits = random_logits(static_cast<std::size_t>(tokens * experts), random);
  std::vector<double> dweights = random_logits(static_cast<std::size_t>(tokens * k), random);
  std::vector<double> dprobs = random_logits(static_cast<std::size_t>(groups * experts), random);
  std::vector<double> weights(dweights.size()), probs(logits.size()), dlogits(logits.size(), nan);
  const auto router = moe::bind(moe::plan(RouterShape{experts, k, DType::f64}, options), HostExecutor{});
  const auto is_routed = [&](std::int64_t t) {
    return std::any_of(ids.begin() + t * k, ids.begin() + (t + 1) * k, [&](int id) { return id >= 0 && id < experts; });
  };
  const auto loss = [&] {
    router.weigh({}, matrix(logits, experts), matrix(ids, k), matrix(weights, k), matrix(probs, experts));
    double sum = 0;
    for (std::size_t i = 0; i < weights.size(); ++i) sum += weights[i] * dweights[i];
    for (std::int64_t i = 0; i < tokens * experts && with_dprobs; ++i) {
      const std::int64_t t = i / experts;
      if (!is_routed(t)) continue;
      sum += probs[static_cast<std::size_t>(i)] *
             dprobs[static_cast<std::size_t>(t / (tokens / groups) * experts + i % experts)];
    }
    return sum;
  };
  loss();
  router.backward({}, matrix(logits, experts), matrix(ids, k), matrix(probs, experts), matrix(dweights, k),
                  with_dprobs ? matrix(dprobs, experts) : TensorRef{}, matrix(dlogits, experts));
  for (std::size_t i = 0; i < logits.size(); ++i) {
    const double kept = logits[i], step = 1e-6;
    logits[i] = kept + step;
    const double above = loss();
    logits[i] = kept - step;
    const double below = loss();
    logits[i] = kept;
    CHECK(std::abs((above - below) / (2 * step) - dlogits[i]) < 2e-8);
  }
}

TEST_CASE("the gradient equals finite differences, with and without the balance term") {
  for (const RouterOptions& options : all_options()) {
    for (const bool with_dprobs : {false, true}) {
      check_gradient(options, {0, 3, 5, 7, 1, 2, 4, 6, 0, 2, 5, 1}, 1, with_dprobs);
      check_gradient(options, {0, 3, 5, 7, 1, 2, 4, 6, 0, 2, 5, 1}, 4, with_dprobs);
      check_gradient(options, {-1, 3, 8, -1, -1, -1, 4, 6, 4, 2147483647, 5, 1}, 2, with_dprobs);
    }
  }
}

TEST_CASE("given ids: unrouted choices weigh nothing, the others share the weight among themselves") {
  std::vector<double> logits = {1, 2, 3, 4, 1, 2, 3, 4};
  std::vector<std::int32_t> ids = {3, -1, 4, 2147483647, 2, 2};
  std::vector<double> weights(6, nan), probs(8, nan);
  const auto router = moe::bind(moe::plan(RouterShape{4, 3, DType::f64}), HostExecutor{});
  router.weigh({}, matrix(logits, 4), matrix(ids, 3), matrix(weights, 3), matrix(probs, 4));
  CHECK(weights == std::vector<double>{1, 0, 0, 0, 1, 0});
}

TEST_CASE("errors name the values") {
  const auto text = [](auto f) {
    try {
      f();
    } catch (const shape_error& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  CHECK(text([] { moe::plan(RouterShape{4, 5}); }).find("pleat[E02]: k=5 distinct experts of experts=4") == 0);
  CHECK(text([] { moe::plan(RouterShape{4, 0}); }).find("pleat[E02]") == 0);
  CHECK(text([] { moe::plan(RouterShape{8, 2, DType::i64}); }).find("pleat[T01]") == 0);
  CHECK(text([] {
          moe::plan(RouterShape{8, 2}, {.scale = 0});
        }) == "pleat[E14]: scale=0 must be a finite number, above 0");
  CHECK(text([] { moe::plan(RouterShape{8, 2}, {.scale = std::nan("")}); }).find("pleat[E14]: scale=nan") == 0);
  CHECK(text([] {
          moe::plan(RouterShape{8, 2}, {.scoring = static_cast<moe::Scoring>(9)});
        }).find("pleat[E14]: scoring=9") == 0);
  CHECK(text([] { moe::plan(RouterShape{8, 2}, {.expert_groups = 3}); }).find("pleat[E03]: expert_groups=3") == 0);
  CHECK(text([] { moe::plan(RouterShape{8, 5}, {.expert_groups = 2, .kept_groups = 1}); }).find("pleat[E03]") == 0);
  CHECK(text([] { moe::plan(RouterShape{8, 2}, {.expert_groups = 2, .kept_groups = 3}); }).find("pleat[E03]") == 0);
  CHECK(text([] {
          moe::plan(RouterShape{8, 2}, {.expert_groups = 2, .kept_groups = 2, .group_top = 5});
        }).find("pleat[E03]") == 0);
  const auto router = moe::bind(moe::plan(RouterShape{4, 1}), HostExecutor{});
  std::vector<float> x(12), w(3);
  std::vector<std::int32_t> ids(3);
  CHECK(text([&] {
          router.backward({}, matrix(x, 4), matrix(ids, 1), matrix(x, 4), matrix(w, 1), TensorRef(x.data(), {2, 4}),
                          matrix(x, 4));
        }).find("pleat[E04]: 3 tokens cannot be cut into 2") == 0);
  TensorRef gaps(x.data(), DType::f32, {});
  gaps.push_extent(2, 6);
  gaps.push_extent(4, 1);
  std::vector<float> two(2), eight(8);
  CHECK(text([&] {
          router.choose({}, gaps, TensorRef(ids.data(), {2, 1}), matrix(two, 1), matrix(eight, 4));
        }).find("pleat[E01]: logits is f32 [2, 4] on host") == 0);
}

TEST_CASE("tokens that are padding are unrouted, others as without them") {
  for (const bool balance : {false, true}) {
    const auto router = moe::bind(moe::plan(RouterShape{8, 3, DType::f64}, {.force_balance = balance}), HostExecutor{});
    std::vector<double> logits(5 * 8), weights(5 * 3), probs(5 * 8), dweights(5 * 3, 1.0), dlogits(5 * 8, nan);
    std::mt19937 random(3);
    for (double& logit : logits) logit = std::normal_distribution<double>()(random);
    std::vector<std::int32_t> ids(5 * 3), masked_ids(5 * 3);
    std::vector<std::uint8_t> routed = {1, 0, 1, 0, 0};
    const auto ref = [](auto& v, std::int64_t cols) { return TensorRef(v.data(), {5, cols}); };
    router.choose({}, ref(logits, 8), ref(ids, 3), ref(weights, 3), ref(probs, 8));
    const std::vector<double> unmasked = weights;
    router.choose({}, ref(logits, 8), ref(masked_ids, 3), ref(weights, 3), ref(probs, 8), TensorRef{},
                  TensorRef(routed.data(), {5}));
    router.backward({}, ref(logits, 8), ref(masked_ids, 3), ref(probs, 8), ref(dweights, 3), TensorRef{},
                    ref(dlogits, 8));
    for (std::size_t i = 0; i < ids.size(); ++i) {
      CHECK(masked_ids[i] == (routed[i / 3] != 0 ? ids[i] : -1));
      CHECK(weights[i] == (routed[i / 3] != 0 ? unmasked[i] : 0));
    }
    for (std::size_t i = 8; i < 16; ++i) CHECK(dlogits[i] == 0);
  }
}

}  // namespace
