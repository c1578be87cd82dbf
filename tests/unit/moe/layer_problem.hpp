// A whole MoE layer as a problem: its inputs, the answer of one rank in float64, and the run over a group of ranks.
#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <type_traits>
#include <vector>

#include <pleat/comm/thread_arena.hpp>
#include <pleat/core/host/buffer.hpp>
#include <pleat/core/host/leaf.hpp>
#include <pleat/moe.hpp>

#include "support/jitter.hpp"

template <>
struct pleat::moe_leaf<testing_support::jitter_device> : pleat::moe_leaf<pleat::host_device> {
  using Host = pleat::moe_leaf<pleat::host_device>;
  template <class... Args>
  static void pack(const Args&... args) {
    testing_support::jitter();
    Host::pack(args...);
  }
  template <class... Args>
  static void expand(const Args&... args) {
    testing_support::jitter();
    Host::expand(args...);
  }
  template <class... Args>
  static void sum_experts(const Args&... args) {
    testing_support::jitter();
    Host::sum_experts(args...);
    testing_support::jitter();
  }
  template <class... Args>
  static void sum_sources(const Args&... args) {
    testing_support::jitter();
    Host::sum_sources(args...);
  }
};

namespace moe_testing {

using namespace pleat;

struct Sizes {
  std::int64_t hidden = 12;
  std::int64_t inner = 10;
  int experts = 8;
  int k = 2;
};

/// ||a - b|| / ||b||, where b is 0: ||a||; NaN counts as infinite.
template <class A>
double relative(const std::vector<A>& a, const std::vector<double>& b) {
  if (a.size() != b.size()) return std::numeric_limits<double>::infinity();
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double difference = static_cast<double>(a[i]) - b[i];
    if (std::isnan(difference)) return std::numeric_limits<double>::infinity();
    error += difference * difference;
    norm += b[i] * b[i];
  }
  return norm == 0 ? std::sqrt(error) : std::sqrt(error / norm);
}

/// Inputs of all ranks, token after token in rank order; every value is exact in T.
template <class T>
struct Problem {
  using Acc = accumulator_t<T>;

  Problem(const Sizes& s, std::vector<std::int64_t> rank_tokens, unsigned seed)
      : sizes(s), tokens(std::move(rank_tokens)) {
    std::mt19937_64 random(seed);
    const std::int64_t all = total();
    x = draw<T>(all * s.hidden, random);
    dy = draw<T>(all * s.hidden, random);
    logits = draw<Acc>(all * s.experts, random);
    gate = draw<T>(s.experts * s.inner * s.hidden, random);
    up = draw<T>(s.experts * s.inner * s.hidden, random);
    down = draw<T>(s.experts * s.hidden * s.inner, random);
    choose();
  }

  std::int64_t total() const { return std::accumulate(tokens.begin(), tokens.end(), std::int64_t{0}); }
  std::int64_t first_token(int rank) const {
    return std::accumulate(tokens.begin(), tokens.begin() + rank, std::int64_t{0});
  }
  /// The k largest logits of every token.
  void choose() {
    ids.clear();
    for (std::int64_t t = 0; t < total(); ++t) {
      std::vector<std::int32_t> order(static_cast<std::size_t>(sizes.experts));
      std::iota(order.begin(), order.end(), 0);
      std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return logit(t, a) > logit(t, b); });
      ids.insert(ids.end(), order.begin(), order.begin() + sizes.k);
    }
  }
  Acc& logit(std::int64_t t, std::int32_t e) { return logits[static_cast<std::size_t>(t * sizes.experts + e)]; }

  Sizes sizes;
  std::vector<std::int64_t> tokens;  // of each rank
  std::vector<T> x, dy;              // [total, hidden]
  std::vector<Acc> logits;           // [total, experts]
  std::vector<std::int32_t> ids;     // [total, k]
  std::vector<T> gate, up, down;     // [experts, ...]

 private:
  template <class V>
  static std::vector<V> draw(std::int64_t count, std::mt19937_64& random) {
    std::normal_distribution<float> normal;
    std::vector<V> values(static_cast<std::size_t>(count));
    for (V& value : values) value = static_cast<V>(normal(random));
    return values;
  }
};

/// What a layer computes, of all ranks together.
template <class T, class Acc = accumulator_t<T>>
struct Answer {
  std::vector<T> y, dx;
  std::vector<Acc> dlogits, dgate, dup, ddown;

  friend bool operator==(const Answer& a, const Answer& b) {
    const auto same = [](const auto& u, const auto& v) {
      return u.size() == v.size() && (u.empty() || std::memcmp(u.data(), v.data(), u.size() * sizeof(u[0])) == 0);
    };
    return same(a.y, b.y) && same(a.dx, b.dx) && same(a.dlogits, b.dlogits) && same(a.dgate, b.dgate) &&
           same(a.dup, b.dup) && same(a.ddown, b.ddown);
  }
};

/// One rank in float64: a loop over tokens and their experts; weights are the softmax over the chosen logits.
template <class T>
Answer<double> solve(const Problem<T>& p) {
  const Sizes& s = p.sizes;
  const std::int64_t H = s.hidden, I = s.inner;
  const auto at = [](const auto& v, std::int64_t i) { return static_cast<double>(v[static_cast<std::size_t>(i)]); };
  const auto zeros = [](std::int64_t n) { return std::vector<double>(static_cast<std::size_t>(n), 0.0); };
  const auto add = [](std::vector<double>& v, std::int64_t i, double d) { v[static_cast<std::size_t>(i)] += d; };
  Answer<double> a{zeros(p.total() * H),     zeros(p.total() * H),     zeros(p.total() * s.experts),
                   zeros(s.experts * I * H), zeros(s.experts * I * H), zeros(s.experts * H * I)};
  for (std::int64_t t = 0; t < p.total(); ++t) {
    std::vector<double> weights, dweights;
    std::vector<std::int64_t> chosen;
    double most = -1e300, sum = 0;
    for (int j = 0; j < s.k; ++j) {
      const std::int64_t e = p.ids[static_cast<std::size_t>(t * s.k + j)];
      if (e < 0 || e >= s.experts) continue;
      chosen.push_back(e);
      most = std::max(most, at(p.logits, t * s.experts + e));
    }
    for (const std::int64_t e : chosen) weights.push_back(std::exp(at(p.logits, t * s.experts + e) - most));
    for (const double w : weights) sum += w;
    for (double& w : weights) w /= sum;

    for (std::size_t c = 0; c < chosen.size(); ++c) {
      const std::int64_t e = chosen[c];
      std::vector<double> g = zeros(I), u = zeros(I), act = zeros(I), dact = zeros(I), out = zeros(H);
      for (std::int64_t i = 0; i < I; ++i) {
        for (std::int64_t h = 0; h < H; ++h) {
          add(g, i, at(p.gate, (e * I + i) * H + h) * at(p.x, t * H + h));
          add(u, i, at(p.up, (e * I + i) * H + h) * at(p.x, t * H + h));
        }
        add(act, i, at(g, i) / (1 + std::exp(-at(g, i))) * at(u, i));
      }
      double dweight = 0;
      for (std::int64_t h = 0; h < H; ++h) {
        const double dout = weights[c] * at(p.dy, t * H + h);
        for (std::int64_t i = 0; i < I; ++i) {
          add(out, h, at(p.down, (e * H + h) * I + i) * at(act, i));
          add(dact, i, at(p.down, (e * H + h) * I + i) * dout);
          add(a.ddown, (e * H + h) * I + i, dout * at(act, i));
        }
        add(a.y, t * H + h, weights[c] * at(out, h));
        dweight += at(p.dy, t * H + h) * at(out, h);
      }
      dweights.push_back(dweight);
      for (std::int64_t i = 0; i < I; ++i) {
        const double sig = 1 / (1 + std::exp(-at(g, i)));
        const double dg = at(dact, i) * at(u, i) * (sig + at(g, i) * sig * (1 - sig));
        const double du = at(dact, i) * at(g, i) * sig;
        for (std::int64_t h = 0; h < H; ++h) {
          add(a.dgate, (e * I + i) * H + h, dg * at(p.x, t * H + h));
          add(a.dup, (e * I + i) * H + h, du * at(p.x, t * H + h));
          add(a.dx, t * H + h, dg * at(p.gate, (e * I + i) * H + h) + du * at(p.up, (e * I + i) * H + h));
        }
      }
    }
    double mean = 0;
    for (std::size_t c = 0; c < chosen.size(); ++c) mean += weights[c] * dweights[c];
    for (std::size_t c = 0; c < chosen.size(); ++c) {
      add(a.dlogits, t * s.experts + chosen[c], weights[c] * (dweights[c] - mean));
    }
  }
  return a;
}

struct RunSettings {
  Transport transport = Transport::peer;
  std::int64_t row_alignment = 128;
  std::int64_t max_tokens = 0;  // 0: the most of any rank
  unsigned char fill = 0xff;    // of workspaces and outputs: NaN
  int steps = 1;                // weight gradients accumulate over them
  moe::SendBy send_by = moe::SendBy::automatic;
};

/// The layer over `problem.tokens.size()` ranks. With given ids where `give_ids`; outputs of the last step.
template <class T, class Executor = HostExecutor>
Answer<T> run(const Problem<T>& problem, const RunSettings& settings, bool give_ids = false) {
  const Sizes& s = problem.sizes;
  const int ranks = static_cast<int>(problem.tokens.size());
  const std::int64_t most = *std::max_element(problem.tokens.begin(), problem.tokens.end());
  const moe::LayerPlan plan =
      moe::plan(ranks,
                moe::LayerShape{settings.max_tokens != 0 ? settings.max_tokens : std::max<std::int64_t>(most, 1),
                                s.hidden, s.inner, s.experts, s.k, dtype_of<T>},
                {.router = {.scoring = moe::Scoring::softmax_topk, .renormalize = true},
                 .dispatch = {.transport = settings.transport,
                              .row_alignment = settings.row_alignment,
                              .send_by = settings.send_by},
                 .experts = {}});

  const auto poisoned = [&](auto& vector, std::int64_t count) {
    vector.resize(static_cast<std::size_t>(count));
    if (count != 0) std::memset(static_cast<void*>(vector.data()), settings.fill, vector.size() * sizeof(vector[0]));
  };
  Answer<T> answer;
  poisoned(answer.y, problem.total() * s.hidden);
  poisoned(answer.dx, problem.total() * s.hidden);
  poisoned(answer.dlogits, problem.total() * s.experts);
  poisoned(answer.dgate, s.experts * s.inner * s.hidden);
  poisoned(answer.dup, s.experts * s.inner * s.hidden);
  poisoned(answer.ddown, s.experts * s.inner * s.hidden);

  run_ranks(ranks, [&](ThreadComm& world) {
    const GroupComm<ThreadComm> ep(world);
    const Footprint need = plan.footprint();
    const HostBuffer scratch(need.scratch, settings.fill), persistent(need.persistent, settings.fill),
        pinned(need.pinned_host, settings.fill), saved_memory(need.saved, settings.fill);
    HostArena arena(ep, need.symmetric);
    auto layer =
        moe::bind(plan, Executor{}, ep, Memory<HostArena>{scratch.block(), persistent.block(), pinned.block(), &arena});
    moe::LayerSaved saved(plan, saved_memory.block());

    const int rank = world.rank();
    const std::int64_t tokens = problem.tokens[static_cast<std::size_t>(rank)], first = problem.first_token(rank);
    const std::int64_t local = plan.dispatch.experts_local(), expert = rank * local, stride = s.inner * s.hidden;
    const auto rows = [&](auto& all, std::int64_t cols) {
      return TensorRef(all.data() + first * cols, {tokens, cols});
    };
    const auto matrices = [&](auto& gate, auto& up, auto& down) {
      return moe::ExpertMatrices{moe::expert_matrix(gate.data() + expert * stride, local, s.inner, s.hidden, stride),
                                 moe::expert_matrix(up.data() + expert * stride, local, s.inner, s.hidden, stride),
                                 moe::expert_matrix(down.data() + expert * stride, local, s.hidden, s.inner, stride)};
    };
    const moe::ExpertMatrices weights = matrices(problem.gate, problem.up, problem.down);
    const moe::ExpertMatrices dweights = matrices(answer.dgate, answer.dup, answer.ddown);
    for (int step = 0; step < settings.steps; ++step) {
      layer.forward({}, rows(problem.x, s.hidden), rows(problem.logits, s.experts), weights, saved,
                    rows(answer.y, s.hidden), {.ids = give_ids ? rows(problem.ids, s.k) : TensorRef{}});
      layer.backward({}, rows(problem.dy, s.hidden), rows(problem.logits, s.experts), weights, TensorRef{}, saved,
                     rows(answer.dx, s.hidden), rows(answer.dlogits, s.experts), dweights, step > 0);
    }
    layer.check({});
  });
  return answer;
}

template <class T>
double tolerance() {
  return std::is_same_v<T, double> ? 1e-13 : std::is_same_v<T, float> ? 3e-6 : 2e-2;
}

/// The largest relative difference over all outputs.
template <class T>
double worst(const Answer<T>& answer, const Answer<double>& expected) {
  return std::max({relative(answer.y, expected.y), relative(answer.dx, expected.dx),
                   relative(answer.dlogits, expected.dlogits), relative(answer.dgate, expected.dgate),
                   relative(answer.dup, expected.dup), relative(answer.ddown, expected.ddown)});
}

}  // namespace moe_testing
