// Every small mesh there is, and what their groups are by definition: ranks that differ only along the given axes.
#pragma once

#include <map>
#include <vector>

#include <pleat/mesh.hpp>

namespace testing_support {

/// Evaluates a test at compile time, and leaves it to the program to fail.
consteval bool at_compile_time(bool value) {
  return value;
}

/// Calls `f` with every legal mesh of at most `largest_world` ranks, replicas included.
template <class Function>
void for_each_mesh(int largest_world, Function f) {
  for (int pp = 1; pp <= largest_world; ++pp) {
    for (int dp = 1; pp * dp <= largest_world; ++dp) {
      for (int cp = 1; pp * dp * cp <= largest_world; ++cp) {
        for (int ep = 1; ep <= dp * cp; ++ep) {
          if (dp * cp % ep != 0) continue;
          for (int replicas = 1; replicas <= dp * cp / ep; ++replicas) {
            if (dp * cp / ep % replicas != 0) continue;
            f(pleat::RuntimeMesh(pleat::MeshDegrees{pp, dp, cp, ep, replicas}));
          }
        }
      }
    }
  }
}

template <class Range>
std::vector<int> ranks_of(const Range& range) {
  std::vector<int> ranks;
  for (const int rank : range) ranks.push_back(rank);
  return ranks;
}

/// The ranks of a world cut by `key(rank)`: in order of first ranks, each ascending.
template <class Key>
std::vector<std::vector<int>> partition_by(int world, Key key) {
  std::map<decltype(key(0)), std::size_t> seen;
  std::vector<std::vector<int>> groups;
  for (int rank = 0; rank < world; ++rank) {
    const auto [at, is_new] = seen.try_emplace(key(rank), groups.size());
    if (is_new) groups.emplace_back();
    groups[at->second].push_back(rank);
  }
  return groups;
}

}  // namespace testing_support
