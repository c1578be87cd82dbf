// The CUDA backends: a rank's streams on its GPU; ranks are threads that may share one, or NCCL's, with one each.
#pragma once

#include <array>
#include <chrono>
#include <cstdlib>
#include <vector>

#include <nvtx3/nvToolsExt.h>

#include <pleat/cuda/thread_comm.hpp>

#include "attention.cuh"
#include "ops.cuh"

namespace train_moe {

/// See HostClock: on the device's own time.
class CudaClock {
 public:
  void mark(std::size_t i, cudaStream_t s) {
    while (i >= events_.size()) events_.emplace_back(/*with_timing=*/true);
    pleat::check_cuda(cudaEventRecord(events_[i], s), "cudaEventRecord");
  }
  double seconds(std::size_t from, std::size_t to) const {
    float milliseconds = 0;
    pleat::check_cuda(cudaEventElapsedTime(&milliseconds, events_[from], events_[to]), "cudaEventElapsedTime");
    return 1e-3 * static_cast<double>(milliseconds);
  }

 private:
  std::vector<pleat::CudaEvent> events_;
};
/// See HostRange: a range of NVTX.
class NvtxRange {
 public:
  explicit NvtxRange(const char* name) { (void)nvtxRangePushA(name); }
  NvtxRange(const NvtxRange&) = delete;
  NvtxRange& operator=(const NvtxRange&) = delete;
  ~NvtxRange() { (void)nvtxRangePop(); }
};

/// See HostBackend. Sums of gradients go first where they find room beside what computes.
struct CudaStreams {
  using Device = pleat::cuda_device;
  using Executor = pleat::CudaExecutor;
  using Buffer = pleat::CudaBuffer;
  using PinnedBuffer = pleat::PinnedBuffer;
  using Stream = cudaStream_t;
  using Clock = CudaClock;
  using Range = NvtxRange;

  static constexpr std::int64_t row_alignment = 16;
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
