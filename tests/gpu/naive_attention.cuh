// The local attention kernel of CUDA in its simplest form, one thread per row: what shows that the ring's schedule runs
// on a GPU.
#pragma once

#include <cmath>

#include <pleat/attention/local_kernel.hpp>
#include <pleat/core/dtype.hpp>
#include <pleat/cuda/executor.hpp>
#include <pleat/cuda/kernel.hpp>

namespace templates_testing {

using pleat::accumulator_t;
using pleat::Rectangle;
using pleat::TensorRef;

/// A tensor [batch, tokens, heads, dim], or [batch, heads, tokens] as rows of one number, in a kernel's arguments.
template <class T>
struct Rows {
  T* data = nullptr;
  std::int64_t batch_stride = 0, token_stride = 0, head_stride = 0;

  static Rows of(const TensorRef& t) { return {t.as<T>(), t.stride(0), t.stride(1), t.stride(2)}; }
  static Rows of_statistics(const TensorRef& t) { return {t.as<T>(), t.stride(0), t.stride(2), t.stride(1)}; }
  __device__ T* at(std::int64_t batch, std::int64_t token, std::int64_t head) const {
    return data + batch * batch_stride + token * token_stride + head * head_stride;
  }
};

/// The rectangles of one call, by value in the kernel's arguments.
struct WorkList {
  static constexpr std::size_t most = 256;
  explicit WorkList(std::span<const Rectangle> work) : count(static_cast<int>(work.size())) {
    if (work.size() > most)
      pleat::fail<pleat::error>("the naive kernel takes ", most, " rectangles, not ", work.size());
    std::copy(work.begin(), work.end(), rectangles);
  }
  Rectangle rectangles[most];
  int count;
};

/// The extents of a call, and the row of each thread.
struct CallShape {
  std::int64_t batch, q_tokens, k_tokens;
  int q_heads, kv_heads, qk_dim, v_dim;

  struct Row {
    std::int64_t batch, token;
    int head;
  };
  __device__ static std::int64_t thread() { return static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; }
  __device__ bool row(std::int64_t tokens, int heads, Row& row) const {
    const std::int64_t i = thread();
    row = {i / heads / (tokens == 0 ? 1 : tokens), i / heads % (tokens == 0 ? 1 : tokens), static_cast<int>(i % heads)};
    return i < batch * tokens * heads;
  }
};

template <class A, class X, class Y>
__device__ A dot(const X* x, const Y* y, int n) {
  A sum = 0;
  for (int i = 0; i < n; ++i) sum += static_cast<A>(x[i]) * static_cast<A>(y[i]);
  return sum;
}
template <class A, class X>
__device__ void add_scaled(A* y, A a, const X* x, int n) {
  for (int i = 0; i < n; ++i) y[i] += a * static_cast<A>(x[i]);
}

template <class T>
struct ForwardArguments {
  using A = accumulator_t<T>;
  CallShape shape;
  Rows<const T> q, k, v;
  Rows<A> o_acc, lse;
  Rows<T> out;
  A scale;
  bool first, last;
};

template <class T>
PLEAT_KERNEL void naive_forward(const ForwardArguments<T> a, const __grid_constant__ WorkList work) {
  using A = accumulator_t<T>;
  CallShape::Row row;
  if (!a.shape.row(a.shape.q_tokens, a.shape.q_heads, row)) return;
  const auto [b, query, h] = row;
  const int kv = h / (a.shape.q_heads / a.shape.kv_heads), v_dim = a.shape.v_dim;
  const T* const q = a.q.at(b, query, h);
  A* const o = a.o_acc.at(b, query, h);
  A& lse = *a.lse.at(b, query, h);
  if (a.first) {
    for (int d = 0; d < v_dim; ++d) o[d] = 0;
    lse = -INFINITY;
  }
  const auto score = [&](std::int64_t key) { return a.scale * dot<A>(q, a.k.at(b, key, kv), a.shape.qk_dim); };
  const auto each_key = [&](auto f) {
    for (int i = 0; i < work.count; ++i) {
      const Rectangle& r = work.rectangles[i];
      if (query < r.q0 || query >= r.q1) continue;
      for (std::int64_t key = r.k0; key < r.keys_end(query); ++key) f(key);
    }
  };
  A peak = lse;
  each_key([&](std::int64_t key) { peak = max(peak, score(key)); });
  if (peak != -INFINITY) {
    A weight = lse == -INFINITY ? A{0} : exp(lse - peak);
    for (int d = 0; d < v_dim; ++d) o[d] *= weight;
    each_key([&](std::int64_t key) {
      const A p = exp(score(key) - peak);
      weight += p;
      add_scaled(o, p, a.v.at(b, key, kv), v_dim);
    });
    for (int d = 0; d < v_dim; ++d) o[d] /= weight;
    lse = peak + log(weight);
  }
  if (a.last) {
    for (int d = 0; d < v_dim; ++d) a.out.at(b, query, h)[d] = static_cast<T>(o[d]);
  }
}

template <class T>
struct BackwardArguments {
  using A = accumulator_t<T>;
  static constexpr int max_head_dim = 64;
  CallShape shape;
  Rows<const T> q, k, v, dout;
  Rows<const A> lse, delta;
  Rows<A> dq, dk, dv;
  A scale;
  bool accumulate_dq, accumulate_dk, accumulate_dv;

  struct Pair {
    A p, ds;
  };
  __device__ Pair pair(std::int64_t b, std::int64_t query, int h, std::int64_t key, int kv) const {
    const A row_lse = *lse.at(b, query, h);
    if (row_lse == -INFINITY) return {0, 0};
    const A p = exp(scale * dot<A>(q.at(b, query, h), k.at(b, key, kv), shape.qk_dim) - row_lse);
    const A dp = dot<A>(dout.at(b, query, h), v.at(b, key, kv), shape.v_dim);
    return {p, scale * p * (dp - *delta.at(b, query, h))};
  }
};
template <class A>
__device__ void put_row(A* to, const A* row, int n, bool accumulate) {
  for (int d = 0; d < n; ++d) to[d] = accumulate ? to[d] + row[d] : row[d];
}

template <class T>
PLEAT_KERNEL void naive_backward_queries(const BackwardArguments<T> a, const __grid_constant__ WorkList work) {
  using A = accumulator_t<T>;
  CallShape::Row row;
  if (!a.shape.row(a.shape.q_tokens, a.shape.q_heads, row)) return;
  const auto [b, query, h] = row;
  const int kv = h / (a.shape.q_heads / a.shape.kv_heads);
  A dq[BackwardArguments<T>::max_head_dim] = {};
  for (int i = 0; i < work.count; ++i) {
    const Rectangle& r = work.rectangles[i];
    if (query < r.q0 || query >= r.q1) continue;
    for (std::int64_t key = r.k0; key < r.keys_end(query); ++key) {
      add_scaled(dq, a.pair(b, query, h, key, kv).ds, a.k.at(b, key, kv), a.shape.qk_dim);
    }
  }
  put_row(a.dq.at(b, query, h), dq, a.shape.qk_dim, a.accumulate_dq);
}

template <class T>
PLEAT_KERNEL void naive_backward_keys(const BackwardArguments<T> a, const __grid_constant__ WorkList work) {
  using A = accumulator_t<T>;
  CallShape::Row row;
  if (!a.shape.row(a.shape.k_tokens, a.shape.kv_heads, row)) return;
  const auto [b, key, kv] = row;
  const int group = a.shape.q_heads / a.shape.kv_heads;
  A dk[BackwardArguments<T>::max_head_dim] = {}, dv[BackwardArguments<T>::max_head_dim] = {};
  for (int i = 0; i < work.count; ++i) {
    const Rectangle& r = work.rectangles[i];
    if (key < r.k0 || key >= r.k1) continue;
    for (int h = kv * group; h < (kv + 1) * group; ++h) {
      for (std::int64_t query = r.queries_begin(key); query < r.q1; ++query) {
        const auto [p, ds] = a.pair(b, query, h, key, kv);
        add_scaled(dv, p, a.dout.at(b, query, h), a.shape.v_dim);
        add_scaled(dk, ds, a.q.at(b, query, h), a.shape.qk_dim);
      }
    }
  }
  put_row(a.dk.at(b, key, kv), dk, a.shape.qk_dim, a.accumulate_dk);
  put_row(a.dv.at(b, key, kv), dv, a.shape.v_dim, a.accumulate_dv);
}

template <class T>
PLEAT_KERNEL void naive_delta(CallShape shape, Rows<accumulator_t<T>> delta, Rows<const T> out, Rows<const T> dout) {
  CallShape::Row row;
  if (!shape.row(shape.q_tokens, shape.q_heads, row)) return;
  const auto [b, token, h] = row;
  *delta.at(b, token, h) = dot<accumulator_t<T>>(out.at(b, token, h), dout.at(b, token, h), shape.v_dim);
}

template <class T>
PLEAT_KERNEL void naive_store(CallShape shape, Rows<T> out, Rows<const accumulator_t<T>> first,
                              Rows<const accumulator_t<T>> last, bool adds) {
  CallShape::Row row;
  if (!shape.row(shape.q_tokens, shape.q_heads, row)) return;
  const auto [b, token, h] = row;
  for (int d = 0; d < shape.v_dim; ++d) {
    const accumulator_t<T> term = first.at(b, token, h)[d];
    out.at(b, token, h)[d] = static_cast<T>(adds ? term + last.at(b, token, h)[d] : term);
  }
}

using NaiveTypes = pleat::TypeList<float, pleat::bfloat16>;
constexpr unsigned naive_threads = 64;
inline unsigned naive_grid(std::int64_t rows) {
  return static_cast<unsigned>((rows + naive_threads - 1) / naive_threads);
}

}  // namespace templates_testing

/// Of float and bfloat16, head dims up to 64 in backward, 256 rectangles per call.
template <>
struct pleat::attention_leaf<pleat::cuda_device> {
  static void forward(const AttentionForward& a, cudaStream_t s) {
    using namespace templates_testing;
    dispatch_dtype(NaiveTypes{}, a.q.dtype(), [&](auto type) {
      using T = typename decltype(type)::type;
      using A = accumulator_t<T>;
      const CallShape shape = shape_of(a.q, a.k, a.v);
      const unsigned grid = naive_grid(shape.batch * shape.q_tokens * shape.q_heads);
      if (grid == 0) return;
      const ForwardArguments<T> arguments{shape,
                                          Rows<const T>::of(a.q),
                                          Rows<const T>::of(a.k),
                                          Rows<const T>::of(a.v),
                                          Rows<A>::of(a.o_acc),
                                          Rows<A>::of_statistics(a.lse),
                                          Rows<T>::of(a.out),
                                          static_cast<A>(a.scale),
                                          a.first,
                                          a.last};
      naive_forward<T><<<grid, naive_threads, 0, s>>>(arguments, WorkList(a.work.host));
      check_launch("naive_forward");
    });
  }

  static void delta(const TensorRef& delta, const TensorRef& out, const TensorRef& dout, cudaStream_t s) {
    using namespace templates_testing;
    dispatch_dtype(NaiveTypes{}, out.dtype(), [&](auto type) {
      using T = typename decltype(type)::type;
      const unsigned grid = naive_grid(out.extent(0) * out.extent(1) * out.extent(2));
      if (grid == 0) return;
      naive_delta<T><<<grid, naive_threads, 0, s>>>(shape_of(out, out, out),
                                                    Rows<accumulator_t<T>>::of_statistics(delta),
                                                    Rows<const T>::of(out), Rows<const T>::of(dout));
      check_launch("naive_delta");
    });
  }

  static void backward(const AttentionBackward& a, cudaStream_t s) {
    using namespace templates_testing;
    dispatch_dtype(NaiveTypes{}, a.q.dtype(), [&](auto type) {
      using T = typename decltype(type)::type;
      using A = accumulator_t<T>;
      const CallShape shape = shape_of(a.q, a.k, a.v);
      constexpr int most = BackwardArguments<T>::max_head_dim;
      if (shape.qk_dim > most || shape.v_dim > most) {
        fail<shape_error>("pleat[A06]: qk_dim=", shape.qk_dim, ", v_dim=", shape.v_dim,
                          ": the naive kernel takes head dims up to ", most);
      }
      const BackwardArguments<T> arguments{shape,
                                           Rows<const T>::of(a.q),
                                           Rows<const T>::of(a.k),
                                           Rows<const T>::of(a.v),
                                           Rows<const T>::of(a.dout),
                                           Rows<const A>::of_statistics(a.lse),
                                           Rows<const A>::of_statistics(a.delta),
                                           Rows<A>::of(a.dq),
                                           Rows<A>::of(a.dk),
                                           Rows<A>::of(a.dv),
                                           static_cast<A>(a.scale),
                                           a.accumulate_dq,
                                           a.accumulate_dk,
                                           a.accumulate_dv};
      const WorkList work(a.work.host);
      const unsigned queries = naive_grid(shape.batch * shape.q_tokens * shape.q_heads);
      if (queries != 0) naive_backward_queries<T><<<queries, naive_threads, 0, s>>>(arguments, work);
      check_launch("naive_backward_queries");
      const unsigned keys = naive_grid(shape.batch * shape.k_tokens * shape.kv_heads);
      if (keys != 0) naive_backward_keys<T><<<keys, naive_threads, 0, s>>>(arguments, work);
      check_launch("naive_backward_keys");
    });
  }

  static void store(const TensorRef& out, std::span<const TensorRef> terms, cudaStream_t s) {
    using namespace templates_testing;
    dispatch_dtype(NaiveTypes{}, out.dtype(), [&](auto type) {
      using T = typename decltype(type)::type;
      const unsigned grid = naive_grid(out.extent(0) * out.extent(1) * out.extent(2));
      if (grid == 0) return;
      naive_store<T><<<grid, naive_threads, 0, s>>>(shape_of(out, out, out), Rows<T>::of(out),
                                                    Rows<const accumulator_t<T>>::of(terms.front()),
                                                    Rows<const accumulator_t<T>>::of(terms.back()), terms.size() == 2);
      check_launch("naive_store");
    });
  }

 private:
  static templates_testing::CallShape shape_of(const TensorRef& q, const TensorRef& k, const TensorRef& v) {
    return {q.extent(0),
            q.extent(1),
            k.extent(1),
            static_cast<int>(q.extent(2)),
            static_cast<int>(k.extent(2)),
            static_cast<int>(q.extent(3)),
            static_cast<int>(v.extent(3))};
  }
};
