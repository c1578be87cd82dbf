// The CUDA backend of the conformance suites whose ranks are threads, on one GPU or on several.
#pragma once

#include <pleat/cuda/thread_comm.hpp>

#include <conformance/host_threads.hpp>

#include <support/copy_now.hpp>

namespace conformance {

/// Device memory of one rank's device.
class CudaTestBuffer {
 public:
  explicit CudaTestBuffer(std::size_t bytes) : memory_(bytes) {
    pleat::check_cuda(cudaMemset(memory_.data(), 0xff, bytes), "cudaMemset");
    pleat::check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  pleat::Block block() const { return memory_.block(); }
  void upload(const std::byte* source) { copy(memory_.data(), source); }
  void download(std::byte* target) const { copy(target, memory_.data()); }

 private:
  void copy(void* to, const void* from) const {
    pleat::check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    testing_support::copy_now(to, from, memory_.size_bytes());
    pleat::check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  pleat::CudaBuffer memory_;
};

struct CudaTestStream {
  cudaStream_t get() const { return stream; }
  pleat::CudaStream stream;
};

/// `devices` of the machine share the ranks; 0: all.
template <int devices>
struct CudaThreads {
  using comm_type = pleat::CudaThreadComm;
  using arena_type = pleat::CudaThreadArena;
  using Stream = CudaTestStream;
  using Buffer = CudaTestBuffer;

  static constexpr Traits traits{.short_deadline = 150ms};  // ranks make streams and events in it
  template <class T>
  using Shared = InProcess<T>;

  template <class F>
  static void run_anew(int ranks, milliseconds deadline, F f) {
    run(ranks, deadline, f);
  }
  template <class F>
  static void run(int ranks, milliseconds deadline, F f) {
    pleat::CudaRunOptions options{.deadline = deadline};
    for (int d = 0; d < devices; ++d) options.devices.push_back(d);
    pleat::run_cuda_ranks(ranks, f, options);
  }
  static std::function<std::string()> status(const pleat::CudaThreadComm& comm) { return last_operations(comm); }
};

}  // namespace conformance
