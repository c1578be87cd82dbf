// Kernels that are launched while the kernel before them on their stream still runs, so that the launch takes no time.
#pragma once

#include <cstddef>

#include <pleat/cuda/kernel.hpp>

namespace pleat::inline v0 {

/// The kernel that follows on the stream may be launched from here on, if it is one of these. What it waits for is not
/// changed by this: all of this kernel.
__device__ __forceinline__ void let_next_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
/// What stood before this kernel on its stream is done; before it, a kernel reads and writes nothing that others write
/// or read.
__device__ __forceinline__ void wait_for_stream() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Launches a kernel that calls `wait_for_stream`; `name` is for the error. May be captured. Errors: C20.
template <class... Params, class... Args>
void launch_early(void (*kernel)(Params...), const char* name, unsigned ctas, unsigned threads,
                  std::size_t shared_bytes, cudaStream_t s, Args... args) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = ctas;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = s;
  config.attrs = &attribute;
  config.numAttrs = 1;
  check_cuda(cudaLaunchKernelEx(&config, kernel, Params(args)...), name);
}

}  // namespace pleat::inline v0
