// Where rows go, planned on the device: counts per block, a scan over the blocks, then places in token order.
#pragma once

#include <algorithm>
#include <cstdint>

#include <pleat/core/dtype.hpp>
#include <pleat/moe/cuda/overflow.cuh>
#include <pleat/moe/cuda/warp.cuh>
#include <pleat/moe/dispatch_plan.hpp>
#include <pleat/moe/routed.hpp>

namespace pleat::inline v0::moe::detail {

inline constexpr int plan_threads = DispatchPlan::tokens_per_block;
inline constexpr int plan_warps = plan_threads / 32;
/// Ranks, or experts, that a CTA looks at together: the bits of one word.
inline constexpr int column_chunk = 64;

/// Which of a CTA's threads use each of `column_chunk` columns: any number of columns goes chunk by chunk. Setting bits
/// in any order gives the same words, so that counts and places do not depend on timing. All threads call.
class ColumnUse {
 public:
  /// `mine`: the columns that this thread uses.
  __device__ explicit ColumnUse(std::uint64_t mine) {
    __shared__ std::uint32_t words[plan_warps][column_chunk];
    words_ = words;
    for (int i = threadIdx.x; i < plan_warps * column_chunk; i += plan_threads) words[0][i] = 0;
    __syncthreads();
    for (std::uint64_t left = mine; left != 0; left &= left - 1) {
      atomicOr(&words[threadIdx.x / 32][__ffsll(static_cast<long long>(left)) - 1], 1u << lane_of_thread());
    }
    __syncthreads();
  }
  __device__ ~ColumnUse() { __syncthreads(); }

  __device__ int users(int column) const {
    int count = 0;
    for (int w = 0; w < plan_warps; ++w) count += __popc(words_[w][column]);
    return count;
  }
  /// Users of a column among the threads before this one.
  __device__ int users_before(int column) const {
    const int warp = static_cast<int>(threadIdx.x / 32);
    int count = __popc(words_[warp][column] & ((1u << lane_of_thread()) - 1));
    for (int w = 0; w < warp; ++w) count += __popc(words_[w][column]);
    return count;
  }

 private:
  std::uint32_t (*words_)[column_chunk];
};

/// counts[column, block] = users of each column in this CTA's block, of all columns. `columns_of(first)`: the bits of
/// columns [first, first + column_chunk) that this thread uses.
template <class ColumnsOf>
__device__ void count_block(int columns, std::int64_t block, std::int64_t blocks, std::int32_t* counts,
                            const ColumnsOf& columns_of) {
  for (int first = 0; first < columns; first += column_chunk) {
    const ColumnUse use(columns_of(first));
    const int column = static_cast<int>(threadIdx.x);
    if (column < column_chunk && first + column < columns) {
      counts[(first + column) * blocks + block] = use.users(column);
    }
  }
}

/// Each row of counts [columns, blocks] becomes its exclusive sums; calls done(column, sum), in one lane.
template <class Done>
__device__ void scan_blocks(int columns, std::int64_t blocks, std::int32_t* counts, const Done& done) {
  for (int column = static_cast<int>(threadIdx.x / 32); column < columns; column += static_cast<int>(blockDim.x / 32)) {
    std::int32_t* const row = counts + column * blocks;
    std::int32_t before = 0;
    for (std::int64_t first = 0; first < blocks; first += 32) {
      const std::int64_t b = first + lane_of_thread();
      const std::int32_t own = b < blocks ? row[b] : 0;
      std::int32_t sum = own;
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const std::int32_t left = __shfl_up_sync(whole_warp, sum, distance);
        if (lane_of_thread() >= distance) sum += left;
      }
      if (b < blocks) row[b] = before + sum - own;
      before += __shfl_sync(whole_warp, sum, 31);
    }
    if (lane_of_thread() == 0) done(column, before);
  }
}

/// The bits of ranks [first, first + column_chunk) that a token's row goes to: those that host one of its experts, or
/// all.
inline __device__ std::uint64_t ranks_of(const DispatchPlan& plan, const std::int32_t* ids, int first) {
  if (plan.sends_all()) {
    const int count = plan.ranks - first;
    return count >= column_chunk ? ~std::uint64_t{0} : (std::uint64_t{1} << count) - 1;
  }
  std::uint64_t ranks = 0;
  for (int j = 0; j < plan.shape.k; ++j) {
    if (!is_routed(ids, j, plan.shape.experts)) continue;
    const int rank = ids[j] / plan.experts_local() - first;
    if (rank >= 0 && rank < column_chunk) ranks |= std::uint64_t{1} << rank;
  }
  return ranks;
}

template <int Threads>
PLEAT_KERNEL void __launch_bounds__(Threads)
    count_sends_kernel(const __grid_constant__ DispatchPlan plan, std::int64_t tokens, const std::int32_t* ids,
                       std::int32_t* counts, DispatchStatus* status) {
  const std::int64_t t = blockIdx.x * std::int64_t{Threads} + threadIdx.x;
  const std::int32_t* const token_ids = ids + t * plan.shape.k;
  count_block(plan.ranks, blockIdx.x, plan.token_blocks(), counts,
              [&](int first) { return t < tokens ? ranks_of(plan, token_ids, first) : 0; });
  int unrouted = 0;
  for (int j = 0; j < plan.shape.k && t < tokens; ++j) unrouted += is_routed(token_ids, j, plan.shape.experts) ? 0 : 1;
  unrouted = sum_of_warp(unrouted);
  if (unrouted != 0 && lane_of_thread() == 0) {  // integers: the same sum in any order
    atomicAdd(reinterpret_cast<unsigned long long*>(&status->unrouted_choices),
              static_cast<unsigned long long>(unrouted));
  }
}

/// Each CTA adds up the counts of the blocks before its own; the last one knows the sums, and there is always one.
/// `refused_tokens`: those of a call that has too many.
template <int Threads>
PLEAT_KERNEL void __launch_bounds__(Threads)
    place_sends_kernel(const __grid_constant__ DispatchPlan plan, int own, std::int64_t tokens,
                       std::int64_t refused_tokens, const std::int32_t* ids, const std::int32_t* counts,
                       const __grid_constant__ DispatchRecord r) {
  __shared__ std::int32_t before[column_chunk];
  const std::int64_t t = blockIdx.x * std::int64_t{Threads} + threadIdx.x;
  SentRow* const sent = r.sent + t * plan.max_sends();
  int length = 0;
  for (int first = 0; first < plan.ranks; first += column_chunk) {
    const int column = static_cast<int>(threadIdx.x);
    if (column < column_chunk && first + column < plan.ranks) {
      const std::int32_t* const row = counts + (first + column) * plan.token_blocks();
      std::int32_t sum = 0;
      for (unsigned b = 0; b < blockIdx.x; ++b) sum += row[b];
      before[column] = sum;
      if (blockIdx.x + 1 == gridDim.x) {
        r.send_counts[first + column] = refused_tokens > 0 ? -refused_tokens : tokens > 0 ? sum + row[blockIdx.x] : 0;
      }
    }
    std::uint64_t left = t < tokens ? ranks_of(plan, ids + t * plan.shape.k, first) : 0;
    const ColumnUse use(left);
    for (; left != 0; left &= left - 1) {
      const int rank = __ffsll(static_cast<long long>(left)) - 1;
      const std::int32_t slot = before[rank] + use.users_before(rank);
      sent[length++] = {first + rank, slot};
      if (first + rank == own) r.own_tokens[slot] = static_cast<std::int32_t>(t);
    }
  }
  if (t < tokens && length < plan.max_sends()) sent[length].rank = -1;
}

template <int Threads>
PLEAT_KERNEL void __launch_bounds__(Threads)
    sum_before_kernel(int ranks, const std::int64_t* counts, std::int64_t* before) {
  if (threadIdx.x != 0) return;
  std::int64_t sum = 0;
  for (int p = 0; p < ranks; ++p) {
    before[p] = sum;
    sum += counts[p] < 0 ? 0 : counts[p];
  }
}

/// The row that a thread of `plan_rows` works on: CTA `source * token_blocks + block` has a block of a source's rows.
struct ReceivedRow {
  int source;
  std::int64_t slot, number;

  __device__ explicit ReceivedRow(const DispatchPlan& plan)
      : source(static_cast<int>(blockIdx.x / plan.token_blocks())),
        slot(blockIdx.x % plan.token_blocks() * plan_threads + threadIdx.x),
        number(source * plan.shape.max_tokens + slot) {}
};

inline __device__ std::int64_t count_from(const RowTable& in, const DispatchRecord& r, int source) {
  return in.counts == nullptr ? r.recv_counts[source] : *in.counts[source];
}

/// The bits of local experts [first, first + column_chunk) on a row's list of entries from entry `next` on, which still
/// holds experts, ascending.
inline __device__ std::uint64_t experts_on(const DispatchPlan& plan, const std::int64_t* entries, int next, int first) {
  std::uint64_t experts = 0;
  for (int i = next; i < plan.max_entries() && entries[i] >= 0; ++i) {
    const std::int64_t expert = entries[i] - first;
    if (expert >= column_chunk) break;
    if (expert >= 0) experts |= std::uint64_t{1} << expert;
  }
  return experts;
}

/// Reads counts and headers: every row's entries with local experts in place of rows, and their counts per block.
template <class Acc, int Threads>
PLEAT_KERNEL void __launch_bounds__(Threads)
    read_headers_kernel(const __grid_constant__ DispatchPlan plan, int rank, const __grid_constant__ RowTable in,
                        const __grid_constant__ DispatchRecord r, std::int32_t* counts, DispatchStatus* status) {
  const ReceivedRow row(plan);
  const bool exists = row.slot < count_from(in, r, row.source);
  std::int64_t* const entries = r.entry_rows + row.number * plan.max_entries();
  if (exists) {
    const std::byte* const header = in.header(row.source, row.slot);
    const auto* const weights = reinterpret_cast<const Acc*>(header);
    const auto* const ids = reinterpret_cast<const std::int32_t*>(header + plan.ids_offset_bytes());
    const std::int64_t first_entry = row.number * plan.max_entries();
    int length = 0;
    for (int first = 0; first < plan.experts_local(); first += column_chunk) {
      const int offset = rank * plan.experts_local() + first;
      const int chunk = plan.experts_local() - first < column_chunk ? plan.experts_local() - first : column_chunk;
      std::uint64_t left = 0;
      for (int j = 0; j < plan.shape.k; ++j) {
        if (ids[j] >= offset && ids[j] < offset + chunk) left |= std::uint64_t{1} << (ids[j] - offset);
      }
      for (; left != 0; left &= left - 1) {
        const int expert = __ffsll(static_cast<long long>(left)) - 1;
        int choice = 0;  // the first that names the expert
        while (ids[choice] != offset + expert) ++choice;
        r.entry_choice[first_entry + length] = choice;
        static_cast<Acc*>(r.entry_weights)[first_entry + length] = weights[choice];
        entries[length++] = first + expert;
      }
    }
    if (length < plan.max_entries()) entries[length] = -1;
  }
  count_block(plan.experts_local(), blockIdx.x, gridDim.x, counts,
              [&](int first) { return exists ? experts_on(plan, entries, 0, first) : 0; });
  if (blockIdx.x != 0 || threadIdx.x != 0) return;
  for (int p = 0; p < plan.ranks; ++p) {  // others may read a count before or after: below 0 and 0 are the same to them
    const std::int64_t count = count_from(in, r, p);
    r.recv_counts[p] = count < 0 ? 0 : count;
    if (count >= 0 || status->poisoned_rank != 0) continue;
    status->poisoned_rank = p + 1;
    status->poisoned_tokens = -count;
  }
  *r.dropped = 0;
}

/// Counts again, after entries were dropped.
template <int Threads>
PLEAT_KERNEL void __launch_bounds__(Threads)
    count_entries_kernel(const __grid_constant__ DispatchPlan plan, const __grid_constant__ DispatchRecord r,
                         std::int32_t* counts) {
  if (*r.dropped == 0) return;
  const ReceivedRow row(plan);
  const bool exists = row.slot < r.recv_counts[row.source];
  count_block(plan.experts_local(), blockIdx.x, gridDim.x, counts, [&](int first) {
    return exists ? experts_on(plan, r.entry_rows + row.number * plan.max_entries(), 0, first) : 0;
  });
}

template <int Threads>
PLEAT_KERNEL void __launch_bounds__(Threads)
    scan_rows_kernel(const __grid_constant__ DispatchPlan plan, std::int32_t* counts,
                     const __grid_constant__ DispatchRecord r) {
  const std::int64_t blocks = plan.ranks * plan.token_blocks();
  scan_blocks(plan.experts_local(), blocks, counts, [&](int expert, std::int32_t sum) { r.ends[expert] = sum; });
  __syncthreads();
  if (threadIdx.x >= 32) return;
  const std::int64_t alignment = plan.options.row_alignment;
  std::int64_t before = used_rows(r);
  for (int first = 0; first < plan.experts_local(); first += 32) {
    const int expert = first + lane_of_thread();
    const bool exists = expert < plan.experts_local();
    const std::int64_t count = exists ? r.ends[expert] : 0;
    const std::int64_t own = (count + alignment - 1) / alignment * alignment;
    std::int64_t sum = own;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const std::int64_t left = __shfl_up_sync(whole_warp, sum, distance);
      if (lane_of_thread() >= distance) sum += left;
    }
    if (exists) {
      r.offsets[expert] = before + sum - own;
      r.ends[expert] = before + sum - own + count;
    }
    before += __shfl_sync(whole_warp, sum, 31);
  }
  if (threadIdx.x != 0) return;
  r.offsets[plan.experts_local()] = before;
  if (r.used_rows != nullptr) *r.used_rows = before;
}

template <int Threads>
PLEAT_KERNEL void __launch_bounds__(Threads)
    place_rows_kernel(const __grid_constant__ DispatchPlan plan, const std::int32_t* counts,
                      const __grid_constant__ DispatchRecord r) {
  const ReceivedRow row(plan);
  std::int64_t* const entries = r.entry_rows + row.number * plan.max_entries();
  const bool exists = row.slot < r.recv_counts[row.source];
  // Lists ascend, so that a chunk's entries follow those of the chunks before, which are rows by now.
  int next = 0;
  for (int first = 0; first < plan.experts_local(); first += column_chunk) {
    std::uint64_t left = exists ? experts_on(plan, entries, next, first) : 0;
    const ColumnUse use(left);
    for (; left != 0; left &= left - 1) {
      const int expert = __ffsll(static_cast<long long>(left)) - 1;
      const std::int32_t before = counts[(first + expert) * std::int64_t{gridDim.x} + blockIdx.x];
      entries[next++] = r.offsets[first + expert] + before + use.users_before(expert);
    }
  }
}

struct CudaPlanLeaf {
  static void preload() {
    preload_kernel(count_sends_kernel<plan_threads>, "count_sends_kernel");
    preload_kernel(place_sends_kernel<plan_threads>, "place_sends_kernel");
    preload_kernel(sum_before_kernel<32>, "sum_before_kernel");
    for_each_type(AccumulatorTypes{}, [](auto type) {
      using Acc = typename decltype(type)::type;
      preload_kernel(read_headers_kernel<Acc, plan_threads>, "read_headers_kernel");
      preload_kernel(drop_entries_kernel<Acc, drop_threads>, "drop_entries_kernel");
    });
    preload_kernel(count_entries_kernel<plan_threads>, "count_entries_kernel");
    preload_kernel(scan_rows_kernel<scan_threads>, "scan_rows_kernel");
    preload_kernel(place_rows_kernel<plan_threads>, "place_rows_kernel");
  }

  static void plan_sends(const DispatchPlan& plan, int rank, std::int64_t tokens, std::int64_t planned_tokens,
                         const std::int32_t* ids, const DispatchRecord& r, const PlanScratch& scratch,
                         DispatchStatus* status, cudaStream_t s) {
    const auto blocks = static_cast<unsigned>((planned_tokens + plan_threads - 1) / plan_threads);
    if (blocks != 0) {
      count_sends_kernel<plan_threads>
          <<<blocks, plan_threads, 0, s>>>(plan, planned_tokens, ids, scratch.block_counts, status);
      check_launch("count_sends_kernel");
    }
    place_sends_kernel<plan_threads><<<std::max(blocks, 1u), plan_threads, 0, s>>>(
        plan, rank, planned_tokens, tokens - planned_tokens, ids, scratch.block_counts, r);
    check_launch("place_sends_kernel");
  }

  static void sum_before(int ranks, const std::int64_t* counts, std::int64_t* before, cudaStream_t s) {
    sum_before_kernel<32><<<1, 32, 0, s>>>(ranks, counts, before);
    check_launch("sum_before_kernel");
  }

  static void plan_rows(const DispatchPlan& plan, int rank, const RowTable& in, const DispatchRecord& r,
                        const PlanScratch& scratch, DispatchStatus* status, cudaStream_t s) {
    const auto blocks = static_cast<unsigned>(plan.ranks * plan.token_blocks());
    std::int32_t* const counts = scratch.block_counts;
    dispatch_dtype(AccumulatorTypes{}, plan.accumulator(), [&](auto type) {
      using Acc = typename decltype(type)::type;
      read_headers_kernel<Acc, plan_threads><<<blocks, plan_threads, 0, s>>>(plan, rank, in, r, counts, status);
      check_launch("read_headers_kernel");
      if (!plan.may_drop()) return;
      drop_entries_kernel<Acc, drop_threads><<<1, drop_threads, 0, s>>>(plan, blocks, counts, r);
      check_launch("drop_entries_kernel");
      count_entries_kernel<plan_threads><<<blocks, plan_threads, 0, s>>>(plan, r, counts);
      check_launch("count_entries_kernel");
    });
    scan_rows_kernel<scan_threads><<<1, scan_threads, 0, s>>>(plan, counts, r);
    check_launch("scan_rows_kernel");
    place_rows_kernel<plan_threads><<<blocks, plan_threads, 0, s>>>(plan, counts, r);
    check_launch("place_rows_kernel");
  }

 private:
  static constexpr int scan_threads = 1024;
};

}  // namespace pleat::inline v0::moe::detail
