// What the Hopper backward kernels have in common: which calls they take, and how a tile of a gradient is written.
#pragma once

#include <pleat/attention/cuda/hopper_tiles.cuh>

namespace pleat::inline v0::attention_kernel {

/// Whether fp32 rows can be written by pairs.
inline bool takes_pairs(const HeadRows<float>& x) {
  return reinterpret_cast<std::uintptr_t>(x.data) % 8 == 0 && x.batch_stride % 2 == 0 && x.token_stride % 2 == 0 &&
         x.head_stride % 2 == 0;
}

/// Whether a call has these head dims, indices of 32 bits, and inputs that the copy engine reads.
template <class T>
bool are_inputs_mappable(const Backward<T>& a, int qk_dim, int v_dim) {
  const Extents& e = a.extents;
  return e.qk_dim == qk_dim && e.v_dim == v_dim && e.q_tokens < most_tokens && e.k_tokens < most_tokens &&
         is_head_mappable(a.q, e.batch, e.q_tokens, e.q_heads, e.qk_dim) &&
         is_head_mappable(a.k, e.batch, e.k_tokens, e.kv_heads, e.qk_dim) &&
         is_head_mappable(a.v, e.batch, e.k_tokens, e.kv_heads, e.v_dim) &&
         is_head_mappable(a.dout, e.batch, e.q_tokens, e.q_heads, e.v_dim);
}

/// Writes `scale * x`, a warp group's 64 rows as wgmma leaves them, or adds it. `row`: this thread's first one; those
/// from `tokens` on do not exist.
template <int Dim>
__device__ void store_rows(const HeadRows<float>& to, float (&x)[Dim / 2], int row, std::int64_t tokens, int batch,
                           int head, float scale, bool accumulate) {
#pragma unroll
  for (float& value : x) value *= scale;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (row + 8 * i >= tokens) continue;
    auto* const pairs = reinterpret_cast<float2*>(to.at(batch, row + 8 * i, head)) + threadIdx.x % 4;
    if (accumulate) {  // all loads before the stores, which might write what they read
      float2 before[Dim / 8];
#pragma unroll
      for (int j = 0; j < Dim / 8; ++j) before[j] = pairs[4 * j];
#pragma unroll
      for (int j = 0; j < Dim / 8; ++j) {
        x[4 * j + 2 * i] += before[j].x;
        x[4 * j + 2 * i + 1] += before[j].y;
      }
    }
#pragma unroll
    for (int j = 0; j < Dim / 8; ++j) pairs[4 * j] = {x[4 * j + 2 * i], x[4 * j + 2 * i + 1]};
  }
}

}  // namespace pleat::inline v0::attention_kernel
