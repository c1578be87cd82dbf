// Kernels of comm_bench: random data and its check, a delay, and the bare stores and sums that the library is held
// against.
#pragma once

#include <cstdint>

#include <pleat/cuda/kernel.hpp>

namespace comm_bench {

/// Element `i` of the data that `key` names: a float in [-1, 1). source: the finalizer of MurmurHash3.
__host__ __device__ inline float value_of(std::uint32_t key, std::size_t i) {
  std::uint32_t h = key ^ (static_cast<std::uint32_t>(i) * 0x9E3779B9u);
  h = (h ^ (h >> 16)) * 0x85EBCA6Bu;
  h = (h ^ (h >> 13)) * 0xC2B2AE35u;
  return static_cast<float>(h >> 8) * 0x1p-23f - 1.0f;
}

__device__ inline std::size_t first_index() {
  return blockIdx.x * static_cast<std::size_t>(blockDim.x) + threadIdx.x;
}
__device__ inline std::size_t index_step() {
  return static_cast<std::size_t>(gridDim.x) * blockDim.x;
}

PLEAT_KERNEL void fill(float* out, std::uint32_t key, std::size_t elems) {
  for (std::size_t i = first_index(); i < elems; i += index_step()) out[i] = value_of(key, i);
}
/// Counts the elements of `found` [elems] that are not elements `first` and on of the keys' data, summed in their
/// order.
PLEAT_KERNEL void count_errors(const float* found, std::uint32_t key, std::uint32_t second_key, bool is_sum,
                               std::size_t first, std::size_t elems, unsigned long long* errors) {
  for (std::size_t i = first_index(); i < elems; i += index_step()) {
    float expected = value_of(key, first + i);
    if (is_sum) expected += value_of(second_key, first + i);
    if (found[i] != expected) atomicAdd(errors, 1ULL);
  }
}

PLEAT_KERNEL void delay(std::uint64_t ns) {
  std::uint64_t start, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start)::"memory");
  do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)::"memory");
  while (now - start < ns);
}

/// Each thread has `batch` words of 16 bytes in flight.
inline constexpr int batch = 4;
inline constexpr unsigned bare_threads = 512;
PLEAT_KERNEL void __launch_bounds__(bare_threads) bare_store(uint4* to, const uint4* from, std::size_t words) {
  const std::size_t step = index_step();
  for (std::size_t i = first_index(); i < words; i += batch * step) {
    uint4 word[batch];
#pragma unroll
    for (int b = 0; b < batch; ++b) {
      if (i + b * step < words) word[b] = from[i + b * step];
    }
#pragma unroll
    for (int b = 0; b < batch; ++b) {
      if (i + b * step < words) to[i + b * step] = word[b];
    }
  }
}
PLEAT_KERNEL void __launch_bounds__(bare_threads)
    bare_pull_and_add(float4* out, const float4* a, const float4* b, std::size_t words) {
  const std::size_t step = index_step();
  for (std::size_t i = first_index(); i < words; i += batch * step) {
    float4 x[batch], y[batch];
#pragma unroll
    for (int k = 0; k < batch; ++k) {
      if (i + k * step < words) x[k] = a[i + k * step], y[k] = b[i + k * step];
    }
#pragma unroll
    for (int k = 0; k < batch; ++k) {
      if (i + k * step >= words) continue;
      out[i + k * step] = {x[k].x + y[k].x, x[k].y + y[k].y, x[k].z + y[k].z, x[k].w + y[k].w};
    }
  }
}

}  // namespace comm_bench
