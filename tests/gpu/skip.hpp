// Programs that lack the GPUs they need end with exit code 77, which ctest shows as skipped, after a line that says
// why.
#pragma once

#include <cstdio>

#include <pleat/cuda/stream.hpp>

namespace gpu_testing {

inline constexpr int skipped = 77;

/// Whether there are fewer than `needed` GPUs; says so.
inline bool lacks_gpus(int needed) {
  const int found = pleat::cuda_device_count();
  if (found < needed) std::printf("skipped: %d GPUs, %d needed\n", found, needed);
  return found < needed;
}

/// Whether the first GPU is no Hopper, or there is none; says so.
inline bool lacks_hopper() {
  if (lacks_gpus(1)) return true;
  int major = 0;
  pleat::check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0), "cudaDeviceGetAttribute");
  if (major != 9) std::puts("skipped: needs a Hopper GPU");
  return major != 9;
}

}  // namespace gpu_testing
