// The leaves of the losses and the selection bias on the host.
#pragma once

#include <algorithm>
#include <cmath>

#include <pleat/core/host/executor.hpp>
#include <pleat/moe/losses.hpp>
#include <pleat/moe/routed.hpp>
#include <pleat/moe/router_z.hpp>

namespace pleat::inline v0::moe::detail {

struct HostLossLeaf {
  static void count_choices(int experts, int k, std::int64_t groups, std::int64_t tokens, const std::int32_t* ids,
                            bool accumulate, double* counts, HostStream) {
    if (!accumulate) std::fill_n(counts, groups * (experts + 1), 0.0);
    for (std::int64_t t = 0; t < tokens; ++t) {
      double* group = counts + t / (tokens / groups) * (experts + 1);
      const std::int32_t* token_ids = ids + t * k;
      for (int j = 0; j < k; ++j) {
        if (is_routed(token_ids, j, experts)) group[token_ids[j]] += 1;
      }
      if (is_routed_token(token_ids, k, experts)) group[experts] += 1;
    }
  }

  static void load_balance(const LoadBalancePlan& plan, std::int64_t groups, std::int64_t tokens,
                           const std::int32_t* ids, const void* probs, const double* counts, const StepTokens* step,
                           void* dprobs, double* value, double*, HostStream) {
    dispatch_dtype(AccumulatorTypes{}, plan.accumulator(), [&](auto type) {
      using Acc = typename decltype(type)::type;
      const int experts = plan.shape.experts, k = plan.shape.k;
      for (std::int64_t g = 0; g < groups; ++g) {
        const double* group = counts + g * (experts + 1);
        auto* slope = static_cast<Acc*>(dprobs) + g * experts;
        double group_value = 0;
        for (int e = 0; e < experts; ++e) {
          const double weight = plan.weight(group[e], group[experts], step->routed);
          slope[e] = static_cast<Acc>(weight * step->targets);
          double sum = 0;  // of the expert's probability over the routed tokens
          for (std::int64_t t = g * (tokens / groups); t < (g + 1) * (tokens / groups); ++t) {
            if (is_routed_token(ids + t * k, k, experts)) sum += static_cast<const Acc*>(probs)[t * experts + e];
          }
          group_value += weight * sum;
        }
        *value += group_value;
      }
    });
  }

  static void router_z(const RouterZPlan& plan, std::int64_t tokens, const void* logits, const std::int32_t* ids,
                       const StepTokens* step, void* dlogits, double* value, double*, HostStream) {
    dispatch_dtype(AccumulatorTypes{}, plan.accumulator(), [&](auto type) {
      using Acc = typename decltype(type)::type;
      const int experts = plan.shape.experts, k = plan.shape.k;
      const double weight = step->routed == 0 ? 0 : plan.options.coefficient / step->routed;
      for (std::int64_t t = 0; t < tokens; ++t) {
        if (!is_routed_token(ids + t * k, k, experts)) continue;
        const Acc* in = static_cast<const Acc*>(logits) + t * experts;
        Acc* out = static_cast<Acc*>(dlogits) + t * experts;
        const Acc most = *std::max_element(in, in + experts);
        Acc sum = 0;
        for (int e = 0; e < experts; ++e) sum += std::exp(in[e] - most);
        const Acc z = most + std::log(sum);
        const Acc slope = static_cast<Acc>(2 * weight * step->targets) * z / sum;
        for (int e = 0; e < experts; ++e) out[e] += slope * std::exp(in[e] - most);
        *value += weight * static_cast<double>(z) * static_cast<double>(z);
      }
    });
  }

  static void update_bias(int experts, DType dtype, const double* counts, double rate, void* bias, HostStream) {
    dispatch_dtype(AccumulatorTypes{}, dtype, [&](auto type) {
      double sum = 0;
      for (int e = 0; e < experts; ++e) sum += counts[e];
      const double mean = sum / experts;
      auto* b = static_cast<typename decltype(type)::type*>(bias);
      for (int e = 0; e < experts; ++e) {
        const double direction = counts[e] < mean ? 1 : counts[e] > mean ? -1 : 0;
        b[e] = static_cast<typename decltype(type)::type>(b[e] + rate * direction);
      }
    });
  }
};

}  // namespace pleat::inline v0::moe::detail
