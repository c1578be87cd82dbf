// The parts of the Hopper backward kernel beside its products: what its warps share, and the warp that loads.
#pragma once

#include <cmath>

#include <pleat/attention/cuda/hopper_tiles.cuh>
#include <pleat/cuda/hopper/barrier.cuh>

namespace pleat::inline v0::attention_kernel {

/// Two warp groups of 64 keys each walk tiles of 64 queries.
template <int QkDim, int VDim>
struct BackwardTiling {
  static constexpr int qk_dim = QkDim, v_dim = VDim;
  static constexpr int consumers = 2, keys = 64 * consumers, queries = 64;
  static constexpr int half = QkDim / consumers;  // columns of dQ per warp group
  static constexpr int threads = (consumers + 1) * hopper::warp_group_threads;
  static constexpr int producer_registers = QkDim + VDim < 256 ? 56 : 40;
  static constexpr int consumer_registers = QkDim + VDim < 256 ? 224 : 232;
};

namespace hopper_backward_detail {

using namespace hopper;

/// What the warps must know of a tile of queries, beside its data.
struct TileRecord {
  TileOfQueries queries;
  int query, head, batch;  // where it lies
  int key_tile, index;     // what it meets: tile of keys, by which rectangle of the work
  bool exists;             // false: no more will come
};

template <class Tiling>
struct Shared {
  static constexpr int records = 8;  // more tiles than are between the loads of queries and the adds to dQ
  alignas(1024) std::uint16_t k[Tiling::keys * Tiling::qk_dim];
  alignas(1024) std::uint16_t v[Tiling::keys * Tiling::v_dim];
  alignas(1024) std::uint16_t q[2][Tiling::queries * Tiling::qk_dim];
  alignas(1024) std::uint16_t dout[2][Tiling::queries * Tiling::v_dim];
  alignas(1024) std::uint16_t ds[2][Tiling::keys * Tiling::queries];
  alignas(1024) float dq[2][Tiling::consumers][Tiling::queries * Tiling::half];
  alignas(16) float lse_log2[2][Tiling::queries];
  alignas(16) float delta[2][Tiling::queries];
  TileRecord record[records];
  unsigned item[2];
  bool any[2];  // whether some query sees keys of the item
  Barrier item_full[2], item_empty[2], kv_full, kv_empty, q_full[2], q_empty[2], dout_full[2], dout_empty[2],
      dq_full[2], dq_empty[2];
};

/// What all warps know. Items (tile of keys, key-value head) are taken in order by whoever is free, early keys first:
/// those of a causal rectangle are seen by the most queries. Where dQ has a fixed order, an item adds to each tile of
/// it after those before it, which are under way or done.
template <class T>
struct Call {
  Extents extents;
  WorkList work;
  float scale, scale_log2;  // scale * log2(e)
  RowStatistics lse, delta;
  HeadRows<float> dk, dv;
  bool accumulate_dk, accumulate_dv;
  unsigned* ticket;  // next item
  unsigned* turns;  // [batch, q_heads, tiles of queries]: how many adds to this tile of dQ have landed; null: any order
  int key_tiles, query_tiles, heads, heads_at_once;
  int group;                      // query heads of a head of keys and values
  unsigned items, items_at_once;  // all of them; of heads_at_once heads

  struct Item {
    int tile, head, batch;  // head: of keys and values
  };
  __device__ Item item(unsigned i) const {
    const int first_head = static_cast<int>(i / items_at_once) * heads_at_once;
    const int rest = static_cast<int>(i % items_at_once), width = min(heads_at_once, heads - first_head);
    const int head = first_head + rest % width;
    return {rest / width, head % extents.kv_heads, head / extents.kv_heads};
  }
};
struct Maps {
  CUtensorMap q, k, v, dout, dq;
};

template <class Tiling, class T>
__device__ QueryTiles<Tiling::queries> query_tiles(const Call<T>& call, int key_tile) {
  const int begin = key_tile * Tiling::keys;
  const int end = static_cast<int>(min(static_cast<std::int64_t>(begin) + Tiling::keys, call.extents.k_tokens));
  return {call.work, begin, end, call.group};
}

/// One warp: takes items, loads their tiles. What it can, it does before it waits for room.
template <class Tiling, class T>
__device__ void produce(Shared<Tiling>& s, const Call<T>& call, const Maps& maps) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  DoubleBuffer item, at;
  while (true) {
    s.item_empty[item.place()].wait(item.parity() ^ 1);
    const unsigned ticket = __shfl_sync(~0u, lane == 0 ? atomicAdd(call.ticket, 1u) : 0u, 0);
    const bool exists = ticket < call.items;
    const auto [key_tile, kv_head, batch] = call.item(exists ? ticket : 0);
    auto tiles = query_tiles<Tiling>(call, key_tile);
    bool more = exists && tiles.next();
    if (lane == 0) {
      for (unsigned i = 0; i < 2 && !exists; ++i) s.record[(at.count + i) % Shared<Tiling>::records].exists = false;
      s.item[item.place()] = ticket;
      s.any[item.place()] = more;
      s.item_full[item.place()].arrive();
    }
    if (!exists) return;
    s.kv_empty.wait(item.count % 2 ^ 1);
    ++item.count;
    if (lane == 0) {
      s.kv_full.arrive_expecting(more ? sizeof s.k + sizeof s.v : 0);
      if (more) {
        load_rows(s.k, maps.k, s.kv_full, tiles.begin(), kv_head, batch);
        load_rows(s.v, maps.v, s.kv_full, tiles.begin(), kv_head, batch);
      }
    }
    while (more) {
      TileRecord& record = s.record[at.count % Shared<Tiling>::records];
      if (lane == 0) {
        record = {
            tiles.tile(),  tiles.query(), kv_head * call.group + tiles.head(), batch, tiles.begin() / Tiling::keys,
            tiles.index(), true};
      }
      __syncwarp();
      more = tiles.next();
      s.q_empty[at.place()].wait(at.parity() ^ 1);
      if (lane == 0) {
        record.queries.is_final = !more;
        s.q_full[at.place()].arrive_expecting(sizeof s.q[0]);
        load_rows(s.q[at.place()], maps.q, s.q_full[at.place()], record.query, record.head, record.batch);
      }
      s.dout_empty[at.place()].wait(at.parity() ^ 1);
      if (lane == 0) {
        s.dout_full[at.place()].arrive_expecting(sizeof s.dout[0]);
        load_rows(s.dout[at.place()], maps.dout, s.dout_full[at.place()], record.query, record.head, record.batch);
      }
      float lse[2], delta[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {  // rows that are no part of the rectangle weigh nothing
        const int row = lane + 32 * i;
        const bool takes_part = row >= record.queries.first && row < record.queries.last;
        lse[i] = takes_part ? call.lse.at(record.batch, record.query + row, record.head) : -INFINITY;
        delta[i] = takes_part ? call.delta.at(record.batch, record.query + row, record.head) : 0.0f;
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {  // exp2(x - inf) = 0, also for rows that see no key
        s.lse_log2[at.place()][lane + 32 * i] = lse[i] == -INFINITY ? INFINITY : lse[i] * 1.44269504088896341f;
        s.delta[at.place()][lane + 32 * i] = delta[i];
      }
      s.q_full[at.place()].arrive();
      ++at.count;
    }
  }
}

}  // namespace hopper_backward_detail

}  // namespace pleat::inline v0::attention_kernel
