// NcclComm and NcclArena as backends of the conformance suites: threads with a GPU each, owned or borrowed
// communicators.
#pragma once

#include <pleat/cuda/leaf.cuh>
#include <pleat/nccl/arena.cuh>
#include <pleat/nccl/run_threads.hpp>

#include <conformance/site.hpp>

#include "nccl_world.cuh"

namespace nccl_testing {

using namespace std::chrono_literals;

/// Device memory of 0xff, with transfers that wait for the whole device.
class DeviceBuffer {
 public:
  explicit DeviceBuffer(std::size_t bytes) : memory_(bytes) {
    if (bytes != 0) pleat::check_cuda(cudaMemset(memory_.data(), 0xff, bytes), "cudaMemset");
    pleat::check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  pleat::Block block() const { return memory_.block(); }
  void upload(const std::byte* source) {
    pleat::check_cuda(cudaMemcpy(memory_.data(), source, memory_.size_bytes(), cudaMemcpyHostToDevice), "cudaMemcpy");
    pleat::check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  void download(std::byte* target) const {
    pleat::check_cuda(cudaMemcpy(target, memory_.data(), memory_.size_bytes(), cudaMemcpyDeviceToHost), "cudaMemcpy");
  }

 private:
  pleat::CudaBuffer memory_;
};

/// A suite asks for other numbers of ranks than two, too: of those, only one rank is run.
struct NcclThreads {
  using comm_type = pleat::NcclComm;
  using arena_type = pleat::NcclArena;
  using Buffer = DeviceBuffer;

  class Stream {
   public:
    cudaStream_t get() const { return stream_; }

   private:
    pleat::CudaStream stream_;
  };

  template <class F>
  static void run(int ranks, std::chrono::milliseconds deadline, F f) {
    if (ranks == 1) pleat::run_nccl_threads(1, f, {.deadline = deadline});
    if (ranks == world_ranks) shared_world.run(f);
  }
  static std::function<std::string()> status(const pleat::NcclComm&) {
    return [] { return shared_world.status(); };
  }
};

/// The same on communicators that belong to somebody else.
struct BorrowedNcclThreads : NcclThreads {
  template <class F>
  static void run(int ranks, std::chrono::milliseconds deadline, F f) {
    NcclThreads::run(ranks, deadline, [&](pleat::NcclComm& world) {
      if (world.size() == 1) return;  // there is nothing to borrow
      pleat::NcclComm borrowed = pleat::NcclComm::borrow(world.native(), {.deadline = 20s});
      shared_world.watch(world.rank(), &borrowed.job());
      f(borrowed);
      shared_world.watch(world.rank(), nullptr);
    });
  }
};
static_assert(conformance::backend<NcclThreads> && conformance::backend<BorrowedNcclThreads>);

}  // namespace nccl_testing
