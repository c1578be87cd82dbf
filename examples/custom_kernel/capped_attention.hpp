// A local kernel of one's own for the ring: attention whose scores are capped, cap * tanh(score / cap).
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include <pleat/attention/host/leaf.hpp>

/// Forward and backward are its own; delta and store are those of the host. float only.
struct CappedAttention : pleat::attention_leaf<pleat::host_device> {
  float cap = 1;

  void forward(const pleat::AttentionForward& a, pleat::HostStream) const {
    each_row(a.q, [&](auto b, auto query, auto head) {
      float *o = at(a.o_acc, b, query, head), *lse = at(a.lse, b, head, query);
      if (a.first) *lse = -std::numeric_limits<float>::infinity(), std::fill_n(o, a.v.extent(3), 0.0f);
      each_key(a, query, [&](auto key) {
        const float s = score(a, b, query, head, key), top = std::max(*lse, s);
        const float merged = top + std::log(std::exp(*lse - top) + std::exp(s - top));
        const float *v = at(a.v, b, key, kv(a, head)), keep = std::exp(*lse - merged), p = std::exp(s - merged);
        for (int d = 0; d < a.v.extent(3); ++d) o[d] = keep * o[d] + p * v[d];
        *lse = merged;
      });
      if (a.last) std::copy_n(o, a.v.extent(3), at(a.out, b, query, head));
    });
  }
  void backward(const pleat::AttentionBackward& a, pleat::HostStream) const {
    if (!a.accumulate_dq) each_row(a.dq, [&](auto... row) { std::fill_n(at(a.dq, row...), a.q.extent(3), 0.0f); });
    if (!a.accumulate_dk) each_row(a.dk, [&](auto... row) { std::fill_n(at(a.dk, row...), a.q.extent(3), 0.0f); });
    if (!a.accumulate_dv) each_row(a.dv, [&](auto... row) { std::fill_n(at(a.dv, row...), a.v.extent(3), 0.0f); });
    each_row(a.q, [&](auto b, auto query, auto head) {
      const float *q = at(a.q, b, query, head), *dout = at(a.dout, b, query, head);
      each_key(a, query, [&](auto key) {
        const float *k = at(a.k, b, key, kv(a, head)), *v = at(a.v, b, key, kv(a, head));
        const float s = score(a, b, query, head, key), p = std::exp(s - *at(a.lse, b, head, query));
        const float dp = dot(dout, v, a.v.extent(3)) - *at(a.delta, b, head, query);
        const float ds = p * dp * (1 - s / cap * (s / cap)) * static_cast<float>(a.scale);
        for (int d = 0; d < a.v.extent(3); ++d) at(a.dv, b, key, kv(a, head))[d] += p * dout[d];
        for (int d = 0; d < a.q.extent(3); ++d) at(a.dk, b, key, kv(a, head))[d] += ds * q[d];
        for (int d = 0; d < a.q.extent(3); ++d) at(a.dq, b, query, head)[d] += ds * k[d];
      });
    });
  }

 private:
  static float* at(const pleat::TensorRef& t, std::int64_t x, std::int64_t y, std::int64_t z) {
    return t.as<float>() + x * t.stride(0) + y * t.stride(1) + z * t.stride(2);
  }
  static float dot(const float* x, const float* y, std::int64_t n) {
    float sum = 0;
    for (std::int64_t i = 0; i < n; ++i) sum += x[i] * y[i];
    return sum;
  }
  template <class Call>
  static std::int64_t kv(const Call& a, std::int64_t head) {
    return head * a.k.extent(2) / a.q.extent(2);
  }
  template <class Call>
  float score(const Call& a, std::int64_t b, std::int64_t query, std::int64_t head, std::int64_t key) const {
    const float s = dot(at(a.q, b, query, head), at(a.k, b, key, kv(a, head)), a.q.extent(3));
    return cap * std::tanh(static_cast<float>(a.scale) * s / cap);
  }
  template <class F>
  static void each_row(const pleat::TensorRef& t, F f) {
    for (std::int64_t b = 0; b < t.extent(0); ++b)
      for (std::int64_t row = 0; row < t.extent(1); ++row)
        for (std::int64_t head = 0; head < t.extent(2); ++head) f(b, row, head);
  }
  template <class Call, class F>
  static void each_key(const Call& a, std::int64_t query, F f) {
    for (const pleat::Rectangle& r : a.work)
      for (auto key = r.k0; r.q0 <= query && query < r.q1 && key < r.keys_end(query); ++key) f(key);
  }
};
