// The parts of the Hopper kernels of hopper_gradients.cuh beside their products: tilings, what the warps share, and the
// warp that loads.
#pragma once

#include <cmath>

#include <pleat/attention/cuda/head_dims.hpp>
#include <pleat/attention/cuda/hopper_tiles.cuh>
#include <pleat/cuda/hopper/barrier.cuh>

namespace pleat::inline v0::attention_kernel {

enum class GradientOf { queries, keys, values };

/// Two warp groups of 64 rows each (queries, or keys) walk tiles of `Columns` of the other kind; `VStages` of the tiles
/// of values, or of output gradients, are in flight.
template <GradientOf Which, int QkDim, int VDim, int Columns, int VStages>
struct GradientTiling {
  static constexpr GradientOf of = Which;
  static constexpr bool walks_keys = Which == GradientOf::queries;
  static constexpr bool needs_dp = Which != GradientOf::values;                      // dV is made of P alone
  static constexpr int qk_dim = QkDim, v_dim = VDim, dim = needs_dp ? QkDim : VDim;  // `dim`: of the gradient
  static constexpr int consumers = 2, rows = 64 * consumers, columns = Columns;
  static constexpr int qk_stages = 2, v_stages = VStages;
  static constexpr int threads = (consumers + 1) * hopper::warp_group_threads;
};

/// The tilings of a pair of head dims: what fits shared memory and registers.
template <class Dims, GradientOf Which>
struct gradient_tiling;
template <>
struct gradient_tiling<HeadDims<192, 128>, GradientOf::values> : GradientTiling<GradientOf::values, 192, 128, 128, 2> {
};
template <GradientOf Which>
struct gradient_tiling<HeadDims<192, 128>, Which> : GradientTiling<Which, 192, 128, 96, 2> {};
template <>
struct gradient_tiling<HeadDims<256, 256>, GradientOf::values> : GradientTiling<GradientOf::values, 256, 256, 64, 2> {};
template <GradientOf Which>
struct gradient_tiling<HeadDims<256, 256>, Which> : GradientTiling<Which, 256, 256, 64, 1> {};

namespace hopper_gradients_detail {

using namespace hopper;

/// A tile of rows: its first row, head and batch.
struct Own {
  int row, head, batch;
};
/// What consumers must know of a tile that rows walk. They see these columns: row r of [row_begin, row_end) those of
/// [begin, end) that are below r + shift where columns are keys, and from r + shift on where they are queries.
struct TileRecord {
  Own own;
  int row_begin, row_end, begin, end, shift;
  bool is_masked;  // whether some row does not see all columns
  bool is_final;   // of its rows
  bool is_empty;   // the rows see nothing, and nothing is loaded
  bool exists;     // false: no more will come
};

/// `qk`: queries and keys, `v`: output gradients and values; the rows' own, and what they walk.
template <class Tiling>
struct Shared {
  alignas(1024) std::uint16_t own_qk[Tiling::rows * Tiling::qk_dim];
  alignas(1024) std::uint16_t own_v[Tiling::needs_dp ? Tiling::rows * Tiling::v_dim : 1];
  alignas(1024) std::uint16_t qk[Tiling::qk_stages][Tiling::columns * Tiling::qk_dim];
  alignas(1024) std::uint16_t v[Tiling::v_stages][Tiling::columns * Tiling::v_dim];
  alignas(16) float lse_log2[Tiling::qk_stages][Tiling::walks_keys ? 4 : Tiling::columns];  // of queries as columns
  alignas(16) float delta[Tiling::qk_stages][Tiling::walks_keys ? 4 : Tiling::columns];
  TileRecord record[4];  // outlive the tiles: one is written only when the tile two before it has been left
  Barrier own_full, own_empty, qk_full[Tiling::qk_stages], qk_empty[Tiling::qk_stages], v_full[Tiling::v_stages],
      v_empty[Tiling::v_stages];
};

struct Call {
  Extents extents;
  WorkList work;
  float scale_log2, scale_result;  // scale * log2(e); what the sums are multiplied with
  RowStatistics lse, delta;
  HeadRows<float> result;
  bool accumulate;
  Items items;  // heads: of the rows
};
struct Maps {
  CUtensorMap own_qk, own_v, qk, v;
};

/// exp2(x - infinity) = 0: rows without keys weigh nothing.
__device__ inline float log2_of(float lse) {
  return lse == -INFINITY ? INFINITY : lse * 1.44269504088896341f;
}

/// Where tile number `count` of a CTA lies.
template <int Stages>
struct Slot {
  __device__ static int stage(unsigned count) { return static_cast<int>(count % Stages); }
  /// Of its `full` barrier; of the `empty` one the other.
  __device__ static std::uint32_t parity(unsigned count) { return count / Stages % 2; }
};

/// One warp.
template <class Tiling>
class Producer {
 public:
  __device__ Producer(Shared<Tiling>& s, const Call& call, const Maps& maps) : s_(s), call_(call), maps_(maps) {}

  __device__ void run() {
    const Extents& e = call_.extents;
    const int group = e.q_heads / e.kv_heads, heads = Tiling::walks_keys ? e.q_heads : e.kv_heads;
    const std::int64_t tokens = Tiling::walks_keys ? e.q_tokens : e.k_tokens;
    Items::Share at;
    Items::Item item;
    while (call_.items.next(at, item)) {
      // Late queries see the most keys of a causal rectangle, early keys are seen by the most queries.
      const int tile = Tiling::walks_keys ? call_.items.places - 1 - item.place : item.place;
      const Own own{tile * Tiling::rows, item.head % heads, item.head / heads};
      const int end = static_cast<int>(min(static_cast<std::int64_t>(own.row) + Tiling::rows, tokens));
      if constexpr (Tiling::walks_keys) {
        KeyTiles<Tiling::columns> tiles(call_.work, own.row, end);
        walk(own, tiles, [&] { return Columns{tiles.key(), own.head / group}; });
      } else {
        QueryTiles<Tiling::columns> tiles(call_.work, own.row, end, group);
        walk(own, tiles, [&] { return Columns{tiles.query(), own.head * group + tiles.head()}; });
      }
    }
    tell({.exists = false});
  }

 private:
  using QkSlot = Slot<Tiling::qk_stages>;
  using VSlot = Slot<Tiling::v_stages>;
  struct Columns {
    int first, head;
  };

  template <class Tiles, class ColumnsOf>
  __device__ void walk(const Own& own, Tiles& tiles, ColumnsOf columns_of) {
    bool more = tiles.next();
    if (!more) return tell({.own = own, .is_final = true, .is_empty = true, .exists = true});
    s_.own_empty.wait(own_parity_ ^ 1);
    own_parity_ ^= 1;
    if (leads()) {
      s_.own_full.arrive_expecting(sizeof s_.own_qk + (Tiling::needs_dp ? sizeof s_.own_v : 0));
      load_rows(s_.own_qk, maps_.own_qk, s_.own_full, own.row, own.head, own.batch);
      if constexpr (Tiling::needs_dp) load_rows(s_.own_v, maps_.own_v, s_.own_full, own.row, own.head, own.batch);
    }
    while (more) {
      const Columns columns = columns_of();
      TileRecord record = record_of(tiles);
      more = tiles.next();
      record.own = own;
      record.is_final = !more;
      load(record, columns);
    }
  }
  __device__ static TileRecord record_of(const KeyTiles<Tiling::columns>& tiles) {
    const TileRectangle& r = tiles.rectangle();
    return {.row_begin = r.q0,
            .row_end = r.q1,
            .begin = 0,
            .end = tiles.keys(),
            .shift = r.diagonal - tiles.key(),
            .is_masked = tiles.is_masked(),
            .exists = true};
  }
  __device__ static TileRecord record_of(const QueryTiles<Tiling::columns>& tiles) {
    const TileOfQueries t = tiles.tile();
    return {.row_begin = t.k0,
            .row_end = t.k1,
            .begin = t.first,
            .end = t.last,
            .shift = t.shift,
            .is_masked = t.is_masked || t.first > 0 || t.last < Tiling::columns,
            .exists = true};
  }
  __device__ void load(const TileRecord& record, const Columns& columns) {
    const int qk = QkSlot::stage(count_), v = VSlot::stage(count_);
    s_.qk_empty[qk].wait(QkSlot::parity(count_) ^ 1);
    if (leads()) {
      s_.record[count_ % 4] = record;
      s_.qk_full[qk].arrive_expecting(sizeof s_.qk[0]);
      load_rows(s_.qk[qk], maps_.qk, s_.qk_full[qk], columns.first, columns.head, record.own.batch);
    }
    if constexpr (!Tiling::walks_keys) {
      for (int i = static_cast<int>(threadIdx.x % 32); i < Tiling::columns; i += 32) {
        const bool takes_part = i >= record.begin && i < record.end;  // the others weigh nothing
        const int query = columns.first + i;
        s_.lse_log2[qk][i] = log2_of(takes_part ? call_.lse.at(record.own.batch, query, columns.head) : -INFINITY);
        s_.delta[qk][i] = takes_part ? call_.delta.at(record.own.batch, query, columns.head) : 0.0f;
      }
    }
    s_.qk_full[qk].arrive();
    s_.v_empty[v].wait(VSlot::parity(count_) ^ 1);
    if (leads()) {
      s_.v_full[v].arrive_expecting(sizeof s_.v[0]);
      load_rows(s_.v[v], maps_.v, s_.v_full[v], columns.first, columns.head, record.own.batch);
    }
    ++count_;
  }
  /// A record without tiles.
  __device__ void tell(const TileRecord& record) {
    const int qk = QkSlot::stage(count_), v = VSlot::stage(count_);
    s_.qk_empty[qk].wait(QkSlot::parity(count_) ^ 1);
    s_.v_empty[v].wait(VSlot::parity(count_) ^ 1);
    if (leads()) {
      s_.record[count_ % 4] = record;
      s_.qk_full[qk].arrive();
      s_.v_full[v].arrive();
    }
    s_.qk_full[qk].arrive();
    ++count_;
  }
  __device__ static bool leads() { return threadIdx.x % 32 == 0; }

  Shared<Tiling>& s_;
  const Call& call_;
  const Maps& maps_;
  unsigned count_ = 0;
  std::uint32_t own_parity_ = 0;
};

}  // namespace hopper_gradients_detail

}  // namespace pleat::inline v0::attention_kernel
