// The parts of the Hopper forward kernel beside its products: what its warps share, the warp that deals out items, and
// the warp that loads.
#pragma once

#include <pleat/attention/cuda/head_dims.hpp>
#include <pleat/attention/cuda/hopper_order.cuh>
#include <pleat/cuda/device_signal.cuh>

namespace pleat::inline v0::attention_kernel {

/// How a head dim is tiled: `Consumers` warp groups of 64 queries each, tiles of `Keys` keys. `TakeTurns`: the warp
/// groups' products alternate, so that one's softmax runs under the other's products.
template <int QkDim, int VDim, int Consumers, int Keys, bool TakeTurns = true>
struct ForwardTiling {
  static constexpr int qk_dim = QkDim, v_dim = VDim, consumers = Consumers, keys = Keys;
  static constexpr bool take_turns = TakeTurns;
  static constexpr int queries = 64 * Consumers;
  static constexpr int threads = (Consumers + 1) * hopper::warp_group_threads;
  static constexpr int producer_registers = Consumers == 2 ? 24 : 32;
  static constexpr int consumer_registers = Consumers == 2 ? 240 : 160;
};

/// The tiling that measures best for a pair of head dims.
template <class Dims>
struct forward_tiling;
template <>
struct forward_tiling<HeadDims<64, 64>> : ForwardTiling<64, 64, 3, 128> {};
template <>
struct forward_tiling<HeadDims<128, 128>> : ForwardTiling<128, 128, 2, 176> {};
template <>
struct forward_tiling<HeadDims<192, 128>> : ForwardTiling<192, 128, 2, 128, false> {};
template <>
struct forward_tiling<HeadDims<256, 256>> : ForwardTiling<256, 256, 2, 80> {};

namespace hopper_forward_detail {

using namespace hopper;

/// What a CTA works on at a time: a tile of queries of one head; no tile: no more will come.
struct ForwardItem {
  int tile, head, batch;
};

template <class Tiling>
struct Shared {
  alignas(1024) std::uint16_t q[Tiling::queries * Tiling::qk_dim];
  alignas(1024) std::uint16_t k[2][Tiling::keys * Tiling::qk_dim];
  alignas(1024) std::uint16_t v[2][Tiling::keys * Tiling::v_dim];
  Barrier q_full, q_empty, k_full[2], k_empty[2], v_full[2], v_empty[2];
  TileOrder<Tiling::queries> order;
  ForwardItem item[2];
  Barrier item_full[2], item_empty[2];
};

/// What all warps know.
template <class T>
struct Call {
  Extents extents;
  WorkList work;
  float scale_log2;  // scale * log2(e)
  HeadRows<float> o_acc;
  RowStatistics lse;
  HeadRows<T> out;
  bool first, last;
  int tiles, heads, heads_at_once;
  int own_keys, block_rows;  // keys from own_keys on are those of other ranks, in blocks
  Arrivals arrivals;
};
struct Maps {
  CUtensorMap q, k, v, other_k, other_v;
};

/// Returns once a block of another rank is there for this head. All lanes of the warp that loads it.
__device__ inline void await_block(const Arrivals& arrivals, int block, int kv_head) {
  const std::uint64_t* const word = arrivals.word(block, kv_head);
  if (word == nullptr) return;
  while (!ends_wait(pleat::detail::load_acquire(word), arrivals.at_least)) {
  }
  asm volatile("fence.proxy.async.global;" ::: "memory");  // loads by TMA follow what the word tells of
}

/// One warp: says what the CTA works on, two items ahead.
template <class Tiling, class T>
__device__ void deal(Shared<Tiling>& s, const Call<T>& call) {
  const Items items{s.order.places(), call.heads, call.heads_at_once};
  const int q_heads = call.extents.q_heads;
  Items::Share share;
  Items::Item item;
  DoubleBuffer at;
  bool exists = true;
  while (exists) {
    exists = items.next(share, item);
    const int tile = exists ? s.order.tile(item.place) : -1;
    if (tile >= call.tiles) continue;
    s.item_empty[at.place()].wait(at.parity() ^ 1);
    if (threadIdx.x % 32 == 0) {
      s.item[at.place()] = {tile, item.head % q_heads, item.head / q_heads};
      s.item_full[at.place()].arrive();
    }
    ++at.count;
  }
}

/// The CTA's items: `work_on(item)` for each, in shared memory. All lanes of each warp that works on them.
template <class Tiling, class F>
__device__ void for_each_item(Shared<Tiling>& s, F work_on) {
  for (DoubleBuffer at;; ++at.count) {
    s.item_full[at.place()].wait(at.parity());
    const ForwardItem& item = s.item[at.place()];
    if (item.tile < 0) return;
    work_on(item);
    s.item_empty[at.place()].arrive();
  }
}

template <class Tiling, class T>
__device__ void produce(Shared<Tiling>& s, const Call<T>& call, const Maps& maps) {
  const bool leads = elect_one();
  if (leads) {
    prefetch(maps.q);
    prefetch(maps.k);
    prefetch(maps.v);
  }
  const int group = call.extents.q_heads / call.extents.kv_heads;
  DoubleBuffer at;
  std::uint32_t q_parity = 0;
  int awaited = -1;  // which block and head were last seen to be there
  for_each_item(s, [&](const ForwardItem& item) {
    const auto [tile, head, batch] = item;
    const int begin = tile * Tiling::queries;
    const int end = static_cast<int>(min(static_cast<std::int64_t>(begin) + Tiling::queries, call.extents.q_tokens));
    KeyTiles<Tiling::keys> tiles(call.work, begin, end);
    for (bool first = true; tiles.next(); first = false) {
      if (first) {
        s.q_empty.wait(q_parity ^ 1);
        q_parity ^= 1;
        if (leads) {
          s.q_full.arrive_expecting(sizeof s.q);
          load_rows(s.q, maps.q, s.q_full, begin, head, batch);
        }
      }
      const bool is_own = tiles.key() < call.own_keys;
      const int key = is_own ? tiles.key() : tiles.key() - call.own_keys;
      if (!is_own) {
        const int block = key / call.block_rows, place = head / group * Arrivals::most_blocks + block;
        if (place != awaited) await_block(call.arrivals, block, head / group);
        awaited = place;
      }
      s.k_empty[at.place()].wait(at.parity() ^ 1);
      if (leads) {
        s.k_full[at.place()].arrive_expecting(sizeof s.k[0]);
        load_rows(s.k[at.place()], is_own ? maps.k : maps.other_k, s.k_full[at.place()], key, head / group, batch);
      }
      s.v_empty[at.place()].wait(at.parity() ^ 1);
      if (leads) {
        s.v_full[at.place()].arrive_expecting(sizeof s.v[0]);
        load_rows(s.v[at.place()], is_own ? maps.v : maps.other_v, s.v_full[at.place()], key, head / group, batch);
      }
      ++at.count;
    }
  });
}

}  // namespace hopper_forward_detail

}  // namespace pleat::inline v0::attention_kernel
