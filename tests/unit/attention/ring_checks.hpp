// What a run of the ring is held against: float64 on one rank, and the same bits from both transports.
#pragma once

#include <cstring>
#include <string>

#include <doctest/doctest.h>

#include "unit/attention/ring_run.hpp"

namespace ring_run {

using oracle::Outputs;
using oracle::Problem;
using Boundaries = std::vector<std::int64_t>;
inline constexpr Transport transports[] = {Transport::collective, Transport::peer};

inline Boundaries boundaries(const Boundaries& lengths) {
  Boundaries cu_seqlens{0};
  for (const std::int64_t length : lengths) cu_seqlens.push_back(cu_seqlens.back() + length);
  return cu_seqlens;
}
inline Problem packed(const Boundaries& lengths, std::int64_t padding = 0) {
  Problem p{.q_heads = 4, .kv_heads = 2, .cu_seqlens = boundaries(lengths)};
  p.tokens = p.cu_seqlens.back() + padding;
  return p;
}

inline bool same_bits(const Outputs& a, const Outputs& b) {
  const auto same = [](const std::vector<double>& x, const std::vector<double>& y) {
    return x.size() == y.size() && (x.empty() || std::memcmp(x.data(), y.data(), x.size() * sizeof(double)) == 0);
  };
  return same(a.out, b.out) && same(a.lse, b.lse) && same(a.dq, b.dq) && same(a.dk, b.dk) && same(a.dv, b.dv);
}

inline void check_close(const Outputs& got, const Outputs& want, double tolerance) {
  const auto check = [&](const std::string& what, const std::vector<double>& a, const std::vector<double>& b) {
    CAPTURE(what);
    CHECK(oracle::relative_l2(a, b) <= tolerance);
    CHECK(oracle::relative_max(a, b) <= 2 * tolerance);
  };
  check("out", got.out, want.out);
  check("dq", got.dq, want.dq);
  check("dk", got.dk, want.dk);
  check("dv", got.dv, want.dv);
  for (std::size_t row = 0; row < want.lse.size(); ++row) {
    if (std::isinf(want.lse[row])) {
      REQUIRE(got.lse[row] == want.lse[row]);
    } else {
      REQUIRE(std::abs(got.lse[row] - want.lse[row]) <= tolerance * std::max(1.0, std::abs(want.lse[row])));
    }
  }
}

template <class T>
constexpr double tolerance = std::is_same_v<T, double>  ? 1e-12
                             : std::is_same_v<T, float> ? 1e-5
                                                        : 2e-2;

/// Both transports on the problem: equal bits, close to float64; and so is one launch. Returns what they got.
template <class T>
Outputs check_ring(const Problem& p, int cp, std::optional<ring::Layout> layout = {}) {
  CAPTURE(cp);
  CAPTURE(p.tokens);
  CAPTURE(p.causal);
  CAPTURE(p.q_heads);
  CAPTURE(p.kv_heads);
  const unsigned seed = std::random_device{}();
  CAPTURE(seed);
  const oracle::Inputs in = oracle::draw(p, seed, as_stored<T>);
  const Outputs hops = run<T>(p, in, cp, {.transport = Transport::collective, .layout = layout});
  const Outputs pushes = run<T>(p, in, cp, {.transport = Transport::peer, .layout = layout});
  CHECK(same_bits(hops, pushes));
  const Outputs want = oracle::solve(p, in);
  check_close(hops, want, tolerance<T>);
  const ring_run::How at_once{.transport = Transport::peer, .layout = layout, .launches = ring::Launches::one};
  check_close(run<T>(p, in, cp, at_once), want, tolerance<T>);
  return hops;
}

}  // namespace ring_run
