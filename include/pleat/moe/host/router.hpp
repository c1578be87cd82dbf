// The router's leaves on the host.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include <pleat/core/host/executor.hpp>
#include <pleat/moe/host/sigmoid.hpp>
#include <pleat/moe/routed.hpp>
#include <pleat/moe/router.hpp>

namespace pleat::inline v0::moe::detail {

/// Whether key `a` of index `i` is chosen before key `b` of index `j`: larger first, NaN last, then the lower index.
template <class Acc>
bool ranks_before(Acc a, int i, Acc b, int j) {
  if (std::isnan(a) != std::isnan(b)) return std::isnan(b);
  if (!std::isnan(a) && a != b) return a > b;
  return i < j;
}

/// The best of `count` indices that come after `last` in the order of `ranks_before`; -1 as `last` means none yet.
template <class Key, class Allowed>
int next_best(int count, int last, const Key& key, const Allowed& allowed) {
  int best = -1;
  for (int i = 0; i < count; ++i) {
    if (!allowed(i)) continue;
    if (last >= 0 && !ranks_before(key(last), last, key(i), i)) continue;
    if (best < 0 || ranks_before(key(i), i, key(best), best)) best = i;
  }
  return best;
}

/// What DeepSeek-V3 adds to the sums that it divides sigmoid scores by.
template <class Acc>
inline constexpr Acc sigmoid_sum_epsilon = static_cast<Acc>(1e-20);

template <class Acc>
class RouteToken {
 public:
  RouteToken(const RouterPlan& plan, const Acc* logits) : plan_(plan), logits_(logits) {}

  void probabilities(Acc* probs) const {
    Acc sum = 0;
    if (plan_.options.scoring == Scoring::sigmoid_topk) {
      for (int e = 0; e < experts(); ++e) sum += probs[e] = sigmoid(logits_[e]);
      sum += sigmoid_sum_epsilon<Acc>;
    } else {
      const Acc most = *std::max_element(logits_, logits_ + experts());
      for (int e = 0; e < experts(); ++e) sum += probs[e] = std::exp(logits_[e] - most);
    }
    for (int e = 0; e < experts(); ++e) probs[e] /= sum;
  }

  /// `kept` [groups] is scratch.
  void choose(const Acc* probs, const Acc* bias, std::vector<char>& kept, std::int32_t* ids) const {
    const RouterOptions& o = plan_.options;
    // Scores rise with logits, and logits tell apart what scores round to the same; a sum needs the scores themselves.
    const bool by_logit = (bias == nullptr && o.group_top == 1) || o.scoring == Scoring::topk_softmax;
    const auto key = [&](int e) {
      const Acc score = by_logit ? logits_[e] : o.scoring == Scoring::sigmoid_topk ? sigmoid(logits_[e]) : probs[e];
      return bias == nullptr ? score : score + bias[e];
    };
    if (o.expert_groups == 1)
      return choose_allowed(
          key, [](int) { return true; }, ids);

    const int members = experts() / o.expert_groups;
    const auto group_key = [&](int g) {
      Acc sum = 0;
      for (int i = 0, last = -1; i < o.group_top; ++i) {
        last = next_best(
            members, last, [&](int e) { return key(g * members + e); }, [](int) { return true; });
        sum += key(g * members + last);
      }
      return sum;
    };
    std::fill(kept.begin(), kept.end(), char{0});
    for (int i = 0, last = -1; i < o.kept_groups; ++i) {
      last = next_best(o.expert_groups, last, group_key, [](int) { return true; });
      kept[static_cast<std::size_t>(last)] = 1;
    }
    choose_allowed(
        key, [&](int e) { return kept[static_cast<std::size_t>(e / members)] != 0; }, ids);
  }

  void balance(std::int64_t token, std::int32_t* ids) const {
    const int stride = experts() / k();
    for (int j = 0; j < k(); ++j) ids[j] = static_cast<std::int32_t>((token + std::int64_t{j} * stride) % experts());
  }

  void weigh(const Acc* probs, const std::int32_t* ids, Acc* weights) const {
    const Acc scale = static_cast<Acc>(plan_.options.scale);
    const Selected sel = selected(ids);
    for (int j = 0; j < k(); ++j) weights[j] = routed(ids, j) ? scale * share(sel, probs, ids[j]) : Acc{0};
  }

  void backward(const std::int32_t* ids, const Acc* probs, const Acc* dweights, const Acc* dprobs, Acc* dlogits) const {
    std::fill_n(dlogits, experts(), Acc{0});
    if (!is_routed_token(ids, k(), experts())) return;
    const Acc scale = static_cast<Acc>(plan_.options.scale);
    const Selected sel = selected(ids);
    Acc mean = 0;  // of scale * dweights under the renormalized weights
    if (normalizes()) {
      for (int j = 0; j < k(); ++j) {
        if (routed(ids, j)) mean += scale * dweights[j] * share(sel, probs, ids[j]);
      }
    }

    // d of the weights with respect to the chosen scores, where these are shares of all experts' scores
    if (!over_chosen_logits()) {
      const Acc sum = plan_.options.renormalize ? sel.sum : Acc{1};
      for (int j = 0; j < k(); ++j) {
        if (routed(ids, j)) dlogits[ids[j]] = (scale * dweights[j] - mean) / sum;
      }
    }
    if (plan_.options.scoring == Scoring::sigmoid_topk) {
      Acc sum = sigmoid_sum_epsilon<Acc>, dot = 0;
      if (dprobs != nullptr) {
        for (int e = 0; e < experts(); ++e) {
          sum += sigmoid(logits_[e]);
          dot += probs[e] * dprobs[e];
        }
      }
      for (int e = 0; e < experts(); ++e) {
        const Acc score = sigmoid(logits_[e]);
        const Acc dbalance = dprobs == nullptr ? Acc{0} : (dprobs[e] - dot) / sum;
        dlogits[e] = (dlogits[e] + dbalance) * score * (1 - score);
      }
      return;
    }
    if (dprobs != nullptr || !over_chosen_logits()) {
      if (dprobs != nullptr) {
        for (int e = 0; e < experts(); ++e) dlogits[e] += dprobs[e];
      }
      Acc dot = 0;
      for (int e = 0; e < experts(); ++e) dot += probs[e] * dlogits[e];
      for (int e = 0; e < experts(); ++e) dlogits[e] = probs[e] * (dlogits[e] - dot);
    }
    if (over_chosen_logits()) {
      for (int j = 0; j < k(); ++j) {
        if (routed(ids, j)) dlogits[ids[j]] += share(sel, probs, ids[j]) * (scale * dweights[j] - mean);
      }
    }
  }

 private:
  /// What the shares of the chosen experts are divided by.
  struct Selected {
    Acc most;  ///< the largest chosen logit
    Acc sum;
  };

  int experts() const { return plan_.shape.experts; }
  int k() const { return plan_.shape.k; }
  bool routed(const std::int32_t* ids, int j) const { return is_routed(ids, j, experts()); }
  bool normalizes() const { return over_chosen_logits() || plan_.options.renormalize; }
  /// Renormalized softmax weights are the softmax over the chosen logits, which no underflow of scores can hurt.
  bool over_chosen_logits() const {
    const RouterOptions& o = plan_.options;
    return o.scoring == Scoring::topk_softmax || (o.scoring == Scoring::softmax_topk && o.renormalize);
  }

  template <class Key, class Allowed>
  void choose_allowed(const Key& key, const Allowed& allowed, std::int32_t* ids) const {
    for (int j = 0, last = -1; j < k(); ++j) ids[j] = last = next_best(experts(), last, key, allowed);
  }

  Selected selected(const std::int32_t* ids) const {
    Selected sel{-std::numeric_limits<Acc>::infinity(), 0};
    if (!normalizes()) return sel;
    for (int j = 0; j < k(); ++j) {
      if (routed(ids, j)) sel.most = std::max(sel.most, logits_[ids[j]]);
    }
    for (int j = 0; j < k(); ++j) {
      if (!routed(ids, j)) continue;
      sel.sum += over_chosen_logits() ? std::exp(logits_[ids[j]] - sel.most) : sigmoid(logits_[ids[j]]);
    }
    if (!over_chosen_logits()) sel.sum += sigmoid_sum_epsilon<Acc>;
    return sel;
  }

  /// The weight of a chosen expert before `scale`.
  Acc share(const Selected& sel, const Acc* probs, int expert) const {
    if (over_chosen_logits()) return std::exp(logits_[expert] - sel.most) / sel.sum;
    if (plan_.options.scoring == Scoring::softmax_topk) return probs[expert];
    return plan_.options.renormalize ? sigmoid(logits_[expert]) / sel.sum : sigmoid(logits_[expert]);
  }

  const RouterPlan& plan_;
  const Acc* logits_;
};

struct HostRouterLeaf {
  static void route(const RouterPlan& plan, IdSource source, std::int64_t tokens, const void* logits, const void* bias,
                    const std::uint8_t* routed, std::int32_t* ids, void* weights, void* probs, HostStream) {
    dispatch_dtype(AccumulatorTypes{}, plan.accumulator(), [&](auto type) {
      using Acc = typename decltype(type)::type;
      const int groups = plan.options.expert_groups;
      std::vector<char> kept(groups == 1 ? 0 : static_cast<std::size_t>(groups));  // allocates where there are groups
      for (std::int64_t t = 0; t < tokens; ++t) {
        const RouteToken<Acc> token(plan, static_cast<const Acc*>(logits) + t * plan.shape.experts);
        auto* token_probs = static_cast<Acc*>(probs) + t * plan.shape.experts;
        std::int32_t* token_ids = ids + t * plan.shape.k;
        token.probabilities(token_probs);
        if (source == IdSource::logits) token.choose(token_probs, static_cast<const Acc*>(bias), kept, token_ids);
        if (source == IdSource::balance) token.balance(t, token_ids);
        if (source != IdSource::caller && routed != nullptr && routed[t] == 0) std::fill_n(token_ids, plan.shape.k, -1);
        token.weigh(token_probs, token_ids, static_cast<Acc*>(weights) + t * plan.shape.k);
      }
    });
  }

  static void route_backward(const RouterPlan& plan, std::int64_t tokens, const void* logits, const std::int32_t* ids,
                             const void* probs, const void* dweights, const void* dprobs, std::int64_t groups,
                             void* dlogits, HostStream) {
    dispatch_dtype(AccumulatorTypes{}, plan.accumulator(), [&](auto type) {
      using Acc = typename decltype(type)::type;
      const std::int64_t experts = plan.shape.experts, k = plan.shape.k;
      for (std::int64_t t = 0; t < tokens; ++t) {
        const auto* token_dprobs =
            dprobs == nullptr ? nullptr : static_cast<const Acc*>(dprobs) + t / (tokens / groups) * experts;
        RouteToken<Acc>(plan, static_cast<const Acc*>(logits) + t * experts)
            .backward(ids + t * k, static_cast<const Acc*>(probs) + t * experts,
                      static_cast<const Acc*>(dweights) + t * k, token_dprobs,
                      static_cast<Acc*>(dlogits) + t * experts);
      }
    });
  }
};

}  // namespace pleat::inline v0::moe::detail
