// Initial values of parameters, each of its own number.
#pragma once

#include "vectors.cuh"

namespace train_moe::gpu {

template <class A>
PLEAT_KERNEL void __launch_bounds__(threads)
    initialize_kernel(A* out, const __grid_constant__ Initial initial, std::int64_t first, std::int64_t elems) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * threads;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * threads + threadIdx.x; i < elems; i += step) {
    out[i] = static_cast<A>(initial(first + i));
  }
}

/// out [elems] = the values of elements first, first + 1, ..
template <class A>
void initialize(A* out, const Initial& initial, std::int64_t first, std::int64_t elems, cudaStream_t s) {
  if (elems == 0) return;
  initialize_kernel<A><<<grid_of(elems), threads, 0, s>>>(out, initial, first, elems);
  pleat::check_launch("initialize_kernel");
}

}  // namespace train_moe::gpu
