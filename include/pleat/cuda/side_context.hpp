// SideContext: a second context of a device, whose copies go through when every hardware queue of the first one waits.
#pragma once

#include <cstddef>

#include <pleat/cuda/driver.hpp>

namespace pleat::inline v0 {

/// With CUDA_DEVICE_MAX_CONNECTIONS=1 all streams of a context share one hardware queue, and a stream that waits for a
/// signal holds up every other, the release stream too. A second context has queues of its own. It takes about 0.2 s
/// and some hundred MB of device memory to make, so it is made only when a release needs it. Errors: cuda_error C20.
class SideContext {
 public:
  /// On the device whose primary context is current; that stays current.
  SideContext(const CudaDriver& driver, int device, std::size_t bytes) : driver_(driver) {
    driver.find(current_, "cuCtxGetCurrent", 4000);
    driver.find(create_, "cuCtxCreate", 12050);
    driver.find(pop_, "cuCtxPopCurrent", 4000);
    driver.find(push_, "cuCtxPushCurrent", 4000);
    driver.find(destroy_, "cuCtxDestroy", 4000);
    driver.find(allocate_, "cuMemAlloc", 3020);
    driver.find(upload_, "cuMemcpyHtoD", 3020);
    driver.find(download_, "cuMemcpyDtoH", 3020);
    driver.find(copy_, "cuMemcpyPeerAsync", 4000);
    driver.find(stream_create_, "cuStreamCreate", 2000);
    driver.find(stream_synchronize_, "cuStreamSynchronize", 2000);
    driver.check(current_(&primary_), "cuCtxGetCurrent");
    CUctxCreateParams parameters = {};
    driver.check(create_(&context_, &parameters, 0, device), "cuCtxCreate");  // now current
    const CUresult allocated = allocate_(&staging_, bytes);
    const CUresult made = allocated == CUDA_SUCCESS ? stream_create_(&stream_, CU_STREAM_NON_BLOCKING) : allocated;
    (void)pop_(&popped_);
    if (made != CUDA_SUCCESS) (void)destroy_(context_);
    driver.check(made, allocated == CUDA_SUCCESS ? "cuStreamCreate" : "cuMemAlloc");
  }
  SideContext(const SideContext&) = delete;
  SideContext& operator=(const SideContext&) = delete;
  ~SideContext() { (void)destroy_(context_); }

  /// to [bytes], device memory of the primary context, = from, host memory. Returns when it is written.
  void write(void* to, const void* from, std::size_t bytes) {
    inside([&] {
      driver_.check(upload_(staging_, from, bytes), "cuMemcpyHtoD");
      copy(reinterpret_cast<CUdeviceptr>(to), primary_, staging_, context_, bytes);
    });
  }
  /// to [bytes], host memory, = from, device memory of the primary context.
  void read(void* to, const void* from, std::size_t bytes) {
    inside([&] {
      copy(staging_, context_, reinterpret_cast<CUdeviceptr>(from), primary_, bytes);
      driver_.check(download_(to, staging_, bytes), "cuMemcpyDtoH");
    });
  }

 private:
  template <class F>
  void inside(F f) {
    driver_.check(push_(context_), "cuCtxPushCurrent");
    try {
      f();
    } catch (...) {
      (void)pop_(&popped_);
      throw;
    }
    driver_.check(pop_(&popped_), "cuCtxPopCurrent");
  }
  void copy(CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context, std::size_t bytes) {
    driver_.check(copy_(to, to_context, from, from_context, bytes, stream_), "cuMemcpyPeerAsync");
    driver_.check(stream_synchronize_(stream_), "cuStreamSynchronize");
  }

  CudaDriver driver_;
  PFN_cuCtxGetCurrent_v4000 current_ = nullptr;
  PFN_cuCtxCreate_v12050 create_ = nullptr;
  PFN_cuCtxPopCurrent_v4000 pop_ = nullptr;
  PFN_cuCtxPushCurrent_v4000 push_ = nullptr;
  PFN_cuCtxDestroy_v4000 destroy_ = nullptr;
  PFN_cuMemAlloc_v3020 allocate_ = nullptr;
  PFN_cuMemcpyHtoD_v3020 upload_ = nullptr;
  PFN_cuMemcpyDtoH_v3020 download_ = nullptr;
  PFN_cuMemcpyPeerAsync_v4000 copy_ = nullptr;
  PFN_cuStreamCreate_v2000 stream_create_ = nullptr;
  PFN_cuStreamSynchronize_v2000 stream_synchronize_ = nullptr;
  CUcontext primary_ = nullptr;
  CUcontext context_ = nullptr;
  CUcontext popped_ = nullptr;  // what cuCtxPopCurrent gives back
  CUdeviceptr staging_ = 0;
  CUstream stream_ = nullptr;
};

}  // namespace pleat::inline v0
