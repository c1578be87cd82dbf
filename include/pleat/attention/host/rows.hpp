// What attention kernels on the host are written with: rows of tensors, loops over them and over the pairs that a call
// sees.
#pragma once

#include <algorithm>
#include <limits>

#include <pleat/attention/local_kernel.hpp>

namespace pleat::inline v0::host_kernel {

/// A query, of one head, and a key that it sees, of the head of keys and values that belongs to that one.
struct Pair {
  std::int64_t batch, query, head, key, kv_head;
};

/// The rows of a tensor [batch, tokens, heads, dim] of any strides but the last.
template <class T>
struct HeadRows {
  explicit HeadRows(const TensorRef& t)
      : data(t.as<T>()), batch_stride(t.stride(0)), token_stride(t.stride(1)), head_stride(t.stride(2)) {}
  T* at(std::int64_t batch, std::int64_t token, std::int64_t head) const {
    return data + batch * batch_stride + token * token_stride + head * head_stride;
  }
  T* of_query(const Pair& p) const { return at(p.batch, p.query, p.head); }
  T* of_key(const Pair& p) const { return at(p.batch, p.key, p.kv_head); }

  T* data;
  std::int64_t batch_stride, token_stride, head_stride;
};
/// The numbers of a tensor [batch, heads, tokens], one per row of queries.
template <class T>
struct RowStatistics {
  explicit RowStatistics(const TensorRef& t)
      : data(t.as<T>()), batch_stride(t.stride(0)), head_stride(t.stride(1)), token_stride(t.stride(2)) {}
  T& at(std::int64_t batch, std::int64_t token, std::int64_t head) const {
    return data[batch * batch_stride + token * token_stride + head * head_stride];
  }
  T& of_query(const Pair& p) const { return at(p.batch, p.query, p.head); }

  T* data;
  std::int64_t batch_stride, head_stride, token_stride;
};

/// <x, y> over `n` elements: eight partial sums, which a compiler keeps in vector registers without changing the
/// result.
template <class A, class X, class Y>
A dot(const X* x, const Y* y, std::int64_t n) {
  constexpr int lanes = 8;
  A part[lanes] = {};
  std::int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    for (int lane = 0; lane < lanes; ++lane) part[lane] += static_cast<A>(x[i + lane]) * static_cast<A>(y[i + lane]);
  }
  A sum = 0;
  for (; i < n; ++i) sum += static_cast<A>(x[i]) * static_cast<A>(y[i]);
  for (int lane = 0; lane < lanes; ++lane) sum += part[lane];
  return sum;
}
/// y += a * x
template <class A, class X>
void add_scaled(A* y, A a, const X* x, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) y[i] += a * static_cast<A>(x[i]);
}
template <class A, class X>
void add(A* y, const X* x, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) y[i] += x[i];
}

/// f(batch, token, head) for each row of a tensor [batch, tokens, heads, dim].
template <class F>
void for_each_row(const TensorRef& t, F f) {
  for (std::int64_t b = 0; b < t.extent(0); ++b) {
    for (std::int64_t token = 0; token < t.extent(1); ++token) {
      for (std::int64_t h = 0; h < t.extent(2); ++h) f(b, token, h);
    }
  }
}
/// f(Pair) for all pairs of an AttentionForward or AttentionBackward.
template <class Call, class F>
void for_each_pair(const Call& a, F f) {
  const std::int64_t group = a.q.extent(2) / a.k.extent(2);
  for (const Rectangle& r : a.work) {
    for_each_row(a.q, [&](std::int64_t batch, std::int64_t query, std::int64_t head) {
      if (query < r.q0 || query >= r.q1) return;
      for (std::int64_t key = r.k0; key < r.keys_end(query); ++key) f(Pair{batch, query, head, key, head / group});
    });
  }
}

/// Sets all rows of a tensor of `A` to 0.
template <class A>
void zero_rows(const TensorRef& t) {
  const HeadRows<A> rows(t);
  for_each_row(t, [&](auto... row) { std::fill_n(rows.at(row...), t.extent(3), A{0}); });
}
/// What a call writes before it sees the first pair: a running result of no keys when nothing is resumed,
template <class A>
void start(const AttentionForward& a) {
  if (!a.first) return;
  zero_rows<A>(a.o_acc);
  const RowStatistics<A> lse(a.lse);
  for_each_row(a.q, [&](auto... row) { lse.at(row...) = -std::numeric_limits<A>::infinity(); });
}
/// and gradients of 0 where nothing is added to.
template <class A>
void start(const AttentionBackward& a) {
  if (!a.accumulate_dq) zero_rows<A>(a.dq);
  if (!a.accumulate_dk) zero_rows<A>(a.dk);
  if (!a.accumulate_dv) zero_rows<A>(a.dv);
}

}  // namespace pleat::inline v0::host_kernel
