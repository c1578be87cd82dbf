// When more entries come than there is room for: the smallest weights go, the same ones whatever the timing.
#pragma once

#include <cstdint>

#include <pleat/moe/cuda/warp.cuh>
#include <pleat/moe/dispatch_plan.hpp>

namespace pleat::inline v0::moe::detail {

inline constexpr int drop_threads = 1024;

/// The sum of the values of the threads before this one, and of all, in a CTA of `drop_threads`.
struct CtaScan {
  int before, all;

  __device__ explicit CtaScan(int value) {
    __shared__ int sums[drop_threads / 32];
    int sum = value;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int left = __shfl_up_sync(whole_warp, sum, distance);
      if (lane_of_thread() >= distance) sum += left;
    }
    if (lane_of_thread() == 31) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    before = sum - value;
    all = 0;
    for (int w = 0; w < drop_threads / 32; ++w) {
      if (w < static_cast<int>(threadIdx.x / 32)) before += sums[w];
      all += sums[w];
    }
    __syncthreads();
  }
};

/// Calls f(first entry) for this thread's rows of those that came, in rounds of `drop_threads` rows that ascend; with
/// -1 where a thread has none, so that all call together.
template <class F>
__device__ void each_round(const DispatchPlan& plan, const DispatchRecord& r, const F& f) {
  for (int source = 0; source < plan.ranks; ++source) {
    const std::int64_t count = r.recv_counts[source];
    for (std::int64_t first = 0; first < count; first += drop_threads) {
      const std::int64_t slot = first + threadIdx.x;
      f(slot < count ? (source * plan.shape.max_tokens + slot) * plan.max_entries() : std::int64_t{-1});
    }
  }
}
/// Calls f(entry) for the entries of a row.
template <class F>
__device__ void each_entry_of(const DispatchPlan& plan, const DispatchRecord& r, std::int64_t first, const F& f) {
  for (int i = 0; first >= 0 && i < plan.max_entries() && r.entry_rows[first + i] >= 0; ++i) f(first + i);
}

/// The key of the `rank`-th largest weight, and how many entries have a larger one: a radix selection by bytes.
template <class Key>
struct Threshold {
  Key key = 0;
  std::int64_t larger = 0;
};
template <class Acc>
__device__ Threshold<OrderedKey<Acc>> select_weight(const DispatchPlan& plan, const DispatchRecord& r,
                                                    std::int64_t rank) {
  using Key = OrderedKey<Acc>;
  __shared__ int histogram[256];
  __shared__ Threshold<Key> found;
  Threshold<Key> threshold;
  for (int shift = 8 * sizeof(Key) - 8; shift >= 0; shift -= 8) {
    if (threadIdx.x < 256) histogram[threadIdx.x] = 0;
    __syncthreads();
    each_round(plan, r, [&](std::int64_t first) {
      each_entry_of(plan, r, first, [&](std::int64_t entry) {
        const Key key = ordered(static_cast<const Acc*>(r.entry_weights)[entry]);
        const Key above = static_cast<Key>(key ^ threshold.key) >> shift;
        if (above < 256) atomicAdd(histogram + (key >> shift) % 256, 1);  // integers: exact in any order
      });
    });
    __syncthreads();
    if (threadIdx.x == 0) {
      int digit = 255;
      std::int64_t larger = threshold.larger;
      while (larger + histogram[digit] < rank) larger += histogram[digit--];
      found = {static_cast<Key>(threshold.key | static_cast<Key>(digit) << shift), larger};
    }
    __syncthreads();
    threshold = found;
  }
  return threshold;
}

/// One CTA: with more than max_rows entries (counts [experts_local, blocks] of all), takes the smallest weights off the
/// lists; of equal ones the later, in the order (source, slot, expert). NaN is the smallest.
template <class Acc, int Threads>
PLEAT_KERNEL void __launch_bounds__(Threads)
    drop_entries_kernel(const __grid_constant__ DispatchPlan plan, std::int64_t blocks, const std::int32_t* counts,
                        const __grid_constant__ DispatchRecord r) {
  static_assert(Threads == drop_threads);
  int own = 0;
  for (std::int64_t i = threadIdx.x; i < plan.experts_local() * blocks; i += Threads) own += counts[i];
  const std::int64_t most = plan.max_rows(used_rows(r)), dropped = CtaScan(own).all - most;
  if (dropped <= 0) return;
  auto* const weights = static_cast<Acc*>(r.entry_weights);
  const auto threshold = select_weight<Acc>(plan, r, most);
  std::int64_t equal_left = most - threshold.larger;  // of those that are equal, the first so many stay
  each_round(plan, r, [&](std::int64_t first) {
    int equal = 0;
    each_entry_of(plan, r, first,
                  [&](std::int64_t entry) { equal += ordered(weights[entry]) == threshold.key ? 1 : 0; });
    const CtaScan scan(equal);
    std::int64_t left = equal_left - scan.before;
    equal_left -= scan.all;
    if (first < 0) return;
    std::int64_t kept = first;
    each_entry_of(plan, r, first, [&](std::int64_t entry) {
      const auto key = ordered(weights[entry]);
      if (key < threshold.key || (key == threshold.key && left-- <= 0)) return;
      r.entry_rows[kept] = r.entry_rows[entry];
      r.entry_choice[kept] = r.entry_choice[entry];
      weights[kept++] = weights[entry];
    });
    if (kept < first + plan.max_entries()) r.entry_rows[kept] = -1;
  });
  if (threadIdx.x == 0) *r.dropped = dropped;
}

}  // namespace pleat::inline v0::moe::detail
