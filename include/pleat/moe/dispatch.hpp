// Dispatch and combine: token rows to the ranks of their experts and weighted results back, with their gradients.
#pragma once

#include <array>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include <pleat/comm/peer_window.hpp>
#include <pleat/comm/plan_digest.hpp>
#include <pleat/core/streams.hpp>
#include <pleat/moe/collective_rows.hpp>
#include <pleat/moe/operand.hpp>
#include <pleat/moe/peer_rows.hpp>
#include <pleat/moe/row_transport.hpp>

namespace pleat::inline v0::moe {

namespace detail {
template <class Executor, class Comm, class Arena>
struct RowsOf {
  using type = std::variant<PeerRows<Executor, pleat::detail::peers_of<Arena>>, CollectiveRows<Executor, Comm>>;
};
template <class Executor, class Comm>
struct RowsOf<Executor, Comm, void> {
  using type = std::variant<CollectiveRows<Executor, Comm>>;
};

/// What all ranks of a group must plan alike.
inline auto agreement_of(const DispatchPlan& plan) {
  const DispatchShape& shape = plan.shape;
  const DispatchOptions& options = plan.options;
  return std::array{PlanField{"max_tokens", shape.max_tokens},
                    PlanField{"hidden", shape.hidden},
                    PlanField{"experts", shape.experts},
                    PlanField{"k", shape.k},
                    PlanField{"dtype", shape.dtype},
                    PlanField{"transport", options.transport},
                    PlanField{"send_by", options.send_by},
                    PlanField{"row_alignment", options.row_alignment},
                    PlanField{"overflow", options.overflow},
                    PlanField{"max_rows", options.max_rows},
                    PlanField{"arena_rows", options.arena_rows},
                    PlanField{"loopback", options.loopback}};
}
}  // namespace detail

/// The rows a rank's experts work on, in device memory: `rows` [capacity_rows, hidden] dtype, of which expert e has
/// [offsets[e], offsets[e + 1]), multiples of row_alignment; `offsets` [experts_local + 1] i64. An expert's rows are in
/// the order (source rank, token), pad rows at its end are zero; rows past the last offset are never written.
struct ExpertRows {
  TensorRef rows;
  TensorRef offsets;
};

/// The bound operation. Every rank of the ep group makes the same calls in the same order, with any number of tokens up
/// to max_tokens, 0 among them. All work is ordered on `streams.compute`; with peer access the host learns nothing of
/// the routing, and rows to other ranks go out on `streams.comm`, while the rank plans and works on its own. Each
/// token's row travels once to each rank that hosts one of its experts (with SendBy::copies to all), both ways; sums
/// run in ascending expert, then rank order, so the same inputs give the same bits, whatever moves the rows.
///
/// A rank that has more than max_tokens sends no row but says so: its outputs are zero, and `check` throws E08 on every
/// rank of the group. What DispatchOptions::overflow drops adds 0 to its token's sum and gets no gradient, on every
/// rank alike whatever the timing: of equal weights the later goes, in the order (source rank, token, expert); `status`
/// counts it once `combine` has run. Errors of all calls: shape_error T07, E01, E15, E16; comm_error of the
/// communicator. One that was moved from may be assigned to and destroyed, no more.
///
/// `Arena` is that of the Memory given to bind; void, as in `Memory<>`, for plans with Transport::collective.
template <executor Executor, communicator Comm, optional_arena Arena>
class Dispatch {
 public:
  using device_type = typename Executor::device_type;
  using stream_type = typename Executor::stream_type;
  using leaf = moe_leaf<device_type>;
  static constexpr KnownDevice<device_type> kind{};

  /// See `bind`.
  Dispatch(const DispatchPlan& plan, const Executor& executor, GroupComm<Comm> ep, const Memory<Arena>& memory,
           stream_type s)
      : Dispatch(agreed(plan, ep, memory.scratch, s), executor, ep, memory, Carver(memory.scratch),
                 Carver(memory.persistent), Carver(memory.pinned_host), s) {}
  const DispatchPlan& plan() const { return plan_; }

  /// x [tokens, hidden] dtype, ids [tokens, k] i32, weights [tokens, k] acc -> the rows of this rank's experts, which
  /// lie in `saved`. Ids are distinct experts; others are unrouted: they take no part, and are counted in `status`.
  template <class X, class Ids, class Weights>
  ExpertRows dispatch(const Streams<stream_type>& streams, const X& x, const Ids& ids, const Weights& weights,
                      DispatchSaved& saved) {
    dispatch_send(streams, x, ids, weights, saved);
    return dispatch_receive(streams, x, saved);
  }
  /// `dispatch` in two halves, between which other work may stand on `streams.compute` while rows travel, but no other
  /// call of this operation. All four exchanges have them; the inputs stay as they are until the second.
  template <class X, class Ids, class Weights>
  void dispatch_send(const Streams<stream_type>& streams, const X& x, const Ids& ids, const Weights& weights,
                     DispatchSaved& saved) {
    const TensorRef in = dense("x", x, plan_.shape.dtype, kind, {any_extent, plan_.shape.hidden});
    const TensorRef chosen = dense("ids", ids, DType::i32, kind, {in.extent(0), plan_.shape.k});
    const TensorRef w = dense("weights", weights, plan_.accumulator(), kind, {in.extent(0), plan_.shape.k});
    saved.expect_made_for(plan_);
    const stream_type s = streams.compute;
    if (saved.place >= 0) release(streams, saved);  // the rows of a forward call that nothing followed
    if (saved.arena != nullptr) saved.place = saved.arena->enter();
    saved.tokens = in.extent(0);
    saved.planned_tokens = plan_.planned(saved.tokens);
    const auto* chosen_ids = chosen.template as<std::int32_t>();
    const auto plan_sends = [&] {
      leaf::plan_sends(plan_, ep_.rank(), saved.tokens, saved.planned_tokens, chosen_ids, saved.record, scratch_,
                       status_, s);
    };
    const bool is_planned_first = !plan_.sends_all();
    if (is_planned_first) plan_sends();
    std::visit(
        [&](row_transport auto& transport) {
          const RowTable out = transport.open(RowKind::token, saved, s);
          if (!is_planned_first) {
            send_rows(transport, RowKind::token, in.data(), saved, out, streams);
            plan_sends();
          }
          leaf::pack_headers(plan_, saved.planned_tokens, chosen_ids, w.data(), saved.record, out, s);
          transport.send_headers(s);
          if (is_planned_first) send_rows(transport, RowKind::token, in.data(), saved, out, streams);
        },
        rows_);
  }
  template <class X>
  ExpertRows dispatch_receive(const Streams<stream_type>& streams, const X& x, DispatchSaved& saved) {
    saved.expect_filled("dispatch_receive", plan_);
    const TensorRef in = token_rows("x", x, saved);
    const stream_type s = streams.compute;
    const int rank = ep_.rank();
    std::visit(
        [&](row_transport auto& transport) {
          leaf::plan_rows(plan_, rank, transport.receive_headers(saved, s), saved.record, scratch_, status_, s);
          leaf::expand(plan_, SourceRows::own(rank, in.data()), saved.record, s);
          if (plan_.ranks > 1) {
            const RowTable came = transport.receive(RowKind::token, saved, s);
            leaf::expand(plan_, SourceRows::of_others(rank, came), saved.record, s);
          }
          finish(transport, RowKind::token, s);
        },
        rows_);
    return rows(saved);
  }

  /// The rows that `dispatch` returned.
  ExpertRows rows(const DispatchSaved& saved) const {
    const Device device = executor_.device();
    return {{saved.record.rows, plan_.shape.dtype, {plan_.capacity_rows(), plan_.shape.hidden}, device},
            {saved.record.offsets, DType::i64, {plan_.experts_local() + 1}, device}};
  }

  /// expert_out [capacity_rows, hidden] dtype -> y [tokens, hidden] dtype, overwritten: each token's sum of weight *
  /// result over its experts, 0 for a token without any. Summed per rank, then over ranks, each rounded to dtype once;
  /// `residual` [tokens, hidden] dtype, where given, is the first term of the second sum, and may be y.
  template <class Out, class Y, class Residual = TensorRef>
  void combine(const Streams<stream_type>& streams, const Out& expert_out, DispatchSaved& saved, const Y& y,
               const Residual& residual = {}) {
    expect_combined(saved, y, residual);
    combine_send(streams, expert_out, saved);
    combine_receive(streams, saved, y, residual);
  }
  template <class Out>
  void combine_send(const Streams<stream_type>& streams, const Out& expert_out, DispatchSaved& saved) {
    saved.expect_filled("combine", plan_);
    const TensorRef out = expert_rows("expert_out", expert_out);
    send_sums(RowKind::result, out, saved, streams.compute);
  }
  template <class Y, class Residual = TensorRef>
  void combine_receive(const Streams<stream_type>& streams, DispatchSaved& saved, const Y& y,
                       const Residual& residual = {}) {
    const auto [result, first] = expect_combined(saved, y, residual);
    receive_sums(RowKind::result, saved, first.data(), result, nullptr, status_, streams.compute);
  }

  /// dy [tokens, hidden] dtype -> dexpert_out [capacity_rows, hidden] dtype: weight * dy of each row's token, pad rows
  /// zero. Also saves the gradients of the weights, <dy, expert_out>; expert_out is what `combine` was given.
  template <class DY, class Out, class DOut>
  void combine_backward(const Streams<stream_type>& streams, const DY& dy, const Out& expert_out, DispatchSaved& saved,
                        const DOut& dexpert_out) {
    saved.expect_filled("combine_backward", plan_);
    expert_rows("expert_out", expert_out);
    expert_rows("dexpert_out", dexpert_out);
    combine_backward_send(streams, dy, saved);
    combine_backward_receive(streams, dy, expert_out, saved, dexpert_out);
  }
  template <class DY>
  void combine_backward_send(const Streams<stream_type>& streams, const DY& dy, DispatchSaved& saved) {
    saved.expect_filled("combine_backward", plan_);
    const TensorRef in = token_rows("dy", dy, saved);
    std::visit(
        [&](row_transport auto& transport) {
          const RowTable out = transport.open(RowKind::gradient, saved, streams.compute);
          send_rows(transport, RowKind::gradient, in.data(), saved, out, streams);
        },
        rows_);
  }
  template <class DY, class Out, class DOut>
  void combine_backward_receive(const Streams<stream_type>& streams, const DY& dy, const Out& expert_out,
                                DispatchSaved& saved, const DOut& dexpert_out) {
    saved.expect_filled("combine_backward", plan_);
    const TensorRef in = token_rows("dy", dy, saved);
    const TensorRef out = expert_rows("expert_out", expert_out);
    const TensorRef dout = expert_rows("dexpert_out", dexpert_out);
    const stream_type s = streams.compute;
    const int rank = ep_.rank();
    std::visit(
        [&](row_transport auto& transport) {
          leaf::expand_gradient(plan_, SourceRows::own(rank, in.data()), out.data(), saved.record, dout.data(), s);
          if (plan_.ranks > 1) {
            const RowTable came = transport.receive(RowKind::gradient, saved, s);
            leaf::expand_gradient(plan_, SourceRows::of_others(rank, came), out.data(), saved.record, dout.data(), s);
          }
          finish(transport, RowKind::gradient, s);
        },
        rows_);
  }

  /// dexpert_rows [capacity_rows, hidden] dtype -> dx [tokens, hidden] dtype and dweights [tokens, k] acc, overwritten;
  /// unrouted choices have gradient 0. Of a call with too many tokens dweights is not written.
  template <class DRows, class DX, class DWeights>
  void dispatch_backward(const Streams<stream_type>& streams, const DRows& dexpert_rows, DispatchSaved& saved,
                         const DX& dx, const DWeights& dweights) {
    expect_returned(saved, dx, dweights);
    dispatch_backward_send(streams, dexpert_rows, saved);
    dispatch_backward_receive(streams, saved, dx, dweights);
  }
  template <class DRows>
  void dispatch_backward_send(const Streams<stream_type>& streams, const DRows& dexpert_rows, DispatchSaved& saved) {
    saved.expect_filled("dispatch_backward", plan_);
    const TensorRef drows = expert_rows("dexpert_rows", dexpert_rows);
    send_sums(RowKind::token_gradient, drows, saved, streams.compute);
  }
  template <class DX, class DWeights>
  void dispatch_backward_receive(const Streams<stream_type>& streams, DispatchSaved& saved, const DX& dx,
                                 const DWeights& dweights) {
    const auto [result, dw] = expect_returned(saved, dx, dweights);
    receive_sums(RowKind::token_gradient, saved, nullptr, result, dw.data(), nullptr, streams.compute);
  }

  /// Gives rows back to the plan's arena, if there is one: once all that reads them is enqueued, in the reverse order
  /// of `dispatch`. Errors: shape_error E17.
  void release(const Streams<stream_type>& streams, DispatchSaved& saved) const {
    if (saved.arena == nullptr) return;
    saved.arena->leave(std::exchange(saved.place, -1));
    executor_.copy(saved.arena->used_rows, saved.record.offsets, sizeof(std::int64_t), streams.compute);
  }

  /// Device memory.
  const DispatchStatus* status() const { return status_; }
  /// The words of the status, in device memory, that are 0 until `check` would throw: what a step reduces with its
  /// gradient norm (optim::StepNorm), so that every rank of the job hears of it and nobody waits for the device.
  std::vector<const std::int64_t*> status_words() const {
    std::vector<const std::int64_t*> words{&status_->poisoned_rank};
    if (plan_.options.overflow == Overflow::error) words.push_back(&status_->overflow_rank);
    return words;
  }
  /// Reads the status: waits for the work on `streams.compute`. Collective over the group. Errors: shape_error E08, and
  /// E10 with Overflow::error, on every rank of the group alike: the ranks meet before they throw.
  DispatchStatus check(const Streams<stream_type>& streams) const {
    DispatchStatus now;
    executor_.copy(&now, status_, sizeof(now), streams.compute);
    ep_.wait(streams.compute);
    const bool overflows = plan_.options.overflow == Overflow::error && now.overflow_rank != 0;
    if (now.poisoned_rank != 0 || overflows) meet(streams.compute);
    if (now.poisoned_rank != 0) {
      fail<shape_error>("pleat[E08]: rank ", ep_.ranks()[static_cast<int>(now.poisoned_rank) - 1], " of the ep group ",
                        ep_.ranks(), " had ", now.poisoned_tokens,
                        " tokens, more than max_tokens=", plan_.shape.max_tokens, "; plan with a larger max_tokens");
    }
    if (overflows) {
      fail<shape_error>("pleat[E10]: rank ", ep_.ranks()[static_cast<int>(now.overflow_rank) - 1], " of the ep group ",
                        ep_.ranks(), " got ", now.overflow_rows, " rows more than ",
                        plan_.has_arena() ? "its arena has left, or than " : "", "max_rows=", plan_.max_rows(),
                        "; plan with a larger max_rows, or with overflow=drop_lowest");
    }
    return now;
  }

 private:
  Dispatch(const DispatchPlan& plan, const Executor& executor, GroupComm<Comm> ep, const Memory<Arena>& memory,
           Carver scratch, Carver persistent, Carver pinned, stream_type s)
      : plan_(plan),
        executor_(executor),
        ep_(ep),
        ready_(executor.make_event()),
        sent_(executor.make_event()),
        scratch_(plan.carve_plan_scratch(scratch)),
        status_(plan.carve_status(persistent)),
        rows_(make_rows(memory, scratch, persistent, pinned, s)) {
    preload_leaves<leaf>();
    executor_.zero(status_, sizeof(DispatchStatus), s);
  }
  /// The plan, once all ranks of the group have shown that they have the same.
  static const DispatchPlan& agreed(const DispatchPlan& plan, const GroupComm<Comm>& ep, Block scratch, stream_type s) {
    check_group(ep.size(), plan.ranks);
    agree_on("moe dispatch", detail::agreement_of(plan), ep, scratch, s);
    return plan;
  }

  /// All ranks of the group have come here, on the host too: none of them ends the run while another still waits in the
  /// calls before.
  void meet(stream_type s) const {
    ep_.barrier(s);
    ep_.wait(s);
    ep_.barrier(s);
  }

  /// Rows of `x` to the other ranks, on the side where the transport lets them go ahead.
  template <class Transport>
  void send_rows(Transport& transport, RowKind row_kind, const void* x, const DispatchSaved& saved, const RowTable& out,
                 const Streams<stream_type>& streams) {
    if (plan_.ranks == 1) return;
    const stream_type s = Transport::sends_ahead ? streams.comm : streams.compute;
    if (Transport::sends_ahead) {
      executor_.record(ready_, streams.compute);
      executor_.wait(s, ready_);
    }
    if (plan_.sends_all()) {
      transport.copy_all(row_kind, x, saved.planned_tokens, s);
    } else {
      leaf::pack(plan_, ep_.rank(), saved.planned_tokens, x, saved.record, out, s);
    }
    transport.send(row_kind, s);
    if (Transport::sends_ahead) executor_.record(sent_, s);
  }
  /// The rows that came have been read, and those that went out may be overwritten where they came from.
  template <class Transport>
  void finish(Transport& transport, RowKind row_kind, stream_type s) {
    transport.release(row_kind, s);
    if (Transport::sends_ahead && plan_.ranks > 1) executor_.wait(s, sent_);
  }

  /// One exchange of results, each token's sum over the experts of a rank: those I send, and the sums of those that
  /// came.
  void send_sums(RowKind row_kind, const TensorRef& out, DispatchSaved& saved, stream_type s) {
    std::visit(
        [&](row_transport auto& transport) {
          leaf::sum_experts(plan_, out.data(), row_kind == RowKind::result, saved.record,
                            transport.open(row_kind, saved, s), s);
          transport.send(row_kind, s);
        },
        rows_);
  }
  void receive_sums(RowKind row_kind, DispatchSaved& saved, const void* first, const TensorRef& result, void* dweights,
                    DispatchStatus* status, stream_type s) {
    std::visit(
        [&](row_transport auto& transport) {
          leaf::sum_sources(plan_, saved.planned_tokens, transport.receive(row_kind, saved, s), saved.record, first,
                            result.data(), dweights, status, s);
          transport.release(row_kind, s);
        },
        rows_);
    zero_unplanned(result, saved, s);
  }

  /// {y, residual}, checked.
  template <class Y, class Residual>
  std::pair<TensorRef, TensorRef> expect_combined(const DispatchSaved& saved, const Y& y,
                                                  const Residual& residual) const {
    saved.expect_filled("combine", plan_);
    const TensorRef result = token_rows("y", y, saved);
    return {result, dense_or_absent("residual", residual, plan_.shape.dtype, kind, {saved.tokens, plan_.shape.hidden})};
  }
  /// {dx, dweights}, checked.
  template <class DX, class DWeights>
  std::pair<TensorRef, TensorRef> expect_returned(const DispatchSaved& saved, const DX& dx,
                                                  const DWeights& dweights) const {
    saved.expect_filled("dispatch_backward", plan_);
    const TensorRef result = token_rows("dx", dx, saved);
    return {result, dense("dweights", dweights, plan_.accumulator(), kind, {saved.tokens, plan_.shape.k})};
  }
  template <class T>
  TensorRef expert_rows(const char* what, const T& t) const {
    return dense(what, t, plan_.shape.dtype, kind, {plan_.capacity_rows(), plan_.shape.hidden});
  }
  template <class T>
  TensorRef token_rows(const char* what, const T& t, const DispatchSaved& saved) const {
    return dense(what, t, plan_.shape.dtype, kind, {saved.tokens, plan_.shape.hidden});
  }
  void zero_unplanned(const TensorRef& t, const DispatchSaved& saved, stream_type s) const {
    const auto row_bytes = static_cast<std::size_t>(t.extent(1)) * size_bytes(t.dtype());
    executor_.zero(static_cast<std::byte*>(t.data()) + static_cast<std::size_t>(saved.planned_tokens) * row_bytes,
                   static_cast<std::size_t>(saved.tokens - saved.planned_tokens) * row_bytes, s);
  }

  using Rows = typename detail::RowsOf<Executor, Comm, Arena>::type;
  Rows make_rows(const Memory<Arena>& memory, Carver& scratch, Carver& persistent, Carver& pinned, stream_type s) {
    if (plan_.options.transport == Transport::collective) {
      return CollectiveRows<Executor, Comm>(plan_, executor_, ep_, scratch, persistent, pinned, s);
    }
    if constexpr (std::is_void_v<Arena>) {
      fail<comm_error>(
          "pleat[C29]: moe dispatch planned with Transport::peer was bound without an arena; give one, or "
          "plan with Transport::collective");
    } else {
      using Peers = pleat::detail::peers_of<Arena>;
      Peers peers = pleat::detail::open_window("moe dispatch", plan_.ranks, ep_, memory, plan_.footprint().symmetric,
                                               plan_.channels());
      return PeerRows<Executor, Peers>(plan_, executor_, std::move(peers), persistent, s);
    }
  }

  DispatchPlan plan_;
  Executor executor_;
  GroupComm<Comm> ep_;
  typename Executor::event_type ready_, sent_;  // of rows that go out on another stream
  PlanScratch scratch_;
  DispatchStatus* status_;
  Rows rows_;
};

/// Collective over the group, whose ranks compare their plans, and over the arena's ranks in the sense of
/// symmetric_arena. What it writes is ordered on `s`, the stream that the calls compute on. Errors: shape_error T02;
/// comm_error C36 on every rank, C07, C08, C29, E06.
template <executor Executor, communicator Comm, optional_arena Arena>
Dispatch<Executor, Comm, Arena> bind(const DispatchPlan& plan, const Executor& executor, GroupComm<Comm> ep,
                                     const Memory<Arena>& memory,
                                     typename Executor::stream_type s = only_stream<typename Executor::stream_type>()) {
  return {plan, executor, ep, memory, s};
}

}  // namespace pleat::inline v0::moe
