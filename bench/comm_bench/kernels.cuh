// Kernels of comm_bench: random data and its check, a delay, and the bare stores and sums that the library is held
// against.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include <pleat/cuda/kernel.hpp>

namespace comm_bench {

/// Element `i` of the data that `key` names: a float in [-1, 1), a multiple of 2^-19, so
/// that sums of few are exact in any order. source: the finalizer of MurmurHash3.
__host__ __device__ inline float value_of(std::uint32_t key, std::size_t i) {
  std::uint32_t h = key ^ (static_cast<std::uint32_t>(i) * 0x9E3779B9u);
  h = (h ^ (h >> 16)) * 0x85EBCA6Bu;
  h = (h ^ (h >> 13)) * 0xC2B2AE35u;
  return static_cast<float>(h >> 12) * 0x1p-19f - 1.0f;
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
/// The keys of a sum's terms are this far apart.
inline constexpr std::uint32_t key_step = 0x01000193u;
/// Counts the elements of `found` [elems] that are not the sums of elements `first` and on of the data of `terms` keys.
PLEAT_KERNEL void count_errors(const float* found, std::uint32_t key, int terms, std::size_t first, std::size_t elems,
                               unsigned long long* errors) {
  for (std::size_t i = first_index(); i < elems; i += index_step()) {
    float expected = value_of(key, first + i);
    for (int t = 1; t < terms; ++t) expected += value_of(key + static_cast<std::uint32_t>(t) * key_step, first + i);
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
/// Where the terms of a sum lie, by rank.
struct BareTerms {
  const float4* at[8];
};
/// As many words are in flight whatever the number of terms.
template <int Terms>
PLEAT_KERNEL void __launch_bounds__(bare_threads) bare_pull_and_add(float4* out, BareTerms terms, std::size_t words) {
  constexpr int in_a_row = 2 * batch / Terms;
  const std::size_t step = index_step();
  for (std::size_t i = first_index(); i < words; i += in_a_row * step) {
    float4 x[in_a_row][Terms];
#pragma unroll
    for (int k = 0; k < in_a_row; ++k) {
#pragma unroll
      for (int t = 0; t < Terms; ++t) {
        if (i + k * step < words) x[k][t] = terms.at[t][i + k * step];
      }
    }
#pragma unroll
    for (int k = 0; k < in_a_row; ++k) {
      if (i + k * step >= words) continue;
      float4 sum = x[k][0];
#pragma unroll
      for (int t = 1; t < Terms; ++t) {
        sum = {sum.x + x[k][t].x, sum.y + x[k][t].y, sum.z + x[k][t].z, sum.w + x[k][t].w};
      }
      out[i + k * step] = sum;
    }
  }
}
/// Errors: std::runtime_error for other than 2, 4 or 8 terms.
inline void launch_bare_sum(unsigned ctas, cudaStream_t s, float4* out, const BareTerms& terms, int count,
                            std::size_t words) {
  if (count == 2) return bare_pull_and_add<2><<<ctas, bare_threads, 0, s>>>(out, terms, words);
  if (count == 4) return bare_pull_and_add<4><<<ctas, bare_threads, 0, s>>>(out, terms, words);
  if (count == 8) return bare_pull_and_add<8><<<ctas, bare_threads, 0, s>>>(out, terms, words);
  throw std::runtime_error("the bare sum is built for 2, 4 and 8 ranks, not for " + std::to_string(count));
}

}  // namespace comm_bench
