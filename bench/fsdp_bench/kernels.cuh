// Kernels of fsdp_bench: random numbers, a gain per channel with its gradient, and what makes a stale slot show.
#pragma once

#include <pleat/core/dtype.hpp>

#include "../comm_bench/kernels.cuh"

namespace fsdp_bench {

using comm_bench::first_index;
using comm_bench::index_step;
using comm_bench::value_of;
using pleat::bfloat16;

/// out [elems] = offset + scale * uniform in [-1, 1).
PLEAT_KERNEL void draw(bfloat16* out, std::uint32_t key, float offset, float scale, std::size_t elems) {
  for (std::size_t i = first_index(); i < elems; i += index_step()) {
    out[i] = bfloat16(offset + scale * value_of(key ^ static_cast<std::uint32_t>(i >> 32), i));
  }
}

/// out [rows, width] = in * gain [width].
PLEAT_KERNEL void scale_columns(bfloat16* out, const bfloat16* in, const bfloat16* gain, std::size_t rows,
                                std::size_t width) {
  for (std::size_t i = first_index(); i < rows * width; i += index_step()) {
    out[i] = bfloat16(static_cast<float>(in[i]) * static_cast<float>(gain[i % width]));
  }
}
inline constexpr unsigned column_parts = 64;
/// parts [column_parts, width]: sums of a * b [rows, width] over every column_parts-th row.
PLEAT_KERNEL void column_products(float* parts, const bfloat16* a, const bfloat16* b, std::size_t rows,
                                  std::size_t width) {
  const std::size_t column = first_index();
  if (column >= width) return;
  float sum = 0;
  for (std::size_t row = blockIdx.y; row < rows; row += column_parts) {
    sum += static_cast<float>(a[row * width + column]) * static_cast<float>(b[row * width + column]);
  }
  parts[blockIdx.y * width + column] = sum;
}
template <class T>
PLEAT_KERNEL void add_column_parts(T* out, const float* parts, std::size_t width, bool accumulate) {
  const std::size_t column = first_index();
  if (column >= width) return;
  float sum = accumulate ? static_cast<float>(out[column]) : 0.0f;
  for (unsigned part = 0; part < column_parts; ++part) sum += parts[part * width + column];
  out[column] = static_cast<T>(sum);
}

/// Every 4096th element of a slot becomes NaN: a product with what is left of an earlier unit shows.
PLEAT_KERNEL void poison(std::uint16_t* slot, std::size_t elems) {
  for (std::size_t i = first_index() * 4096; i < elems; i += index_step() * 4096) slot[i] = 0x7FFF;
}

/// sum [elems] = (is_first ? 0 : sum) + term.
template <class T>
PLEAT_KERNEL void add_term(float* sum, const T* term, bool is_first, std::size_t elems) {
  for (std::size_t i = first_index(); i < elems; i += index_step()) {
    sum[i] = (is_first ? 0.0f : sum[i]) + static_cast<float>(term[i]);
  }
}
/// Counts the elements whose bits differ.
PLEAT_KERNEL void count_differences(const std::uint32_t* found, const std::uint32_t* expected, std::size_t elems,
                                    unsigned long long* count) {
  for (std::size_t i = first_index(); i < elems; i += index_step()) {
    if (found[i] != expected[i]) atomicAdd(count, 1ULL);
  }
}

}  // namespace fsdp_bench
