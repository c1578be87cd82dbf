// Launching kernels of one CTA per multiprocessor.
#pragma once

#include <algorithm>
#include <cstdint>

#include <pleat/cuda/check.hpp>

namespace pleat::inline v0::hopper {

/// Whether the code of `kernel` for the current device has a body. Its launch bounds are `threads` where it has one,
/// and less for other targets (`is_target`). Loads the kernel. Errors: cuda_error C20.
template <class Kernel>
bool is_built(Kernel* kernel, int threads, const char* name) {
  cudaFuncAttributes attributes = {};
  check_cuda(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)), name);
  return attributes.maxThreadsPerBlock >= threads;
}

/// Launches `kernel` with as many CTAs as there are items, but at most one per multiprocessor and at most `max_ctas`
/// (0: no limit of its own). Errors: cuda_error C20.
template <int Threads, int SharedBytes, class... Parameters, class... Arguments>
void launch_persistent(void (*kernel)(Parameters...), const char* name, std::int64_t items, int max_ctas,
                       cudaStream_t s, const Arguments&... arguments) {
  static_assert(SharedBytes <= 227 * 1024, "pleat: a Hopper CTA has 227 KiB of shared memory");
  int device = 0, ctas = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&ctas, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  if (max_ctas > 0) ctas = std::min(ctas, max_ctas);
  check_cuda(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  SharedBytes),
             name);
  kernel<<<static_cast<unsigned>(std::min<std::int64_t>(ctas, items)), Threads, SharedBytes, s>>>(arguments...);
  check_launch(name);
}

}  // namespace pleat::inline v0::hopper
