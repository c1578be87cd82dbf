// Moves a tensor from one split of a sequence to another in one all-to-all, and its gradient back.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include <pleat/attention/tensor_rows.hpp>
#include <pleat/attention/work.hpp>
#include <pleat/comm/group_comm.hpp>
#include <pleat/core/carve.hpp>
#include <pleat/core/footprint.hpp>
#include <pleat/tensor/tensor_traits.hpp>

namespace pleat::inline v0::relayout {

/// Tensors [batch, tokens, ...] with `row_elems` elements per token and batch entry.
struct Shape {
  std::int64_t batch = 1;
  std::int64_t row_elems = 1;
  DType dtype = DType::f32;
};

/// Made by `plan`; read its members freely.
struct Plan {
  Shape shape;
  std::vector<TokenSpans> from, to;  // of each rank

  /// Ranks that hold parts of the sequence.
  int ranks() const { return static_cast<int>(from.size()); }
  /// The tokens that `sender` holds before and `receiver` after, as rows of both, ascending.
  struct Moves {
    std::vector<TokenSpan> from_rows, to_rows;
    std::int64_t rows = 0;
  };
  Moves moves(int sender, int receiver) const;
  /// Bytes per rank, the same on every rank: what is sent and what is received lie in scratch. Rows that stay on their
  /// rank are copied from tensor to tensor.
  Footprint footprint() const;
};

inline Plan::Moves Plan::moves(int sender, int receiver) const {
  const TokenSpans &before = from[static_cast<std::size_t>(sender)], &after = to[static_cast<std::size_t>(receiver)];
  Moves m;
  for (const TokenSpan& held : before) {
    for (const TokenSpan& wanted : after) {
      const TokenSpan tokens = intersection(held, wanted);
      if (tokens.empty()) continue;
      m.from_rows.push_back(pleat::detail::rows_of(before, tokens));
      m.to_rows.push_back(pleat::detail::rows_of(after, tokens));
      m.rows += tokens.size();
    }
  }
  return m;
}

namespace detail {
/// What one rank sends and what it receives, each a packed array for the rank that moves most.
struct Scratch {
  std::byte *sent, *received;
};
inline Scratch take_scratch(Carver& memory, const Plan& p) {
  std::int64_t most = 0;
  for (int rank = 0; rank < p.ranks(); ++rank) {
    const auto at = static_cast<std::size_t>(rank);
    most = std::max(most, std::max(p.from[at].tokens(), p.to[at].tokens()) - p.moves(rank, rank).rows);
  }
  const auto bytes = static_cast<std::size_t>(p.shape.batch * most * p.shape.row_elems) * size_bytes(p.shape.dtype);
  Scratch scratch;
  scratch.sent = memory.take_bytes(bytes);
  scratch.received = memory.take_bytes(bytes);
  return scratch;
}
}  // namespace detail

inline Footprint Plan::footprint() const {
  Carver memory;
  detail::take_scratch(memory, *this);
  Footprint bytes;
  bytes.scratch = memory.used_bytes();
  return bytes;
}

/// Plans the way from one split to another; `ring::layout_spans` and a ring's plan give splits.
/// Errors: shape_error A15 when the two are not splits of the same tokens over the same ranks, A02 (extents).
inline Plan plan(std::span<const TokenSpans> from, std::span<const TokenSpans> to, const Shape& shape) {
  const auto tokens_of = [](std::span<const TokenSpans> split) {
    std::int64_t sum = 0;
    for (const TokenSpans& rank : split) sum += rank.tokens();
    return sum;
  };
  const auto covers = [](std::span<const TokenSpans> split, std::int64_t tokens) {
    Runs held;
    for (const TokenSpans& rank : split) {
      for (const TokenSpan& span : rank) held.insert(span);
    }
    return held == Runs({0, tokens});
  };
  const std::int64_t tokens = tokens_of(from);
  if (from.empty() || from.size() != to.size() || tokens_of(to) != tokens || !covers(from, tokens) ||
      !covers(to, tokens)) {
    fail<shape_error>("pleat[A15]: a relayout from ", from.size(), " ranks with ", tokens, " tokens to ", to.size(),
                      " ranks with ", tokens_of(to), " tokens; both must hold every token of the sequence once, on as ",
                      "many ranks");
  }
  if (shape.batch < 0 || shape.row_elems < 0) {
    fail<shape_error>("pleat[A02]: batch=", shape.batch, " and row_elems=", shape.row_elems, " must be at least 0");
  }
  return {shape, {from.begin(), from.end()}, {to.begin(), to.end()}};
}

/// A relayout over the ranks of `bind`. Every rank makes the same calls in the same order. Per call a rank sends
/// `batch * row_elems` elements for each token that it holds before and not after, in one all-to-all; from zigzag to
/// contiguous that is at most all of its tokens.
template <executor Executor, communicator Comm>
class Relayout {
 public:
  using stream_type = typename Executor::stream_type;

  /// See `bind`.
  Relayout(Plan plan, const Executor& executor, const GroupComm<Comm>& group, Block scratch)
      : plan_(std::move(plan)), executor_(executor), group_(group) {
    if (group.size() != plan_.ranks()) {
      fail<shape_error>("pleat[A05]: a plan for cp=", plan_.ranks(), " was bound to a group of ", group.size(),
                        " ranks");
    }
    Carver memory(scratch);
    scratch_ = detail::take_scratch(memory, plan_);
    const int self = group.rank();
    before_.tokens = plan_.from[static_cast<std::size_t>(self)].tokens();
    after_.tokens = plan_.to[static_cast<std::size_t>(self)].tokens();
    for (int peer = 0; peer < plan_.ranks(); ++peer) {
      before_.add(plan_.moves(self, peer).from_rows, peer == self, plan_.shape);
      after_.add(plan_.moves(peer, self).to_rows, peer == self, plan_.shape);
    }
  }

  const Plan& plan() const { return plan_; }

  /// out = in in the other order: in [batch, tokens of plan.from, ...], out [batch, tokens of plan.to, ...], with the
  /// same axes behind; any strides, best with contiguous rows. No overlap. Ordered on `s`.
  /// Errors: shape_error T07 (extents), T12 (a read-only output), A04 (an output whose rows overlap); static T07 for a
  /// type that is never on this device.
  template <class In, class Out>
  void forward(stream_type s, const In& in, const Out& out) {
    move(s, checked("in", in, before_), before_, checked_output("out", out, after_), after_);
  }
  /// din = dout in the order before: the gradient of `forward`, and its inverse.
  template <class DOut, class DIn>
  void backward(stream_type s, const DOut& dout, const DIn& din) {
    move(s, checked("dout", dout, after_), after_, checked_output("din", din, before_), before_);
  }

 private:
  /// The rows of this rank in one of the two splits, by the rank that holds them in the other.
  struct Side {
    std::int64_t tokens = 0;
    std::vector<std::vector<TokenSpan>> rows;  // [peer]
    std::vector<std::int64_t> packed_rows;     // [peer], 0 for this rank itself
    std::vector<std::size_t> elems;            // [peer], of the packed rows

    void add(std::vector<TokenSpan> of_peer, bool is_self, const Shape& shape) {
      std::int64_t count = 0;
      for (const TokenSpan& span : of_peer) count += is_self ? 0 : span.size();
      rows.push_back(std::move(of_peer));
      packed_rows.push_back(count);
      elems.push_back(static_cast<std::size_t>(count * shape.batch * shape.row_elems));
    }
  };

  void move(stream_type s, const TensorRef& in, const Side& in_side, const TensorRef& out, const Side& out_side) {
    for (int axis = 2; axis < std::max(in.rank(), out.rank()); ++axis) {
      if (in.rank() != out.rank() || in.extent(axis) != out.extent(axis)) {
        fail<shape_error>("pleat[T07]: a relayout of ", in, " writes ", out,
                          "; both need the same axes after the second");
      }
    }
    const auto self = static_cast<std::size_t>(group_.rank());
    for (std::size_t i = 0; i < in_side.rows[self].size(); ++i) {
      copy(pleat::detail::token_rows(out, out_side.rows[self][i]), pleat::detail::token_rows(in, in_side.rows[self][i]),
           s);
    }
    if (plan_.ranks() == 1) return;
    for_each_packed(scratch_.sent, in, in_side,
                    [&](const TensorRef& packed, const TensorRef& rows) { copy(packed, rows, s); });
    group_.all_to_all_v(scratch_.sent, in_side.elems, scratch_.received, out_side.elems, plan_.shape.dtype, s);
    for_each_packed(scratch_.received, out, out_side,
                    [&](const TensorRef& packed, const TensorRef& rows) { copy(rows, packed, s); });
  }

  /// f(packed, rows) for all rows of `t` that travel and their place in `memory`: per peer [batch, its rows, ...].
  template <class F>
  void for_each_packed(std::byte* memory, const TensorRef& t, const Side& side, F f) const {
    for (std::size_t peer = 0; peer < side.rows.size(); ++peer) {
      if (side.packed_rows[peer] == 0) continue;
      TensorRef block(memory, t.dtype(), {}, t.device());
      std::int64_t stride = side.packed_rows[peer] * plan_.shape.row_elems;
      for (int axis = 0; axis < t.rank(); ++axis) {
        const std::int64_t extent = axis == 1 ? side.packed_rows[peer] : t.extent(axis);
        if (axis > 0) stride = extent == 0 ? 0 : stride / extent;
        block.push_extent(extent, stride);
      }
      std::int64_t at = 0;
      for (const TokenSpan& rows : side.rows[peer]) {
        f(pleat::detail::token_rows(block, {at, at + rows.size()}), pleat::detail::token_rows(t, rows));
        at += rows.size();
      }
      memory += side.elems[peer] * size_bytes(t.dtype());
    }
  }
  void copy(const TensorRef& out, const TensorRef& in, stream_type s) const {
    pleat::detail::copy_tensor(executor_, out, in, s);
  }

  template <class T>
  TensorRef checked(const char* what, const T& t, const Side& side) const {
    const TensorRef ref = as_tensor(t, KnownDevice<typename Executor::device_type>{});
    std::int64_t row_elems = 1;
    for (int axis = 2; axis < ref.rank(); ++axis) row_elems *= ref.extent(axis);
    if (ref.rank() < 2 || ref.dtype() != plan_.shape.dtype || ref.device().kind != executor_.device().kind ||
        ref.extent(0) != plan_.shape.batch || ref.extent(1) != side.tokens || row_elems != plan_.shape.row_elems) {
      fail<shape_error>("pleat[T07]: ", what, " is ", ref, "; it must be ", plan_.shape.dtype, " [", plan_.shape.batch,
                        ", ", side.tokens, ", ...] with ", plan_.shape.row_elems, " elements per token on ",
                        executor_.device());
    }
    return ref;
  }
  template <class T>
  TensorRef checked_output(const char* what, const T& t, const Side& side) const {
    const TensorRef ref = checked(what, as_writable(what, t, KnownDevice<typename Executor::device_type>{}), side);
    pleat::detail::require_distinct_rows(what, ref);
    return ref;
  }

  Plan plan_;
  Executor executor_;
  GroupComm<Comm> group_;
  detail::Scratch scratch_{};
  Side before_, after_;
};

/// Binds a plan to the group and `plan.footprint().scratch` bytes, both borrowed as long as the operation lives;
/// scratch may be shared with operations that never run at the same time. No communication. Errors: shape_error A05
/// (the group's size), T02 (a block too small).
template <executor Executor, communicator Comm>
Relayout<Executor, Comm> bind(Plan plan, const Executor& executor, const GroupComm<Comm>& group, Block scratch) {
  return Relayout<Executor, Comm>(std::move(plan), executor, group, scratch);
}

}  // namespace pleat::inline v0::relayout
