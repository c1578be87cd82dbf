// Ranks that are threads on CUDA memory: several may share a GPU, which NCCL does not allow.
#pragma once

#include <utility>
#include <vector>

#include <pleat/comm/run_ranks.hpp>
#include <pleat/comm/thread_arena.hpp>
#include <pleat/cuda/buffer.hpp>
#include <pleat/cuda/executor.hpp>
#include <pleat/cuda/peer_memory.hpp>

namespace pleat::inline v0 {

/// See BasicThreadComm. Each rank's device must be current in its thread, as `run_cuda_ranks` leaves it.
using CudaThreadComm = BasicThreadComm<CudaExecutor>;
using CudaThreadPeers = BasicThreadPeers<CudaExecutor, CudaBuffer>;
using CudaThreadArena = BasicThreadArena<CudaExecutor, CudaBuffer>;
static_assert(communicator<CudaThreadComm>);
static_assert(peer_access<CudaThreadPeers>);
static_assert(symmetric_arena<CudaThreadArena>);

/// Options of `run_cuda_ranks`.
struct CudaRunOptions {
  /// As RunOptions.
  std::chrono::milliseconds deadline = RunOptions{}.deadline;
  /// Rank r runs on `devices[r % devices.size()]`; empty: on all that are visible.
  std::vector<int> devices = {};
};

/// `run_ranks` on GPUs: runs `f(CudaThreadComm& world)` on `ranks` threads, each with its device current. Errors: those
/// of run_ranks; comm_error C26 when two of the devices cannot map each other; cuda_error C20.
template <class F>
void run_cuda_ranks(int ranks, F&& f, const CudaRunOptions& options = {}) {
  std::vector<int> devices = options.devices;
  for (int d = 0; options.devices.empty() && d < cuda_device_count(); ++d) devices.push_back(d);
  if (devices.empty()) pleat::fail<cuda_error>("pleat[C20]: no CUDA device is visible");
  map_memory_between(devices);
  const auto prepare = [&](int rank) {
    check_cuda(cudaSetDevice(devices[static_cast<std::size_t>(rank) % devices.size()]), "cudaSetDevice");
  };
  run_ranks<CudaThreadComm>(ranks, std::forward<F>(f), {.deadline = options.deadline, .prepare = prepare});
}

}  // namespace pleat::inline v0
