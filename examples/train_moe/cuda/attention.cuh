// Attention on GPUs: the library's kernels for bf16, and plain ones in fp32, which prove a run rather than speed it up.
#pragma once

#include <pleat/attention/cuda/cuda_attention.cuh>

#include "vectors.cuh"

namespace train_moe::gpu {

namespace attention = pleat::attention_kernel;

/// A warp's row of up to `dim` numbers: lane l holds numbers l, l + 32, ..
template <int dim>
struct WarpRow {
  static constexpr int count = dim / 32;
  float at[count];

  __device__ static WarpRow load(const float* row, int elems) {
    WarpRow out;
#pragma unroll
    for (int i = 0; i < count; ++i) out.at[i] = lane() + 32 * i < elems ? row[lane() + 32 * i] : 0;
    return out;
  }
  __device__ void store(float* row, int elems, bool add = false) const {
#pragma unroll
    for (int i = 0; i < count; ++i) {
      float* const to = row + lane() + 32 * i;
      if (lane() + 32 * i < elems) *to = add ? *to + at[i] : at[i];
    }
  }
  __device__ float dot(const WarpRow& other) const {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < count; ++i) sum += at[i] * other.at[i];
    return sum_of_lanes<32>(sum);
  }
  /// this = this * scale + other * factor.
  __device__ void mix(float scale, const WarpRow& other, float factor) {
#pragma unroll
    for (int i = 0; i < count; ++i) at[i] = at[i] * scale + other.at[i] * factor;
  }

 private:
  __device__ static int lane() {
    return static_cast<int>(threadIdx.x) % 32;
  }
};

/// One warp per (token, head, batch entry): f(token, head, batch).
template <class F>
__device__ void for_each_warp_row(std::int64_t tokens, int heads, int batch, F f) {
  const std::int64_t rows = tokens * heads * batch, step = static_cast<std::int64_t>(gridDim.x) * (threads / 32);
  for (std::int64_t row = blockIdx.x * (threads / 32) + threadIdx.x / 32; row < rows; row += step) {
    f(row % tokens, static_cast<int>(row / tokens % heads), static_cast<int>(row / tokens / heads));
  }
}

template <class Dims>
PLEAT_KERNEL void __launch_bounds__(threads) plain_forward_kernel(const attention::Forward<float> a) {
  using Keys = WarpRow<Dims::qk>;
  using Values = WarpRow<Dims::v>;
  const attention::Extents& x = a.extents;
  for_each_warp_row(x.q_tokens, x.q_heads, x.batch, [&](std::int64_t query, int head, int batch) {
    const int kv_head = head / (x.q_heads / x.kv_heads);
    const Keys q = Keys::load(a.q.at(batch, query, head), x.qk_dim);
    float most = a.first ? -INFINITY : a.lse.at(batch, query, head), sum = a.first ? 0.0f : 1.0f;
    Values out{};
    if (!a.first) out = Values::load(a.o_acc.at(batch, query, head), x.v_dim);
    if (most == -INFINITY) sum = 0;
    for (int i = 0; i < a.work.count; ++i) {
      const pleat::Rectangle r = a.work.rectangles[i];
      if (query < r.q0 || query >= r.q1) continue;
      for (std::int64_t key = r.k0; key < r.keys_end(query); ++key) {
        const float score = a.scale * q.dot(Keys::load(a.k.at(batch, key, kv_head), x.qk_dim));
        const float top = fmaxf(most, score), kept = expf(most - top), weight = expf(score - top);
        out.mix(kept, Values::load(a.v.at(batch, key, kv_head), x.v_dim), weight);
        sum = sum * kept + weight;
        most = top;
      }
    }
    // The running result is kept normalized.
    out.mix(sum == 0 ? 0.0f : 1 / sum, out, 0);
    if (threadIdx.x % 32 == 0) a.lse.at(batch, query, head) = sum == 0 ? -INFINITY : most + logf(sum);
    if (a.last) {
      out.store(a.out.at(batch, query, head), x.v_dim);
    } else {
      out.store(a.o_acc.at(batch, query, head), x.v_dim);
    }
  });
}

/// The weight of a pair, and scale times the gradient of its score.
struct Pair {
  float weight, dscore;
  template <class Keys, class Values>
  __device__ Pair(const attention::Backward<float>& a, const Keys& q, const Keys& k, const Values& dout,
                  const Values& v, float lse, float delta)
      : weight(lse == -INFINITY ? 0.0f : expf(a.scale * q.dot(k) - lse)),
        dscore(a.scale * weight * (dout.dot(v) - delta)) {}
};

template <class Dims>
PLEAT_KERNEL void __launch_bounds__(threads) plain_query_kernel(const attention::Backward<float> a) {
  using Keys = WarpRow<Dims::qk>;
  using Values = WarpRow<Dims::v>;
  const attention::Extents& x = a.extents;
  for_each_warp_row(x.q_tokens, x.q_heads, x.batch, [&](std::int64_t query, int head, int batch) {
    const int kv_head = head / (x.q_heads / x.kv_heads);
    const Keys q = Keys::load(a.q.at(batch, query, head), x.qk_dim);
    const Values dout = Values::load(a.dout.at(batch, query, head), x.v_dim);
    const float lse = a.lse.at(batch, query, head), delta = a.delta.at(batch, query, head);
    Keys dq{};
    for (int i = 0; i < a.work.count; ++i) {
      const pleat::Rectangle r = a.work.rectangles[i];
      if (query < r.q0 || query >= r.q1) continue;
      for (std::int64_t key = r.k0; key < r.keys_end(query); ++key) {
        const Keys k = Keys::load(a.k.at(batch, key, kv_head), x.qk_dim);
        const Pair pair(a, q, k, dout, Values::load(a.v.at(batch, key, kv_head), x.v_dim), lse, delta);
        dq.mix(1, k, pair.dscore);
      }
    }
    dq.store(a.dq.at(batch, query, head), x.qk_dim, a.accumulate_dq);
  });
}

template <class Dims>
PLEAT_KERNEL void __launch_bounds__(threads) plain_key_kernel(const attention::Backward<float> a) {
  using Keys = WarpRow<Dims::qk>;
  using Values = WarpRow<Dims::v>;
  const attention::Extents& x = a.extents;
  for_each_warp_row(x.k_tokens, x.kv_heads, x.batch, [&](std::int64_t key, int kv_head, int batch) {
    const int heads = x.q_heads / x.kv_heads;
    const Keys k = Keys::load(a.k.at(batch, key, kv_head), x.qk_dim);
    const Values v = Values::load(a.v.at(batch, key, kv_head), x.v_dim);
    Keys dk{};
    Values dv{};
    for (int i = 0; i < a.work.count; ++i) {
      const pleat::Rectangle r = a.work.rectangles[i];
      if (key < r.k0 || key >= r.k1) continue;
      for (int head = kv_head * heads; head < (kv_head + 1) * heads; ++head) {
        for (std::int64_t query = r.queries_begin(key); query < r.q1; ++query) {
          const Keys q = Keys::load(a.q.at(batch, query, head), x.qk_dim);
          const Values dout = Values::load(a.dout.at(batch, query, head), x.v_dim);
          const Pair pair(a, q, k, dout, v, a.lse.at(batch, query, head), a.delta.at(batch, query, head));
          dk.mix(1, q, pair.dscore);
          dv.mix(1, dout, pair.weight);
        }
      }
    }
    dk.store(a.dk.at(batch, key, kv_head), x.qk_dim, a.accumulate_dk);
    dv.store(a.dv.at(batch, key, kv_head), x.v_dim, a.accumulate_dv);
  });
}

/// The library's kernels.
template <class T, class Dims>
struct AttentionKernels : attention::KernelTable<T, Dims> {};

/// One warp per row of what is written, so that sums have one order.
template <class Dims>
struct AttentionKernels<float, Dims> {
  static void forward(const attention::Forward<float>& a, const attention::Alignment&, cudaStream_t s) {
    launch(plain_forward_kernel<Dims>, "plain_forward_kernel", a.extents.q_tokens * a.extents.q_heads, a, s);
  }
  static void backward(const attention::Backward<float>& a, const attention::Alignment&, cudaStream_t s) {
    launch(plain_query_kernel<Dims>, "plain_query_kernel", a.extents.q_tokens * a.extents.q_heads, a, s);
    launch(plain_key_kernel<Dims>, "plain_key_kernel", a.extents.k_tokens * a.extents.kv_heads, a, s);
  }
  static void preload() {
    pleat::preload_kernel(plain_forward_kernel<Dims>, "plain_forward_kernel");
    pleat::preload_kernel(plain_query_kernel<Dims>, "plain_query_kernel");
    pleat::preload_kernel(plain_key_kernel<Dims>, "plain_key_kernel");
  }

 private:
  template <class Call>
  static void launch(void (*kernel)(Call), const char* name, std::int64_t rows, const Call& call, cudaStream_t s) {
    if (rows * call.extents.batch == 0) return;
    kernel<<<grid_of(rows * call.extents.batch, threads / 32), threads, 0, s>>>(call);
    pleat::check_launch(name);
  }
};

}  // namespace train_moe::gpu

namespace pleat::inline v0 {

/// What the trainer's models have.
template <>
struct attention_leaf<cuda_device>
    : CudaAttention<TypeList<bfloat16, float>, HeadDimsList<HeadDims<64, 64>, HeadDims<128, 128>, HeadDims<192, 128>>,
                    train_moe::gpu::AttentionKernels> {};

}  // namespace pleat::inline v0
