// What backward does besides products, at memory speed: delta = sum of out * dout per row, and rounding sums.
#pragma once

#include <algorithm>

#include <pleat/attention/cuda/arguments.hpp>
#include <pleat/cuda/kernel.hpp>

namespace pleat::inline v0::attention_kernel {

/// Rows [batch, tokens, heads] of `dim` elements; 8, 16 or 32 lanes share a row, 8 elements each at a time. Fewer than
/// 2^32 rows.
struct RowGrid {
  static constexpr int threads = 256, chunk_elems = 8;

  RowGrid(const TensorRef& t)
      : tokens(static_cast<unsigned>(t.extent(1))),
        heads(static_cast<unsigned>(t.extent(2))),
        rows(static_cast<unsigned>(t.extent(0)) * tokens * heads),
        dim(static_cast<int>(t.extent(3))),
        lanes(dim <= 64    ? 8
              : dim <= 128 ? 16
                           : 32) {}

  unsigned ctas() const {
    constexpr unsigned most = 4096;
    return std::min(most, (rows + rows_per_cta() - 1) / rows_per_cta());
  }
  PLEAT_HD unsigned rows_per_cta() const { return static_cast<unsigned>(threads / lanes); }

  /// Calls f(batch, token, head, lane) for the rows of this thread.
  template <class F>
  __device__ void for_each_row(F f) const {
    const int lane = static_cast<int>(threadIdx.x) % lanes;
    for (unsigned row = blockIdx.x * rows_per_cta() + threadIdx.x / static_cast<unsigned>(lanes); row < rows;
         row += gridDim.x * rows_per_cta()) {
      const unsigned token = row / heads;
      f(token / tokens, token % tokens, row % heads, lane);
    }
  }

  unsigned tokens, heads, rows;
  int dim, lanes;
};

/// 8 elements of T, or fewer where a row ends.
template <class T>
struct alignas(16) Chunk {
  T at[RowGrid::chunk_elems];

  __device__ static Chunk load(const T* from, int elems, bool is_aligned) {
    Chunk chunk;
    if (is_aligned) return *reinterpret_cast<const Chunk*>(from);
#pragma unroll
    for (int i = 0; i < RowGrid::chunk_elems; ++i) chunk.at[i] = i < elems ? from[i] : T{};
    return chunk;
  }
  __device__ void store(T* to, int elems, bool is_aligned) const {
    if (is_aligned) {
      *reinterpret_cast<Chunk*>(to) = *this;
      return;
    }
#pragma unroll
    for (int i = 0; i < RowGrid::chunk_elems; ++i) {
      if (i < elems) to[i] = at[i];
    }
  }
};

template <class T>
PLEAT_KERNEL void __launch_bounds__(RowGrid::threads)
    delta_kernel(const RowStatistics delta, const HeadRows<const T> out, const HeadRows<const T> dout,
                 const RowGrid grid, const bool is_aligned) {
  grid.for_each_row([&](unsigned batch, unsigned token, unsigned head, int lane) {
    const T* const out_row = out.at(batch, token, head);
    const T* const dout_row = dout.at(batch, token, head);
    float sum = 0;
    for (int d = lane * RowGrid::chunk_elems; d < grid.dim; d += grid.lanes * RowGrid::chunk_elems) {
      const auto x = Chunk<T>::load(out_row + d, grid.dim - d, is_aligned);
      const auto y = Chunk<T>::load(dout_row + d, grid.dim - d, is_aligned);
#pragma unroll
      for (int i = 0; i < RowGrid::chunk_elems; ++i) {
        sum = fmaf(static_cast<float>(x.at[i]), static_cast<float>(y.at[i]), sum);
      }
    }
    const unsigned first = threadIdx.x % 32 / static_cast<unsigned>(grid.lanes) * static_cast<unsigned>(grid.lanes);
    const unsigned sharing = (grid.lanes == 32 ? 0xffffffffu : (1u << grid.lanes) - 1) << first;
    for (int distance = grid.lanes / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(sharing, sum, distance);
    if (lane == 0) delta.at(batch, token, head) = sum;
  });
}

template <class T>
PLEAT_KERNEL void __launch_bounds__(RowGrid::threads)
    store_kernel(const HeadRows<T> out, const HeadRows<const float> first, const HeadRows<const float> last,
                 const int terms, const RowGrid grid, const bool is_aligned) {
  grid.for_each_row([&](unsigned batch, unsigned token, unsigned head, int lane) {
    const float* const from = first.at(batch, token, head);
    const float* const added = last.at(batch, token, head);
    T* const to = out.at(batch, token, head);
    for (int d = lane * RowGrid::chunk_elems; d < grid.dim; d += grid.lanes * RowGrid::chunk_elems) {
      auto sums = Chunk<float>::load(from + d, grid.dim - d, is_aligned);
      if (terms == 2) {
        const auto more = Chunk<float>::load(added + d, grid.dim - d, is_aligned);
#pragma unroll
        for (int i = 0; i < RowGrid::chunk_elems; ++i) sums.at[i] += more.at[i];
      }
      Chunk<T> rounded;
#pragma unroll
      for (int i = 0; i < RowGrid::chunk_elems; ++i) rounded.at[i] = static_cast<T>(sums.at[i]);
      rounded.store(to + d, grid.dim - d, is_aligned);
    }
  });
}

}  // namespace pleat::inline v0::attention_kernel
