// The leaves of the losses and the selection bias on CUDA: counts are integers, and values are summed in a fixed order.
#pragma once

#include <algorithm>
#include <cstdint>

#include <pleat/core/dtype.hpp>
#include <pleat/cuda/leaf.cuh>
#include <pleat/moe/cuda/warp.cuh>
#include <pleat/moe/losses.hpp>
#include <pleat/moe/routed.hpp>
#include <pleat/moe/router_z.hpp>

namespace pleat::inline v0::moe::detail {

inline constexpr int loss_threads = pleat::detail::leaf_threads;
static_assert(loss_partials == loss_threads, "one thread adds one partial");

/// CTA (x, group) counts some tokens of a group. Integers in float64 are exact in any order, and so are their atomics.
template <int Threads>
PLEAT_KERNEL void __launch_bounds__(Threads)
    count_choices_kernel(int experts, int k, std::int64_t group_tokens, const std::int32_t* ids, double* counts) {
  extern __shared__ int seen[];  // [experts + 1]
  for (int e = threadIdx.x; e <= experts; e += Threads) seen[e] = 0;
  __syncthreads();
  const std::int64_t group = blockIdx.y;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * Threads;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * Threads + threadIdx.x; i < group_tokens; i += step) {
    const std::int32_t* const token_ids = ids + (group * group_tokens + i) * k;
    bool any = false;
    for (int j = 0; j < k; ++j) {
      if (!is_routed(token_ids, j, experts)) continue;
      atomicAdd(seen + token_ids[j], 1);
      any = true;
    }
    if (any) atomicAdd(seen + experts, 1);
  }
  __syncthreads();
  for (int e = threadIdx.x; e <= experts; e += Threads) {
    if (seen[e] != 0) atomicAdd(counts + group * (experts + 1) + e, static_cast<double>(seen[e]));
  }
}

template <class Acc, int Threads>
PLEAT_KERNEL void __launch_bounds__(Threads)
    balance_slope_kernel(const __grid_constant__ LoadBalancePlan plan, std::int64_t groups, const double* counts,
                         const StepTokens* step, Acc* dprobs) {
  const std::int64_t experts = plan.shape.experts, stride = static_cast<std::int64_t>(gridDim.x) * Threads;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * Threads + threadIdx.x; i < groups * experts;
       i += stride) {
    const double* const group = counts + i / experts * (experts + 1);
    dprobs[i] = static_cast<Acc>(plan.weight(group[i % experts], group[experts], step->routed) * step->targets);
  }
}

/// Calls f(token) for this warp's share of the tokens, of which a grid of `loss_partials` CTAs has all, whatever the
/// device; partials[CTA] = the sum of what the lanes return.
template <class F>
__device__ void sum_over_tokens(std::int64_t tokens, double* partials, const F& f) {
  constexpr std::int64_t warps = loss_threads / 32;
  double sum = 0;
  for (std::int64_t t = blockIdx.x * warps + threadIdx.x / 32; t < tokens; t += loss_partials * warps) sum += f(t);
  sum = pleat::detail::sum_of_block(sum);
  if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

template <class Acc, int Threads>
PLEAT_KERNEL void __launch_bounds__(Threads)
    balance_value_kernel(const __grid_constant__ LoadBalancePlan plan, std::int64_t group_tokens, std::int64_t tokens,
                         const std::int32_t* ids, const Acc* probs, const double* counts, const StepTokens* step,
                         double* partials) {
  const int experts = plan.shape.experts, k = plan.shape.k;
  sum_over_tokens(tokens, partials, [&](std::int64_t t) {
    double sum = 0;
    if (!is_routed_token(ids + t * k, k, experts)) return sum;
    const double* const group = counts + t / group_tokens * (experts + 1);
    for (int e = lane_of_thread(); e < experts; e += 32) {
      sum += plan.weight(group[e], group[experts], step->routed) * static_cast<double>(probs[t * experts + e]);
    }
    return sum;
  });
}

template <class Acc, int Threads>
PLEAT_KERNEL void __launch_bounds__(Threads)
    router_z_kernel(const __grid_constant__ RouterZPlan plan, std::int64_t tokens, const Acc* logits,
                    const std::int32_t* ids, const StepTokens* step, Acc* dlogits, double* partials) {
  const int experts = plan.shape.experts, k = plan.shape.k, lane = lane_of_thread();
  const double weight = step->routed == 0 ? 0 : plan.options.coefficient / step->routed;
  sum_over_tokens(tokens, partials, [&](std::int64_t t) {
    if (!is_routed_token(ids + t * k, k, experts)) return 0.0;
    const Acc* const in = logits + t * experts;
    Acc* const out = dlogits + t * experts;
    Acc most = -INFINITY;
    for (int e = lane; e < experts; e += 32) most = in[e] > most ? in[e] : most;
    most = largest_of_warp(most);
    Acc sum = 0;
    for (int e = lane; e < experts; e += 32) sum += exp_of(in[e] - most);
    sum = sum_of_warp(sum);
    const Acc z = most + log(sum);
    const Acc slope = static_cast<Acc>(2 * weight * step->targets) * z / sum;
    for (int e = lane; e < experts; e += 32) out[e] += slope * exp_of(in[e] - most);
    return lane == 0 ? weight * static_cast<double>(z) * static_cast<double>(z) : 0.0;
  });
}

template <int Threads>
PLEAT_KERNEL void __launch_bounds__(Threads) add_partials_kernel(double* value, const double* partials) {
  const double sum = pleat::detail::sum_of_block(partials[threadIdx.x]);
  if (threadIdx.x == 0) *value += sum;
}

template <class Acc, int Threads>
PLEAT_KERNEL void __launch_bounds__(Threads)
    update_bias_kernel(int experts, const double* counts, double rate, Acc* bias) {
  __shared__ double mean;
  double sum = 0;  // of integers: exact in any order
  for (int e = threadIdx.x; e < experts; e += Threads) sum += counts[e];
  sum = pleat::detail::sum_of_block(sum);
  if (threadIdx.x == 0) mean = sum / experts;
  __syncthreads();
  for (int e = threadIdx.x; e < experts; e += Threads) {
    const double direction = counts[e] < mean ? 1 : counts[e] > mean ? -1 : 0;
    bias[e] = static_cast<Acc>(static_cast<double>(bias[e]) + rate * direction);
  }
}

struct CudaLossLeaf {
  static void preload() {
    preload_kernel(count_choices_kernel<loss_threads>, "count_choices_kernel");
    preload_kernel(add_partials_kernel<loss_threads>, "add_partials_kernel");
    for_each_type(AccumulatorTypes{}, [](auto type) {
      using Acc = typename decltype(type)::type;
      preload_kernel(balance_slope_kernel<Acc, loss_threads>, "balance_slope_kernel");
      preload_kernel(balance_value_kernel<Acc, loss_threads>, "balance_value_kernel");
      preload_kernel(router_z_kernel<Acc, loss_threads>, "router_z_kernel");
      preload_kernel(update_bias_kernel<Acc, loss_threads>, "update_bias_kernel");
    });
  }

  static void count_choices(int experts, int k, std::int64_t groups, std::int64_t tokens, const std::int32_t* ids,
                            bool accumulate, double* counts, cudaStream_t s) {
    const std::size_t bytes = static_cast<std::size_t>(groups * (experts + 1)) * sizeof(double);
    if (!accumulate) check_cuda(cudaMemsetAsync(counts, 0, bytes, s), "cudaMemsetAsync");
    if (tokens == 0) return;
    const std::int64_t group_tokens = tokens / groups;
    const std::int64_t ctas = std::clamp<std::int64_t>(group_tokens / loss_threads, 1, 128);
    const dim3 grid(static_cast<unsigned>(ctas), static_cast<unsigned>(groups));
    count_choices_kernel<loss_threads>
        <<<grid, loss_threads, sizeof(int) * (static_cast<std::size_t>(experts) + 1), s>>>(experts, k, group_tokens,
                                                                                           ids, counts);
    check_launch("count_choices_kernel");
  }

  static void load_balance(const LoadBalancePlan& plan, std::int64_t groups, std::int64_t tokens,
                           const std::int32_t* ids, const void* probs, const double* counts, const StepTokens* step,
                           void* dprobs, double* value, double* scratch, cudaStream_t s) {
    dispatch_dtype(AccumulatorTypes{}, plan.accumulator(), [&](auto type) {
      using Acc = typename decltype(type)::type;
      const unsigned grid = pleat::detail::leaf_grid(static_cast<std::size_t>(groups * plan.shape.experts));
      balance_slope_kernel<Acc, loss_threads>
          <<<grid, loss_threads, 0, s>>>(plan, groups, counts, step, static_cast<Acc*>(dprobs));
      check_launch("balance_slope_kernel");
      if (tokens == 0) return;
      balance_value_kernel<Acc, loss_threads><<<loss_partials, loss_threads, 0, s>>>(
          plan, tokens / groups, tokens, ids, static_cast<const Acc*>(probs), counts, step, scratch);
      check_launch("balance_value_kernel");
      add_partials(value, scratch, s);
    });
  }

  static void router_z(const RouterZPlan& plan, std::int64_t tokens, const void* logits, const std::int32_t* ids,
                       const StepTokens* step, void* dlogits, double* value, double* scratch, cudaStream_t s) {
    if (tokens == 0) return;
    dispatch_dtype(AccumulatorTypes{}, plan.accumulator(), [&](auto type) {
      using Acc = typename decltype(type)::type;
      router_z_kernel<Acc, loss_threads><<<loss_partials, loss_threads, 0, s>>>(
          plan, tokens, static_cast<const Acc*>(logits), ids, step, static_cast<Acc*>(dlogits), scratch);
      check_launch("router_z_kernel");
      add_partials(value, scratch, s);
    });
  }

  static void update_bias(int experts, DType dtype, const double* counts, double rate, void* bias, cudaStream_t s) {
    dispatch_dtype(AccumulatorTypes{}, dtype, [&](auto type) {
      using Acc = typename decltype(type)::type;
      update_bias_kernel<Acc, loss_threads><<<1, loss_threads, 0, s>>>(experts, counts, rate, static_cast<Acc*>(bias));
      check_launch("update_bias_kernel");
    });
  }

 private:
  static void add_partials(double* value, const double* partials, cudaStream_t s) {
    add_partials_kernel<loss_threads><<<1, loss_threads, 0, s>>>(value, partials);
    check_launch("add_partials_kernel");
  }
};

}  // namespace pleat::inline v0::moe::detail
