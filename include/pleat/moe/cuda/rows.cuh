// The kernels that move rows: a warp per row, straight into the windows of the peers.
#pragma once

#include <cstdint>
#include <type_traits>

#include <pleat/core/dtype.hpp>
#include <pleat/cuda/rank_parts.cuh>
#include <pleat/moe/cuda/row_ring.cuh>
#include <pleat/moe/cuda/row_walk.cuh>
#include <pleat/moe/dispatch_plan.hpp>

namespace pleat::inline v0::moe::detail {

/// Whether rows of such packs go through rings of shared memory: where the device has the copy engine for them.
template <class Packed>
inline constexpr bool goes_by_ring = hopper::is_target && sizeof(Packed) == 16;

/// What a kernel needs for it; other widths need nothing.
template <class Packed>
inline constexpr int ring_bytes = sizeof(Packed) == 16 ? RowRing::shared_bytes : 0;

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

/// Copies `units` to each of `count` places; a lane has `batch` units in flight.
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

/// Copies the rows of a cursor to the places on their lists: `list_of(rows, first)` has up to 32 of them from `first`
/// on, of which there are at most `longest`, and `place(value)` is where a row goes. `begin(rows, list)` runs once per
/// row and part of its list. Lists that fit the lanes of a warp go by ring.
template <class Unit, class Rows, class ListOf, class Place, class Begin>
__device__ void fan_out(const Rows& rows, std::int64_t row_bytes, int longest, const ListOf& list_of,
                        const Place& place, const Begin& begin) {
  if (goes_by_ring<Unit> && longest <= 32) {
    if constexpr (goes_by_ring<Unit>) {
      extern __shared__ __align__(128) std::byte ring_memory[];
      __shared__ hopper::Barrier barriers[RowRing::warps * RowRing::stages];
      RowRing ring(ring_memory, barriers);
      const RowPieces<Rows> pieces(rows, row_bytes);
      std::byte* to = nullptr;  // of the row's i-th place, in lane i
      ring.run(pieces, pieces, [&](const RowPieces<Rows>& piece, const std::byte* stage) {
        if (piece.offset() == 0) {
          const auto list = list_of(piece.rows(), 0);
          to = lane_of_thread() < list.count ? place(list.value) : nullptr;
          begin(piece.rows(), list);
        }
        if (to != nullptr) hopper::store_bytes(to + piece.offset(), stage, piece.bytes());
        hopper::commit_stores();
      });
    }
  } else {
    for (Rows row = rows; row.exists(); row.advance()) {
      for (int first = 0; first < longest; first += 32) {
        const auto list = list_of(row, first);
        begin(row, list);
        copy_row(reinterpret_cast<const Unit*>(row.source()), row_bytes / static_cast<int>(sizeof(Unit)), list.count,
                 [&](int i) { return reinterpret_cast<Unit*>(place(list.of_lane(i))); });
        if (list.count < 32) break;
      }
    }
  }
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
  const int weight_words = static_cast<int>(plan.ids_offset_bytes() / 4), k = plan.shape.k;
  const auto write_headers = [&](const TokenRows& row, const LaneList<SentRow>& list) {
    for (int word = lane_of_thread(); word - lane_of_thread() <= weight_words + k && ids != nullptr; word += 32) {
      const bool exists = word <= weight_words + k;
      auto value = static_cast<std::uint32_t>(row.token());
      if (exists && word < weight_words) value = weights[row.token() * weight_words + word];
      if (exists && word >= weight_words && word < weight_words + k) {
        value = static_cast<std::uint32_t>(ids[row.token() * k + word - weight_words]);
      }
      for (int i = 0; i < list.count; ++i) {
        const SentRow sent = list.of_lane(i);
        if (exists) reinterpret_cast<std::uint32_t*>(out.header(sent.rank, sent.slot))[word] = value;
      }
    }
  };
  const auto places = [&](const TokenRows& row, int first) { return sent_list(plan, r, row.token(), first); };
  const auto place = [&](SentRow sent) { return out.payload(sent.rank, sent.slot); };
  fan_out<Unit>(TokenRows(tokens, x, payload_bytes_of(plan)), payload_bytes_of(plan), plan.max_sends(), places, place,
                write_headers);
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
    expand_kernel(const __grid_constant__ DispatchPlan plan, const __grid_constant__ RowTable in,
                  const __grid_constant__ DispatchRecord r) {
  const std::int64_t row_bytes = payload_bytes_of(plan);
  const auto places = [&](const ReceivedRows& row, int first) { return entry_list(plan, r, row.number(), first); };
  const auto place = [&](std::int64_t row) { return r.rows + row * row_bytes; };
  fan_out<Unit>(ReceivedRows(plan, r, in), row_bytes, plan.max_entries(), places, place,
                [](const auto&, const auto&) {});
  zero_pad_rows<Unit>(plan, r, r.rows);
}

/// The rows of an array at the entries of a received row, for SidePieces: behind the received row itself where asked.
template <bool WithReceived>
class EntryRows {
 public:
  __device__ EntryRows(const DispatchPlan& plan, const DispatchRecord& r, const RowTable& table, const void* array)
      : rows_(plan, r, table), plan_(&plan), record_(&r), array_(static_cast<const std::byte*>(array)) {
    read_list();
  }
  __device__ bool exists() const { return rows_.exists(); }
  __device__ void advance() {
    rows_.advance();
    read_list();
  }
  __device__ int sources() const { return list_.count == 0 ? 0 : list_.count + (WithReceived ? 1 : 0); }
  __device__ const std::byte* source() const { return source_; }

  __device__ const ReceivedRows& received() const { return rows_; }
  __device__ const LaneList<std::int64_t>& entries() const { return list_; }

 private:
  __device__ void read_list() {
    if (!rows_.exists()) return;
    list_ = entry_list(*plan_, *record_, rows_.number(), 0);
    const int lane = lane_of_thread();
    std::int64_t row = list_.value;
    if constexpr (WithReceived) row = __shfl_up_sync(whole_warp, row, 1);
    source_ = array_ + row * payload_bytes_of(*plan_);
    if (WithReceived && lane == 0) source_ = rows_.source();
  }

  ReceivedRows rows_;
  const DispatchPlan* plan_;
  const DispatchRecord* record_;
  const std::byte* array_;
  LaneList<std::int64_t> list_;
  const std::byte* source_ = nullptr;
};

/// Lists that fit the lanes of a warp go by ring.
template <class Rows, class F>
__device__ void each_side_piece(const Rows& rows, std::int64_t row_bytes, const F& f) {
  extern __shared__ __align__(128) std::byte ring_memory[];
  __shared__ hopper::Barrier barriers[RowRing::warps * RowRing::stages];
  RowRing ring(ring_memory, barriers);
  const SidePieces<Rows> pieces(rows, row_bytes);
  ring.run(pieces, pieces, f);
}

/// dout = weight * dy of the row's token, and r.entry_dweights = <dy, out>.
template <class T, int Width>
PLEAT_KERNEL void __launch_bounds__(row_threads)
    expand_gradient_kernel(const __grid_constant__ DispatchPlan plan, const __grid_constant__ RowTable in, const T* out,
                           const __grid_constant__ DispatchRecord r, T* dout) {
  using Acc = accumulator_t<T>;
  using Packed = pleat::detail::Pack<T, Width>;
  const std::int64_t hidden = plan.shape.hidden, row_bytes = payload_bytes_of(plan);
  const auto weight_of = [&](std::int64_t entry) { return static_cast<const Acc*>(r.entry_weights)[entry]; };
  // One pack of one entry: stores its gradient, and returns its part of the dot product.
  const auto apply = [&](const Packed& dy, const Packed& from, Acc weight, Packed* to) {
    Acc d[Width], dot = 0;
#pragma unroll
    for (int e = 0; e < Width; ++e) {
      const Acc gradient = static_cast<Acc>(dy.elem[e]);
      dot += gradient * static_cast<Acc>(from.elem[e]);
      d[e] = weight * gradient;
    }
    *to = rounded<T>(d);
    return dot;
  };
  const int lane = lane_of_thread();
  if (goes_by_ring<Packed> && plan.max_entries() < 32) {
    if constexpr (goes_by_ring<Packed>) {
      Acc dot = 0;  // of this lane's entry
      using Rows = EntryRows<true>;
      each_side_piece(Rows(plan, r, in, out), row_bytes, [&](const SidePieces<Rows>& piece, const std::byte* stage) {
        const auto& list = piece.rows().entries();
        const std::int64_t first_entry = piece.rows().received().number() * plan.max_entries();
        const Acc weight = lane < list.count ? weight_of(first_entry + lane) : Acc{0};
        const auto* const dy = reinterpret_cast<const Packed*>(stage);
        const int packs = static_cast<int>(piece.piece_bytes() / sizeof(Packed));
        for (int i = 0; i < list.count; ++i) {
          const auto* const from = reinterpret_cast<const Packed*>(stage + (i + 1) * piece.pitch());
          auto* const to = reinterpret_cast<Packed*>(dout + list.of_lane(i) * hidden) + piece.offset() / sizeof(Packed);
          const Acc entry_weight = __shfl_sync(whole_warp, weight, i);
          Acc part = 0;
          for (int u = lane; u < packs; u += 32) part += apply(dy[u], from[u], entry_weight, to + u);
          part = sum_of_warp(part);
          if (lane == i) dot = piece.offset() == 0 ? part : dot + part;
        }
        if (piece.ends_row() && lane < list.count) static_cast<Acc*>(r.entry_dweights)[first_entry + lane] = dot;
      });
    }
  } else {
    for (ReceivedRows row(plan, r, in); row.exists(); row.advance()) {
      const std::int64_t first_entry = row.number() * plan.max_entries();
      const auto* const dy = reinterpret_cast<const Packed*>(row.source());
      for (std::int64_t i = first_entry; i < first_entry + plan.max_entries() && r.entry_rows[i] >= 0; ++i) {
        const auto* const from = reinterpret_cast<const Packed*>(out + r.entry_rows[i] * hidden);
        auto* const to = reinterpret_cast<Packed*>(dout + r.entry_rows[i] * hidden);
        Acc dot = 0;
        for (std::int64_t u = lane; u < hidden / Width; u += 32) dot += apply(dy[u], from[u], weight_of(i), to + u);
        dot = sum_of_warp(dot);
        if (lane == 0) static_cast<Acc*>(r.entry_dweights)[i] = dot;
      }
    }
  }
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
  if (goes_by_ring<Packed> && plan.max_entries() <= 32) {
    if constexpr (goes_by_ring<Packed>) {
      using Rows = EntryRows<false>;
      each_side_piece(Rows(plan, r, out, expert_rows), payload_bytes_of(plan),
                      [&](const SidePieces<Rows>& piece, const std::byte* stage) {
                        const ReceivedRows& row = piece.rows().received();
                        const int count = piece.rows().entries().count;
                        const Acc weight = lane < count ? weight_of(row.number() * plan.max_entries() + lane) : Acc{0};
                        auto* const to = reinterpret_cast<Packed*>(row.source() + piece.offset());
                        const int packs = static_cast<int>(piece.piece_bytes() / sizeof(Packed));
                        for (int u = lane; u - lane < packs; u += 32) {
                          Acc sums[Width] = {};
                          for (int i = 0; i < count; ++i) {
                            const Acc entry_weight = __shfl_sync(whole_warp, weight, i);
                            if (u < packs)
                              add(sums, entry_weight, reinterpret_cast<const Packed*>(stage + i * piece.pitch())[u]);
                          }
                          if (u < packs) to[u] = rounded<T>(sums);
                        }
                        if (!weighted && piece.offset() == 0) write_gradients(row);
                      });
    }
    return;
  }
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
      const auto add = [&](const Packed* from) {
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
      };
      if (residual != nullptr) add(reinterpret_cast<const Packed*>(residual + t * hidden));
      for (int i = 0; i < plan.max_sends(); ++i) {
        const SentRow row = sent[i];
        if (row.rank < 0) break;
        add(reinterpret_cast<const Packed*>(in.payload(row.rank, row.slot)));
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
