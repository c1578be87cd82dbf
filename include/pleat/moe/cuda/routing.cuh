// The router's leaves on CUDA: one warp per token; ids are distinct, ties go to the lowest index, NaN is below all.
#pragma once

#include <algorithm>
#include <cstdint>

#include <pleat/core/dtype.hpp>
#include <pleat/moe/cuda/warp.cuh>
#include <pleat/moe/routed.hpp>
#include <pleat/moe/router.hpp>

namespace pleat::inline v0::moe::detail {

inline constexpr int route_warps = 8;

template <class Acc>
__device__ Acc sigmoid_of(Acc x) {
  return Acc{1} / (Acc{1} + exp_of(-x));
}
/// What DeepSeek-V3 adds to the sums that it divides sigmoid scores by.
template <class Acc>
inline constexpr Acc cuda_sigmoid_epsilon = static_cast<Acc>(1e-20);

/// One token's routing by a warp; all lanes call each function.
template <class Acc>
class WarpRouter {
 public:
  using Key = OrderedKey<Acc>;

  __device__ WarpRouter(const RouterPlan& plan, const Acc* logits)
      : plan_(plan), logits_(logits), lane_(lane_of_thread()) {}

  __device__ void probabilities(Acc* probs) const {
    const bool is_sigmoid = plan_.options.scoring == Scoring::sigmoid_topk;
    Acc most = -INFINITY;
    for (int e = lane_; e < experts() && !is_sigmoid; e += 32) most = logits_[e] > most ? logits_[e] : most;
    most = largest_of_warp(most);
    const auto score = [&](int e) { return is_sigmoid ? sigmoid_of(logits_[e]) : exp_of(logits_[e] - most); };
    Acc sum = 0;
    for (int e = lane_; e < experts(); e += 32) {
      const Acc value = score(e);
      probs[e] = value;
      sum += value;
    }
    sum = sum_of_warp(sum) + (is_sigmoid ? cuda_sigmoid_epsilon<Acc> : Acc{0});
    for (int e = lane_; e < experts(); e += 32) probs[e] /= sum;
    __syncwarp();
  }

  /// `keys` [experts] and `group_keys` [groups] are the warp's shared memory.
  __device__ void choose(const Acc* probs, const Acc* bias, Key* keys, Key* group_keys, std::int32_t* ids) const {
    const RouterOptions& o = plan_.options;
    // Scores rise with logits, and logits tell apart what scores round to the same; a sum needs the scores themselves.
    const bool by_logit = (bias == nullptr && o.group_top == 1) || o.scoring == Scoring::topk_softmax;
    const auto value = [&](int e) {
      const Acc score = by_logit ? logits_[e] : o.scoring == Scoring::sigmoid_topk ? sigmoid_of(logits_[e]) : probs[e];
      return bias == nullptr ? score : score + bias[e];
    };
    for (int e = lane_; e < experts(); e += 32) keys[e] = ordered(value(e));
    __syncwarp();
    if (o.expert_groups > 1) keep_groups(value, keys, group_keys);
    Candidate<Key> last = before_all<Key>();
    for (int j = 0; j < k(); ++j) {
      last = next_best(experts(), last, [&](int e) { return keys[e]; });
      if (lane_ == 0) ids[j] = last.index;
    }
    __syncwarp();
  }

  __device__ void balance(std::int64_t token, std::int32_t* ids) const {
    const int stride = experts() / k();
    for (int j = lane_; j < k(); j += 32) {
      ids[j] = static_cast<std::int32_t>((token + std::int64_t{j} * stride) % experts());
    }
    __syncwarp();
  }
  __device__ void unroute(std::int32_t* ids) const {
    for (int j = lane_; j < k(); j += 32) ids[j] = -1;
    __syncwarp();
  }

  __device__ void weigh(const Acc* probs, const std::int32_t* ids, Acc* weights) const {
    const Acc scale = static_cast<Acc>(plan_.options.scale);
    const Selected sel = selected(ids);
    for (int j = lane_; j < k(); j += 32) weights[j] = routed(ids, j) ? scale * share(sel, probs, ids[j]) : Acc{0};
  }

  __device__ void backward(const std::int32_t* ids, const Acc* probs, const Acc* dweights, const Acc* dprobs,
                           Acc* dlogits) const {
    const Acc scale = static_cast<Acc>(plan_.options.scale);
    const bool is_routed_at_all = is_routed_token(ids, k(), experts());
    const bool is_sigmoid = plan_.options.scoring == Scoring::sigmoid_topk;
    for (int e = lane_; e < experts(); e += 32) {
      dlogits[e] = is_routed_at_all && dprobs != nullptr && !is_sigmoid ? dprobs[e] : Acc{0};
    }
    if (!is_routed_at_all) return;
    __syncwarp();
    const Selected sel = selected(ids);
    Acc mean = 0;  // of scale * dweights under the renormalized weights
    for (int j = lane_; j < k() && normalizes(); j += 32) {
      if (routed(ids, j)) mean += scale * dweights[j] * share(sel, probs, ids[j]);
    }
    mean = sum_of_warp(mean);

    // d of the weights with respect to the chosen scores, where these are shares of all experts' scores
    if (!over_chosen_logits()) {
      const Acc sum = plan_.options.renormalize ? sel.sum : Acc{1};
      for (int j = lane_; j < k(); j += 32) {
        if (routed(ids, j)) dlogits[ids[j]] += (scale * dweights[j] - mean) / sum;
      }
      __syncwarp();
    }
    if (is_sigmoid) return through_sigmoid(probs, dprobs, dlogits);
    if (dprobs != nullptr || !over_chosen_logits()) {
      Acc dot = 0;
      for (int e = lane_; e < experts(); e += 32) dot += probs[e] * dlogits[e];
      dot = sum_of_warp(dot);
      for (int e = lane_; e < experts(); e += 32) dlogits[e] = probs[e] * (dlogits[e] - dot);
      __syncwarp();
    }
    if (over_chosen_logits()) {
      for (int j = lane_; j < k(); j += 32) {
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

  __device__ int experts() const { return plan_.shape.experts; }
  __device__ int k() const { return plan_.shape.k; }
  __device__ bool routed(const std::int32_t* ids, int j) const { return is_routed(ids, j, experts()); }
  __device__ bool normalizes() const { return over_chosen_logits() || plan_.options.renormalize; }
  /// Renormalized softmax weights are the softmax over the chosen logits, which no underflow of scores can hurt.
  __device__ bool over_chosen_logits() const {
    const RouterOptions& o = plan_.options;
    return o.scoring == Scoring::topk_softmax || (o.scoring == Scoring::softmax_topk && o.renormalize);
  }

  /// Keys of experts outside the best groups become 0.
  template <class Value>
  __device__ void keep_groups(const Value& value, Key* keys, Key* group_keys) const {
    const RouterOptions& o = plan_.options;
    const int members = experts() / o.expert_groups;
    for (int g = 0; g < o.expert_groups; ++g) {
      Acc sum = 0;
      Candidate<Key> last = before_all<Key>();
      for (int i = 0; i < o.group_top; ++i) {
        last = next_best(members, last, [&](int e) { return keys[g * members + e]; });
        sum += value(g * members + last.index);
      }
      if (lane_ == 0) group_keys[g] = ordered(sum);
    }
    __syncwarp();
    Candidate<Key> last = before_all<Key>();
    for (int i = 0; i < o.kept_groups; ++i) {
      last = next_best(o.expert_groups, last, [&](int g) { return group_keys[g]; });
    }
    for (int e = lane_; e < experts(); e += 32) {
      if (last.comes_before({group_keys[e / members], e / members})) keys[e] = 0;
    }
    __syncwarp();
  }

  __device__ Selected selected(const std::int32_t* ids) const {
    Selected sel{-INFINITY, 0};
    if (!normalizes()) return sel;
    for (int j = lane_; j < k(); j += 32) {
      if (routed(ids, j)) sel.most = logits_[ids[j]] > sel.most ? logits_[ids[j]] : sel.most;
    }
    sel.most = largest_of_warp(sel.most);
    for (int j = lane_; j < k(); j += 32) {
      if (!routed(ids, j)) continue;
      sel.sum += over_chosen_logits() ? exp_of(logits_[ids[j]] - sel.most) : sigmoid_of(logits_[ids[j]]);
    }
    sel.sum = sum_of_warp(sel.sum) + (over_chosen_logits() ? Acc{0} : cuda_sigmoid_epsilon<Acc>);
    return sel;
  }

  /// The weight of a chosen expert before `scale`.
  __device__ Acc share(const Selected& sel, const Acc* probs, int expert) const {
    if (over_chosen_logits()) return exp_of(logits_[expert] - sel.most) / sel.sum;
    if (plan_.options.scoring == Scoring::softmax_topk) return probs[expert];
    return plan_.options.renormalize ? sigmoid_of(logits_[expert]) / sel.sum : sigmoid_of(logits_[expert]);
  }

  __device__ void through_sigmoid(const Acc* probs, const Acc* dprobs, Acc* dlogits) const {
    Acc sum = 0, dot = 0;
    for (int e = lane_; e < experts() && dprobs != nullptr; e += 32) {
      sum += sigmoid_of(logits_[e]);
      dot += probs[e] * dprobs[e];
    }
    sum = sum_of_warp(sum) + cuda_sigmoid_epsilon<Acc>;
    dot = sum_of_warp(dot);
    for (int e = lane_; e < experts(); e += 32) {
      const Acc score = sigmoid_of(logits_[e]);
      const Acc dbalance = dprobs == nullptr ? Acc{0} : (dprobs[e] - dot) / sum;
      dlogits[e] = (dlogits[e] + dbalance) * score * (1 - score);
    }
  }

  const RouterPlan& plan_;
  const Acc* logits_;
  int lane_;
};

/// Dynamic shared memory: per warp, keys of all experts and groups.
template <class Acc>
PLEAT_KERNEL void __launch_bounds__(32 * route_warps)
    route_kernel(const __grid_constant__ RouterPlan plan, IdSource source, std::int64_t tokens, const Acc* logits,
                 const Acc* bias, const std::uint8_t* routed, std::int32_t* ids, Acc* weights, Acc* probs) {
  extern __shared__ __align__(16) std::byte route_memory[];
  const int warps = static_cast<int>(blockDim.x / 32), warp = static_cast<int>(threadIdx.x / 32);
  auto* const keys = reinterpret_cast<OrderedKey<Acc>*>(route_memory) +
                     static_cast<std::int64_t>(warp) * (plan.shape.experts + plan.options.expert_groups);
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * warps;
  for (std::int64_t t = static_cast<std::int64_t>(blockIdx.x) * warps + warp; t < tokens; t += step) {
    const WarpRouter<Acc> token(plan, logits + t * plan.shape.experts);
    Acc* const token_probs = probs + t * plan.shape.experts;
    std::int32_t* const token_ids = ids + t * plan.shape.k;
    token.probabilities(token_probs);
    if (source != IdSource::caller && routed != nullptr && routed[t] == 0) {
      token.unroute(token_ids);
    } else if (source == IdSource::logits) {
      token.choose(token_probs, bias, keys, keys + plan.shape.experts, token_ids);
    } else if (source == IdSource::balance) {
      token.balance(t, token_ids);
    }
    token.weigh(token_probs, token_ids, weights + t * plan.shape.k);
    __syncwarp();
  }
}

template <class Acc>
PLEAT_KERNEL void __launch_bounds__(32 * route_warps)
    route_backward_kernel(const __grid_constant__ RouterPlan plan, std::int64_t tokens, const Acc* logits,
                          const std::int32_t* ids, const Acc* probs, const Acc* dweights, const Acc* dprobs,
                          std::int64_t group_tokens, Acc* dlogits) {
  const std::int64_t experts = plan.shape.experts, k = plan.shape.k;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * route_warps;
  for (std::int64_t t = static_cast<std::int64_t>(blockIdx.x) * route_warps + threadIdx.x / 32; t < tokens; t += step) {
    WarpRouter<Acc>(plan, logits + t * experts)
        .backward(ids + t * k, probs + t * experts, dweights + t * k,
                  dprobs == nullptr ? nullptr : dprobs + t / group_tokens * experts, dlogits + t * experts);
  }
}

struct CudaRouterLeaf {
  static void preload() {
    for_each_type(AccumulatorTypes{}, [](auto type) {
      using Acc = typename decltype(type)::type;
      preload_kernel(route_kernel<Acc>, "route_kernel");
      preload_kernel(route_backward_kernel<Acc>, "route_backward_kernel");
    });
  }

  /// Errors: shape_error E13 where the keys of one token do not fit a CTA's memory.
  static void route(const RouterPlan& plan, IdSource source, std::int64_t tokens, const void* logits, const void* bias,
                    const std::uint8_t* routed, std::int32_t* ids, void* weights, void* probs, cudaStream_t s) {
    if (tokens == 0) return;
    dispatch_dtype(AccumulatorTypes{}, plan.accumulator(), [&](auto type) {
      using Acc = typename decltype(type)::type;
      constexpr std::int64_t most_bytes = 48 << 10;
      const std::int64_t warp_bytes =
          static_cast<std::int64_t>(sizeof(Acc)) * (plan.shape.experts + plan.options.expert_groups);
      const int warps = static_cast<int>(std::min<std::int64_t>(route_warps, most_bytes / warp_bytes));
      if (warps == 0) {
        fail<shape_error>("pleat[E13]: experts=", plan.shape.experts, " expert_groups=", plan.options.expert_groups,
                          " are too many to choose from on this device; valid: experts + groups up to ",
                          most_bytes / static_cast<std::int64_t>(sizeof(Acc)));
      }
      route_kernel<Acc><<<grid(tokens, warps), 32 * warps, warps * warp_bytes, s>>>(
          plan, source, tokens, static_cast<const Acc*>(logits), static_cast<const Acc*>(bias), routed, ids,
          static_cast<Acc*>(weights), static_cast<Acc*>(probs));
      check_launch("route_kernel");
    });
  }

  static void route_backward(const RouterPlan& plan, std::int64_t tokens, const void* logits, const std::int32_t* ids,
                             const void* probs, const void* dweights, const void* dprobs, std::int64_t groups,
                             void* dlogits, cudaStream_t s) {
    if (tokens == 0) return;
    dispatch_dtype(AccumulatorTypes{}, plan.accumulator(), [&](auto type) {
      using Acc = typename decltype(type)::type;
      route_backward_kernel<Acc><<<grid(tokens, route_warps), 32 * route_warps, 0, s>>>(
          plan, tokens, static_cast<const Acc*>(logits), ids, static_cast<const Acc*>(probs),
          static_cast<const Acc*>(dweights), static_cast<const Acc*>(dprobs), tokens / groups,
          static_cast<Acc*>(dlogits));
      check_launch("route_backward_kernel");
    });
  }

 private:
  static unsigned grid(std::int64_t tokens, int warps) {
    return static_cast<unsigned>(std::min<std::int64_t>((tokens + warps - 1) / warps, 4096));
  }
};

}  // namespace pleat::inline v0::moe::detail
