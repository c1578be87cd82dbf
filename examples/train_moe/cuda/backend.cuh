// The CUDA backends: a rank's streams on its GPU; ranks are threads that may share one, or NCCL's, with one each.
#pragma once

#include <array>
#include <chrono>
#include <cstdlib>

#include <pleat/cuda/thread_comm.hpp>

#include "attention.cuh"
#include "ops.cuh"

namespace train_moe {

/// See HostBackend. Sums of gradients go first where they find room beside what computes.
struct CudaStreams {
  using Device = pleat::cuda_device;
  using Executor = pleat::CudaExecutor;
  using Buffer = pleat::CudaBuffer;
  using PinnedBuffer = pleat::PinnedBuffer;
  using Stream = cudaStream_t;

  static constexpr std::int64_t row_alignment = 128;
  static constexpr bool loads_late = true;

  Stream compute(int lane) const { return compute_[static_cast<std::size_t>(lane)]; }
  Stream comm(int lane) const { return comm_[static_cast<std::size_t>(lane)]; }
  Stream gather() const { return gather_; }
  Stream reduce() const { return reduce_; }
  /// Of activations between stages.
  Stream transfers() const { return transfers_; }
  /// Of copies that a checkpoint is written from.
  Stream snapshots() const { return snapshots_; }

 private:
  std::array<pleat::CudaStream, 2> compute_, comm_;
  pleat::CudaStream gather_, transfers_, snapshots_, reduce_ = pleat::CudaStream(pleat::first_priority());
};

/// Ranks are threads; rank r runs on GPU r modulo their number.
struct CudaBackend : CudaStreams {
  using Comm = pleat::CudaThreadComm;
  using Arena = pleat::CudaThreadArena;

  /// Errors: those of pleat::run_cuda_ranks.
  template <class F>
  static void run_ranks(int ranks, std::chrono::milliseconds deadline, F&& f) {
    pleat::run_cuda_ranks(ranks, f, {.deadline = deadline});
  }
};

}  // namespace train_moe
