// Keys and values of Multi-head Latent Attention out of its compressed rows, and back. source: arXiv 2405.04434
#pragma once

#include "products.cuh"
#include "vectors.cuh"

namespace train_moe::gpu {

/// keys[r, h, nope..] = latent[r, lora..] for every head: the shared part that has a position.
template <class T>
PLEAT_KERNEL void __launch_bounds__(threads)
    spread_positions_kernel(LatentShape shape, Rows<const T> latent, T* keys, std::int64_t rows) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * threads;
  const std::int64_t elems = rows * shape.heads * shape.rope;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * threads + threadIdx.x; i < elems; i += step) {
    const std::int64_t head = i / shape.rope, j = i % shape.rope;
    keys[head * shape.key() + shape.nope + j] = latent.data[head / shape.heads * latent.stride + shape.lora + j];
  }
}

/// plain[r, h] = dkeys[r, h, ..nope] in T; dlatent[r, lora..] (add ? += : =) the sum of dkeys[r, h, nope..] over heads.
template <class T, class A>
PLEAT_KERNEL void __launch_bounds__(threads)
    gather_positions_kernel(LatentShape shape, const A* dkeys, T* plain, Rows<A> dlatent, bool add, std::int64_t rows) {
  const std::int64_t width = shape.key();
  for (std::int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const A* const from = dkeys + row * shape.heads * width;
    for (std::int64_t i = threadIdx.x; i < shape.heads * shape.nope; i += threads) {
      plain[row * shape.heads * shape.nope + i] = static_cast<T>(from[i / shape.nope * width + i % shape.nope]);
    }
    for (std::int64_t j = threadIdx.x; j < shape.rope; j += threads) {
      A sum = 0;
      for (std::int64_t head = 0; head < shape.heads; ++head) sum += from[head * width + shape.nope + j];
      A* const to = dlatent.data + row * dlatent.stride + shape.lora + j;
      *to = add ? *to + sum : sum;
    }
  }
}

template <class T>
void expand_latent(Products& products, const LatentShape& shape, Rows<const T> latent, const T* key_weight,
                   const T* value_weight, T* keys, T* values, std::int64_t rows, cudaStream_t s) {
  if (rows == 0) return;
  Product keys_of_heads =
      product_of<T, T>(false, true, rows, shape.nope, shape.lora, {latent.stride, 0, shape.heads * shape.key()});
  keys_of_heads.count = static_cast<std::int32_t>(shape.heads);
  keys_of_heads.b_step = shape.nope * shape.lora;
  keys_of_heads.out_step = shape.key();
  products.run(keys_of_heads, latent.data, key_weight, 0, nullptr, keys, s);
  products.run(product_of<T, T>(false, true, rows, shape.heads * shape.value, shape.lora, {latent.stride, 0, 0}),
               latent.data, value_weight, 0, nullptr, values, s);
  spread_positions_kernel<T><<<grid_of(rows * shape.heads * shape.rope), threads, 0, s>>>(shape, latent, keys, rows);
  pleat::check_launch("spread_positions_kernel");
}

}  // namespace train_moe::gpu
