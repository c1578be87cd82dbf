// RMSNorm over rows, forward and backward; rows may be tokens or the heads of tokens.
#pragma once

#include <pleat/cuda/executor.hpp>

#include "vectors.cuh"

namespace train_moe::gpu {

/// A group of lanes per row. source: arXiv 1910.07467.
template <class T, int width, int lanes>
PLEAT_KERNEL void __launch_bounds__(threads)
    rms_norm_kernel(Rows<const T> x, const T* weight, Rows<T> y, pleat::accumulator_t<T>* inverse_rms,
                    std::int64_t rows, int dim, pleat::accumulator_t<T> epsilon) {
  using A = pleat::accumulator_t<T>;
  constexpr int groups = threads / lanes;
  const int lane = static_cast<int>(threadIdx.x) % lanes * width;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * groups;
  // All lanes of a warp take part in its sums: rows past the end read the last one and write nothing.
  for (std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * groups; first < rows; first += step) {
    const std::int64_t wanted = first + threadIdx.x / lanes, row = wanted < rows ? wanted : rows - 1;
    const T* const in = x.data + row * x.stride;
    A squares = 0;
#pragma unroll 4
    for (int i = lane; i < dim; i += lanes * width) {
      const auto values = load<width>(in, i);
#pragma unroll
      for (int k = 0; k < width; ++k) squares += static_cast<A>(values.elem[k]) * static_cast<A>(values.elem[k]);
    }
    const A inverse = 1 / sqrt(sum_of_lanes<lanes>(squares) / static_cast<A>(dim) + epsilon);
    if (wanted >= rows) continue;
    if (lane == 0) inverse_rms[row] = inverse;
#pragma unroll 4
    for (int i = lane; i < dim; i += lanes * width) {
      auto values = load<width>(in, i);
      const auto scale = load<width>(weight, i);
#pragma unroll
      for (int k = 0; k < width; ++k) {
        values.elem[k] = static_cast<T>(static_cast<A>(values.elem[k]) * inverse * static_cast<A>(scale.elem[k]));
      }
      store(y.data, row * y.stride + i, values);
    }
  }
}

/// dx = residual + inverse * (dy * weight - x * along), along = <dy * weight, x> * inverse^2 / dim. A row is read
/// before it is written, so that dx may be any of the others.
template <class T, int width, int lanes>
PLEAT_KERNEL void __launch_bounds__(threads)
    rms_norm_input_kernel(Rows<const T> dy, Rows<const T> x, const T* weight,
                          const pleat::accumulator_t<T>* inverse_rms, Rows<const T> residual, Rows<T> dx,
                          std::int64_t rows, int dim) {
  using A = pleat::accumulator_t<T>;
  constexpr int groups = threads / lanes;
  const int lane = static_cast<int>(threadIdx.x) % lanes * width;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * groups;
  for (std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * groups; first < rows; first += step) {
    const std::int64_t wanted = first + threadIdx.x / lanes, row = wanted < rows ? wanted : rows - 1;
    const A inverse = inverse_rms[row];
    const T *const d_row = dy.data + row * dy.stride, *const x_row = x.data + row * x.stride;
    A dot = 0;
#pragma unroll 4
    for (int i = lane; wanted < rows && i < dim; i += lanes * width) {
      const auto d = load<width>(d_row, i), in = load<width>(x_row, i), scale = load<width>(weight, i);
#pragma unroll
      for (int k = 0; k < width; ++k) {
        dot += static_cast<A>(d.elem[k]) * static_cast<A>(scale.elem[k]) * static_cast<A>(in.elem[k]);
      }
    }
    const A along = sum_of_lanes<lanes>(dot) * inverse * inverse / static_cast<A>(dim);
    if (wanted >= rows) continue;
#pragma unroll 4
    for (int i = lane; i < dim; i += lanes * width) {
      const auto d = load<width>(d_row, i), in = load<width>(x_row, i), scale = load<width>(weight, i);
      Vector<T, width> out{};
      if (residual.data != nullptr) out = load<width>(residual.data, row * residual.stride + i);
#pragma unroll
      for (int k = 0; k < width; ++k) {
        const A value =
            inverse * (static_cast<A>(d.elem[k]) * static_cast<A>(scale.elem[k]) - static_cast<A>(in.elem[k]) * along);
        out.elem[k] = static_cast<T>(static_cast<A>(out.elem[k]) + value);
      }
      store(dx.data, row * dx.stride + i, out);
    }
  }
}

/// How the sum over rows is cut: a number of rows alone decides it, so that its bits are the same on every chip.
struct RowSplit {
  static constexpr int most = 512;
  std::int64_t rows_each;
  int count;
  explicit RowSplit(std::int64_t rows)
      : rows_each(std::max<std::int64_t>(64, (rows + most - 1) / most)),
        count(static_cast<int>((rows + rows_each - 1) / rows_each)) {}
};

/// partials[blockIdx.y][dim] = the sum over that split's rows of dy * x * inverse. A CTA has threads / columns rows at
/// a time, where `columns` is a power of two.
template <class T, int width>
PLEAT_KERNEL void __launch_bounds__(threads)
    rms_norm_weight_kernel(Rows<const T> dy, Rows<const T> x, const pleat::accumulator_t<T>* inverse_rms,
                           pleat::accumulator_t<T>* partials, std::int64_t rows, std::int64_t rows_each, int dim,
                           int columns) {
  using A = pleat::accumulator_t<T>;
  __shared__ A sums[threads * width];
  const int column = static_cast<int>(threadIdx.x) % columns, row_lanes = threads / columns;
  const int at = static_cast<int>(blockIdx.x * columns + column) * width;
  const std::int64_t begin = blockIdx.y * rows_each, end = min(rows, begin + rows_each);
  A sum[width] = {};
  if (at < dim) {
#pragma unroll 4
    for (std::int64_t row = begin + threadIdx.x / columns; row < end; row += row_lanes) {
      const auto d = load<width>(dy.data, row * dy.stride + at), in = load<width>(x.data, row * x.stride + at);
      const A inverse = inverse_rms[row];
#pragma unroll
      for (int k = 0; k < width; ++k) sum[k] += static_cast<A>(d.elem[k]) * static_cast<A>(in.elem[k]) * inverse;
    }
  }
#pragma unroll
  for (int k = 0; k < width; ++k) sums[threadIdx.x * width + k] = sum[k];
  __syncthreads();
  if (threadIdx.x >= columns || at >= dim) return;
#pragma unroll
  for (int k = 0; k < width; ++k) {
    A total = 0;
    for (int lane = 0; lane < row_lanes; ++lane) total += sums[(lane * columns + column) * width + k];
    partials[static_cast<std::int64_t>(blockIdx.y) * dim + at + k] = total;
  }
}

/// out [dim] = the sum of the partials in order.
template <class A>
PLEAT_KERNEL void __launch_bounds__(threads) sum_partials_kernel(const A* partials, int count, A* out, int dim) {
  const int i = static_cast<int>(blockIdx.x * threads + threadIdx.x);
  if (i >= dim) return;
  A sum = 0;
  for (int p = 0; p < count; ++p) sum += partials[static_cast<std::int64_t>(p) * dim + i];
  out[i] = sum;
}

template <class T>
void rms_norm(Rows<const T> x, const T* weight, Rows<T> y, pleat::accumulator_t<T>* inverse_rms, std::int64_t rows,
              std::int64_t dim, double epsilon, cudaStream_t s) {
  if (rows == 0) return;
  with_width<T>(is_vectorizable<T>({dim, x.stride, y.stride}, {x.data, weight, y.data}),
                [&]<int width>(std::integral_constant<int, width>) {
                  with_lanes(dim / width, [&]<int lanes>(std::integral_constant<int, lanes>) {
                    rms_norm_kernel<T, width, lanes><<<grid_of(rows, threads / lanes), threads, 0, s>>>(
                        x, weight, y, inverse_rms, rows, static_cast<int>(dim),
                        static_cast<pleat::accumulator_t<T>>(epsilon));
                    pleat::check_launch("rms_norm_kernel");
                  });
                });
}

/// Elements of the accumulator that the backward pass works in.
inline std::int64_t norm_partials(std::int64_t dim) {
  return RowSplit::most * dim;
}

/// `partials`: [norm_partials(dim)]. The weight's gradient comes first, since dx may be written where x or dy is.
template <class T, class A>
void rms_norm_backward(Rows<const T> dy, Rows<const T> x, const T* weight, const A* inverse_rms, Rows<const T> residual,
                       Rows<T> dx, A* dweight, A* partials, std::int64_t rows, std::int64_t dim, cudaStream_t s) {
  if (rows == 0) return pleat::CudaExecutor{}.zero(dweight, static_cast<std::size_t>(dim) * sizeof(A), s);
  const bool vectorizable =
      is_vectorizable<T>({dim, dy.stride, x.stride, residual.data == nullptr ? 0 : residual.stride, dx.stride},
                         {dy.data, x.data, weight, residual.data, dx.data});
  const RowSplit split(rows);
  with_width<T>(vectorizable, [&]<int width>(std::integral_constant<int, width>) {
    const int vectors = static_cast<int>(dim / width);
    int columns = 1;
    while (columns < vectors && columns < threads) columns *= 2;
    const dim3 grid(static_cast<unsigned>((vectors + columns - 1) / columns), static_cast<unsigned>(split.count));
    rms_norm_weight_kernel<T, width>
        <<<grid, threads, 0, s>>>(dy, x, inverse_rms, partials, rows, split.rows_each, static_cast<int>(dim), columns);
    pleat::check_launch("rms_norm_weight_kernel");
    sum_partials_kernel<A><<<static_cast<unsigned>((dim + threads - 1) / threads), threads, 0, s>>>(
        partials, split.count, dweight, static_cast<int>(dim));
    pleat::check_launch("sum_partials_kernel");
    with_lanes(vectors, [&]<int lanes>(std::integral_constant<int, lanes>) {
      rms_norm_input_kernel<T, width, lanes><<<grid_of(rows, threads / lanes), threads, 0, s>>>(
          dy, x, weight, inverse_rms, residual, dx, rows, static_cast<int>(dim));
      pleat::check_launch("rms_norm_input_kernel");
    });
  });
}

}  // namespace train_moe::gpu
