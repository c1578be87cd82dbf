// Muon's training of a small model on any ranks, against one rank that holds all of it: the same bits.
#pragma once

#include <pleat/optim/cuda/leaf.cuh>
#include <pleat/optim/cuda/muon_leaf.cuh>
#include <pleat/optim/cuda/newton_schulz.cuh>

#include <cstdio>
#include <mutex>
#include <string>

#include <pleat/optim.hpp>

#include "unit/optim/muon_run.hpp"

namespace muon_testing {

using namespace pleat;
using optim_testing::Sizes;

inline int failures = 0;
inline void expect(bool holds, const std::string& what) {
  if (holds) return;
  ++failures;
  std::printf("FAILED: %s\n", what.c_str());
}

struct CudaSite {
  CudaExecutor executor = {};
  CudaStream stream = CudaStream();
  CudaBuffer allocate(std::size_t bytes) const {
    CudaBuffer buffer(bytes);
    if (bytes != 0) check_cuda(cudaMemsetAsync(buffer.data(), 0xff, bytes, stream), "cudaMemset");
    return buffer;
  }
  template <class Comm>
  void wait(Comm& world) const {
    world.wait(stream);
  }
};

/// The masters after three steps. `run(ranks, f)` calls `f(site, world)` on each rank.
template <class Compute, class Run>
auto trained(Run run, const optim_testing::Model& model, const Sizes& sizes, const optim::OptimizerOptions& options,
             unsigned seed) {
  auto values = optim_testing::empty_values<accumulator_t<Compute>>(model);
  std::mutex mutex;
  run(sizes.ranks, [&](auto site, auto& world) {
    const bool agrees = optim_testing::train<Compute>(site, world, model, sizes, options, seed, 3, values, mutex);
    const std::lock_guard lock(mutex);
    expect(agrees, "ranks differ");
  });
  return values;
}

/// Shards and replicas of `all`, as `run` has them, have the bits of `whole`.
template <class Compute, class Run, class Values>
void check_meshes(const std::string& name, Run run, std::initializer_list<Sizes> all, const optim::MuonOptions& muon,
                  unsigned seed, const Values& whole) {
  const auto model = optim_testing::small_model();
  for (const Sizes& sizes : all) {
    const auto sharded = trained<Compute>(run, model, sizes, {.muon = muon}, seed);
    const std::string mesh = name + ": " + std::to_string(sizes.ranks) + " ranks, " + std::to_string(sizes.replicas) +
                             " replicas, ep " + std::to_string(sizes.ep);
    expect(sharded == whole, mesh);
    for (std::size_t u = 0; u < model.size(); ++u) {
      for (std::size_t p = 0; p < whole[u].size(); ++p) {
        for (std::size_t i = 0; i < whole[u][p].size(); ++i) {
          if (sharded[u][p][i] == whole[u][p][i]) continue;
          std::printf("  %s unit %zu parameter %zu element %zu: %.9g, whole %.9g\n", mesh.c_str(), u, p, i,
                      static_cast<double>(sharded[u][p][i]), static_cast<double>(whole[u][p][i]));
          break;
        }
      }
    }
  }
}

}  // namespace muon_testing
