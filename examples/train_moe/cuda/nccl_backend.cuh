// Ranks over NCCL, one per GPU: the processes that a launcher started, or threads of this program.
#pragma once

#include <pleat/nccl.cuh>
#include <pleat/nccl/run_process.hpp>
#include <pleat/nccl/run_threads.hpp>

#include "backend.cuh"

namespace train_moe {

struct NcclBackend : CudaStreams {
  using Comm = pleat::NcclComm;
  using Arena = pleat::NcclArena;

  /// Where torchrun's RANK is set, this process is one rank; else all ranks are threads. Errors: those of
  /// pleat::run_nccl_process and pleat::run_nccl_threads; comm_error where the launcher started another number of
  /// ranks.
  template <class F>
  static void run_ranks(int ranks, std::chrono::milliseconds deadline, F&& f) {
    if (std::getenv("RANK") == nullptr) return pleat::run_nccl_threads(ranks, f, {.deadline = deadline});
    pleat::run_nccl_process(
        [&](pleat::NcclComm& world) {
          if (world.size() != ranks) {
            throw std::runtime_error("the mesh has " + std::to_string(ranks) + " ranks and the launcher started " +
                                     std::to_string(world.size()));
          }
          f(world);
        },
        {.deadline = deadline});
  }
};

}  // namespace train_moe
