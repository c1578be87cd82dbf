// A model with everything that is odd, and random values that need no order: what sharded training is tested on.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include <pleat/comm/peer_access.hpp>
#include <pleat/fsdp/plan.hpp>

namespace fsdp_testing {

using namespace pleat;
using fsdp::UnitSpec;

struct RunConfig {
  int ranks = 1;
  int ep = 1;
  int replicas = 1;
  Transport transport = Transport::collective;
  int prefetch = 1;
  int micro_batches = 1;
  int steps = 2;
  std::int64_t experts = 2;
  std::int64_t alignment_elems = 4;
  std::int64_t width = 5;  // of the matrices
};

/// A model with everything that is odd: a scalar, an empty and a tied parameter, frozen ones, expert-major units.
inline std::vector<UnitSpec> odd_model(const RunConfig& config) {
  const auto n = config.width;
  std::vector<UnitSpec> units;
  units.push_back({.name = "embedding",
                   .params = {{.name = "embedding", .shape = {2 * n + 1, n}, .granule = fsdp::Granule::row()},
                              {.name = "scale", .shape = {}},
                              {.name = "head", .shape = {2 * n + 1, n}, .tied_to = 0},
                              {.name = "nothing", .shape = {0, 3}}}});
  for (const std::string layer : {"0", "1"}) {
    units.push_back({.name = "attention " + layer,
                     .params = {{.name = "norm", .shape = {n}, .weight_decay = false},
                                {.name = "wq", .shape = {n, n + 1}},
                                {.name = "adapted", .shape = {3, n}, .frozen = true},
                                {.name = "wo", .shape = {n + 1, n}}}});
    units.push_back({.name = "experts " + layer,
                     .kind = Param::expert,
                     .experts_local = config.experts,
                     .params = {{.name = "gate", .shape = {3, n}}, {.name = "down", .shape = {n, 3}}}});
  }
  units.push_back({.name = "frozen", .params = {{.name = "table", .shape = {n + 4}, .frozen = true}}});
  return units;
}

/// A number in [-1, 1), of full precision so that the order of sums shows, drawn from what names it; the same on every
/// rank that asks.
inline double drawn(std::initializer_list<std::int64_t> keys) {
  std::uint64_t state = 0x9e3779b97f4a7c15u;
  for (const std::int64_t key : keys) {
    state ^= static_cast<std::uint64_t>(key) + 0x9e3779b97f4a7c15u + (state << 6) + (state >> 2);
    state *= 0xbf58476d1ce4e5b9u;
    state ^= state >> 27;
  }
  return static_cast<double>(state >> 11) * 0x1p-52 - 1;
}
inline int choice(std::initializer_list<std::int64_t> keys, int count) {
  return std::min(count - 1, static_cast<int>((drawn(keys) + 1) / 2 * count));
}

}  // namespace fsdp_testing
