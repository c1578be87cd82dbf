// Cross-entropy over a vocabulary: a CTA per token, which turns its scores into their gradient.
#pragma once

#include "vectors.cuh"

namespace train_moe::gpu {

/// A running maximum and the sum of exp(x - maximum).
template <class A>
struct SoftmaxSum {
  A most, sum;
  static constexpr A nothing = -INFINITY;
  __device__ void add(const SoftmaxSum& other) {
    const A top = most > other.most ? most : other.most;
    if (top == nothing) return;
    sum = sum * exp(most - top) + other.sum * exp(other.most - top);
    most = top;
  }
};

/// A CTA per row: losses[row] = -log softmax(logits)[label], and the row becomes its gradient. A row of a label below 0
/// has neither loss nor gradient.
template <class T, int width>
PLEAT_KERNEL void __launch_bounds__(1024)
    cross_entropy_kernel(T* logits, const std::int32_t* labels, double* losses, std::int64_t classes) {
  using A = pleat::accumulator_t<T>;
  T* const row = logits + blockIdx.x * classes;
  const std::int32_t label = labels[blockIdx.x];
  const std::int64_t first = threadIdx.x * width, step = static_cast<std::int64_t>(blockDim.x) * width;
  if (label < 0) {
    for (std::int64_t i = first; i < classes; i += step) store(row, i, Vector<T, width>{});
    if (threadIdx.x == 0) losses[blockIdx.x] = 0;
    return;
  }
  __shared__ SoftmaxSum<A> parts[32];
  SoftmaxSum<A> mine{SoftmaxSum<A>::nothing, 0};
#pragma unroll 4
  for (std::int64_t i = first; i < classes; i += step) {
    const auto values = load<width>(row, i);
    SoftmaxSum<A> vector{SoftmaxSum<A>::nothing, 0};
#pragma unroll
    for (int k = 0; k < width; ++k) vector.most = max(vector.most, static_cast<A>(values.elem[k]));
#pragma unroll
    for (int k = 0; k < width; ++k) vector.sum += exp(static_cast<A>(values.elem[k]) - vector.most);
    mine.add(vector);
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    mine.add({__shfl_xor_sync(0xffffffffu, mine.most, distance), __shfl_xor_sync(0xffffffffu, mine.sum, distance)});
  }
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = mine;
  const A label_score = static_cast<A>(row[label]);
  __syncthreads();
  SoftmaxSum<A> all{SoftmaxSum<A>::nothing, 0};
  for (unsigned w = 0; w < blockDim.x / 32; ++w) all.add(parts[w]);
  if (threadIdx.x == 0) losses[blockIdx.x] = static_cast<double>(log(all.sum) + all.most - label_score);
  const A scale = 1 / all.sum;
#pragma unroll 4
  for (std::int64_t i = first; i < classes; i += step) {
    auto values = load<width>(row, i);
#pragma unroll
    for (int k = 0; k < width; ++k) {
      values.elem[k] = static_cast<T>(exp(static_cast<A>(values.elem[k]) - all.most) * scale - (i + k == label));
    }
    store(row, i, values);
  }
}

/// *sum += values [count], in a fixed order; one CTA.
template <class A>
PLEAT_KERNEL void __launch_bounds__(1024) sum_losses_kernel(const A* values, std::int64_t count, A* sum) {
  __shared__ A parts[32];
  A mine = 0;
  for (std::int64_t i = threadIdx.x; i < count; i += blockDim.x) mine += values[i];
  mine = sum_of_lanes<32>(mine);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = mine;
  __syncthreads();
  if (threadIdx.x != 0) return;
  A total = 0;
  for (const A part : parts) total += part;
  *sum += total;
}

/// `losses`: [rows] to work in.
template <class T>
void cross_entropy(T* logits, const std::int32_t* labels, double* loss, std::int64_t rows, std::int64_t classes,
                   double* losses, cudaStream_t s) {
  if (rows == 0) return;
  with_width<T>(is_vectorizable<T>({classes}, {logits}), [&]<int width>(std::integral_constant<int, width>) {
    const unsigned block = classes / width >= 4096 ? 1024 : 256;
    cross_entropy_kernel<T, width><<<static_cast<unsigned>(rows), block, 0, s>>>(logits, labels, losses, classes);
    pleat::check_launch("cross_entropy_kernel");
  });
  sum_losses_kernel<<<1, 1024, 0, s>>>(losses, rows, loss);
  pleat::check_launch("sum_losses_kernel");
}

}  // namespace train_moe::gpu
