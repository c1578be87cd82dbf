// Copies of CUDA tests that have landed on return.
#pragma once

#include <pleat/cuda/check.hpp>

namespace testing_support {

/// cudaMemcpy from pageable memory may return while its bytes are on their way, and streams that do not wait for the
/// default stream overtake them: a kernel there would now and then read what was in memory before.
inline void copy_now(void* to, const void* from, std::size_t bytes) {
  pleat::check_cuda(cudaMemcpy(to, from, bytes, cudaMemcpyDefault), "cudaMemcpy");
  pleat::check_cuda(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
}

}  // namespace testing_support
