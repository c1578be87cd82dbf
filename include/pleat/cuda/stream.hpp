// Owned CUDA streams and events, for programs and for what a bind creates.
#pragma once

#include <utility>

#include <pleat/cuda/check.hpp>

namespace pleat::inline v0 {

/// The priority of streams whose work goes first on the current device: signals, and kernels that need few
/// multiprocessors beside what computes. Errors: C20.
inline int first_priority() {
  int last = 0, first = 0;
  check_cuda(cudaDeviceGetStreamPriorityRange(&last, &first), "cudaDeviceGetStreamPriorityRange");
  return first;
}

/// A non-blocking stream of the current device. Waits for nothing when it goes. Errors: C20.
class CudaStream {
 public:
  /// `priority` as cudaStreamCreateWithPriority: lower numbers go first.
  explicit CudaStream(int priority = 0) {
    check_cuda(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, priority), "cudaStreamCreateWithPriority");
  }
  CudaStream(CudaStream&& other) noexcept : stream_(std::exchange(other.stream_, nullptr)) {}
  CudaStream& operator=(CudaStream&& other) noexcept {
    std::swap(stream_, other.stream_);
    return *this;
  }
  ~CudaStream() {
    if (stream_ != nullptr) (void)cudaStreamDestroy(stream_);
  }
  operator cudaStream_t() const noexcept { return stream_; }

  /// Blocks until the work on it is done; without a deadline: with peers, use the communicator's `wait`.
  void synchronize() const { check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"); }

 private:
  cudaStream_t stream_ = nullptr;
};

/// An event of the current device without timing, or with. Errors: C20.
class CudaEvent {
 public:
  explicit CudaEvent(bool with_timing = false) {
    check_cuda(cudaEventCreateWithFlags(&event_, with_timing ? cudaEventDefault : cudaEventDisableTiming),
               "cudaEventCreateWithFlags");
  }
  CudaEvent(CudaEvent&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
  CudaEvent& operator=(CudaEvent&& other) noexcept {
    std::swap(event_, other.event_);
    return *this;
  }
  ~CudaEvent() {
    if (event_ != nullptr) (void)cudaEventDestroy(event_);
  }
  operator cudaEvent_t() const noexcept { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

/// Makes a device current for a scope, and then the one before again.
class CudaDeviceScope {
 public:
  explicit CudaDeviceScope(int device) {
    check_cuda(cudaGetDevice(&before_), "cudaGetDevice");
    if (device != before_) check_cuda(cudaSetDevice(device), "cudaSetDevice");
  }
  CudaDeviceScope(const CudaDeviceScope&) = delete;
  CudaDeviceScope& operator=(const CudaDeviceScope&) = delete;
  ~CudaDeviceScope() { (void)cudaSetDevice(before_); }

 private:
  int before_ = 0;
};

/// Devices of this machine; 0 where there is no driver or none is visible.
inline int cuda_device_count() noexcept {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    (void)cudaGetLastError();
    return 0;
  }
  return count;
}

}  // namespace pleat::inline v0
