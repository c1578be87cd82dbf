// In which order tiles of queries are dealt out: those first that see the most keys, so that CTAs get equal work
// whatever the rectangles are.
#pragma once

#include <pleat/attention/cuda/hopper_tiles.cuh>

namespace pleat::inline v0::attention_kernel {

/// The tiles of `Queries` queries by how many keys they see, in shared memory; late ones first among equals. Beyond
/// `most` tiles, neighbours keep together.
template <int Queries>
struct TileOrder {
  static constexpr int most = 1024;

  std::uint16_t run[most];
  int runs, width;  // runs of so many tiles

  /// All threads of the CTA; only those runs that see keys, unless `all`. To be read after their next barrier, when the
  /// copy engine may write to `keys`, [most], too.
  __device__ void make(unsigned* keys, const WorkList& work, int tiles, bool all) {
    const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
    const int tiles_of_run = (tiles + most - 1) / most, count = (tiles + tiles_of_run - 1) / tiles_of_run;
    for (int i = thread; i < count; i += threads) keys[i] = 0;
    if (thread == 0) {
      runs = 0;
      width = tiles_of_run;
    }
    __syncthreads();
    for (int i = thread / 32; i < work.count; i += threads / 32) {
      const TileRectangle r = TileRectangle::of(work.rectangles[i]);
      for (int tile = r.q0 / Queries + thread % 32; tile <= (r.q1 - 1) / Queries; tile += 32) {
        const int seen = r.keys_end(min(r.q1, (tile + 1) * Queries) - 1) - r.k0;
        if (seen > 0) atomicAdd(&keys[tile / tiles_of_run], static_cast<unsigned>(seen));
      }
    }
    __syncthreads();
    for (int i = thread; i < count; i += threads) {
      if (keys[i] == 0 && !all) continue;
      int place = 0;
      for (int other = 0; other < count; ++other) {
        place += keys[other] > keys[i] || (keys[other] == keys[i] && other > i);
      }
      run[place] = static_cast<std::uint16_t>(i);
      atomicAdd(&runs, 1);
    }
    hopper::fence_async_proxy();
  }
  __device__ int places() const { return runs * width; }
  /// The tile of a place; the last run may have places that are no tiles.
  __device__ int tile(int place) const { return run[place / width] * width + width - 1 - place % width; }
};

}  // namespace pleat::inline v0::attention_kernel
