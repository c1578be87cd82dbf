// The contract of the local attention kernel: what a device computes of one block of keys, inside the ring or alone.
#pragma once

#include <concepts>
#include <cstdint>
#include <span>

#include <pleat/attention/work.hpp>
#include <pleat/core/device.hpp>
#include <pleat/core/executor.hpp>
#include <pleat/tensor/tensor_ref.hpp>

namespace pleat::inline v0 {

/// What queries, keys and values may be made of; a device may take fewer.
using AttentionTypes = TypeList<double, float, bfloat16, float16>;

/// The rectangles of a call, borrowed; the same list twice. No (query, key) pair stands in two of them, and they ascend
/// in q0 and then k0.
struct WorkView {
  WorkView() = default;
  template <std::convertible_to<std::span<const Rectangle>> Rectangles>
  WorkView(const Rectangles& in_host_memory, const Rectangle* where_kernels_read = nullptr)
      : host(in_host_memory), device(where_kernels_read) {}

  bool empty() const { return host.empty(); }
  auto begin() const { return host.begin(); }
  auto end() const { return host.end(); }

  std::span<const Rectangle> host;
  const Rectangle* device = nullptr;  // in the device's memory, as of the call on its stream; null on the host
};

/// One call of the forward kernel. Tensors of the dtype T: any strides (64-bit offsets) with a contiguous last axis.
/// Query head h reads key-value head `h / (q_heads / kv_heads)`. Softmax weights are exp(scale * <q, k>), normalized
/// over all keys that a query sees in a sequence of calls; the running result is kept normalized, so that a call
/// resumes an earlier one: maximum = LSE, sum of weights = 1.
struct AttentionForward {
  TensorRef q;    // [batch, q_tokens, q_heads, qk_dim] T
  TensorRef k;    // [batch, k_tokens, kv_heads, qk_dim] T
  TensorRef v;    // [batch, k_tokens, kv_heads, v_dim] T
  WorkView work;  // the same for each batch entry
  double scale = 1;
  TensorRef o_acc;    // [batch, q_tokens, q_heads, v_dim] accumulator_t<T>, in and out
  TensorRef lse;      // [batch, q_heads, q_tokens] accumulator_t<T>, in and out: natural log; -inf: has seen no key yet
  TensorRef out;      // [batch, q_tokens, q_heads, v_dim] T, all rows written when `last`; not touched otherwise
  bool first = true;  // nothing is resumed: o_acc and lse are written in all rows, covered by the work or not
  bool last = true;   // o_acc holds nothing of use afterwards
  int max_ctas = 0;   // how many thread blocks may run at once; 0: as many as fit. The bits do not depend on it.
};

/// How a kernel sees that blocks of keys have come that were still under way when it was launched: a word of device
/// memory per block and group of heads, which is written when the rows are there. Without words they are.
struct Arrivals {
  static constexpr int most_blocks = 7;

  const std::uint64_t* words[most_blocks] = {};  // of each block's first heads; the next group's: `word_stride` on
  std::int64_t word_stride = 0;
  int heads_per_word = 1;      // key-value heads
  std::uint64_t at_least = 0;  // `ends_wait(word, at_least)` says that the rows are there

  /// The word that says when a block's rows of these heads are there; null where they are.
  PLEAT_HD const std::uint64_t* word(int block, int kv_head) const {
    return words[block] == nullptr ? nullptr : words[block] + kv_head / heads_per_word * word_stride;
  }
};

/// One call of a forward kernel on the blocks of several ranks: `call`, which is first and last, with the own keys and
/// values; and those of others, `block_rows` rows each. The work's keys `call.k.extent(1)` and on are rows of `k`, and
/// no rectangle has keys of two blocks.
struct AttentionForwardBlocks {
  AttentionForward call;
  TensorRef k;  // [batch, blocks * block_rows, kv_heads, qk_dim] T
  TensorRef v;  // [batch, blocks * block_rows, kv_heads, v_dim] T
  std::int64_t block_rows = 1;
  Arrivals arrivals;
};

/// One call of the backward kernel: the gradients that the pairs of `work` contribute. `lse` and `delta` are those of
/// the complete sequence, not of this block. A query that sees no key (lse -inf) gets and gives 0.
/// `accumulate_x`: the contribution is added to dx; otherwise dx is overwritten, also in rows that no rectangle covers.
/// dk and dv get a finished contribution, added once, so that their bits do not depend on how a kernel is tiled.
/// source: FlashAttention-2, arXiv 2307.08691, algorithm 2: P = exp(scale q k - lse), dV = P^T dO, dS = P (dO v -
/// delta), dQ = scale dS K, dK = scale dS^T Q.
struct AttentionBackward {
  TensorRef q, k, v;  // as in forward
  TensorRef dout;     // [batch, q_tokens, q_heads, v_dim] T
  TensorRef lse;      // [batch, q_heads, q_tokens] accumulator_t<T>
  TensorRef delta;    // [batch, q_heads, q_tokens] accumulator_t<T>
  WorkView work;      // as in forward
  double scale = 1;
  TensorRef dq;  // [batch, q_tokens, q_heads, qk_dim] accumulator_t<T>
  TensorRef dk;  // [batch, k_tokens, kv_heads, qk_dim] accumulator_t<T>
  TensorRef dv;  // [batch, k_tokens, kv_heads, v_dim] accumulator_t<T>
  bool accumulate_dq = false;
  bool accumulate_dk = false;
  bool accumulate_dv = false;
  bool deterministic = true;  // false allows dq an order of its own; dk and dv are always reproducible
  int max_ctas = 0;           // as in forward
  /// `attention_workspace_bytes` of the device's memory, of this call alone while it runs: what it holds does not
  /// matter and is nothing of use. Without it a kernel that needs none is chosen.
  void* workspace = nullptr;
  /// [batch, q_tokens, q_heads, v_dim] T, of forward: what `delta` was made of, for kernels that make their own of it.
  TensorRef out{};
};

/// Memory by which thread blocks that add to one row of dq keep an order: a word for 64 queries of a head, and one
/// more.
constexpr std::size_t attention_workspace_bytes(std::int64_t batch, int q_heads, std::int64_t q_tokens) {
  return sizeof(std::uint32_t) * static_cast<std::size_t>(1 + batch * q_heads * ((q_tokens + 63) / 64));
}

/// What a schedule asks of a local kernel, an object or a type of static members, ordered on the stream `s`:
/// - `forward(const AttentionForward&, s)`
/// - `delta(delta, out, dout, s)`: delta [batch, q_heads, q_tokens] = sum over v_dim of out * dout [batch, q_tokens,
///   q_heads, v_dim], in accumulator_t.
/// - `backward(const AttentionBackward&, s)`
/// - `store(out, terms, s)`: out = the sum of one or two `terms` of accumulator_t, a span, rounded once to the dtype of
/// out; all [batch, tokens, heads, dim], each with its own strides. Errors: shape_error A06 when a head dim is larger
/// than the kernel takes.
/// One that plans calls of known extents and strides ahead also has `prepare(const AttentionForward&)` and
/// `prepare(const AttentionBackward&)`, which read neither data nor work in device memory. One that takes the blocks of
/// all ranks at once also has `bool forward(const AttentionForwardBlocks&, s)`: false, and nothing is done, where it
/// does not take these.
template <class Leaf, class Stream>
concept local_attention = requires(const Leaf& leaf, const AttentionForward& forward, const AttentionBackward& backward,
                                   const TensorRef& t, std::span<const TensorRef> terms, Stream s) {
  leaf.forward(forward, s);
  leaf.delta(t, t, t, s);
  leaf.backward(backward, s);
  leaf.store(t, terms, s);
};

/// The local kernel that a ring on this device uses unless `bind` is given another.
template <class DeviceType>
struct attention_leaf {
  static_assert(detail::no_device<DeviceType>,
                "pleat[T03]: no attention kernel for this device: include pleat/attention/host/leaf.hpp or "
                "pleat/attention/cuda/leaf.cuh");
};

}  // namespace pleat::inline v0
