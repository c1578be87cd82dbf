// The MoE layer in one piece: route, dispatch, experts, combine, and back.
#pragma once

#include <array>
#include <utility>

#include <pleat/moe/dispatch.hpp>
#include <pleat/moe/experts.hpp>
#include <pleat/moe/layer_saved.hpp>
#include <pleat/moe/router.hpp>

namespace pleat::inline v0::moe {

/// The bound layer. It holds no weights: one operation serves all layers of a shape. Every rank of the ep group makes
/// the same calls in the same order, with any number of tokens up to max_tokens, 0 among them; a graph that was
/// captured with max_tokens takes other numbers by Choice::routed. `acc` is the accumulator of the dtype. All work is
/// ordered on `streams.compute`. Errors of all calls: shape_error T07, E01, E15, E16; comm_error. One that was moved
/// from may be assigned to and destroyed, no more. `ExpertLeaf`: see Experts.
template <executor Executor, communicator Comm, optional_arena Arena,
          class ExpertLeaf = moe_leaf<typename Executor::device_type>>
class Layer {
 public:
  using device_type = typename Executor::device_type;
  using stream_type = typename Executor::stream_type;
  static constexpr KnownDevice<device_type> kind{};

  /// See `bind`.
  Layer(const LayerPlan& plan, const Executor& executor, GroupComm<Comm> ep, Memory<Arena> memory, stream_type s,
        ExpertLeaf leaf = {})
      : plan_(agreed(plan, ep, memory.scratch, s)),
        executor_(executor),
        scratch_(take_scratch(plan, memory)),
        router_(plan.router),
        dispatch_(plan.dispatch, executor, ep, memory, s),
        experts_(plan.experts, memory.scratch, std::move(leaf)) {}
  const LayerPlan& plan() const { return plan_; }

  /// Inputs of a forward call that most calls leave out.
  struct Choice {
    TensorRef bias{};  ///< [experts] acc: added to the scores for the choice only
    TensorRef ids{};   ///< [tokens, k] i32: the choice itself; the weights are still those of the logits
    /// [tokens] u8: tokens with 0 are padding and unrouted. Ids that are given say so themselves.
    TensorRef routed{};
  };

  /// x [tokens, hidden] dtype, logits [tokens, experts] acc -> y [tokens, hidden] dtype, overwritten. `weights` are
  /// this rank's experts. `residual` [tokens, hidden] dtype, where given, is added before y is rounded, and may be y.
  template <class X, class Logits, class Y, class Residual = TensorRef>
  void forward(const Streams<stream_type>& streams, const X& x, const Logits& logits, const ExpertMatrices& weights,
               LayerSaved& saved, const Y& y, const Choice& choice = {}, const Residual& residual = {}) {
    forward_send(streams, x, logits, saved, choice);
    forward_experts(streams, x, weights, saved);
    forward_receive(streams, saved, y, residual);
  }
  /// `forward` in three parts, for callers that let other work stand on `streams.compute` while rows travel, but no
  /// other call of this operation: routes and sends the tokens; computes the experts of what came and sends the
  /// results; sums those that came. `x` and `residual` stay as they are until the part that takes them.
  template <class X, class Logits>
  void forward_send(const Streams<stream_type>& streams, const X& x, const Logits& logits, LayerSaved& saved,
                    const Choice& choice = {}) {
    const TensorRef in = dense("x", x, plan_.dispatch.shape.dtype, kind, {any_extent, plan_.dispatch.shape.hidden});
    const std::int64_t tokens = in.extent(0);
    dense("logits", logits, plan_.router.accumulator(), kind, {tokens, plan_.router.shape.experts});
    saved.dispatch.expect_made_for(plan_.dispatch);
    saved.experts.expect_made_for(plan_.experts.shape);
    const LayerRecord& r = saved.record;
    // Too many tokens are not routed: the arrays have no room for them, and dispatch reads none.
    const std::int64_t planned = plan_.dispatch.planned(tokens);
    name_choice(saved, planned, in.device());
    if (planned == tokens) route(streams, logits, saved, choice);
    dispatch_.dispatch_send(streams, in, choice_array(r.ids, DType::i32, tokens, in.device()),
                            choice_array(r.weights, plan_.router.accumulator(), tokens, in.device()), saved.dispatch);
  }
  template <class X>
  void forward_experts(const Streams<stream_type>& streams, const X& x, const ExpertMatrices& weights,
                       LayerSaved& saved) {
    const ExpertRows rows = dispatch_.dispatch_receive(streams, x, saved.dispatch);
    experts_.forward(streams, rows.rows, rows.offsets, weights, saved.experts, expert_out(saved));
    dispatch_.combine_send(streams, expert_out(saved), saved.dispatch);
  }
  template <class Y, class Residual = TensorRef>
  void forward_receive(const Streams<stream_type>& streams, LayerSaved& saved, const Y& y,
                       const Residual& residual = {}) {
    dispatch_.combine_receive(streams, saved.dispatch, y, residual);
  }

  /// dy [tokens, hidden] dtype -> dx [tokens, hidden] dtype through the experts, dlogits [tokens, experts] acc, both
  /// overwritten, and dweights (accumulate ? += : =) of this rank's experts (ExpertMatrices). logits and weights are
  /// those of the forward call; dprobs [groups, experts] acc, or absent, is the load-balance loss's (losses.hpp). All
  /// sums are plain: a step divides once. The gradient of x by way of the logits is the caller's, who made the logits.
  /// Gradients take the place of results in `saved`, which wants another forward call before it is given again.
  template <class DY, class Logits, class DProbs, class DX, class DLogits>
  void backward(const Streams<stream_type>& streams, const DY& dy, const Logits& logits, const ExpertMatrices& weights,
                const DProbs& dprobs, LayerSaved& saved, const DX& dx, const DLogits& dlogits,
                const ExpertMatrices& dweights, bool accumulate) {
    backward_send(streams, dy, saved);
    backward_experts(streams, dy, weights, saved, dweights, accumulate);
    backward_receive(streams, logits, dprobs, saved, dx, dlogits);
  }
  /// `backward` in three parts, as `forward`: sends dy; computes the experts' gradients and sends those of their rows,
  /// which travel while those of the weights are computed; sums what came.
  template <class DY>
  void backward_send(const Streams<stream_type>& streams, const DY& dy, LayerSaved& saved) {
    dispatch_.combine_backward_send(streams, dy, saved.dispatch);
  }
  template <class DY>
  void backward_experts(const Streams<stream_type>& streams, const DY& dy, const ExpertMatrices& weights,
                        LayerSaved& saved, const ExpertMatrices& dweights, bool accumulate) {
    const TensorRef out = expert_out(saved), drows = row_gradients(saved);
    const ExpertRows rows = dispatch_.rows(saved.dispatch);
    dispatch_.combine_backward_receive(streams, dy, out, saved.dispatch, out);  // which is read for the last time
    if (!plan_.sends_before_weights()) {
      experts_.backward(streams, out, rows.rows, rows.offsets, weights, saved.experts, drows, dweights, accumulate);
      return dispatch_.dispatch_backward_send(streams, drows, saved.dispatch);
    }
    experts_.input_backward(streams, out, rows.offsets, weights, saved.experts, drows);
    dispatch_.dispatch_backward_send(streams, drows, saved.dispatch);
    experts_.weight_backward(streams, out, rows.rows, rows.offsets, saved.experts, dweights, accumulate);
  }
  template <class Logits, class DProbs, class DX, class DLogits>
  void backward_receive(const Streams<stream_type>& streams, const Logits& logits, const DProbs& dprobs,
                        LayerSaved& saved, const DX& dx, const DLogits& dlogits) {
    receive_token_gradients(streams, logits, dprobs, saved, dx, dlogits);
    release(streams, saved);
  }
  /// `backward` in two halves, for schedules that put the weights' gradients off: the first gives dx and dlogits and
  /// fills `deferred`, memory of the caller's carved by `LayerPlan::carve_deferred`.
  template <class DY, class Logits, class DProbs, class DX, class DLogits>
  void input_backward(const Streams<stream_type>& streams, const DY& dy, const Logits& logits,
                      const ExpertMatrices& weights, const DProbs& dprobs, LayerSaved& saved,
                      const LayerPlan::Deferred& deferred, const DX& dx, const DLogits& dlogits) {
    const TensorRef dout = expert_rows(deferred.dexpert_out, saved.ids.device());
    const TensorRef drows = row_gradients(saved);
    dispatch_.combine_backward(streams, dy, expert_out(saved), saved.dispatch, dout);
    experts_.input_backward(streams, dout, dispatch_.rows(saved.dispatch).offsets, weights, saved.experts,
                            deferred.inner, drows);
    dispatch_.dispatch_backward_send(streams, drows, saved.dispatch);
    receive_token_gradients(streams, logits, dprobs, saved, dx, dlogits);
  }
  /// The second half, at any later time: dweights (accumulate ? += : =). Local.
  void weight_backward(const Streams<stream_type>& streams, LayerSaved& saved, const LayerPlan::Deferred& deferred,
                       const ExpertMatrices& dweights, bool accumulate) {
    const ExpertRows rows = dispatch_.rows(saved.dispatch);
    experts_.weight_backward(streams, expert_rows(deferred.dexpert_out, saved.ids.device()), rows.rows, rows.offsets,
                             deferred.inner, dweights, accumulate);
    release(streams, saved);
  }
  /// Gives the rows of a forward pass without a backward pass back to the arena, if there is one; backward does so
  /// itself. Local. Errors: shape_error E17 unless it was the last that took rows.
  void release(const Streams<stream_type>& streams, LayerSaved& saved) const {
    dispatch_.release(streams, saved.dispatch);
  }

  const DispatchStatus* status() const { return dispatch_.status(); }
  std::vector<const std::int64_t*> status_words() const { return dispatch_.status_words(); }
  /// As Dispatch::check. Errors: shape_error E08, E10, on every rank of the ep group alike.
  DispatchStatus check(const Streams<stream_type>& streams) const { return dispatch_.check(streams); }

 private:
  /// The plan, once all ranks of the group have shown that they route alike; dispatch compares the rest.
  static const LayerPlan& agreed(const LayerPlan& plan, const GroupComm<Comm>& ep, Block scratch, stream_type s) {
    check_group(ep.size(), plan.dispatch.ranks);
    const RouterOptions& router = plan.router.options;
    const std::array fields{
        PlanField{"inner", plan.experts.shape.inner},     PlanField{"scoring", router.scoring},
        PlanField{"renormalize", router.renormalize},     PlanField{"scale", router.scale},
        PlanField{"expert_groups", router.expert_groups}, PlanField{"kept_groups", router.kept_groups},
        PlanField{"group_top", router.group_top},         PlanField{"force_balance", router.force_balance}};
    agree_on("moe layer", fields, ep, scratch, s);
    return plan;
  }
  /// Cuts the layer's own scratch off and leaves the parts theirs.
  static LayerPlan::Scratch take_scratch(const LayerPlan& plan, Memory<Arena>& memory) {
    Carver carver(memory.scratch);
    const LayerPlan::Scratch scratch = plan.carve_scratch(carver);
    memory.scratch = scratch.parts;
    return scratch;
  }
  template <class Logits>
  void route(const Streams<stream_type>& streams, const Logits& logits, LayerSaved& saved, const Choice& choice) const {
    if (choice.ids.rank() == 0) {
      return router_.choose(streams, logits, saved.ids, saved.weights, saved.probs, choice.bias, choice.routed);
    }
    const TensorRef ids = dense("ids", choice.ids, DType::i32, kind, {saved.ids.extent(0), plan_.router.shape.k});
    executor_.copy(saved.ids.data(), ids.data(), static_cast<std::size_t>(ids.elems()) * sizeof(std::int32_t),
                   streams.compute);
    router_.weigh(streams, logits, saved.ids, saved.weights, saved.probs);
  }
  TensorRef row_gradients(const LayerSaved& saved) const {
    std::byte* const rows = plan_.dispatch.has_arena() ? saved.record.expert_out : scratch_.dexpert_rows;
    return expert_rows(rows, saved.ids.device());
  }
  TensorRef expert_out(const LayerSaved& saved) const {
    return expert_rows(saved.record.expert_out, saved.ids.device());
  }
  /// The gradients of the tokens and of their logits, from those of the rows that came.
  template <class Logits, class DProbs, class DX, class DLogits>
  void receive_token_gradients(const Streams<stream_type>& streams, const Logits& logits, const DProbs& dprobs,
                               LayerSaved& saved, const DX& dx, const DLogits& dlogits) {
    const TensorRef dchoice =
        choice_array(scratch_.dweights, plan_.router.accumulator(), saved.dispatch.tokens, saved.ids.device());
    dispatch_.dispatch_backward_receive(streams, saved.dispatch, dx, dchoice);
    if (!saved.dispatch.is_refused()) {
      return router_.backward(streams, logits, saved.ids, saved.probs, dchoice, dprobs, dlogits);
    }
    const TensorRef all = dense("dlogits", dlogits, plan_.router.accumulator(), kind,
                                {saved.dispatch.tokens, plan_.router.shape.experts});
    executor_.zero(all.data(), static_cast<std::size_t>(all.elems()) * size_bytes(all.dtype()), streams.compute);
  }
  void name_choice(LayerSaved& saved, std::int64_t tokens, Device device) const {
    const LayerRecord& r = saved.record;
    const DType acc = plan_.router.accumulator();
    saved.ids = choice_array(r.ids, DType::i32, tokens, device);
    saved.weights = choice_array(r.weights, acc, tokens, device);
    saved.probs = {r.probs, acc, {tokens, plan_.router.shape.experts}, device};
  }
  TensorRef choice_array(void* data, DType dtype, std::int64_t tokens, Device device) const {
    return {data, dtype, {tokens, plan_.router.shape.k}, device};
  }
  TensorRef expert_rows(std::byte* data, Device device) const {
    return {data, plan_.dispatch.shape.dtype, {plan_.dispatch.capacity_rows(), plan_.dispatch.shape.hidden}, device};
  }

  LayerPlan plan_;
  Executor executor_;
  LayerPlan::Scratch scratch_;
  Router<Executor> router_;
  Dispatch<Executor, Comm, Arena> dispatch_;
  Experts<Executor, ExpertLeaf> experts_;
};

/// Collective as `bind` of a DispatchPlan. What it writes is ordered on `s`, the stream that the calls compute on.
/// `leaf` computes the experts' products. Errors: shape_error T02; comm_error C36 on every rank, C07, C08, C29, E06.
template <executor Executor, communicator Comm, optional_arena Arena,
          class ExpertLeaf = moe_leaf<typename Executor::device_type>>
Layer<Executor, Comm, Arena, ExpertLeaf> bind(
    const LayerPlan& plan, const Executor& executor, GroupComm<Comm> ep, const Memory<Arena>& memory,
    typename Executor::stream_type s = only_stream<typename Executor::stream_type>(), ExpertLeaf leaf = {}) {
  return {plan, executor, ep, memory, s, std::move(leaf)};
}

}  // namespace pleat::inline v0::moe
