// The plan of a ring: who holds what, who computes what with whose block, and the memory it takes. No pointers.
#pragma once

#include <cmath>
#include <optional>

#include <pleat/attention/layout.hpp>
#include <pleat/attention/ring_work.hpp>
#include <pleat/comm/peer_access.hpp>
#include <pleat/core/carve.hpp>
#include <pleat/core/dtype.hpp>
#include <pleat/core/footprint.hpp>
#include <pleat/mesh/model_checks.hpp>
#include <pleat/mesh/runtime_mesh.hpp>

namespace pleat::inline v0::ring {

/// One attention over `batch` sequences of `tokens` tokens each, counted over all ranks.
struct Shape {
  std::int64_t batch = 1;
  std::int64_t tokens = 0;
  int q_heads = 1;
  int kv_heads = 1;  // divides q_heads
  int qk_dim = 0;
  int v_dim = 0;
  /// 0: keys and values travel. Otherwise what travels is one row of this many numbers per token, from which every rank
  /// makes the keys and values (MLA: the compressed key-value and the shared rope key).
  int latent_dim = 0;
  DType dtype = DType::f32;
  /// Boundaries of packed documents, ascending from 0; the tokens after the last are padding: output and gradients 0.
  /// Empty: dense, each sequence one document. A packed stream may be of any length, a dense zigzag needs 2 * cp |
  /// tokens.
  std::vector<std::int64_t> cu_seqlens{};
};

/// What of a plan does not follow from its shape.
struct Options {
  bool causal = true;
  std::optional<double> scale{};  // default 1 / sqrt(qk_dim)
  Transport transport = Transport::collective;
  std::optional<Layout> layout{};  // default: `choose_layout`
  /// Of forward. One per step gives the same bits by every transport; `std::nullopt`: `choose_launches`.
  std::optional<Launches> launches = Launches::per_step;
  bool deterministic = true;
  /// How many thread blocks an attention kernel may have at once, so that others run beside it; 0: as many as fit.
  int max_ctas = 0;
  /// Makes `place` a collective that waits for its stream and fails with C36 where ranks place other documents: to find
  /// the data loader that does so. Without it the ranks of a step trust each other; their plans are compared at bind.
  bool compares_documents = false;
};

/// Ranks of a ring at most.
inline constexpr int most_ring_ranks = 1024;

/// Made by `plan`; read its members freely.
struct Plan {
  int cp = 1;
  Shape shape;
  bool causal = true;
  double scale = 1;
  Transport transport = Transport::collective;
  Layout layout = Layout::zigzag;
  Launches launches = Launches::per_step;
  bool deterministic = true;
  int max_ctas = 0;
  bool compares_documents = false;
  std::vector<TokenSpans> spans;  // of each rank
  Work work;                      // of shape.cu_seqlens

  /// Tokens of a rank; of the rank that holds most, as many as blocks and slots have room for.
  std::int64_t local_tokens(int rank) const { return spans[static_cast<std::size_t>(rank)].tokens(); }
  std::int64_t max_local_tokens() const {
    std::int64_t most = 0;
    for (const TokenSpans& rank : spans) most = std::max(most, rank.tokens());
    return most;
  }
  /// The work of another packing of the same stream, for the operation's `place`. Errors: A03.
  Work documents(std::span<const std::int64_t> cu_seqlens) const { return documents(cu_seqlens, spans); }
  /// The same where that packing's tokens are split in a way of their own, as `layout_spans` gives for it. A rank must
  /// hold as many tokens as in the plan; a balanced split does where `TokenSpans::capacity * cp` divides the tokens.
  /// Errors: A03, A12.
  Work documents(std::span<const std::int64_t> cu_seqlens, std::span<const TokenSpans> split) const {
    check_documents(cu_seqlens, shape.tokens);
    bool fits = split.size() == spans.size();
    for (std::size_t rank = 0; fits && rank < spans.size(); ++rank) fits = split[rank].tokens() == spans[rank].tokens();
    if (!fits) {
      fail<shape_error>("pleat[A12]: a split over ", split.size(), " ranks gives a rank another number of tokens than ",
                        "the plan of cp=", cp, " does; a multiple of ", TokenSpans::capacity * cp,
                        " tokens is split equally by every layout");
    }
    return Work(split, cu_seqlens, causal, launches);
  }
  /// `Work::placed_bytes` of any packing of at most so many documents.
  std::size_t most_placed_bytes(std::int64_t documents) const {
    return Work::most_placed_bytes(cp, documents, launches);
  }
  /// Bytes per rank, the same on every rank.
  Footprint footprint() const;
};

/// The choices of a plan, as one line of a log.
inline void append_to(Message& message, const Plan& p) {
  message.append("ring cp=").append(p.cp).append(p.causal ? " causal " : " full ");
  message.append(name_of(p.layout)).append(' ').append(name_of(p.transport));
  message.append(p.deterministic ? " deterministic" : " non-deterministic");
  if (p.launches == Launches::one) message.append(" forward in ").append(name_of(p.launches));
}

namespace detail {
/// Errors: shape_error T01, A19.
inline void check_choices(DType dtype, const Options& o) {
  dispatch_dtype(AttentionTypes{}, dtype, [](auto) {});
  const double scale = o.scale.value_or(1);
  const Launches launches = o.launches.value_or(Launches::per_step);
  const bool is_layout = !o.layout || *o.layout <= Layout::balanced;
  if (!std::isfinite(scale) || o.max_ctas < 0 || !is_layout || o.transport > Transport::peer ||
      launches > Launches::one) {
    fail<shape_error>(
        "pleat[A19]: a ring with scale=", scale, ", max_ctas=", o.max_ctas,
        ", layout=", o.layout ? static_cast<int>(*o.layout) : 0, ", transport=", static_cast<int>(o.transport),
        " and launches=", static_cast<int>(launches),
        "; valid: a finite scale, max_ctas of 0 and more, and the named layouts, transports and launches");
  }
}
/// Keys and values of all other ranks.
inline double gathered_bytes(int cp, const Shape& s, std::int64_t local_tokens) {
  return static_cast<double>(s.batch) * static_cast<double>(local_tokens) * (cp - 1) * s.kv_heads *
         (s.qk_dim + s.v_dim) * static_cast<double>(size_bytes(s.dtype));
}
}  // namespace detail

/// Plans attention over a cp group of `cp` ranks.
/// Errors: shape_error A01 (heads), A02 (extents), A03 (cu_seqlens), A19 (options), A22 (one launch), T01 (dtype);
/// mesh_error M07 (dense zigzag).
inline Plan plan(int cp, Shape shape, Options options = {}) {
  if (shape.kv_heads < 1 || shape.q_heads < 1 || shape.q_heads % shape.kv_heads != 0) {
    fail<shape_error>("pleat[A01]: kv_heads=", shape.kv_heads, " must divide q_heads=", shape.q_heads,
                      "; valid kv_heads: ", Divisors{shape.q_heads});
  }
  if (cp < 1 || cp > most_ring_ranks || shape.batch < 0 || shape.tokens < 0 || shape.qk_dim < 1 || shape.v_dim < 1 ||
      shape.latent_dim < 0) {
    fail<shape_error>("pleat[A02]: cp=", cp, ", qk_dim=", shape.qk_dim, " and v_dim=", shape.v_dim,
                      " must be at least 1, cp at most ", most_ring_ranks, ", batch=", shape.batch,
                      ", tokens=", shape.tokens, " and latent_dim=", shape.latent_dim, " at least 0");
  }
  const double row_elems = std::max(static_cast<double>(shape.q_heads) * std::max(shape.qk_dim, shape.v_dim),
                                    static_cast<double>(shape.latent_dim));
  const double rows = static_cast<double>(std::max<std::int64_t>(shape.batch, 1)) * static_cast<double>(shape.tokens);
  if (rows * row_elems > 0x1p56) {  // so that no sum of sizes passes 64 bits
    fail<shape_error>("pleat[A02]: batch=", shape.batch, " tokens=", shape.tokens, " q_heads=", shape.q_heads,
                      " qk_dim=", shape.qk_dim, " v_dim=", shape.v_dim, " latent_dim=", shape.latent_dim,
                      ": the product of batch, tokens, heads and a head's dim must not pass 2^56, nor the latents'");
  }
  detail::check_choices(shape.dtype, options);
  Plan p;
  p.cp = cp;
  p.causal = options.causal;
  p.scale = options.scale.value_or(1 / std::sqrt(static_cast<double>(shape.qk_dim)));
  p.transport = options.transport;
  p.deterministic = options.deterministic;
  p.max_ctas = options.max_ctas;
  p.compares_documents = options.compares_documents;
  const bool dense = shape.cu_seqlens.empty();
  if (dense) shape.cu_seqlens = {0, shape.tokens};
  check_documents(shape.cu_seqlens, shape.tokens);
  p.layout = options.layout            ? *options.layout
             : dense && options.causal ? Layout::zigzag
                                       : choose_layout(shape.tokens, cp, shape.cu_seqlens, options.causal);
  if (dense && p.layout == Layout::zigzag && cp > 1) zigzag_chunk_tokens(RuntimeMesh({.cp = cp}), shape.tokens);
  p.spans = layout_spans(p.layout, shape.tokens, cp, shape.cu_seqlens, options.causal);
  p.launches = options.launches ? *options.launches
                                : choose_launches(cp, p.transport, shape.latent_dim, shape.cu_seqlens.size() - 1,
                                                  detail::gathered_bytes(cp, shape, p.max_local_tokens()));
  if (cp == 1) p.launches = Launches::per_step;  // which is one
  if (p.launches == Launches::one && !allows_one_launch(cp, p.transport, shape.latent_dim)) {
    fail<shape_error>("pleat[A22]: one launch for cp=", cp, " by ", name_of(p.transport),
                      " transport with latent_dim=", shape.latent_dim, "; it takes peer transport, at most ",
                      most_ranks_of_one_launch, " ranks, and keys and values that travel: plan for a launch per step");
  }
  p.shape = std::move(shape);
  p.work = p.documents(p.shape.cu_seqlens);
  return p;
}

namespace detail {
inline DType accumulator_of(const Plan& p) {
  return accumulator(p.shape.dtype);
}

/// An untyped array of `heads` rows of `dim` per token, for the largest local block.
inline std::byte* take_rows(Carver& memory, const Plan& p, int heads, int dim, DType dtype, int blocks = 1) {
  return memory.take_bytes(static_cast<std::size_t>(blocks * p.shape.batch * p.max_local_tokens() * heads * dim) *
                           size_bytes(dtype));
}

/// Rows per token of a pair of arrays, for keys and for values or their gradients.
struct BlockDims {
  int heads, key_dim, value_dim;
};
inline BlockDims key_value_dims(const Plan& p) {
  return {p.shape.kv_heads, p.shape.qk_dim, p.shape.v_dim};
}
/// Of what travels: keys and values, or the latent in place of the keys of one head, and no values.
inline BlockDims travelling_dims(const Plan& p) {
  return p.shape.latent_dim > 0 ? BlockDims{1, p.shape.latent_dim, 0} : key_value_dims(p);
}

/// The arrays [batch, tokens, heads, key_dim] and [.., value_dim].
struct BlockMemory {
  std::byte* keys = nullptr;
  std::byte* values = nullptr;
};
inline BlockMemory take_block(Carver& memory, const Plan& p, const BlockDims& dims, DType dtype, int blocks = 1) {
  BlockMemory block;
  block.keys = take_rows(memory, p, dims.heads, dims.key_dim, dtype, blocks);
  block.values = take_rows(memory, p, dims.heads, dims.value_dim, dtype, blocks);
  return block;
}

/// The key-value heads that travel together to one launch, which computes them one group after the other: so that the
/// first are there soon. Rows of a copy are 1 KiB and more; there are few groups, each of which is a signal.
struct HeadGroups {
  int heads_each, count, heads;

  TokenSpan operator[](int group) const {
    return {group * heads_each, std::min<std::int64_t>(heads, (group + 1) * heads_each)};
  }
};
inline HeadGroups head_groups(const Plan& p) {
  constexpr int least_row_bytes = 1024, most_groups = 8;
  const auto above = [](int x, int y) { return (x + y - 1) / y; };
  const int row_bytes = std::min(p.shape.qk_dim, p.shape.v_dim) * static_cast<int>(size_bytes(p.shape.dtype));
  const int heads = p.shape.kv_heads;
  const int each = std::min(heads, std::max(above(least_row_bytes, row_bytes), above(heads, most_groups)));
  return {each, above(heads, each), heads};
}

/// Where blocks and sums of gradients arrive: two of each, whatever cp is, and all blocks of others for one launch. In
/// the arena for peer access, else scratch.
struct Slots {
  static constexpr int count = 2;
  BlockMemory blocks[count];
  BlockMemory sums[count];
  BlockMemory gathered;
};
/// Of pushes: free and full, of blocks and of each slot of sums, there full of each of two slices; then of what is
/// gathered, free and full of each group.
inline constexpr int step_channels = 2 + 3 * Slots::count;
inline int push_channels(const Plan& p) {
  return step_channels + (p.launches == Launches::one ? 1 + head_groups(p).count : 0);
}
inline Slots take_slots(Carver& memory, const Plan& p) {
  Slots slots;
  if (p.cp == 1) return slots;
  for (BlockMemory& block : slots.blocks) block = take_block(memory, p, travelling_dims(p), p.shape.dtype);
  for (BlockMemory& sum : slots.sums) sum = take_block(memory, p, travelling_dims(p), accumulator_of(p));
  if (p.launches == Launches::one) {
    slots.gathered = take_block(memory, p, key_value_dims(p), p.shape.dtype, p.cp - 1);
  }
  return slots;
}

/// Keys and values that are made of a latent block.
inline BlockMemory take_expanded(Carver& memory, const Plan& p, DType dtype) {
  return p.shape.latent_dim > 0 ? take_block(memory, p, key_value_dims(p), dtype) : BlockMemory{};
}

struct ForwardScratch {
  std::byte* o_acc;
  BlockMemory expanded;
};
inline ForwardScratch take_forward_scratch(Carver& memory, const Plan& p) {
  ForwardScratch scratch;
  scratch.o_acc = take_rows(memory, p, p.shape.q_heads, p.shape.v_dim, accumulator_of(p));
  scratch.expanded = take_expanded(memory, p, p.shape.dtype);
  return scratch;
}

struct BackwardScratch {
  std::byte* workspace;
  std::byte* delta;
  std::byte* dq;
  BlockMemory own_part;  // gradients of this rank's block, as they travel
  BlockMemory expanded, expanded_gradients;
};
inline BackwardScratch take_backward_scratch(Carver& memory, const Plan& p) {
  BackwardScratch scratch;
  scratch.workspace =
      memory.take_bytes(attention_workspace_bytes(p.shape.batch, p.shape.q_heads, p.max_local_tokens()));
  scratch.delta = take_rows(memory, p, p.shape.q_heads, 1, accumulator_of(p));
  scratch.dq = take_rows(memory, p, p.shape.q_heads, p.shape.qk_dim, accumulator_of(p));
  scratch.own_part = take_block(memory, p, travelling_dims(p), accumulator_of(p));
  scratch.expanded = take_expanded(memory, p, p.shape.dtype);
  scratch.expanded_gradients = take_expanded(memory, p, accumulator_of(p));
  return scratch;
}

/// What the ranks of a ring must have planned alike. `max_ctas` and `deterministic` are each rank's own choice.
inline auto agreement_of(const Plan& p) {
  const Shape& s = p.shape;
  return std::array{PlanField{"tokens", s.tokens},
                    PlanField{"batch", s.batch},
                    PlanField{"q_heads", s.q_heads},
                    PlanField{"kv_heads", s.kv_heads},
                    PlanField{"qk_dim", s.qk_dim},
                    PlanField{"v_dim", s.v_dim},
                    PlanField{"latent_dim", s.latent_dim},
                    PlanField{"dtype", s.dtype},
                    PlanField{"causal", p.causal},
                    PlanField{"scale", p.scale},
                    PlanField{"transport", p.transport},
                    PlanField{"layout", p.layout},
                    PlanField{"launches", p.launches},
                    PlanField{"compares_documents", p.compares_documents},
                    PlanField{"documents", s.cu_seqlens.size() - 1},
                    PlanField{"hash of documents and split", p.work.hash()}};
}

inline std::byte* take_saved(Carver& memory, const Plan& p) {
  return take_rows(memory, p, p.shape.q_heads, 1, accumulator_of(p));
}
}  // namespace detail

inline Footprint Plan::footprint() const {
  Footprint bytes;
  Carver slots, forward, backward, saved;
  detail::take_slots(slots, *this);
  detail::take_forward_scratch(forward, *this);
  detail::take_backward_scratch(backward, *this);
  detail::take_saved(saved, *this);
  bytes.scratch = std::max({forward.used_bytes(), backward.used_bytes(), agreement_bytes(cp)});
  (transport == Transport::peer ? bytes.symmetric : bytes.scratch) += slots.used_bytes();
  if (transport == Transport::peer && cp > 1) bytes.channels = detail::push_channels(*this);
  bytes.saved = saved.used_bytes();
  bytes.persistent = bytes.pinned_host = work.placed_bytes();
  return bytes;
}

}  // namespace pleat::inline v0::ring
