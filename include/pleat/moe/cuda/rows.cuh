// The kernels that move rows: a warp per row, straight into the windows of the peers.
#pragma once

#include <cstdint>
#include <type_traits>

#include <pleat/core/dtype.hpp>
#include <pleat/cuda/rank_parts.cuh>
#include <pleat/moe/cuda/row_walk.cuh>
#include <pleat/moe/dispatch_plan.hpp>

namespace pleat::inline v0::moe::detail {

/// Values rounded to nearest even, two bf16 by one instruction.
template <class T, int Width>
__device__ pleat::detail::Pack<T, Width> rounded(const accumulator_t<T> (&values)[Width]) {
  pleat::detail::Pack<T, Width> pack;
  if constexpr (std::is_same_v<T, bfloat16> && Width % 2 == 0) {
#pragma unroll
    for (int e = 0; e < Width; e += 2) {
      std::uint32_t pair;
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(values[e + 1]), "f"(values[e]));
      pack.elem[e] = bfloat16::from_bits(static_cast<std::uint16_t>(pair));
      pack.elem[e + 1] = bfloat16::from_bits(static_cast<std::uint16_t>(pair >> 16));
    }
  } else {
#pragma unroll
    for (int e = 0; e < Width; ++e) pack.elem[e] = static_cast<T>(values[e]);
  }
  return pack;
}

/// Copies `units` to each of `count` places, of which some may be null; a lane has `batch` units in flight.
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
      if (place == nullptr) continue;
#pragma unroll
      for (int b = 0; b < batch; ++b) {
        if (first + 32 * b < units) place[first + 32 * b] = unit[b];
      }
    }
  }
}

/// Copies the rows of a cursor to the places on their lists: `list_of(rows, first)` has up to 32 of them from `first`
/// on, of which there are at most `longest`, and `place(value)` is where a row goes, null where it does not.
template <class Unit, class Rows, class ListOf, class Place>
__device__ void fan_out(Rows row, std::int64_t row_bytes, int longest, const ListOf& list_of, const Place& place) {
  for (; row.exists(); row.advance()) {
    for (int first = 0; first < longest; first += 32) {
      const auto list = list_of(row, first);
      copy_row(reinterpret_cast<const Unit*>(row.source()), row_bytes / static_cast<int>(sizeof(Unit)), list.count,
               [&](int i) { return reinterpret_cast<Unit*>(place(list.of_lane(i))); });
      if (list.count < 32) break;
    }
  }
}

/// The headers of all rows that are sent, a thread per word, and the counts beside the rows.
template <int Threads>
PLEAT_KERNEL void __launch_bounds__(Threads)
    pack_headers_kernel(const __grid_constant__ DispatchPlan plan, std::int64_t tokens, const std::uint32_t* ids,
                        const std::uint32_t* weights, const __grid_constant__ DispatchRecord r,
                        const __grid_constant__ RowTable out) {
  if (out.counts != nullptr && blockIdx.x == 0) {
    for (int p = threadIdx.x; p < plan.ranks; p += Threads) *out.counts[p] = r.send_counts[p];
  }
  const int weight_words = static_cast<int>(plan.ids_offset_bytes() / 4), k = plan.shape.k;
  const int words = weight_words + k + 1;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * Threads;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * Threads + threadIdx.x; i < tokens * words; i += step) {
    const std::int64_t token = i / words;
    const int word = static_cast<int>(i - token * words);
    const std::uint32_t value = word < weight_words       ? weights[token * weight_words + word]
                                : word < weight_words + k ? ids[token * k + word - weight_words]
                                                          : static_cast<std::uint32_t>(token);
    const SentRow* const sent = r.sent + token * plan.max_sends();
    for (int place = 0; place < plan.max_sends() && sent[place].rank >= 0; ++place) {
      reinterpret_cast<std::uint32_t*>(out.header(sent[place].rank, sent[place].slot))[word] = value;
    }
  }
}

/// The rows of tokens to all their ranks but `rank`.
template <class Unit>
PLEAT_KERNEL void __launch_bounds__(row_threads)
    pack_kernel(const __grid_constant__ DispatchPlan plan, int rank, std::int64_t tokens, const std::byte* x,
                const __grid_constant__ DispatchRecord r, const __grid_constant__ RowTable out) {
  const auto places = [&](const TokenRows& row, int first) { return sent_list(plan, r, row.token(), first); };
  const auto place = [&](SentRow sent) { return sent.rank == rank ? nullptr : out.payload(sent.rank, sent.slot); };
  fan_out<Unit>(TokenRows(tokens, x, payload_bytes_of(plan)), payload_bytes_of(plan), plan.max_sends(), places, place);
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

template <class Unit>
PLEAT_KERNEL void __launch_bounds__(row_threads)
    expand_kernel(const __grid_constant__ DispatchPlan plan, const __grid_constant__ SourceRows in,
                  const __grid_constant__ DispatchRecord r) {
  const std::int64_t row_bytes = payload_bytes_of(plan);
  const auto places = [&](const ReceivedRows& row, int first) { return entry_list(plan, r, row.number(), first); };
  const auto place = [&](std::int64_t row) { return r.rows + row * row_bytes; };
  fan_out<Unit>(ReceivedRows(plan, r, in), row_bytes, plan.max_entries(), places, place);
  if (in.are_own) zero_pad_rows<Unit>(plan, r, r.rows);
}

/// dout = weight * dy of the row's token, and r.entry_dweights = <dy, out>; dout may be out.
template <class T, int Width>
PLEAT_KERNEL void __launch_bounds__(row_threads)
    expand_gradient_kernel(const __grid_constant__ DispatchPlan plan, const __grid_constant__ SourceRows in,
                           const T* out, const __grid_constant__ DispatchRecord r, T* dout) {
  using Acc = accumulator_t<T>;
  using Packed = pleat::detail::Pack<T, Width>;
  const std::int64_t hidden = plan.shape.hidden, packs = hidden / Width;
  constexpr int batch = 4;  // packs of a lane in flight
  for (ReceivedRows row(plan, r, in); row.exists(); row.advance()) {
    const std::int64_t first_entry = row.number() * plan.max_entries();
    const auto* const dy = reinterpret_cast<const Packed*>(row.source());
    for (std::int64_t entry = first_entry; entry < first_entry + plan.max_entries(); ++entry) {
      const std::int64_t place = r.entry_rows[entry];
      if (place < 0) break;
      const Acc weight = static_cast<const Acc*>(r.entry_weights)[entry];
      const auto* const from = reinterpret_cast<const Packed*>(out + place * hidden);
      auto* const to = reinterpret_cast<Packed*>(dout + place * hidden);
      Acc dot = 0;
      for (std::int64_t first = lane_of_thread(); first < packs; first += 32 * batch) {
        Packed gradient[batch], result[batch];
#pragma unroll
        for (int b = 0; b < batch; ++b) {
          if (first + 32 * b >= packs) continue;
          gradient[b] = dy[first + 32 * b];
          result[b] = from[first + 32 * b];
        }
#pragma unroll
        for (int b = 0; b < batch; ++b) {
          if (first + 32 * b >= packs) continue;
          Acc d[Width];
#pragma unroll
          for (int e = 0; e < Width; ++e) {
            d[e] = static_cast<Acc>(gradient[b].elem[e]);
            dot += d[e] * static_cast<Acc>(result[b].elem[e]);
            d[e] *= weight;
          }
          to[first + 32 * b] = rounded<T>(d);
        }
      }
      dot = sum_of_warp(dot);
      if (lane_of_thread() == 0) static_cast<Acc*>(r.entry_dweights)[entry] = dot;
    }
  }
  if (in.are_own) zero_pad_rows<Packed>(plan, r, reinterpret_cast<std::byte*>(dout));
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
  const int lane = lane_of_thread();
  const std::int64_t hidden = plan.shape.hidden;
  const auto weight_of = [&](std::int64_t entry) {
    return weighted ? static_cast<const Acc*>(r.entry_weights)[entry] : Acc{1};
  };
  const auto write_gradients = [&](const ReceivedRows& row) {
    const std::int64_t first_entry = row.number() * plan.max_entries();
    auto* const dweights = reinterpret_cast<Acc*>(row.header());
    for (int j = lane; j < plan.shape.k; j += 32) {
      Acc dweight = 0;
      for (std::int64_t i = first_entry; i < first_entry + plan.max_entries() && r.entry_rows[i] >= 0; ++i) {
        if (r.entry_choice[i] == j) dweight = static_cast<const Acc*>(r.entry_dweights)[i];
      }
      dweights[j] = dweight;
    }
  };
  const auto add = [](Acc(&sums)[Width], Acc weight, const Packed& term) {
#pragma unroll
    for (int e = 0; e < Width; ++e) sums[e] += weight * static_cast<Acc>(term.elem[e]);
  };
  for (ReceivedRows row(plan, r, out); row.exists(); row.advance()) {
    const std::int64_t first_entry = row.number() * plan.max_entries();
    auto* const to = reinterpret_cast<Packed*>(row.source());
    for (std::int64_t u = lane; u < hidden / Width; u += 32) {
      Acc sums[Width] = {};
      constexpr int batch = 4;  // entries whose loads are in flight together
      for (int i = 0, count = batch; i < plan.max_entries() && count == batch; i += batch) {
        Packed term[batch];
        count = 0;
#pragma unroll
        for (int b = 0; b < batch; ++b) {
          const std::int64_t from = count == b && i + b < plan.max_entries() ? r.entry_rows[first_entry + i + b] : -1;
          if (from < 0) continue;
          term[b] = reinterpret_cast<const Packed*>(expert_rows + from * hidden)[u];
          ++count;
        }
#pragma unroll
        for (int b = 0; b < batch; ++b) {
          if (b < count) add(sums, weight_of(first_entry + i + b), term[b]);
        }
      }
      to[u] = rounded<T>(sums);
    }
    if (!weighted) write_gradients(row);
  }
}

/// One row per token: the residual, where there is one, and the sum over the ranks that answered, in their order; the
/// same of the headers' weight gradients where asked. With a status, notes what each rank dropped.
template <class T, int Width>
PLEAT_KERNEL void __launch_bounds__(row_threads)
    sum_sources_kernel(const __grid_constant__ DispatchPlan plan, std::int64_t tokens,
                       const __grid_constant__ RowTable in, const __grid_constant__ DispatchRecord r, const T* residual,
                       T* y, accumulator_t<T>* dweights, DispatchStatus* status) {
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
      for (int i = residual != nullptr ? -1 : 0; i < plan.max_sends(); ++i) {
        const SentRow row = i < 0 ? SentRow{} : sent[i];
        if (row.rank < 0) break;
        const auto* const from = reinterpret_cast<const Packed*>(
            i < 0 ? reinterpret_cast<const std::byte*>(residual + t * hidden) : in.payload(row.rank, row.slot));
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
        if (first + 32 * b < hidden / Width) to[first + 32 * b] = rounded<T>(sums[b]);
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
