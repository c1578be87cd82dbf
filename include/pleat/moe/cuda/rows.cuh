// The kernels that move rows: a warp per row, 16 bytes per lane, straight into the windows of the peers.
#pragma once

#include <cstdint>

#include <pleat/core/dtype.hpp>
#include <pleat/cuda/rank_parts.cuh>
#include <pleat/moe/cuda/warp.cuh>
#include <pleat/moe/dispatch_plan.hpp>

namespace pleat::inline v0::moe::detail {

inline constexpr int row_threads = 512;
inline constexpr int row_warps = row_threads / 32;

/// This warp among those of the grid, and how many there are.
struct WarpOfGrid {
  std::int64_t index = static_cast<std::int64_t>(blockIdx.x) * row_warps + threadIdx.x / 32;
  std::int64_t count = static_cast<std::int64_t>(gridDim.x) * row_warps;
};

/// Calls f(source, slot, number) for this warp's share of the rows that came; neighbours take rows of different
/// sources, so that all links are busy at once.
template <class F>
__device__ void each_received_row(const DispatchPlan& plan, const DispatchRecord& r, const F& f) {
  const WarpOfGrid warp;
  for (std::int64_t i = warp.index; i < plan.max_received(); i += warp.count) {
    const std::int64_t slot = i / plan.ranks;
    const int source = static_cast<int>(i - slot * plan.ranks);
    if (slot < r.recv_counts[source]) f(source, slot, source * plan.shape.max_tokens + slot);
  }
}

/// Up to 32 entries of a row, one per lane: longer lists go piece by piece.
template <class Value>
struct LaneList {
  int count = 0;  ///< of all lanes
  Value value{};  ///< of this lane

  __device__ Value of_lane(int i) const {
    static_assert(sizeof(Value) % 4 == 0);
    Value other;
    const auto* from = reinterpret_cast<const std::uint32_t*>(&value);
    auto* to = reinterpret_cast<std::uint32_t*>(&other);
#pragma unroll
    for (int w = 0; w < static_cast<int>(sizeof(Value) / 4); ++w) to[w] = __shfl_sync(whole_warp, from[w], i);
    return other;
  }
};
/// The entries [first, first + 32) of a list of at most `length` that the first for which `exists` is false ends.
template <class Value, class Load, class Exists>
__device__ LaneList<Value> load_list(int first, int length, const Load& load, const Exists& exists) {
  LaneList<Value> list;
  const int at = first + lane_of_thread();
  bool ends = true;
  if (at < length) {
    list.value = load(at);
    ends = !exists(list.value);
  }
  const unsigned ended = __ballot_sync(whole_warp, ends);
  list.count = ended == 0 ? 32 : __ffs(static_cast<int>(ended)) - 1;
  return list;
}

/// Copies `units` to each of `count` places; a lane has `Batch` units in flight.
template <class Unit, class To>
__device__ void copy_row(const Unit* from, std::int64_t units, int count, const To& to) {
  constexpr int batch = 8;
  for (std::int64_t first = lane_of_thread(); first - lane_of_thread() < units; first += 32 * batch) {
    Unit unit[batch];
#pragma unroll
    for (int b = 0; b < batch; ++b) {
      if (first + 32 * b < units) unit[b] = from[first + 32 * b];
    }
    for (int i = 0; i < count; ++i) {
      Unit* const place = to(i);
#pragma unroll
      for (int b = 0; b < batch; ++b) {
        if (first + 32 * b < units) place[first + 32 * b] = unit[b];
      }
    }
  }
}

inline __device__ std::int64_t payload_bytes_of(const DispatchPlan& plan) {
  return plan.shape.hidden * static_cast<std::int64_t>(size_bytes(plan.shape.dtype));
}

/// With ids, each row has a header, and the counts go beside the rows.
template <class Unit>
PLEAT_KERNEL void __launch_bounds__(row_threads)
    pack_kernel(const __grid_constant__ DispatchPlan plan, std::int64_t tokens, const std::byte* x,
                const std::int32_t* ids, const std::uint32_t* weights, const __grid_constant__ DispatchRecord r,
                const __grid_constant__ RowTable out) {
  if (ids != nullptr && out.counts != nullptr && blockIdx.x == 0) {
    for (int p = threadIdx.x; p < plan.ranks; p += row_threads) *out.counts[p] = r.send_counts[p];
  }
  const std::int64_t row_bytes = payload_bytes_of(plan);
  const int weight_words = static_cast<int>(plan.ids_offset_bytes() / 4), k = plan.shape.k;
  const WarpOfGrid warp;
  for (std::int64_t t = warp.index; t < tokens; t += warp.count) {
    const SentRow* const sent = r.sent + t * plan.max_sends();
    for (int first = 0; first < plan.max_sends(); first += 32) {
      const auto list = load_list<SentRow>(
          first, plan.max_sends(), [&](int i) { return sent[i]; }, [](SentRow row) { return row.rank >= 0; });
      for (int word = lane_of_thread(); word - lane_of_thread() <= weight_words + k && ids != nullptr; word += 32) {
        const bool exists = word <= weight_words + k;
        std::uint32_t value = static_cast<std::uint32_t>(t);
        if (exists && word < weight_words) value = weights[t * weight_words + word];
        if (exists && word >= weight_words && word < weight_words + k) {
          value = static_cast<std::uint32_t>(ids[t * k + word - weight_words]);
        }
        for (int i = 0; i < list.count; ++i) {
          const SentRow row = list.of_lane(i);
          if (exists) reinterpret_cast<std::uint32_t*>(out.header(row.rank, row.slot))[word] = value;
        }
      }
      copy_row(reinterpret_cast<const Unit*>(x + t * row_bytes), row_bytes / static_cast<int>(sizeof(Unit)), list.count,
               [&](int i) {
                 const SentRow row = list.of_lane(i);
                 return reinterpret_cast<Unit*>(out.payload(row.rank, row.slot));
               });
      if (list.count < 32) break;
    }
  }
}

/// Zeroes the pad rows of an expert-major array.
template <class Unit>
__device__ void zero_pad_rows(const DispatchPlan& plan, const DispatchRecord& r, std::byte* rows) {
  const std::int64_t row_bytes = payload_bytes_of(plan), alignment = plan.options.row_alignment;
  const WarpOfGrid warp;
  for (std::int64_t i = warp.index; i < plan.experts_local() * alignment; i += warp.count) {
    const std::int64_t expert = i / alignment, row = r.ends[expert] + i % alignment;
    if (row >= r.offsets[expert + 1]) continue;
    auto* const to = reinterpret_cast<Unit*>(rows + row * row_bytes);
    for (std::int64_t u = lane_of_thread(); u < row_bytes / static_cast<int>(sizeof(Unit)); u += 32) to[u] = Unit{};
  }
}

inline __device__ bool is_entry(std::int64_t row) {
  return row >= 0;
}

template <class Unit>
PLEAT_KERNEL void __launch_bounds__(row_threads)
    expand_kernel(const __grid_constant__ DispatchPlan plan, const __grid_constant__ RowTable in,
                  const __grid_constant__ DispatchRecord r) {
  const std::int64_t row_bytes = payload_bytes_of(plan);
  each_received_row(plan, r, [&](int source, std::int64_t slot, std::int64_t number) {
    const std::int64_t* const rows = r.entry_rows + number * plan.max_entries();
    for (int first = 0; first < plan.max_entries(); first += 32) {
      const auto list = load_list<std::int64_t>(
          first, plan.max_entries(), [&](int i) { return rows[i]; }, is_entry);
      copy_row(reinterpret_cast<const Unit*>(in.payload(source, slot)), row_bytes / static_cast<int>(sizeof(Unit)),
               list.count, [&](int i) { return reinterpret_cast<Unit*>(r.rows + list.of_lane(i) * row_bytes); });
      if (list.count < 32) break;
    }
  });
  zero_pad_rows<Unit>(plan, r, r.rows);
}

/// An entry as the sums use it.
template <class Acc>
struct WeightedRow {
  std::int64_t row = -1;
  Acc weight{};
};

/// Entries that a lane works on together.
inline constexpr int entry_batch = 4;

/// dout = weight * dy of the row's token, and r.entry_dweights = <dy, out>.
template <class T, int Width>
PLEAT_KERNEL void __launch_bounds__(row_threads)
    expand_gradient_kernel(const __grid_constant__ DispatchPlan plan, const __grid_constant__ RowTable in, const T* out,
                           const __grid_constant__ DispatchRecord r, T* dout) {
  using Acc = accumulator_t<T>;
  using Packed = pleat::detail::Pack<T, Width>;
  const std::int64_t hidden = plan.shape.hidden;
  each_received_row(plan, r, [&](int source, std::int64_t slot, std::int64_t number) {
    const std::int64_t first_entry = number * plan.max_entries();
    const auto* const dy = reinterpret_cast<const Packed*>(in.payload(source, slot));
    for (int first = 0; first < plan.max_entries(); first += entry_batch) {
      std::int64_t rows[entry_batch];
      Acc weights[entry_batch], dots[entry_batch] = {};
      int count = 0;
#pragma unroll
      for (int i = 0; i < entry_batch; ++i) {
        if (count != i || first + i >= plan.max_entries()) continue;
        rows[i] = r.entry_rows[first_entry + first + i];
        if (rows[i] < 0) continue;
        weights[i] = static_cast<const Acc*>(r.entry_weights)[first_entry + first + i];
        ++count;
      }
      for (std::int64_t u = lane_of_thread(); u < hidden / Width; u += 32) {
        const Packed g = dy[u];
        Packed o[entry_batch];
#pragma unroll
        for (int i = 0; i < entry_batch; ++i) {
          if (i < count) o[i] = reinterpret_cast<const Packed*>(out + rows[i] * hidden)[u];
        }
#pragma unroll
        for (int i = 0; i < entry_batch; ++i) {
          if (i >= count) continue;
          Packed d;
#pragma unroll
          for (int e = 0; e < Width; ++e) {
            const Acc gradient = static_cast<Acc>(g.elem[e]);
            dots[i] += gradient * static_cast<Acc>(o[i].elem[e]);
            d.elem[e] = static_cast<T>(weights[i] * gradient);
          }
          reinterpret_cast<Packed*>(dout + rows[i] * hidden)[u] = d;
        }
      }
#pragma unroll
      for (int i = 0; i < entry_batch; ++i) {
        if (i >= count) continue;
        const Acc dot = sum_of_warp(dots[i]);
        if (lane_of_thread() == 0) static_cast<Acc*>(r.entry_dweights)[first_entry + first + i] = dot;
      }
      if (count < entry_batch) break;
    }
  });
  zero_pad_rows<Packed>(plan, r, reinterpret_cast<std::byte*>(dout));
}

/// One row per received row: the sum over its experts in their order, weighted and with the count of dropped entries
/// beside the rows, or plain and with the gradients of the weights in front.
template <class T, int Width>
PLEAT_KERNEL void __launch_bounds__(row_threads)
    sum_experts_kernel(const __grid_constant__ DispatchPlan plan, const T* expert_rows, bool weighted,
                       const __grid_constant__ DispatchRecord r, const __grid_constant__ RowTable out) {
  using Acc = accumulator_t<T>;
  using Packed = pleat::detail::Pack<T, Width>;
  if (weighted && out.counts != nullptr && blockIdx.x == 0) {
    for (int p = threadIdx.x; p < plan.ranks; p += row_threads) *out.counts[p] = *r.dropped;
  }
  const std::int64_t hidden = plan.shape.hidden;
  each_received_row(plan, r, [&](int source, std::int64_t slot, std::int64_t number) {
    const std::int64_t first_entry = number * plan.max_entries();
    auto* const to = reinterpret_cast<Packed*>(out.payload(source, slot));
    const auto list_from = [&](int first) {
      return load_list<WeightedRow<Acc>>(
          first, plan.max_entries(),
          [&](int i) {
            WeightedRow<Acc> entry;
            entry.row = r.entry_rows[first_entry + i];
            if (entry.row < 0) return entry;
            entry.weight = weighted ? static_cast<const Acc*>(r.entry_weights)[first_entry + i] : Acc{1};
            return entry;
          },
          [](const WeightedRow<Acc>& entry) { return entry.row >= 0; });
    };
    const auto list = list_from(0);
    for (std::int64_t u = lane_of_thread(); u - lane_of_thread() < hidden / Width; u += 32) {
      const bool exists = u < hidden / Width;
      Acc sums[Width] = {};
      auto part = list;
      for (int first = 0;;) {
        for (int i = 0; i < part.count; i += entry_batch) {
          Packed term[entry_batch];
          Acc weight[entry_batch];
#pragma unroll
          for (int b = 0; b < entry_batch; ++b) {
            const std::int64_t row = __shfl_sync(whole_warp, part.value.row, i + b);
            weight[b] = __shfl_sync(whole_warp, part.value.weight, i + b);
            if (exists && i + b < part.count) term[b] = reinterpret_cast<const Packed*>(expert_rows + row * hidden)[u];
          }
#pragma unroll
          for (int b = 0; b < entry_batch; ++b) {
            if (i + b >= part.count) continue;
#pragma unroll
            for (int e = 0; e < Width; ++e) sums[e] += weight[b] * static_cast<Acc>(term[b].elem[e]);
          }
        }
        first += 32;
        if (part.count < 32 || first >= plan.max_entries()) break;
        part = list_from(first);
      }
      if (!exists) continue;
      Packed sum;
#pragma unroll
      for (int e = 0; e < Width; ++e) sum.elem[e] = static_cast<T>(sums[e]);
      to[u] = sum;
    }
    if (weighted) return;
    auto* const dweights = reinterpret_cast<Acc*>(out.header(source, slot));
    for (int j = lane_of_thread(); j < plan.shape.k; j += 32) {
      Acc dweight = 0;
      for (int i = 0; i < plan.max_entries() && r.entry_rows[first_entry + i] >= 0; ++i) {
        if (r.entry_choice[first_entry + i] == j) dweight = static_cast<const Acc*>(r.entry_dweights)[first_entry + i];
      }
      dweights[j] = dweight;
    }
  });
}

/// One row per token: the sum over the ranks that answered, in their order; the same of the headers' weight gradients
/// where asked. With a status, notes what each rank dropped.
template <class T, int Width>
PLEAT_KERNEL void __launch_bounds__(row_threads)
    sum_sources_kernel(const __grid_constant__ DispatchPlan plan, std::int64_t tokens,
                       const __grid_constant__ RowTable in, const __grid_constant__ DispatchRecord r, T* y,
                       accumulator_t<T>* dweights, DispatchStatus* status) {
  using Acc = accumulator_t<T>;
  using Packed = pleat::detail::Pack<T, Width>;
  for (int p = 0; p < plan.ranks && status != nullptr && blockIdx.x == 0 && threadIdx.x == 0; ++p) {
    const std::int64_t dropped = in.counts == nullptr ? r.all_dropped[p] : *in.counts[p];
    status->dropped_rows += dropped;
    if (dropped == 0 || status->overflow_rank != 0) continue;
    status->overflow_rank = p + 1;
    status->overflow_rows = dropped;
  }
  const std::int64_t hidden = plan.shape.hidden;
  const WarpOfGrid warp;
  for (std::int64_t t = warp.index; t < tokens; t += warp.count) {
    const SentRow* const sent = r.sent + t * plan.max_sends();
    auto* const to = reinterpret_cast<Packed*>(y + t * hidden);
    constexpr int batch = 4;
    for (std::int64_t first = lane_of_thread(); first < hidden / Width; first += 32 * batch) {
      Acc sums[batch][Width] = {};
      for (int i = 0; i < plan.max_sends(); ++i) {
        const SentRow row = sent[i];
        if (row.rank < 0) break;
        const auto* const from = reinterpret_cast<const Packed*>(in.payload(row.rank, row.slot));
        Packed term[batch];
#pragma unroll
        for (int b = 0; b < batch; ++b) {
          if (first + 32 * b < hidden / Width) term[b] = from[first + 32 * b];
        }
#pragma unroll
        for (int b = 0; b < batch; ++b) {
#pragma unroll
          for (int e = 0; e < Width; ++e) sums[b][e] += static_cast<Acc>(term[b].elem[e]);
        }
      }
#pragma unroll
      for (int b = 0; b < batch; ++b) {
        Packed sum;
#pragma unroll
        for (int e = 0; e < Width; ++e) sum.elem[e] = static_cast<T>(sums[b][e]);
        if (first + 32 * b < hidden / Width) to[first + 32 * b] = sum;
      }
    }
    for (int j = lane_of_thread(); j < plan.shape.k && dweights != nullptr; j += 32) {
      Acc sum = 0;
      for (int i = 0; i < plan.max_sends() && sent[i].rank >= 0; ++i) {
        sum += reinterpret_cast<const Acc*>(in.header(sent[i].rank, sent[i].slot))[j];
      }
      dweights[t * plan.shape.k + j] = sum;
    }
  }
}

}  // namespace pleat::inline v0::moe::detail
