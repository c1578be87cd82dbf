// Kernels that look at one place at a time: sums, SwiGLU, rotary positions, conversions.
#pragma once

#include <cmath>

#include "vectors.cuh"

namespace train_moe::gpu {

/// Calls `f(at, width constant)` for all elements, in vectors and then one by one.
template <int width, class F>
__device__ __forceinline__ void for_each_vector(std::int64_t elems, F f) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * threads;
  const std::int64_t thread = static_cast<std::int64_t>(blockIdx.x) * threads + threadIdx.x;
  for (std::int64_t v = thread; v < elems / width; v += step) f(v * width, std::integral_constant<int, width>{});
  const std::int64_t rest = elems / width * width + thread;
  if (rest < elems) f(rest, std::integral_constant<int, 1>{});
}

/// out = silu(gate) * up. source: arXiv 2002.05202.
template <class T>
PLEAT_KERNEL void __launch_bounds__(threads) swiglu_kernel(const T* gate, const T* up, T* out, std::int64_t elems) {
  using A = pleat::accumulator_t<T>;
  for_each_vector<full_width<T>>(elems, [&]<int width>(std::int64_t at, std::integral_constant<int, width>) {
    auto g = load<width>(gate, at);
    const auto u = load<width>(up, at);
#pragma unroll
    for (int k = 0; k < width; ++k) {
      const A value = static_cast<A>(g.elem[k]);
      g.elem[k] = static_cast<T>(value / (1 + exp(-value)) * static_cast<A>(u.elem[k]));
    }
    store(out, at, g);
  });
}

/// In place: `act` holds its gradient on entry and swiglu's result on return, `gate` and `up` become their gradients.
template <class T>
PLEAT_KERNEL void __launch_bounds__(threads) swiglu_backward_kernel(T* gate, T* up, T* act, std::int64_t elems) {
  using A = pleat::accumulator_t<T>;
  for_each_vector<full_width<T>>(elems, [&]<int width>(std::int64_t at, std::integral_constant<int, width>) {
    auto d = load<width>(act, at), g = load<width>(gate, at), u = load<width>(up, at);
#pragma unroll
    for (int k = 0; k < width; ++k) {
      const A dy = static_cast<A>(d.elem[k]), value = static_cast<A>(g.elem[k]), other = static_cast<A>(u.elem[k]);
      const A sigmoid = 1 / (1 + exp(-value));
      d.elem[k] = static_cast<T>(value * sigmoid * other);
      g.elem[k] = static_cast<T>(dy * other * sigmoid * (1 + value * (1 - sigmoid)));
      u.elem[k] = static_cast<T>(dy * value * sigmoid);
    }
    store(act, at, d);
    store(gate, at, g);
    store(up, at, u);
  });
}

template <class Out, class In>
PLEAT_KERNEL void __launch_bounds__(threads) convert_kernel(const In* in, Out* out, std::int64_t elems) {
  constexpr int wide = full_width<std::conditional_t<(sizeof(Out) > sizeof(In)), Out, In>>;
  for_each_vector<wide>(elems, [&]<int width>(std::int64_t at, std::integral_constant<int, width>) {
    const auto from = load<width>(in, at);
    Vector<Out, width> to;
#pragma unroll
    for (int k = 0; k < width; ++k) to.elem[k] = static_cast<Out>(from.elem[k]);
    store(out, at, to);
  });
}

template <class A>
PLEAT_KERNEL void add_constant_kernel(A* sum, A value) {
  *sum += value;
}

/// Where heads lie: token t, head h begin at t * token_stride + h * head_stride.
struct HeadStrides {
  std::int64_t token, head;
};

/// Pairs (i, i + dim / 2) of all heads of a CTA's tokens, whose angles are worked out once. source: arXiv 2104.09864.
template <class T, int width>
PLEAT_KERNEL void __launch_bounds__(threads)
    rotate_kernel(T* x, const std::int32_t* positions, std::int64_t tokens, int heads, HeadStrides strides, int half,
                  double log2_theta, int direction, int cta_tokens) {
  using A = pleat::accumulator_t<T>;
  extern __shared__ std::byte shared[];
  A* const cosine = reinterpret_cast<A*>(shared);  // [cta_tokens, half]
  A* const sine = cosine + cta_tokens * half;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * cta_tokens;
  const int count = static_cast<int>(min(static_cast<std::int64_t>(cta_tokens), tokens - first));
  for (int i = static_cast<int>(threadIdx.x); i < count * half; i += threads) {
    const double frequency = exp2(-log2_theta * (i % half) / half);
    double of_sine, of_cosine;
    sincos(positions[first + i / half] * frequency, &of_sine, &of_cosine);
    cosine[i] = static_cast<A>(of_cosine);
    sine[i] = static_cast<A>(direction * of_sine);
  }
  __syncthreads();
  const int vectors = half / width, items = count * heads * vectors;
  for (int item = static_cast<int>(threadIdx.x); item < items; item += threads) {
    const int at = item % vectors * width, head = item / vectors % heads, token = item / vectors / heads;
    T* const row = x + (first + token) * strides.token + head * strides.head;
    auto a = load<width>(row, at), b = load<width>(row, at + half);
#pragma unroll
    for (int k = 0; k < width; ++k) {
      const A c = cosine[token * half + at + k], s = sine[token * half + at + k];
      const A u = static_cast<A>(a.elem[k]), v = static_cast<A>(b.elem[k]);
      a.elem[k] = static_cast<T>(u * c - v * s);
      b.elem[k] = static_cast<T>(v * c + u * s);
    }
    store(row, at, a);
    store(row, at + half, b);
  }
}

/// Launches a kernel of for_each_vector; arrays are aligned to 16 bytes.
template <int width, class... Params, class... Args>
void launch_pointwise(void (*kernel)(Params...), const char* name, std::int64_t elems, cudaStream_t s, Args... args) {
  if (elems == 0) return;
  kernel<<<grid_of((elems + width - 1) / width), threads, 0, s>>>(args..., elems);
  pleat::check_launch(name);
}

template <class T>
void rotate(T* x, const std::int32_t* positions, std::int64_t tokens, std::int64_t heads, std::int64_t dim,
            HeadStrides strides, double theta, int direction, cudaStream_t s) {
  if (tokens == 0) return;
  const int half = static_cast<int>(dim / 2);
  const int cta_tokens = std::clamp(threads / half, 1, 16);
  with_width<T>(is_vectorizable<T>({half, strides.token, strides.head}, {x}), [&]<int width>(
                                                                                  std::integral_constant<int, width>) {
    rotate_kernel<T, width><<<static_cast<unsigned>((tokens + cta_tokens - 1) / cta_tokens), threads,
                              2 * sizeof(pleat::accumulator_t<T>) * static_cast<std::size_t>(cta_tokens * half), s>>>(
        x, positions, tokens, static_cast<int>(heads), strides, half, std::log2(theta), direction, cta_tokens);
    pleat::check_launch("rotate_kernel");
  });
}

}  // namespace train_moe::gpu
