// The warps of the Hopper backward kernel that add tiles of dQ to device memory: in a fixed order when asked for, by
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

/// The place of an add among those to its tile of dQ: `landed` counts them. One thread.
struct Turn {
  unsigned* landed = nullptr;  // null: any order
  unsigned mine = 0;

  __device__ void wait() const {
    if (landed == nullptr) return;
    unsigned count;
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(count) : "l"(landed) : "memory");
    } while (count != mine);
    asm volatile("fence.proxy.async;" ::: "memory");
  }
  /// Returns after this thread's adds have landed.
  __device__ void pass() const {
    if (landed == nullptr) return;
    wait_stores<0>();
    asm volatile("fence.proxy.async;" ::: "memory");
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(landed), "r"(mine + 1) : "memory");
  }
};

/// One warp for each place of dQ in shared memory: adds the tiles that come there to device memory. In a fixed order a
/// tile waits for its turn, and passes it on when the add has landed, not only been read; both take longer than a
/// tile's products, so the other warp's next tile is under way meanwhile.
template <class Tiling, class T>
__device__ void add_queries(Shared<Tiling>& s, const Call<T>& call, const Maps& maps, int place) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const TileRectangle first_32 =
      lane < call.work.count ? TileRectangle::of(call.work.rectangles[lane]) : TileRectangle{};
  for (DoubleBuffer at{static_cast<unsigned>(place)};; at.count += 2) {
    s.dq_full[place].wait(at.parity());
    const TileRecord& tile = s.record[at.count % Shared<Tiling>::records];
    if (!tile.exists) break;
    Turn turn;
    if (call.turns != nullptr) {
      turn = {call.turns +
                  (static_cast<std::int64_t>(tile.batch) * call.extents.q_heads + tile.head) * call.query_tiles +
                  tile.query / Tiling::queries,
              adds_before<Tiling>(tile, call.work, first_32)};
    }
    if (lane != 0) {
      s.dq_empty[place].arrive();  // it has read the record
    } else {
      turn.wait();
#pragma unroll
      for (int half = 0; half < Tiling::consumers; ++half) {
        add(maps.dq, s.dq[place][half], 0, tile.query, half * Tiling::half / 32, tile.head, tile.batch);
      }
      commit_stores();
      wait_stores_read<0>();
      s.dq_empty[place].arrive();
      turn.pass();
    }
    __syncwarp();
  }
}

}  // namespace pleat::inline v0::attention_kernel::hopper_backward_detail
