// What joins cuDNN's results, of the inputs' dtype, to running ones in fp32: one pass over the rows of a rectangle.
#pragma once

#include <pleat/attention/cuda/cudnn_call.hpp>
#include <pleat/attention/cuda/row_kernels.cuh>

namespace pleat::inline v0::cudnn {

using attention_kernel::Chunk, attention_kernel::HeadRows, attention_kernel::RowGrid, attention_kernel::RowStatistics;

/// Rows of 0; and the LSE of a query that has seen no key, where `lse` has memory.
template <class A>
PLEAT_KERNEL void __launch_bounds__(RowGrid::threads)
    clear_kernel(const HeadRows<A> rows, const RowStatistics lse, const RowGrid grid) {
  grid.for_each_row([&](unsigned batch, unsigned token, unsigned head, int lane) {
    for (int d = lane; d < grid.dim; d += grid.lanes) rows.at(batch, token, head)[d] = 0;
    if (lane == 0 && lse.data != nullptr) lse.at(batch, token, head) = -INFINITY;
  });
}

/// The running result (o, lse) takes a partial one in, or becomes it when it `starts`.
template <class T>
PLEAT_KERNEL void __launch_bounds__(RowGrid::threads)
    merge_kernel(const HeadRows<float> o, const RowStatistics lse, const HeadRows<const T> partial,
                 const RowStatistics partial_lse, const RowGrid grid, const bool starts, const bool is_aligned) {
  grid.for_each_row([&](unsigned batch, unsigned token, unsigned head, int lane) {
    float& row_lse = lse.at(batch, token, head);
    const Weights w = merge(starts ? -INFINITY : row_lse, partial_lse.at(batch, token, head));
    float* const to = o.at(batch, token, head);
    const T* const from = partial.at(batch, token, head);
    for (int d = lane * RowGrid::chunk_elems; d < grid.dim; d += grid.lanes * RowGrid::chunk_elems) {
      const int elems = grid.dim - d;
      Chunk<float> sum{};
      if (!starts) sum = Chunk<float>::load(to + d, elems, is_aligned);
      const auto part = Chunk<T>::load(from + d, elems, is_aligned);
#pragma unroll
      for (int i = 0; i < RowGrid::chunk_elems; ++i) {
        const float add = w.partial == 0 ? 0 : w.partial * static_cast<float>(part.at[i]);  // of no key it may be NaN
        sum.at[i] = w.running * sum.at[i] + add;
      }
      sum.store(to + d, elems, is_aligned);
    }
    const unsigned first = threadIdx.x % 32 / static_cast<unsigned>(grid.lanes) * static_cast<unsigned>(grid.lanes);
    __syncwarp((grid.lanes == 32 ? 0xffffffffu : (1u << grid.lanes) - 1) << first);  // all lanes have read the old LSE
    if (lane == 0) row_lse = w.lse;
  });
}

/// out = (adds ? out : 0) + part
template <class T>
PLEAT_KERNEL void __launch_bounds__(RowGrid::threads)
    add_kernel(const HeadRows<float> out, const HeadRows<const T> part, const RowGrid grid, const bool adds,
               const bool is_aligned) {
  grid.for_each_row([&](unsigned batch, unsigned token, unsigned head, int lane) {
    float* const to = out.at(batch, token, head);
    const T* const from = part.at(batch, token, head);
    for (int d = lane * RowGrid::chunk_elems; d < grid.dim; d += grid.lanes * RowGrid::chunk_elems) {
      const int elems = grid.dim - d;
      Chunk<float> sum{};
      if (adds) sum = Chunk<float>::load(to + d, elems, is_aligned);
      const auto more = Chunk<T>::load(from + d, elems, is_aligned);
#pragma unroll
      for (int i = 0; i < RowGrid::chunk_elems; ++i) sum.at[i] += static_cast<float>(more.at[i]);
      sum.store(to + d, elems, is_aligned);
    }
  });
}

/// The LSE of some queries, packed. That of a query that sees no key becomes so large that its weights are 0, not NaN.
template <class A>
PLEAT_KERNEL void __launch_bounds__(RowGrid::threads)
    pack_lse_kernel(A* const out, const RowStatistics lse, const unsigned heads, const unsigned tokens,
                    const unsigned count) {
  for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
    const float value = lse.at(i / tokens / heads, i % tokens, i / tokens % heads);
    out[i] = value == -INFINITY ? 1e30f : value;
  }
}

}  // namespace pleat::inline v0::cudnn
