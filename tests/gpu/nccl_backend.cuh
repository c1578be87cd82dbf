// NcclComm and NcclArena as backends of the conformance suites: threads with a GPU each, owned or borrowed
// communicators.
#pragma once

#include <pleat/cuda/leaf.cuh>
#include <pleat/nccl/arena.cuh>
#include <pleat/nccl/run_threads.hpp>

#include <conformance/site.hpp>

namespace nccl_testing {

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

/// A suite asks for more ranks than there are GPUs, too: those runs are left out.
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
    if (ranks <= pleat::cuda_device_count()) pleat::run_nccl_threads(ranks, f, {.deadline = deadline});
  }
  static std::function<std::string()> status(const pleat::NcclComm& comm) {
    return [&job = comm.job()] { return std::string("rank 0: ") + job.last_operation(); };
  }
};

/// The same on communicators that belong to somebody else.
struct BorrowedNcclThreads : NcclThreads {
  template <class F>
  static void run(int ranks, std::chrono::milliseconds deadline, F f) {
    NcclThreads::run(ranks, deadline, [&](pleat::NcclComm& world) {
      if (world.size() == 1) return;  // there is nothing to borrow
      pleat::NcclComm borrowed = pleat::NcclComm::borrow(world.native(), {.deadline = deadline});
      f(borrowed);
    });
  }
};
static_assert(conformance::backend<NcclThreads> && conformance::backend<BorrowedNcclThreads>);

}  // namespace nccl_testing
