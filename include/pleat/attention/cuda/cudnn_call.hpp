// What cuDNN plans an attention for, made of one rectangle of a call; and how partial results join running ones.
#pragma once

#include <cmath>
#include <compare>
#include <cstdint>

#include <pleat/attention/cuda/arguments.hpp>
#include <pleat/attention/tensor_rows.hpp>
#include <pleat/core/dtype.hpp>

namespace pleat::inline v0::cudnn {

/// How much of a rectangle is seen: all, or what lies below a diagonal through its first or its last corner.
enum class Mask : unsigned char { full, top_left, bottom_right };

/// Strides of a tensor [batch, tokens, heads, dim] in elements; dim has stride 1.
struct Strides {
  std::int64_t batch = 0, token = 0, head = 0;
  friend auto operator<=>(const Strides&, const Strides&) = default;
};
/// That of memory without gaps.
inline Strides packed(std::int64_t tokens, std::int64_t heads, std::int64_t dim) {
  return {tokens * heads * dim, heads * dim, dim};
}

/// Everything that a plan of cuDNN depends on: forward of one rectangle, or backward.
struct Call {
  bool is_backward = false;
  bool deterministic = true;
  Mask mask = Mask::full;
  DType dtype = DType::bf16;
  float scale = 1;
  std::int64_t batch = 0, q_heads = 0, kv_heads = 0, q_tokens = 0, k_tokens = 0, qk_dim = 0, v_dim = 0;
  Strides q, k, v, out, dout;
  friend auto operator<=>(const Call&, const Call&) = default;
};

/// Errors: shape_error A13 when the diagonal passes no corner that cuDNN knows.
inline Mask mask_of(const Rectangle& r) {
  const std::int64_t queries = r.q1 - r.q0, keys = r.k1 - r.k0;
  if (r.is_full()) return Mask::full;
  if (r.causal_offset == 0) return Mask::top_left;
  if (r.causal_offset == keys - queries && keys > queries) return Mask::bottom_right;
  fail<shape_error>("pleat[A13]: cuDNN has no mask for ", queries, " queries x ", keys, " keys with causal offset ",
                    r.causal_offset, "; it has: full, offset 0, and offset keys - queries of more keys than queries");
}

/// The rows [begin, end) of a tensor [batch, tokens, heads, dim] as cuDNN takes them.
/// Errors: shape_error A13 when they do not start at multiples of 16 bytes.
inline Strides strides_of(const char* what, const TensorRef& t, std::int64_t begin) {
  const auto elem_bytes = static_cast<std::int64_t>(size_bytes(t.dtype()));
  const std::int64_t first =
      static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(t.data())) + begin * t.stride(1) * elem_bytes;
  const Strides s{t.extent(0) > 1 ? t.stride(0) : t.stride(1) * t.extent(1), t.stride(1), t.stride(2)};
  if ((first | s.batch * elem_bytes | s.token * elem_bytes | s.head * elem_bytes) % 16 != 0) {
    fail<shape_error>("pleat[A13]: cuDNN takes rows that start at multiples of 16 bytes; ", what, " has strides ",
                      s.batch, ", ", s.token, ", ", s.head, " and starts at ", first % 16, " past one");
  }
  return s;
}

namespace detail {
template <class AnyCall>
Call call_of(const AnyCall& a, const Rectangle& r) {
  Call call;
  call.mask = mask_of(r);
  call.dtype = a.q.dtype();
  call.scale = static_cast<float>(a.scale);
  call.batch = a.q.extent(0);
  call.q_heads = a.q.extent(2);
  call.kv_heads = a.k.extent(2);
  call.q_tokens = r.q1 - r.q0;
  call.k_tokens = r.k1 - r.k0;
  call.qk_dim = a.q.extent(3);
  call.v_dim = a.v.extent(3);
  if (call.dtype != DType::bf16 && call.dtype != DType::f16) {
    fail<shape_error>("pleat[A13]: cuDNN's attention takes bf16 and f16, not ", call.dtype);
  }
  if (call.qk_dim % 8 != 0 || call.v_dim % 8 != 0 || call.qk_dim > 256 || call.v_dim > 256) {
    fail<shape_error>("pleat[A13]: cuDNN's attention takes head dims that are multiples of 8 up to 256, not qk_dim=",
                      call.qk_dim, ", v_dim=", call.v_dim);
  }
  if (a.max_ctas != 0) {
    fail<shape_error>("pleat[A13]: cuDNN keeps no budget of CTAs; max_ctas must be 0, not ", a.max_ctas);
  }
  call.q = strides_of("q", a.q, r.q0);
  call.k = strides_of("k", a.k, r.k0);
  call.v = strides_of("v", a.v, r.k0);
  return call;
}
}  // namespace detail

/// Whether the results of a call are those of one rectangle, which nothing joins: cuDNN writes them where they belong.
inline bool is_whole(const AttentionForward& a) {
  if (!a.first || !a.last || a.work.host.size() != 1 || !a.lse.is_contiguous()) return false;
  const Rectangle& r = a.work.host.front();
  return r.q0 == 0 && r.q1 == a.q.extent(1);
}

/// Forward of `r`; its output is a packed partial result, or `a.out` of a whole call. Errors: shape_error A13.
inline Call call_of(const AttentionForward& a, const Rectangle& r) {
  Call call = detail::call_of(a, r);
  call.out = is_whole(a) ? strides_of("out", a.out, 0) : packed(call.q_tokens, call.q_heads, call.v_dim);
  return call;
}
/// Backward of `r`; gradients are packed. Errors: shape_error A13, also without `a.out`.
inline Call call_of(const AttentionBackward& a, const Rectangle& r) {
  if (a.out.rank() == 0) {
    fail<shape_error>("pleat[A13]: cuDNN makes delta itself: set AttentionBackward::out to the output of forward");
  }
  Call call = detail::call_of(a, r);
  call.is_backward = true;
  call.deterministic = a.deterministic;
  call.out = strides_of("out", a.out, r.q0);
  call.dout = strides_of("dout", a.dout, r.q0);
  return call;
}

/// What the running result and a partial one weigh in their sum, and its LSE.
struct Weights {
  float running, partial, lse;
};
/// Of two results that have seen no key (both LSE -inf) the sum has seen none either: -inf, and not NaN.
PLEAT_HD inline Weights merge(float running_lse, float partial_lse) {
  const float top = running_lse > partial_lse ? running_lse : partial_lse;
  if (top == -INFINITY) return {0, 0, top};
  const float running = expf(running_lse - top), partial = expf(partial_lse - top), sum = running + partial;
  return {running / sum, partial / sum, top + logf(sum)};
}

}  // namespace pleat::inline v0::cudnn
