// The status of a CUDA call, as an exception.
#pragma once

#include <cuda_runtime_api.h>

#include <pleat/core/error.hpp>

namespace pleat::inline v0 {

/// Throws what a CUDA call returned; `call` names it. Errors: cuda_error C20.
inline void check_cuda(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  fail<cuda_error>("pleat[C20]: ", call, " failed: ", cudaGetErrorName(status), ", ", cudaGetErrorString(status));
}

/// Throws what the launch of a kernel just before left behind; `kernel` names it. Errors: cuda_error C20.
inline void check_launch(const char* kernel) {
  check_cuda(cudaGetLastError(), kernel);
}

}  // namespace pleat::inline v0
