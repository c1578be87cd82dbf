// The CUDA executor: copies, zeroing and events on the caller's streams.
#pragma once

#include <pleat/core/executor.hpp>
#include <pleat/cuda/stream.hpp>

namespace pleat::inline v0 {

/// Stateless; acts on the device of the stream, which must be current. Addresses may be device, peer or pinned host
/// memory: copies between GPUs use the copy engines. Errors of all calls: cuda_error C20.
class CudaExecutor {
 public:
  using device_type = cuda_device;
  using stream_type = cudaStream_t;
  using event_type = CudaEvent;

  /// The device that is current.
  Device device() const {
    int index = 0;
    check_cuda(cudaGetDevice(&index), "cudaGetDevice");
    return {DeviceKind::cuda, index};
  }
  [[nodiscard]] CudaEvent make_event() const { return CudaEvent(); }
  void record(const CudaEvent& event, cudaStream_t s) const {
    check_cuda(cudaEventRecord(event, s), "cudaEventRecord");
  }
  void wait(cudaStream_t s, const CudaEvent& event) const {
    check_cuda(cudaStreamWaitEvent(s, event, cudaEventWaitDefault), "cudaStreamWaitEvent");
  }
  void copy(void* out, const void* in, std::size_t bytes, cudaStream_t s) const {
    if (bytes != 0) check_cuda(cudaMemcpyAsync(out, in, bytes, cudaMemcpyDefault, s), "cudaMemcpyAsync");
  }
  void copy_2d(void* out, std::size_t out_pitch_bytes, const void* in, std::size_t in_pitch_bytes,
               std::size_t width_bytes, std::size_t height, cudaStream_t s) const {
    if (width_bytes == 0 || height == 0) return;
    check_cuda(cudaMemcpy2DAsync(out, out_pitch_bytes, in, in_pitch_bytes, width_bytes, height, cudaMemcpyDefault, s),
               "cudaMemcpy2DAsync");
  }
  void zero(void* out, std::size_t bytes, cudaStream_t s) const {
    if (bytes != 0) check_cuda(cudaMemsetAsync(out, 0, bytes, s), "cudaMemsetAsync");
  }
  bool is_idle(cudaStream_t s) const {
    const cudaError_t status = cudaStreamQuery(s);
    if (status == cudaErrorNotReady) return false;
    check_cuda(status, "cudaStreamQuery");
    return true;
  }
};
static_assert(executor<CudaExecutor>);

template <>
struct detail::ExecutorFor<cuda_device> {
  using type = CudaExecutor;
};

}  // namespace pleat::inline v0
