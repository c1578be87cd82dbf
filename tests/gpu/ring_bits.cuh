// Whether runs of one ring problem have the same bits; where not, which element of which rank is the first.
#pragma once

#include <cstring>
#include <span>
#include <string>

#include <pleat/attention/ring_plan.hpp>

#include <unit/attention/oracle.hpp>

namespace ring_testing {

using namespace pleat;
using oracle::Outputs;
using oracle::Problem;

using MemberValues = std::vector<double> Outputs::*;  // nvcc parenthesizes what follows ::*, which g++ warns about
struct Member {
  const char* name;
  MemberValues values;
  int heads, dim;
};
inline std::vector<Member> members(const Problem& p) {
  return {{"lse", &Outputs::lse, p.q_heads, 1},
          {"out", &Outputs::out, p.q_heads, p.v_dim},
          {"dq", &Outputs::dq, p.q_heads, p.qk_dim},
          {"dk", &Outputs::dk, p.kv_heads, p.qk_dim},
          {"dv", &Outputs::dv, p.kv_heads, p.v_dim}};
}

inline std::string place_of(const Problem& p, const Member& m, std::size_t index, std::span<const TokenSpans> split) {
  const std::size_t row = index / static_cast<std::size_t>(m.dim);
  const auto token = static_cast<std::int64_t>(row / static_cast<std::size_t>(m.heads)) % p.tokens;
  std::size_t rank = 0;
  for (std::size_t r = 0; r < split.size(); ++r) {
    for (const TokenSpan& span : split[r]) rank = span.begin <= token && token < span.end ? r : rank;
  }
  char text[96];
  std::snprintf(text, sizeof text, "batch %zu token %lld head %zu dim %zu of rank %zu",
                row / static_cast<std::size_t>(p.tokens * m.heads), static_cast<long long>(token),
                row % static_cast<std::size_t>(m.heads), index % static_cast<std::size_t>(m.dim), rank);
  return text;
}

/// Empty when all bits are equal; else a line per tensor that differs.
inline std::string differences(const Problem& p, const Outputs& want, const Outputs& got,
                               std::span<const TokenSpans> split) {
  std::string text;
  for (const Member& m : members(p)) {
    const std::vector<double>&a = want.*m.values, &b = got.*m.values;
    std::size_t count = 0, first = 0;
    for (std::size_t i = 0; i < a.size(); ++i) {
      if (std::memcmp(&a[i], &b[i], sizeof a[i]) != 0 && count++ == 0) first = i;
    }
    if (count == 0) continue;
    char numbers[160];
    std::snprintf(numbers, sizeof numbers, "\n      %s: %zu of %zu differ, first %.9g in place of %.9g at ", m.name,
                  count, a.size(), b[first], a[first]);
    text += numbers + place_of(p, m, first, split);
  }
  return text;
}

}  // namespace ring_testing
