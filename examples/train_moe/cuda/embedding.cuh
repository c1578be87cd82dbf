// The table of token vectors: rows are picked forward, and summed backward in an order of their own.
#pragma once

#include <cub/device/device_radix_sort.cuh>

#include <pleat/core/carve.hpp>

#include "vectors.cuh"

namespace train_moe::gpu {

/// out [rows, dim] = table at ids; a CTA per row.
template <class T, int width>
PLEAT_KERNEL void __launch_bounds__(threads)
    embed_kernel(const std::int32_t* ids, const T* table, T* out, std::int64_t rows, std::int64_t dim) {
  for (std::int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const T* const from = table + ids[row] * dim;
    for (std::int64_t i = threadIdx.x * width; i < dim; i += threads * width)
      store(out + row * dim, i, load<width>(from, i));
  }
}

template <class Index>
PLEAT_KERNEL void __launch_bounds__(threads) count_up_kernel(Index* out, std::int64_t elems) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * threads + threadIdx.x;
  if (i < elems) out[i] = static_cast<Index>(i);
}

/// A CTA at the first of equal ids adds all their rows to the table's, in ascending order of rows. `ids` are sorted,
/// `order` says which row each was.
template <class T, int width>
PLEAT_KERNEL void __launch_bounds__(threads)
    embed_backward_kernel(const std::int32_t* ids, const std::int32_t* order, const T* dout,
                          pleat::accumulator_t<T>* dtable, std::int64_t rows, std::int64_t dim) {
  using A = pleat::accumulator_t<T>;
  const std::int64_t begin = blockIdx.x;
  const std::int32_t id = ids[begin];
  if (begin > 0 && ids[begin - 1] == id) return;
  const std::int64_t i = (static_cast<std::int64_t>(blockIdx.y) * threads + threadIdx.x) * width;
  if (i >= dim) return;
  A sum[width] = {};
  constexpr int batch = 8;  // loads in flight
  for (std::int64_t at = begin; at < rows && ids[at] == id; at += batch) {
    Vector<T, width> terms[batch];
#pragma unroll
    for (int b = 0; b < batch; ++b) {
      if (at + b < rows && ids[at + b] == id) terms[b] = load<width>(dout, order[at + b] * dim + i);
    }
#pragma unroll
    for (int b = 0; b < batch; ++b) {
      if (at + b >= rows || ids[at + b] != id) break;
#pragma unroll
      for (int k = 0; k < width; ++k) sum[k] += static_cast<A>(terms[b].elem[k]);
    }
  }
  A* const out = dtable + id * dim + i;
#pragma unroll
  for (int k = 0; k < width; ++k) out[k] += sum[k];
}

/// What the backward pass sorts in: ids and rows, before and after.
struct EmbeddingScratch {
  std::int32_t *ids, *rows, *order;
  std::byte* sort;
  std::size_t sort_bytes;

  /// Asks the current device how much a sort of `rows` ids takes.
  static EmbeddingScratch carve(pleat::Carver& memory, std::int64_t max_rows) {
    const auto elems = static_cast<std::size_t>(max_rows);
    EmbeddingScratch scratch{};
    scratch.ids = memory.take<std::int32_t>(elems);
    scratch.rows = memory.take<std::int32_t>(elems);
    scratch.order = memory.take<std::int32_t>(elems);
    pleat::check_cuda(scratch.sort_pairs(nullptr, max_rows, nullptr), "cub::DeviceRadixSort::SortPairs");
    scratch.sort = memory.take_bytes(scratch.sort_bytes);
    return scratch;
  }
  /// ids, order = the sorted `from`, and which row each was; equal ids keep their order.
  cudaError_t sort_pairs(const std::int32_t* from, std::int64_t count, cudaStream_t s) {
    return cub::DeviceRadixSort::SortPairs(sort, sort_bytes, from, ids, rows, order, count, 0, 32, s);
  }
};

template <class T>
void embed(const std::int32_t* ids, const T* table, T* out, std::int64_t rows, std::int64_t dim, cudaStream_t s) {
  if (rows == 0) return;
  with_width<T>(is_vectorizable<T>({dim}, {table, out}), [&]<int width>(std::integral_constant<int, width>) {
    embed_kernel<T, width><<<grid_of(rows, 1), threads, 0, s>>>(ids, table, out, rows, dim);
    pleat::check_launch("embed_kernel");
  });
}

/// dtable += dout at ids.
template <class T, class A>
void embed_backward(const std::int32_t* ids, const T* dout, A* dtable, std::int64_t rows, std::int64_t dim,
                    EmbeddingScratch scratch, cudaStream_t s) {
  if (rows == 0) return;
  count_up_kernel<<<static_cast<unsigned>((rows + threads - 1) / threads), threads, 0, s>>>(scratch.rows, rows);
  pleat::check_launch("count_up_kernel");
  pleat::check_cuda(scratch.sort_pairs(ids, rows, s), "cub::DeviceRadixSort::SortPairs");
  with_width<T>(is_vectorizable<T>({dim}, {dout}), [&]<int width>(std::integral_constant<int, width>) {
    const std::int64_t columns = (dim + threads * width - 1) / (threads * width);
    const dim3 grid(static_cast<unsigned>(rows), static_cast<unsigned>(columns));
    embed_backward_kernel<T, width><<<grid, threads, 0, s>>>(scratch.ids, scratch.order, dout, dtable, rows, dim);
    pleat::check_launch("embed_backward_kernel");
  });
}

}  // namespace train_moe::gpu
