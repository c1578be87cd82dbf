// The local attention kernel on the host: the oracle of the others, in plain loops over rows.
#pragma once

#include <cmath>
#include <limits>

#include <pleat/attention/host/rows.hpp>
#include <pleat/core/dtype.hpp>
#include <pleat/core/host/executor.hpp>

namespace pleat::inline v0 {

template <>
struct attention_leaf<host_device> {
  /// The largest qk_dim of the backward pass, and the largest v_dim: one row of each gradient stands on the stack.
  static constexpr std::int64_t max_head_dim = 1024;

  static void forward(const AttentionForward& a, HostStream) {
    dispatch_dtype(AttentionTypes{}, a.q.dtype(), [&](auto type) { forward_as<typename decltype(type)::type>(a); });
  }

  static bool forward(const AttentionForwardBlocks& a, HostStream) {
    dispatch_dtype(AttentionTypes{}, a.call.q.dtype(),
                   [&](auto type) { forward_as<typename decltype(type)::type>(a.call, &a); });
    return true;
  }

  static void delta(const TensorRef& delta, const TensorRef& out, const TensorRef& dout, HostStream) {
    dispatch_dtype(AttentionTypes{}, out.dtype(), [&](auto type) {
      using T = typename decltype(type)::type;
      using A = accumulator_t<T>;
      const host_kernel::HeadRows<const T> outs(out), douts(dout);
      const host_kernel::RowStatistics<A> deltas(delta);
      host_kernel::for_each_row(out, [&](auto... row) {
        deltas.at(row...) = host_kernel::dot<A>(outs.at(row...), douts.at(row...), out.extent(3));
      });
    });
  }

  static void backward(const AttentionBackward& a, HostStream) {
    if (a.q.extent(3) > max_head_dim || a.v.extent(3) > max_head_dim) {
      fail<shape_error>("pleat[A06]: qk_dim=", a.q.extent(3), ", v_dim=", a.v.extent(3),
                        ": the host kernel takes head dims up to ", max_head_dim);
    }
    dispatch_dtype(AttentionTypes{}, a.q.dtype(), [&](auto type) { backward_as<typename decltype(type)::type>(a); });
  }

  static void store(const TensorRef& out, std::span<const TensorRef> terms, HostStream) {
    dispatch_dtype(AttentionTypes{}, out.dtype(), [&](auto type) {
      using T = typename decltype(type)::type;
      const host_kernel::HeadRows<T> outs(out);
      const host_kernel::HeadRows<const accumulator_t<T>> first(terms.front()), last(terms.back());
      host_kernel::for_each_row(out, [&](auto... row) {
        const auto* const a = first.at(row...);
        const auto* const b = last.at(row...);
        T* const to = outs.at(row...);
        for (std::int64_t i = 0; i < out.extent(3); ++i) to[i] = static_cast<T>(terms.size() == 1 ? a[i] : a[i] + b[i]);
      });
    });
  }

 private:
  template <class T, class A>
  static void round_row(T* out, const A* acc, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i) out[i] = static_cast<T>(acc[i]);
  }
  /// One call for dtype T; the tensors as rows.
  template <class T>
  struct Forward {
    using A = accumulator_t<T>;
    static constexpr A nothing = -std::numeric_limits<A>::infinity();

    explicit Forward(const AttentionForward& a)
        : q(a.q),
          k(a.k),
          v(a.v),
          o_acc(a.o_acc),
          lse(a.lse),
          scale(static_cast<A>(a.scale)),
          group(a.q.extent(2) / a.k.extent(2)),
          qk_dim(a.q.extent(3)),
          v_dim(a.v.extent(3)) {}

    /// Takes the keys [begin, end) into the running result of one query row.
    void see(std::int64_t b, std::int64_t query, std::int64_t h, std::int64_t begin, std::int64_t end) const {
      constexpr std::int64_t tile = 64;
      A score[tile];
      const T* q_row = q.at(b, query, h);
      A* o = o_acc.at(b, query, h);
      A& row_lse = lse.at(b, query, h);
      A peak = row_lse;
      A weight = row_lse == nothing ? 0 : 1;
      for (; begin < end; begin += tile) {
        const std::int64_t count = std::min(tile, end - begin);
        const A old_peak = peak;
        for (std::int64_t j = 0; j < count; ++j) {
          score[j] = scale * host_kernel::dot<A>(q_row, k.at(b, begin + j, h / group), qk_dim);
          peak = std::max(peak, score[j]);
        }
        const A shift = peak == nothing ? 0 : peak;  // nothing - nothing would be NaN
        const A keep = std::exp(old_peak - shift);
        weight *= keep;
        for (std::int64_t d = 0; d < v_dim; ++d) o[d] *= keep;
        for (std::int64_t j = 0; j < count; ++j) {
          const A p = std::exp(score[j] - shift);
          weight += p;
          host_kernel::add_scaled(o, p, v.at(b, begin + j, h / group), v_dim);
        }
      }
      if (weight == 0) return;  // all scores are -inf: as if no key were seen
      for (std::int64_t d = 0; d < v_dim; ++d) o[d] /= weight;
      row_lse = peak + std::log(weight);
    }

    host_kernel::HeadRows<const T> q, k, v;
    host_kernel::HeadRows<A> o_acc;
    host_kernel::RowStatistics<A> lse;
    A scale;
    std::int64_t group, qk_dim, v_dim;
  };

  /// `others`: of a call on several blocks; else null.
  template <class T>
  static void forward_as(const AttentionForward& a, const AttentionForwardBlocks* others = nullptr) {
    const Forward<T> f(a);
    Forward<T> of_others = f;
    if (others != nullptr) {
      of_others.k = host_kernel::HeadRows<const T>(others->k);
      of_others.v = host_kernel::HeadRows<const T>(others->v);
    }
    const std::int64_t own_keys = a.k.extent(1);
    host_kernel::start<accumulator_t<T>>(a);
    for (std::int64_t b = 0; b < a.q.extent(0); ++b) {
      for (std::int64_t h = 0; h < a.q.extent(2); ++h) {
        for (const Rectangle& r : a.work) {
          const bool is_own = r.k0 < own_keys;
          const std::int64_t before = is_own ? 0 : own_keys;
          for (std::int64_t query = r.q0; query < r.q1; ++query) {
            if (r.keys_end(query) == r.k0) continue;
            (is_own ? f : of_others).see(b, query, h, r.k0 - before, r.keys_end(query) - before);
          }
        }
      }
    }
    if (a.last) {
      const host_kernel::HeadRows<T> out(a.out);
      host_kernel::for_each_row(a.q, [&](auto... row) { round_row(out.at(row...), f.o_acc.at(row...), f.v_dim); });
    }
  }

  template <class T>
  struct Backward {
    using A = accumulator_t<T>;

    explicit Backward(const AttentionBackward& a)
        : q(a.q),
          k(a.k),
          v(a.v),
          dout(a.dout),
          lse(a.lse),
          delta(a.delta),
          dq(a.dq),
          dk(a.dk),
          dv(a.dv),
          work(a.work),
          scale(static_cast<A>(a.scale)),
          group(a.q.extent(2) / a.k.extent(2)),
          qk_dim(a.q.extent(3)),
          v_dim(a.v.extent(3)) {}

    /// All that key-value head `kv_head` of `key` takes part in.
    void visit_key(std::int64_t b, std::int64_t key, std::int64_t kv_head) const {
      A dk_row[max_head_dim];
      A dv_row[max_head_dim];
      std::fill_n(dk_row, qk_dim, A{0});
      std::fill_n(dv_row, v_dim, A{0});
      for (const Rectangle& r : work) {
        if (key < r.k0 || key >= r.k1) continue;
        for (std::int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h) {
          for (std::int64_t query = r.queries_begin(key); query < r.q1; ++query) {
            visit_pair(b, query, h, k.at(b, key, kv_head), v.at(b, key, kv_head), dk_row, dv_row);
          }
        }
      }
      host_kernel::add(dk.at(b, key, kv_head), dk_row, qk_dim);
      host_kernel::add(dv.at(b, key, kv_head), dv_row, v_dim);
    }

    void visit_pair(std::int64_t b, std::int64_t query, std::int64_t h, const T* k_row, const T* v_row, A* dk_row,
                    A* dv_row) const {
      const A row_lse = lse.at(b, query, h);
      if (row_lse == -std::numeric_limits<A>::infinity()) return;
      const T* q_row = q.at(b, query, h);
      const T* dout_row = dout.at(b, query, h);
      const A p = std::exp(scale * host_kernel::dot<A>(q_row, k_row, qk_dim) - row_lse);
      const A ds = scale * p * (host_kernel::dot<A>(dout_row, v_row, v_dim) - delta.at(b, query, h));
      host_kernel::add_scaled(dv_row, p, dout_row, v_dim);
      host_kernel::add_scaled(dk_row, ds, q_row, qk_dim);
      host_kernel::add_scaled(dq.at(b, query, h), ds, k_row, qk_dim);
    }

    host_kernel::HeadRows<const T> q, k, v, dout;
    host_kernel::RowStatistics<const A> lse, delta;
    host_kernel::HeadRows<A> dq, dk, dv;
    WorkView work;
    A scale;
    std::int64_t group, qk_dim, v_dim;
  };

  template <class T>
  static void backward_as(const AttentionBackward& a) {
    host_kernel::start<accumulator_t<T>>(a);
    const Backward<T> f(a);
    host_kernel::for_each_row(
        a.k, [&](std::int64_t b, std::int64_t key, std::int64_t kv_head) { f.visit_key(b, key, kv_head); });
  }
};

}  // namespace pleat::inline v0
