// What every kernel has: its attribute, and loading before anybody may wait.
#pragma once

#include <pleat/cuda/check.hpp>

/// Kernels have hidden visibility, so that two shared libraries built for different architectures live in one process.
#define PLEAT_KERNEL __attribute__((visibility("hidden"))) __global__

namespace pleat::inline v0 {

/// Loads a kernel on the current device; `name` is for the error. For a leaf's `preload` (preload_leaves tells why),
/// and for operations that bind kernels of their own. Errors: cuda_error C20.
template <class Kernel>
void preload_kernel(Kernel* kernel, const char* name) {
  cudaFuncAttributes attributes = {};
  check_cuda(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)), name);
}

}  // namespace pleat::inline v0
