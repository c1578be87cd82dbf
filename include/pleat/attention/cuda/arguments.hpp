// What a CUDA attention kernel is launched with: device pointers, strides and the work, in device memory too.
#pragma once

#include <pleat/attention/local_kernel.hpp>

namespace pleat::inline v0::attention_kernel {

/// Rows of a tensor [batch, tokens, heads, dim] with a contiguous last axis; strides in elements.
template <class T>
struct HeadRows {
  T* data = nullptr;
  std::int64_t batch_stride = 0, token_stride = 0, head_stride = 0;

  PLEAT_HD T* at(std::int64_t batch, std::int64_t token, std::int64_t head) const {
    return data + batch * batch_stride + token * token_stride + head * head_stride;
  }
};
template <class T>
HeadRows<T> head_rows(const TensorRef& t) {
  return {static_cast<T*>(t.data()), t.stride(0), t.stride(1), t.stride(2)};
}

/// One number per query row: a tensor [batch, heads, tokens] of float; strides in elements.
struct RowStatistics {
  float* data = nullptr;
  std::int64_t batch_stride = 0, head_stride = 0, token_stride = 0;

  PLEAT_HD float& at(std::int64_t batch, std::int64_t token, std::int64_t head) const {
    return data[batch * batch_stride + head * head_stride + token * token_stride];
  }
};
inline RowStatistics row_statistics(const TensorRef& t) {
  return {static_cast<float*>(t.data()), t.stride(0), t.stride(1), t.stride(2)};
}

/// The rectangles of a call in device memory, ascending in q0 and then k0; a tile of queries or keys visits those that
/// it meets in this order, so that no two CTAs write the same row.
struct WorkList {
  const Rectangle* rectangles = nullptr;
  int count = 0;
};

struct Extents {
  int batch = 0, q_heads = 0, kv_heads = 0;
  std::int64_t q_tokens = 0, k_tokens = 0;
  int qk_dim = 0, v_dim = 0;
};

/// A call resumes earlier ones with a maximum far below their LSE and weights as much larger: so the maximum becomes a
/// score of this call, whose weight is 1 without rounding, and the error does not grow with the number of calls.
inline constexpr float resumed_weight = 65536;
/// The maximum in powers of 2.
PLEAT_HD inline float resumed_peak(float lse) {
  return lse * 1.4426950408889634f - 16;
}

/// The blocks of others in AttentionForwardBlocks; `tokens`: of all of them.
template <class T>
struct OtherBlocks {
  HeadRows<const T> k, v;
  std::int64_t tokens = 0, block_rows = 1;
  Arrivals arrivals;
};

/// AttentionForward for inputs of type T (bfloat16 or float16), and AttentionForwardBlocks where there are others.
template <class T>
struct Forward {
  Extents extents;
  HeadRows<const T> q, k, v;
  WorkList work;
  float scale = 1;
  HeadRows<float> o_acc;
  RowStatistics lse;
  HeadRows<T> out;
  bool first = true, last = true;
  OtherBlocks<T> others;
  int max_ctas = 0;  ///< how many CTAs may be resident, one per SM and more; 0: as many as fit the device
};

/// AttentionBackward for inputs of type T.
template <class T>
struct Backward {
  Extents extents;
  HeadRows<const T> q, k, v, dout;
  RowStatistics lse, delta;
  WorkList work;
  float scale = 1;
  HeadRows<float> dq, dk, dv;
  bool accumulate_dq = false, accumulate_dk = false, accumulate_dv = false;
  bool deterministic = true;
  int max_ctas = 0;
  unsigned* workspace = nullptr;  ///< attention_workspace_bytes; null: there is none
};

}  // namespace pleat::inline v0::attention_kernel
