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

/// The sorted ids are cut into tiles of so many; a number of rows alone decides the order of all sums.
inline constexpr int tile_rows = 64;

/// Where equal ids of the tile that begins at `first` end, at most at `end`.
inline __device__ std::int64_t run_end(const std::int32_t* ids, std::int64_t first, std::int64_t end) {
  std::int64_t at = first + 1;
  while (at < end && ids[at] == ids[first]) ++at;
  return at;
}

/// A CTA per tile sums the rows of equal ids. What begins and ends in the tile is added to the table; what comes from
/// the tile before is left in partials[tile][0], what goes on in the next one in partials[tile][1]. `ids` are sorted,
/// `order` says which row each was.
template <class T, int width>
PLEAT_KERNEL void __launch_bounds__(threads)
    embed_tiles_kernel(const std::int32_t* ids, const std::int32_t* order, const T* dout,
                       pleat::accumulator_t<T>* dtable, pleat::accumulator_t<T>* partials, std::int64_t rows,
                       std::int64_t dim) {
  using A = pleat::accumulator_t<T>;
  const std::int64_t i = (static_cast<std::int64_t>(blockIdx.y) * threads + threadIdx.x) * width;
  if (i >= dim) return;
  const std::int64_t begin = static_cast<std::int64_t>(blockIdx.x) * tile_rows, end = min(rows, begin + tile_rows);
  for (std::int64_t first = begin, last; first < end; first = last) {
    last = run_end(ids, first, end);
    A sum[width] = {};
    constexpr int batch = 8;  // loads in flight
    for (std::int64_t at = first; at < last; at += batch) {
      Vector<T, width> terms[batch];
#pragma unroll
      for (int b = 0; b < batch; ++b) terms[b] = load<width>(dout, order[min(at + b, last - 1)] * dim + i);
#pragma unroll
      for (int b = 0; b < batch; ++b) {
#pragma unroll
        for (int k = 0; k < width; ++k) sum[k] += at + b < last ? static_cast<A>(terms[b].elem[k]) : A{0};
      }
    }
    const bool continues = first > 0 && first == begin && ids[first - 1] == ids[first];
    const bool goes_on = last == end && end < rows && ids[end] == ids[first];
    const bool is_partial = continues || goes_on;
    A* const out = is_partial ? partials + (2 * static_cast<std::int64_t>(blockIdx.x) + !continues) * dim + i
                              : dtable + ids[first] * dim + i;
#pragma unroll
    for (int k = 0; k < width; ++k) out[k] = is_partial ? sum[k] : out[k] + sum[k];
  }
}

/// A CTA per tile adds up what begins in its tile and goes on.
template <class A>
PLEAT_KERNEL void __launch_bounds__(threads)
    embed_partials_kernel(const std::int32_t* ids, const A* partials, A* dtable, std::int64_t rows, std::int64_t dim) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.y) * threads + threadIdx.x;
  const std::int64_t begin = static_cast<std::int64_t>(blockIdx.x) * tile_rows, end = begin + tile_rows;
  if (i >= dim || end >= rows) return;
  const std::int32_t id = ids[end - 1];
  if (ids[end] != id || (begin > 0 && ids[begin - 1] == id)) return;
  A sum = partials[(2 * static_cast<std::int64_t>(blockIdx.x) + 1) * dim + i];
  for (std::int64_t tile = blockIdx.x + 1; tile * tile_rows < rows && ids[tile * tile_rows] == id; ++tile) {
    sum += partials[2 * tile * dim + i];
  }
  dtable[id * dim + i] += sum;
}

/// What the backward pass works in: ids and rows, before and after they are sorted, and sums that tiles share.
struct EmbeddingScratch {
  std::int32_t *ids, *rows, *order;
  std::byte* partials;  // [tiles, 2, dim] of the accumulator
  std::byte* sort;
  std::size_t sort_bytes;

  /// Asks the current device how much a sort of `max_rows` ids takes.
  static EmbeddingScratch carve(pleat::Carver& memory, std::int64_t max_rows, std::int64_t dim, pleat::DType dtype) {
    const auto elems = static_cast<std::size_t>(max_rows);
    EmbeddingScratch scratch{};
    scratch.ids = memory.take<std::int32_t>(elems);
    scratch.rows = memory.take<std::int32_t>(elems);
    scratch.order = memory.take<std::int32_t>(elems);
    scratch.partials = memory.take_bytes(static_cast<std::size_t>(2 * tiles(max_rows) * dim) *
                                         pleat::size_bytes(pleat::accumulator(dtype)));
    pleat::check_cuda(scratch.sort_pairs(nullptr, max_rows, nullptr), "cub::DeviceRadixSort::SortPairs");
    scratch.sort = memory.take_bytes(scratch.sort_bytes);
    return scratch;
  }
  static constexpr std::int64_t tiles(std::int64_t rows) { return (rows + tile_rows - 1) / tile_rows; }
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
  const auto tiles = static_cast<unsigned>(scratch.tiles(rows));
  const auto columns = [&](std::int64_t each) { return static_cast<unsigned>((dim + each - 1) / each); };
  A* const partials = reinterpret_cast<A*>(scratch.partials);
  with_width<T>(is_vectorizable<T>({dim}, {dout}), [&]<int width>(std::integral_constant<int, width>) {
    embed_tiles_kernel<T, width><<<dim3(tiles, columns(threads * width)), threads, 0, s>>>(
        scratch.ids, scratch.order, dout, dtable, partials, rows, dim);
    pleat::check_launch("embed_tiles_kernel");
  });
  embed_partials_kernel<A><<<dim3(tiles, columns(threads)), threads, 0, s>>>(scratch.ids, partials, dtable, rows, dim);
  pleat::check_launch("embed_partials_kernel");
}

}  // namespace train_moe::gpu
