// The router: from logits to k experts per token and their weights, and back.
#pragma once

#include <pleat/core/streams.hpp>
#include <pleat/moe/leaf.hpp>
#include <pleat/moe/operand.hpp>
#include <pleat/moe/plan_checks.hpp>

namespace pleat::inline v0::moe {

/// How logits become scores and weights.
/// source: Switch Transformers (arXiv 2101.03961) for softmax_topk, Mixtral for topk_softmax, DeepSeek-V3 (arXiv
/// 2412.19437) for sigmoid_topk, groups and the selection bias.
enum class Scoring : unsigned char {
  softmax_topk,  ///< scores = softmax over all experts; weights = the chosen scores
  topk_softmax,  ///< scores = logits; weights = softmax over the chosen logits
  sigmoid_topk,  ///< scores = sigmoid of each logit; weights = the chosen scores
};

/// How experts are chosen; all ranks choose alike.
struct RouterOptions {
  Scoring scoring = Scoring::softmax_topk;
  /// Divide the weights of a token by their sum (topk_softmax does so by itself).
  bool renormalize = true;
  /// Factor on all weights.
  double scale = 1;
  /// Group-limited choice: `groups` equal groups of consecutive experts, of which a token may choose in the
  /// `kept_groups` best; a group is judged by the sum of its `group_top` best scores.
  int expert_groups = 1;
  int kept_groups = 1;
  int group_top = 1;
  /// Token t takes expert (t + j * (experts / k)) % experts as its choice j, whatever the logits: for benchmarks.
  bool force_balance = false;
};

/// Sizes of the router.
struct RouterShape {
  int experts = 0;
  int k = 0;
  /// Of the model; logits, weights and probabilities are of its accumulator.
  DType dtype = DType::f32;
};

/// Made by `plan_router`; read its members freely.
struct RouterPlan {
  RouterShape shape;
  RouterOptions options;

  PLEAT_HD constexpr DType accumulator() const { return pleat::accumulator(shape.dtype); }
};

/// Errors: shape_error T01, E02 when k does not fit experts, E03 when the groups do not, E14 for other options.
inline RouterPlan plan(const RouterShape& shape, const RouterOptions& options = {}) {
  check_choice(shape.experts, shape.k);
  check_float(shape.dtype);
  check_enumerator("scoring", options.scoring, Scoring::sigmoid_topk);
  check_number("scale", options.scale, false);
  const int groups = options.expert_groups;
  const int members = groups >= 1 && shape.experts % groups == 0 ? shape.experts / groups : 0;
  if (members == 0 || options.kept_groups < 1 || options.kept_groups > groups ||
      options.kept_groups * members < shape.k || options.group_top < 1 || options.group_top > members) {
    fail<shape_error>(
        "pleat[E03]: expert_groups=", groups, " kept_groups=", options.kept_groups, " group_top=", options.group_top,
        " do not fit experts=", shape.experts, " k=", shape.k, "; valid groups: ", Divisors{shape.experts},
        "; 1 <= kept_groups <= expert_groups; kept_groups * experts / expert_groups >= k; 1 <= group_top <= experts / "
        "expert_groups");
  }
  return {shape, options};
}

/// Where the ids of a call come from.
enum class IdSource : unsigned char { logits, caller, balance };

/// The bound router; it owns nothing and needs no memory. `acc` is the accumulator of the plan's dtype.
///
/// Ids are k distinct experts per token, best first; ties go to the lowest index, and NaN ranks below everything. Ids
/// that a caller gives may be unrouted: outside [0, experts), or a repetition within their token. Those get weight 0
/// and no gradient; a token that is padding has none but such ids. Calls are local and ordered on `streams.compute`.
/// Errors: shape_error T07, E01.
template <executor Executor>
class Router {
 public:
  using device_type = typename Executor::device_type;
  using stream_type = typename Executor::stream_type;

  explicit Router(const RouterPlan& plan) : plan_(plan) { preload_leaves<moe_leaf<device_type>>(); }
  const RouterPlan& plan() const { return plan_; }

  /// Chooses: logits [tokens, experts] acc -> ids [tokens, k] i32, weights [tokens, k] acc, probs [tokens, experts]
  /// acc: the distribution of the load-balance loss, softmax or normalized sigmoid. `bias` [experts] acc, or absent, is
  /// added to the scores for the choice only. `routed` [tokens] u8, or absent: tokens with 0 are padding, their ids are
  /// -1.
  template <class Logits, class Ids, class Weights, class Probs, class Bias = TensorRef, class Routed = TensorRef>
  void choose(const Streams<stream_type>& streams, const Logits& logits, const Ids& ids, const Weights& weights,
              const Probs& probs, const Bias& bias = {}, const Routed& routed = {}) const {
    const IdSource source = plan_.options.force_balance ? IdSource::balance : IdSource::logits;
    route(streams, source, logits, ids, weights, probs, bias, routed);
  }

  /// Weights and probs of the choice `ids` that the caller gives; otherwise as `choose`.
  template <class Logits, class Ids, class Weights, class Probs>
  void weigh(const Streams<stream_type>& streams, const Logits& logits, const Ids& ids, const Weights& weights,
             const Probs& probs) const {
    route(streams, IdSource::caller, logits, ids, weights, probs, TensorRef{}, TensorRef{});
  }

  /// dweights [tokens, k] acc, and optionally dprobs [groups, experts] acc -> dlogits [tokens, experts] acc,
  /// overwritten. `groups` divides tokens: tokens/groups consecutive tokens share a row of dprobs (see losses.hpp); it
  /// acts on tokens that have at least one routed id. logits, ids and probs are those of the forward call.
  template <class Logits, class Ids, class Probs, class DWeights, class DProbs, class DLogits>
  void backward(const Streams<stream_type>& streams, const Logits& logits, const Ids& ids, const Probs& probs,
                const DWeights& dweights, const DProbs& dprobs, const DLogits& dlogits) const {
    const auto [in, chosen, p] = operands(logits, ids, probs);
    const std::int64_t tokens = in.extent(0);
    const TensorRef dw = dense("dweights", dweights, plan_.accumulator(), kind, {tokens, plan_.shape.k});
    const TensorRef out = dense("dlogits", dlogits, plan_.accumulator(), kind, {tokens, plan_.shape.experts});
    const TensorRef dp =
        dense_or_absent("dprobs", dprobs, plan_.accumulator(), kind, {any_extent, plan_.shape.experts});
    const std::int64_t groups = dp.data() == nullptr ? 1 : dp.extent(0);
    check_divides(tokens, groups);
    moe_leaf<device_type>::route_backward(plan_, tokens, in.data(), chosen.template as<std::int32_t>(), p.data(),
                                          dw.data(), dp.data(), groups, out.data(), streams.compute);
  }

 private:
  static constexpr KnownDevice<device_type> kind{};
  struct Operands {
    TensorRef logits, ids, probs;
  };

  template <class Logits, class Ids, class Probs>
  Operands operands(const Logits& logits, const Ids& ids, const Probs& probs) const {
    const TensorRef in = dense("logits", logits, plan_.accumulator(), kind, {any_extent, plan_.shape.experts});
    const std::int64_t tokens = in.extent(0);
    return {in, dense("ids", ids, DType::i32, kind, {tokens, plan_.shape.k}),
            dense("probs", probs, plan_.accumulator(), kind, {tokens, plan_.shape.experts})};
  }

  template <class Logits, class Ids, class Weights, class Probs, class Bias, class Routed>
  void route(const Streams<stream_type>& streams, IdSource source, const Logits& logits, const Ids& ids,
             const Weights& weights, const Probs& probs, const Bias& bias, const Routed& routed) const {
    const auto [in, chosen, p] = operands(logits, ids, probs);
    const std::int64_t tokens = in.extent(0);
    const TensorRef w = dense("weights", weights, plan_.accumulator(), kind, {tokens, plan_.shape.k});
    const TensorRef b = dense_or_absent("bias", bias, plan_.accumulator(), kind, {plan_.shape.experts});
    const TensorRef mask = dense_or_absent("routed", routed, DType::u8, kind, {tokens});
    moe_leaf<device_type>::route(plan_, source, tokens, in.data(), b.data(),
                                 static_cast<const std::uint8_t*>(mask.data()), chosen.template as<std::int32_t>(),
                                 w.data(), p.data(), streams.compute);
  }

  RouterPlan plan_;
};

/// Binds a router: it keeps no memory of its own.
template <executor Executor>
Router<Executor> bind(const RouterPlan& plan, const Executor&) {
  return Router<Executor>(plan);
}

}  // namespace pleat::inline v0::moe
