// Attention in float64 on the GPU, one thread block per row: what its kernels are compared with.
#pragma once

#include <cmath>

#include <pleat/attention/cuda/arguments.hpp>
#include <pleat/cuda/check.hpp>
#include <pleat/cuda/kernel.hpp>

namespace reference_attention {

using namespace pleat;
using namespace pleat::attention_kernel;

inline constexpr int threads = 128;

template <class F>
__device__ double block_sum(F&& term, std::int64_t begin, std::int64_t end) {
  __shared__ double parts[threads];
  double sum = 0;
  for (std::int64_t i = begin + threadIdx.x; i < end; i += threads) sum += term(i);
  __syncthreads();
  parts[threadIdx.x] = sum;
  __syncthreads();
  for (int half = threads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) parts[threadIdx.x] += parts[threadIdx.x + half];
    __syncthreads();
  }
  return parts[0];
}

template <class A, class B>
__device__ double dot(const A* a, const B* b, int n) {
  double sum = 0;
  for (int i = 0; i < n; ++i) sum += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  return sum;
}

/// The running result in float64: o [batch, q_tokens, q_heads, v_dim], lse [batch, q_tokens, q_heads], dense.
struct Running {
  double* o;
  double* lse;
};

/// Scores are shifted by the row's largest possible one, |scale| |q| max |k|, which needs no first pass over the keys.
template <class T>
PLEAT_KERNEL void forward_row(Forward<T> a, Running r) {
  const Extents& e = a.extents;
  const std::int64_t row = blockIdx.x, q = row / e.q_heads % e.q_tokens, b = row / e.q_heads / e.q_tokens;
  const int h = static_cast<int>(row % e.q_heads), kv = h / (e.q_heads / e.kv_heads);
  double* const o = r.o + row * e.v_dim;
  __shared__ double peak_, parts[threads];
  const auto score = [&](std::int64_t k) {
    return static_cast<double>(a.scale) * dot(a.q.at(b, q, h), a.k.at(b, k, kv), e.qk_dim);
  };
  double peak = a.first ? -INFINITY : r.lse[row];
  const double before = peak;
  for (int i = 0; i < a.work.count; ++i) {
    const Rectangle w = a.work.rectangles[i];
    if (q < w.q0 || q >= w.q1) continue;
    for (std::int64_t k = w.k0 + threadIdx.x; k < w.keys_end(q); k += threads) peak = fmax(peak, score(k));
  }
  parts[threadIdx.x] = peak;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (double x : parts) peak = fmax(peak, x);
    peak_ = peak;
  }
  __syncthreads();
  peak = peak_;
  if (peak == -INFINITY) {
    for (int d = threadIdx.x; d < e.v_dim; d += threads) o[d] = 0;
    if (threadIdx.x == 0) r.lse[row] = -INFINITY;
    return;
  }
  const double kept = before == -INFINITY ? 0 : exp(before - peak);
  double sum = kept;
  for (int i = 0; i < a.work.count; ++i) {
    const Rectangle w = a.work.rectangles[i];
    if (q < w.q0 || q >= w.q1) continue;
    sum += block_sum([&](std::int64_t k) { return exp(score(k) - peak); }, w.k0, w.keys_end(q));
  }
  for (int d = threadIdx.x; d < e.v_dim; d += threads) o[d] = kept == 0 ? 0 : o[d] * kept;
  __shared__ double weights[threads];
  for (int i = 0; i < a.work.count; ++i) {
    const Rectangle w = a.work.rectangles[i];
    if (q < w.q0 || q >= w.q1) continue;
    const std::int64_t end = w.keys_end(q);
    for (std::int64_t k0 = w.k0; k0 < end; k0 += threads) {
      __syncthreads();
      weights[threadIdx.x] = k0 + threadIdx.x < end ? exp(score(k0 + threadIdx.x) - peak) : 0;
      __syncthreads();
      for (int d = threadIdx.x; d < e.v_dim; d += threads) {
        for (int k = 0; k < threads && k0 + k < end; ++k)
          o[d] += weights[k] * static_cast<double>(a.v.at(b, k0 + k, kv)[d]);
      }
    }
  }
  for (int d = threadIdx.x; d < e.v_dim; d += threads) o[d] /= sum;
  if (threadIdx.x == 0) r.lse[row] = peak + log(sum);
}

template <class T>
void forward(const Forward<T>& a, Running r) {
  const Extents& e = a.extents;
  forward_row<T><<<static_cast<unsigned>(e.batch * e.q_tokens * e.q_heads), threads>>>(a, r);
  check_launch("reference forward");
}

/// Gradients in float64, dense: dq [batch, q_tokens, q_heads, qk_dim], dk and dv as k and v; added to what is there.
struct Gradients {
  double *dq, *dk, *dv;
};

template <class T>
struct Pair {
  double p, ds;
  __device__ static Pair of(const Backward<T>& a, std::int64_t b, std::int64_t q, int h, std::int64_t k, int kv) {
    const double lse = a.lse.at(b, q, h);
    if (lse == -INFINITY) return {0, 0};
    const double p = exp(static_cast<double>(a.scale) * dot(a.q.at(b, q, h), a.k.at(b, k, kv), a.extents.qk_dim) - lse);
    return {p, a.scale * p * (dot(a.dout.at(b, q, h), a.v.at(b, k, kv), a.extents.v_dim) - a.delta.at(b, q, h))};
  }
};

template <class T>
PLEAT_KERNEL void backward_query(Backward<T> a, double* dq) {
  const Extents& e = a.extents;
  const std::int64_t row = blockIdx.x, q = row / e.q_heads % e.q_tokens, b = row / e.q_heads / e.q_tokens;
  const int h = static_cast<int>(row % e.q_heads), kv = h / (e.q_heads / e.kv_heads);
  __shared__ double ds[threads];
  for (int i = 0; i < a.work.count; ++i) {
    const Rectangle w = a.work.rectangles[i];
    if (q < w.q0 || q >= w.q1) continue;
    const std::int64_t end = w.keys_end(q);
    for (std::int64_t k0 = w.k0; k0 < end; k0 += threads) {
      __syncthreads();
      ds[threadIdx.x] = k0 + threadIdx.x < end ? Pair<T>::of(a, b, q, h, k0 + threadIdx.x, kv).ds : 0;
      __syncthreads();
      for (int d = threadIdx.x; d < e.qk_dim; d += threads) {
        for (int k = 0; k < threads && k0 + k < end; ++k) {
          dq[row * e.qk_dim + d] += ds[k] * static_cast<double>(a.k.at(b, k0 + k, kv)[d]);
        }
      }
    }
  }
}

template <class T>
PLEAT_KERNEL void backward_key(Backward<T> a, double* dk, double* dv) {
  const Extents& e = a.extents;
  const std::int64_t row = blockIdx.x, k = row / e.kv_heads % e.k_tokens, b = row / e.kv_heads / e.k_tokens;
  const int kv = static_cast<int>(row % e.kv_heads), group = e.q_heads / e.kv_heads;
  __shared__ double ps[threads], dss[threads];
  for (int i = 0; i < a.work.count; ++i) {
    const Rectangle w = a.work.rectangles[i];
    if (k < w.k0 || k >= w.k1) continue;
    for (int h = kv * group; h < (kv + 1) * group; ++h) {
      for (std::int64_t q0 = w.queries_begin(k); q0 < w.q1; q0 += threads) {
        __syncthreads();
        const std::int64_t q = q0 + threadIdx.x;
        const Pair<T> pair = q < w.q1 ? Pair<T>::of(a, b, q, h, k, kv) : Pair<T>{0, 0};
        ps[threadIdx.x] = pair.p;
        dss[threadIdx.x] = pair.ds;
        __syncthreads();
        for (int j = 0; j < threads && q0 + j < w.q1; ++j) {
          for (int d = threadIdx.x; d < e.v_dim; d += threads) {
            dv[row * e.v_dim + d] += ps[j] * static_cast<double>(a.dout.at(b, q0 + j, h)[d]);
          }
          for (int d = threadIdx.x; d < e.qk_dim; d += threads) {
            dk[row * e.qk_dim + d] += dss[j] * static_cast<double>(a.q.at(b, q0 + j, h)[d]);
          }
        }
      }
    }
  }
}

template <class T>
void backward(const Backward<T>& a, Gradients g) {
  const Extents& e = a.extents;
  backward_query<T><<<static_cast<unsigned>(e.batch * e.q_tokens * e.q_heads), threads>>>(a, g.dq);
  backward_key<T><<<static_cast<unsigned>(e.batch * e.k_tokens * e.kv_heads), threads>>>(a, g.dk, g.dv);
  check_launch("reference backward");
}

}  // namespace reference_attention
