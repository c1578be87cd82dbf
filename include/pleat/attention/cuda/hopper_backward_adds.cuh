// The warp of the Hopper backward kernel that adds tiles of dQ to device memory: in a fixed order when asked for, by
// turns that are counted per tile.
#pragma once

#include <pleat/attention/cuda/hopper_backward_loads.cuh>

namespace pleat::inline v0::attention_kernel::hopper_backward_detail {

/// How many adds to a tile of dQ come before one: they are ordered by tile of keys, then by rectangle. All lanes of a
/// warp; lane i brings `first_32`, rectangle i if there is one.
template <class Tiling>
__device__ unsigned adds_before(const TileRecord& tile, const WorkList& work, const TileRectangle& first_32) {
  int count = 0;
  for (int i = static_cast<int>(threadIdx.x % 32); i < work.count; i += 32) {
    const TileRectangle r = i < 32 ? first_32 : TileRectangle::of(work.rectangles[i]);
    const int last = min(r.q1, tile.query + Tiling::queries) - 1;
    if (last < max(r.q0, tile.query) || r.keys_end(last) <= r.k0) continue;
    const int low = r.k0 / Tiling::keys, high = (r.keys_end(last) - 1) / Tiling::keys;
    count += min(max(tile.key_tile - low, 0), high - low + 1);
    if (i < tile.index && tile.key_tile >= low && tile.key_tile <= high) ++count;
  }
  return __reduce_add_sync(~0u, static_cast<unsigned>(count));
}

/// The order of the adds to a tile of dQ: `turn` counts those that have landed.
struct Turn {
  unsigned* turn = nullptr;  // null: any order
  unsigned mine = 0;

  __device__ bool is_mine() const {
    unsigned landed;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(landed) : "l"(turn) : "memory");
    return landed == mine;
  }
  /// After the add has landed.
  __device__ void pass() const {
    asm volatile("fence.proxy.async;" ::: "memory");
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(turn), "r"(mine + 1) : "memory");
  }
};

/// One warp: adds tiles of dQ to device memory. A tile's turn is passed on when the add has landed, not only been read,
/// which is seen after the next add is under way, or before waiting for a turn.
template <class Tiling, class T>
__device__ void add_queries(Shared<Tiling>& s, const Call<T>& call, const Maps& maps) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const TileRectangle first_32 =
      lane < call.work.count ? TileRectangle::of(call.work.rectangles[lane]) : TileRectangle{};
  Turn before;
  for (TileNumber at;; ++at.count) {
    s.dq_full[at.place()].wait(at.parity());
    const TileRecord& tile = s.record[at.count % Shared<Tiling>::records];
    if (!tile.exists) break;
    Turn now;
    if (call.turns != nullptr) {
      now.turn = call.turns +
                 (static_cast<std::int64_t>(tile.batch) * call.extents.q_heads + tile.head) * call.query_tiles +
                 tile.query / Tiling::queries;
      now.mine = adds_before<Tiling>(tile, call.work, first_32);
    }
    if (lane == 0) {
      if (now.turn != nullptr && !now.is_mine()) {
        wait_stores<0>();
        if (before.turn != nullptr) before.pass();
        before.turn = nullptr;
        while (!now.is_mine()) {
        }
      }
      if (now.turn != nullptr) asm volatile("fence.proxy.async;" ::: "memory");
#pragma unroll
      for (int half = 0; half < Tiling::consumers; ++half) {
        add(maps.dq, s.dq[at.place()][half], 0, tile.query, half * Tiling::half / 32, tile.head, tile.batch);
      }
      commit_stores();
      wait_stores_read<0>();
      s.dq_empty[at.place()].arrive();
      if (before.turn != nullptr) {
        wait_stores<1>();
        before.pass();
      }
      before = now;
    }
    __syncwarp();
  }
  if (lane == 0) {
    wait_stores<0>();
    if (before.turn != nullptr) before.pass();
  }
}

}  // namespace pleat::inline v0::attention_kernel::hopper_backward_detail
