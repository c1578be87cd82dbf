// The load-balance loss: value and gradient against the definition on one rank, whatever the mesh, masks and scope.
#include <pleat/moe/losses.hpp>

#include <array>
#include <cmath>
#include <numeric>
#include <random>
#include <vector>

#include <doctest/doctest.h>

#include <pleat/comm/thread_arena.hpp>
#include <pleat/core/host/buffer.hpp>
#include <pleat/core/host/leaf.hpp>
#include <pleat/moe.hpp>

namespace {

using namespace pleat;
using moe::BalanceScope;

constexpr int experts = 8, k = 2;
constexpr double alpha = 0.01;

/// Tokens of a step in the order (micro-batch, sequence, position); some are masked.
struct Step {
  std::int64_t micro_batches, sequences, length;  // per micro-batch; tokens per sequence
  std::vector<double> logits;                     // [tokens, experts]
  std::vector<std::int32_t> ids;                  // [tokens, k]

  Step(std::int64_t micro, std::int64_t seqs, std::int64_t len, unsigned seed)
      : micro_batches(micro), sequences(seqs), length(len) {
    std::mt19937_64 random(seed);
    std::normal_distribution<double> normal(0, 1.5);
    logits.resize(static_cast<std::size_t>(tokens() * experts));
    for (double& logit : logits) logit = normal(random);
    for (std::int64_t t = 0; t < tokens(); ++t) {
      const auto first = static_cast<std::int32_t>(random() % experts);
      const bool masked = random() % 5 == 0, half = random() % 7 == 0;
      ids.push_back(masked ? -1 : first);
      ids.push_back(masked || half ? experts + 3 : (first + 1 + static_cast<std::int32_t>(random() % 7)) % experts);
    }
  }
  std::int64_t tokens() const { return micro_batches * sequences * length; }
  bool routed(std::int64_t t) const { return ids[static_cast<std::size_t>(t * k)] >= 0; }
  double routed_tokens(std::int64_t first, std::int64_t last) const {
    double count = 0;
    for (std::int64_t t = first; t < last; ++t) count += routed(t) ? 1 : 0;
    return count;
  }

  /// alpha * experts * sum f_i P_i of tokens [first, last), f over [f_first, last).
  double term(std::int64_t f_first, std::int64_t first, std::int64_t last) const {
    std::vector<double> f(experts, 0.0), p(experts, 0.0);
    for (std::int64_t t = f_first; t < last; ++t) {
      for (int j = 0; j < k; ++j) {
        const std::int32_t id = ids[static_cast<std::size_t>(t * k + j)];
        if (id >= 0 && id < experts) f[static_cast<std::size_t>(id)] += 1 / (k * routed_tokens(f_first, last));
      }
      if (t < first || !routed(t)) continue;
      double sum = 0;
      for (int e = 0; e < experts; ++e) sum += std::exp(logits[static_cast<std::size_t>(t * experts + e)]);
      for (int e = 0; e < experts; ++e) {
        p[static_cast<std::size_t>(e)] +=
            std::exp(logits[static_cast<std::size_t>(t * experts + e)]) / sum / routed_tokens(first, last);
      }
    }
    return alpha * experts * std::inner_product(f.begin(), f.end(), p.begin(), 0.0);
  }

  /// The loss of the step by definition: every micro-batch, or sequence, by its share of the routed tokens.
  double loss(BalanceScope scope) const {
    const std::int64_t batch = scope == BalanceScope::sequence ? length : sequences * length;
    double sum = 0;
    for (std::int64_t first = 0; first < tokens(); first += batch) {
      const double count = routed_tokens(first, first + batch);
      if (count == 0) continue;
      sum += count / routed_tokens(0, tokens()) *
             term(scope == BalanceScope::global_batch ? 0 : first, first, first + batch);
    }
    return sum;
  }
};

struct Outcome {
  std::vector<double> dlogits;
  double value = 0;
};

/// The step on dp x cp ranks: sequences are dealt to dp in order, each cut into cp pieces; gradients are summed, not
/// divided. `pieces` cuts a sequence unevenly where given.
Outcome run(const Step& step, BalanceScope scope, int dp, int cp, double targets,
            std::vector<std::int64_t> pieces = {}) {
  if (pieces.empty()) pieces.assign(static_cast<std::size_t>(cp), step.length / cp);
  const std::int64_t own = step.sequences / dp;
  Outcome outcome{std::vector<double>(step.logits.size(), std::numeric_limits<double>::quiet_NaN()), 0};
  std::vector<double> values(static_cast<std::size_t>(dp * cp));
  run_ranks(dp * cp, [&](ThreadComm& world) {
    const int my_dp = world.rank() / cp, my_cp = world.rank() % cp;
    ThreadComm cp_comm = world.split(my_dp, my_cp);
    const GroupComm<ThreadComm> stage(world), cp_group(cp_comm);
    const auto& counted = scope == BalanceScope::sequence ? cp_group : stage;
    const auto plan = moe::plan(counted.size(), moe::LoadBalanceShape{experts, k, DType::f64, own}, {alpha, scope});
    const Footprint need = plan.footprint();
    const HostBuffer persistent(need.persistent, 0xff);
    auto balance = moe::bind(plan, HostExecutor{}, counted, Memory<>{.persistent = persistent.block()});
    const auto router = moe::bind(moe::plan(moe::RouterShape{experts, k, DType::f64}), HostExecutor{});

    const std::int64_t piece = pieces[static_cast<std::size_t>(my_cp)];
    const std::int64_t offset = std::accumulate(pieces.begin(), pieces.begin() + my_cp, std::int64_t{0});
    const std::int64_t tokens = own * piece;
    const auto size = static_cast<std::size_t>(tokens * experts);
    double& value = values[static_cast<std::size_t>(world.rank())];
    for (int pass = 0; pass < 2; ++pass) {  // a second step forgets the first
      value = 0;
      balance.reset();
      for (std::int64_t m = 0; m < step.micro_batches; ++m) {
        std::vector<double> logits, weights(static_cast<std::size_t>(tokens * k)), probs(size), dlogits(size);
        std::vector<std::int32_t> ids;
        std::vector<std::int64_t> places;
        for (std::int64_t i = 0; i < tokens; ++i) {
          const std::int64_t sequence = m * step.sequences + my_dp * own + i / piece;
          const std::int64_t t = sequence * step.length + offset + i % piece;
          places.push_back(t);
          logits.insert(logits.end(), step.logits.begin() + t * experts, step.logits.begin() + (t + 1) * experts);
          ids.insert(ids.end(), step.ids.begin() + t * k, step.ids.begin() + (t + 1) * k);
        }
        const std::int64_t groups = plan.rows(own);
        std::vector<double> dprobs(static_cast<std::size_t>(groups * experts), std::nan(""));
        const auto ref = [&](auto& v, std::int64_t cols) {
          return TensorRef(v.data(), {static_cast<std::int64_t>(v.size()) / cols, cols});
        };
        router.weigh({}, ref(logits, experts), ref(ids, k), ref(weights, k), ref(probs, experts));
        const moe::StepTokens all{.targets = targets, .routed = step.routed_tokens(0, step.tokens())};
        if (pass == 0) {
          balance.forward({}, ref(ids, k), ref(probs, experts), own, &all, ref(dprobs, experts),
                          TensorRef(&value, {1}));
        } else {
          balance.begin({}, ref(ids, k), ref(probs, experts), own, &all, ref(dprobs, experts), TensorRef(&value, {1}));
          balance.end({});
        }
        const std::vector<double> dweights(weights.size(), 0.0);
        router.backward({}, ref(logits, experts), ref(ids, k), ref(probs, experts), ref(dweights, k),
                        ref(dprobs, experts), ref(dlogits, experts));
        for (std::int64_t i = 0; i < tokens; ++i) {
          std::copy_n(dlogits.begin() + i * experts, experts,
                      outcome.dlogits.begin() + places[static_cast<std::size_t>(i)] * experts);
        }
      }
    }
  });
  outcome.value = std::accumulate(values.begin(), values.end(), 0.0);
  return outcome;
}

void check_scope(BalanceScope scope) {
  Step step(2, 8, 8, 5);
  const double targets = 97;  // not the routed tokens
  const double loss = step.loss(scope);
  std::vector<double> expected;
  for (double& logit : step.logits) {
    const double kept = logit, h = 1e-5;
    logit = kept + h;
    const double above = step.loss(scope);
    logit = kept - h;
    const double below = step.loss(scope);
    logit = kept;
    expected.push_back(targets * (above - below) / (2 * h));
  }
  const int meshes[][2] = {{1, 1}, {2, 1}, {1, 2}, {2, 2}, {4, 2}, {8, 1}, {1, 8}, {1, 4}};
  Outcome first;
  for (const auto& mesh : meshes) {
    const int dp = mesh[0], cp = mesh[1];
    CAPTURE(dp);
    CAPTURE(cp);
    const Outcome outcome = run(step, scope, dp, cp, targets);
    CHECK(std::abs(outcome.value - loss) < 1e-14);
    for (std::size_t i = 0; i < expected.size(); ++i) CHECK(std::abs(outcome.dlogits[i] - expected[i]) < 1e-9);
    if (dp == 1 && cp == 1) first = outcome;
    CHECK(outcome.dlogits == first.dlogits);  // counts are exact: the same bits on every mesh
  }
  const Outcome uneven = run(step, scope, 1, 3, targets, {5, 0, 3});
  CHECK(uneven.dlogits == first.dlogits);
}

TEST_CASE("per micro-batch: value and gradient are those of one rank on every mesh") {
  check_scope(BalanceScope::micro_batch);
}
TEST_CASE("global batch: counts of the micro-batches so far, forgotten after the step") {
  check_scope(BalanceScope::global_batch);
}
TEST_CASE("per sequence: counts over cp only") {
  check_scope(BalanceScope::sequence);
}

TEST_CASE("the global batch differs from the micro-batch, so that the tests above can tell") {
  const Step step(2, 4, 8, 5);
  CHECK(std::abs(step.loss(BalanceScope::global_batch) - step.loss(BalanceScope::micro_batch)) > 1e-5);
  CHECK(std::abs(step.loss(BalanceScope::sequence) - step.loss(BalanceScope::micro_batch)) > 1e-5);
}

TEST_CASE("a step without routed tokens has loss 0 and gradient 0") {
  Step step(1, 2, 4, 3);
  std::fill(step.ids.begin(), step.ids.end(), -1);
  const Outcome outcome = run(step, BalanceScope::micro_batch, 2, 1, 8);
  CHECK(outcome.value == 0);
  for (const double d : outcome.dlogits) CHECK(d == 0);
}

TEST_CASE("counters pass 2^31 and 2^32 exactly") {
  // 2048 tokens, k 8, 128 ranks, 1024 micro-batches: 2^31 choices; here more of them are already counted.
  const auto plan = moe::plan(1, moe::LoadBalanceShape{2, 1, DType::f64}, {1.0, BalanceScope::global_batch});
  const HostBuffer persistent(plan.footprint().persistent);
  auto balance = moe::bind(plan, HostExecutor{}, GroupComm<ThreadComm>(), Memory<>{.persistent = persistent.block()});
  std::vector<std::int32_t> ids = {0};
  std::vector<double> probs = {0.5, 0.5}, dprobs(2);
  double value = 0;
  const auto forward = [&] {
    const moe::StepTokens step{.targets = 1, .routed = 1};
    balance.forward({}, TensorRef(ids.data(), {1, 1}), TensorRef(probs.data(), {1, 2}), 1, &step,
                    TensorRef(dprobs.data(), {1, 2}), TensorRef(&value, {1}));
  };
  forward();
  auto* counts = reinterpret_cast<double*>(persistent.data());
  CHECK(counts[0] == 1);
  counts[0] = 4294967295.0;
  counts[1] = 4294967297.0;
  counts[2] = 8589934592.0;
  forward();
  CHECK(counts[0] == 4294967296.0);
  CHECK(counts[2] == 8589934593.0);
  CHECK(dprobs[0] == doctest::Approx(2 * 4294967296.0 / 8589934593.0).epsilon(1e-15));
}

TEST_CASE("ranks that plan different losses all hear which, when they bind") {
  const auto texts = [](auto plan_of) {
    std::array<std::string, 2> all;
    run_ranks(2, [&](ThreadComm& world) {
      const auto plan = plan_of(world.rank());
      const HostBuffer scratch(plan.footprint().scratch), persistent(plan.footprint().persistent);
      try {
        moe::bind(plan, HostExecutor{}, GroupComm<ThreadComm>(world),
                  Memory<>{.scratch = scratch.block(), .persistent = persistent.block()});
      } catch (const comm_error& e) {
        all[static_cast<std::size_t>(world.rank())] = e.what();
      }
    });
    CHECK(all[0] == all[1]);
    return all[0];
  };
  CHECK(texts([](int rank) {
          return moe::plan(2, moe::LoadBalanceShape{4, 2}, {rank == 0 ? 0.5 : 0.25, BalanceScope::micro_batch});
        }) ==
        "pleat[C36]: rank 1 binds moe load balance with alpha=0.25, rank 0 with alpha=0.5; plan alike on every rank of "
        "{0, 1}");
  CHECK(texts([](int rank) {
          return moe::plan(2, moe::LoadBalanceShape{4, 2},
                           {1, rank == 0 ? BalanceScope::micro_batch : BalanceScope::sequence});
        }).find("with scope=sequence, rank 0 with scope=micro_batch") != std::string::npos);
  CHECK(texts([](int rank) {
          return moe::plan(2, moe::SelectionBiasShape{4, 1 + rank});
        }).find("pleat[C36]: rank 1 binds moe selection bias with k=2, rank 0 with k=1") == 0);
  CHECK(texts([](int) { return moe::plan(2, moe::SelectionBiasShape{4, 1}); }).empty());
}

TEST_CASE("errors name the values") {
  const auto text = [](auto f) {
    try {
      f();
    } catch (const error& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  CHECK(text([] {
          moe::plan(1, moe::LoadBalanceShape{4, 5});
        }).find("pleat[E02]: k=5 distinct experts of experts=4") == 0);
  const auto plan = moe::plan(1, moe::LoadBalanceShape{4, 2, DType::f32, 2}, {1.0, BalanceScope::sequence});
  const HostBuffer persistent(plan.footprint().persistent);
  const Memory<> memory{.persistent = persistent.block()};
  auto balance = moe::bind(plan, HostExecutor{}, GroupComm<ThreadComm>(), memory);
  std::vector<std::int32_t> ids(6);
  std::vector<float> probs(12), dprobs(12);
  double value = 0;
  const auto forward = [&](std::int64_t sequences) {
    balance.forward({}, TensorRef(ids.data(), {3, 2}), TensorRef(probs.data(), {3, 4}), sequences, nullptr,
                    TensorRef(dprobs.data(), {sequences, 4}), TensorRef(&value, {1}));
  };
  CHECK(text([&] { forward(3); }).find("pleat[E05]: 3 sequences in a micro-batch; valid: 1 .. 2") == 0);
  CHECK(text([&] { forward(2); }).find("pleat[E04]: 3 tokens cannot be cut into 2") == 0);
  CHECK(text([&] {
          auto two = plan;
          two.ranks = 2;
          moe::bind(two, HostExecutor{}, GroupComm<ThreadComm>(), memory);
        }).find("pleat[E06]: the plan is for a group of 2 ranks, it was bound to one of 1") == 0);
  for (const int ranks : {0, -1}) {
    CHECK(text([&] { moe::plan(ranks, moe::LoadBalanceShape{4, 2}); }).find("pleat[E07]: ranks=") == 0);
    CHECK(text([&] { moe::plan(ranks, moe::SelectionBiasShape{4, 2}); }).find("pleat[E07]: ranks=") == 0);
  }
  for (const std::int64_t sequences : {std::int64_t{0}, std::int64_t{-4}, std::int64_t{1} << 62}) {
    CHECK(text([&] { moe::plan(1, moe::LoadBalanceShape{4, 2, DType::f32, sequences}); }).find("pleat[E07]") == 0);
  }
  CHECK(text([] {
          moe::plan(1, moe::LoadBalanceShape{4, 2}, {.alpha = std::nan("")});
        }) == "pleat[E14]: alpha=nan must be a finite number, 0 or more");
  CHECK(text([] { moe::plan(1, moe::LoadBalanceShape{4, 2}, {.alpha = -1}); }).find("pleat[E14]: alpha=-1") == 0);
  CHECK(text([] {
          moe::plan(1, moe::LoadBalanceShape{4, 2}, {.scope = static_cast<BalanceScope>(7)});
        }).find("pleat[E14]: scope=7 is no enumerator; valid: 0 .. 2") == 0);
  CHECK(text([] { moe::plan(moe::RouterZShape{4, 2}, {.coefficient = HUGE_VAL}); }).find("pleat[E14]") == 0);
  CHECK(text([] { moe::plan(moe::RouterZShape{4, 2, DType::u8}); }).find("pleat[T01]") == 0);
}

}  // namespace
