// The gradient of queries on sm_80 and up: one CTA per tile of queries, over all keys that they see, in order.
#pragma once

#include <pleat/attention/cuda/portable_key_gradients.cuh>

namespace pleat::inline v0::attention_kernel {

/// Each warp owns 16 queries and all keys of a step. `MostShared`: bytes of shared memory that a CTA may have.
template <class T, int QkDim, int VDim, int MostShared>
struct QueryGradientTiles {
  static constexpr int warps = QkDim <= 64 ? 4 : 8, threads = 32 * warps;
  static constexpr int queries = 16 * warps, keys = QkDim <= 192 ? 64 : MostShared >= shared_of_sm90 ? 32 : 16;
  static constexpr int ctas_per_sm = QkDim <= 64 ? 2 : 1;
  static constexpr bool holds_queries = QkDim + VDim <= 256;  // in registers

  static constexpr Indices indices = Indices::kept;

  using QueryTile = MmaTile<T, queries, QkDim, indices>;
  using OutTile = MmaTile<T, queries, VDim, indices>;
  using KeyTile = MmaTile<T, keys, QkDim, indices>;
  using ValueTile = MmaTile<T, keys, VDim, indices>;
  static constexpr int own_bytes = QueryTile::bytes + OutTile::bytes;
  static constexpr int stage_bytes = KeyTile::bytes + ValueTile::bytes;
  static constexpr int shared_bytes = own_bytes + 2 * stage_bytes;
  static_assert(shared_bytes <= MostShared);
};

template <class T, int QkDim, int VDim, int MostShared>
PLEAT_KERNEL void __launch_bounds__(QueryGradientTiles<T, QkDim, VDim, MostShared>::threads,
                                    QueryGradientTiles<T, QkDim, VDim, MostShared>::ctas_per_sm)
    portable_query_gradient_kernel(const __grid_constant__ Backward<T> a, const Alignment alignment) {
  using Tiles = QueryGradientTiles<T, QkDim, VDim, MostShared>;
  constexpr int threads = Tiles::threads, keys = Tiles::keys;
  extern __shared__ __align__(128) std::byte shared[];
  const typename Tiles::QueryTile q_tile(shared);
  const typename Tiles::OutTile dout_tile(shared + Tiles::QueryTile::bytes);
  const auto k_tile = [&](int stage) {
    return typename Tiles::KeyTile(shared + Tiles::own_bytes + stage * Tiles::stage_bytes);
  };
  const auto v_tile = [&](int stage) {
    return typename Tiles::ValueTile(shared + Tiles::own_bytes + stage * Tiles::stage_bytes + Tiles::KeyTile::bytes);
  };

  const float scale = log2_scale(a.scale);

  const Extents& x = a.extents;
  for_each_tile<Tiles::queries>(x.q_tokens, x.batch, x.q_heads, true, [&](auto& position) {
    const auto meets = [](const Rectangle& r, const TileRows& tile) { return SeenKeys(r, tile).keys > 0; };
    if (a.accumulate_dq && !meets_any(a.work, position, meets)) return;

    __syncthreads();         // nobody reads the queries of the last tile any more
    float lse[2], delta[2];  // lse in powers of 2; +inf where the query has seen nothing
    Left q_held[Tiles::holds_queries ? QkDim / 16 : 1], dout_held[Tiles::holds_queries ? VDim / 16 : 1];
    {
      const TileRows tile = position.tile_rows();
      q_tile.template fill<threads>(a.q.at(tile.batch, tile.begin, tile.head), a.q.token_stride, tile.rows, x.qk_dim,
                                    alignment.inputs);
      dout_tile.template fill<threads>(a.dout.at(tile.batch, tile.begin, tile.head), a.dout.token_stride, tile.rows,
                                       x.v_dim, alignment.inputs);
      const OwnSums<Tiles::indices> own(16);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = own.row(0, half);
        const bool exists = row < tile.rows;
        const float natural = exists ? a.lse.at(tile.batch, tile.begin + row, tile.head) : minus_infinity;
        lse[half] = natural == minus_infinity ? -minus_infinity : natural * log2e;
        delta[half] = exists ? a.delta.at(tile.batch, tile.begin + row, tile.head) : 0;
      }
      if constexpr (Tiles::holds_queries) {
        wait_for_copies();
        __syncthreads();
#pragma unroll
        for (int d = 0; d < QkDim; d += 16) q_held[d / 16] = q_tile.left(own.warp_row).at(0, d);
#pragma unroll
        for (int d = 0; d < VDim; d += 16) dout_held[d / 16] = dout_tile.left(own.warp_row).at(0, d);
      }
    }

    Sums dq[QkDim / 8] = {};
    for_each_rectangle(a.work, position, meets, [&](const Rectangle& r) {
      const TileRows tile = position.tile_rows();
      const SeenKeys work(r, tile);
      const int kv_head = tile.head / (x.q_heads / x.kv_heads);
      const T* k_rows = a.k.at(tile.batch, r.k0, kv_head);
      const T* v_rows = a.v.at(tile.batch, r.k0, kv_head);
      const auto fill = [&](int key) {  // with the rows that follow the ones before
        const int stage = key / keys % 2, count = work.keys - key;
        k_tile(stage).template fill<threads>(k_rows, a.k.token_stride, count, x.qk_dim, alignment.inputs);
        v_tile(stage).template fill<threads>(v_rows, a.v.token_stride, count, x.v_dim, alignment.inputs);
        k_rows += keys * a.k.token_stride;
        v_rows += keys * a.v.token_stride;
      };

      __syncthreads();  // nobody reads the stages any more
      fill(0);
      for (int key = 0; key < work.keys; key += keys) {
        const int stage = key / keys % 2;
        wait_for_copies();
        __syncthreads();  // this stage is there, the other one free
        if (key + keys < work.keys) fill(key + keys);
        const OwnSums<Tiles::indices> own(16);
        if (key >= work.seen_by_any(own.warp_row, own.warp_row + 16)) continue;

        Sums p[keys / 8] = {}, ds[keys / 8];
        const bool is_masked = key + keys > work.seen_by_all(own.warp_row, own.warp_row + 16);
        const auto hide = [&](Sums(&sums)[keys / 8], float value) {
          if (!is_masked) return;
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int visible = work.seen_by(own.row(0, half)) - key - own.column;
#pragma unroll
            for (int n = 0; n < keys / 8; ++n) {
              if (n * 8 >= visible) sums[n].at[2 * half] = value;
              if (n * 8 + 1 >= visible) sums[n].at[2 * half + 1] = value;
            }
          }
        };
        const auto q_blocks = q_tile.left(own.warp_row);
        const auto k_columns = k_tile(stage).right_transposed();
#pragma unroll
        for (int d = 0; d < QkDim; d += 16) {
          const Left q = Tiles::holds_queries ? q_held[d / 16] : q_blocks.at(0, d);
#pragma unroll
          for (int n = 0; n < keys / 16; ++n) multiply<T>(p[2 * n], p[2 * n + 1], q, k_columns.at(n * 16, d));
        }
        hide(p, minus_infinity);
#pragma unroll
        for (Sums& sums : p) {
#pragma unroll
          for (int i = 0; i < 4; ++i) sums.at[i] = exp2_of(fmaf(sums.at[i], scale, -lse[i / 2]));
        }
#pragma unroll
        for (Sums& sums : ds) sums = {{-delta[0], -delta[0], -delta[1], -delta[1]}};
        const auto dout_blocks = dout_tile.left(own.warp_row);
        const auto v_columns = v_tile(stage).right_transposed();
#pragma unroll
        for (int d = 0; d < VDim; d += 16) {
          const Left dout = Tiles::holds_queries ? dout_held[d / 16] : dout_blocks.at(0, d);
#pragma unroll
          for (int n = 0; n < keys / 16; ++n) multiply<T>(ds[2 * n], ds[2 * n + 1], dout, v_columns.at(n * 16, d));
        }
        hide(ds, 0);
        const auto k_blocks = k_tile(stage).right();
#pragma unroll
        for (int n = 0; n < keys / 16; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            ds[2 * n].at[i] *= p[2 * n].at[i];
            ds[2 * n + 1].at[i] *= p[2 * n + 1].at[i];
          }
          const Left left = left_of<T>(ds[2 * n], ds[2 * n + 1]);
#pragma unroll
          for (int d = 0; d < QkDim; d += 16) multiply<T>(dq[d / 8], dq[d / 8 + 1], left, k_blocks.at(n * 16, d));
        }
      }
    });
    wait_for_copies();  // also where there was no key
    store_gradient<QkDim>(OwnSums<Tiles::indices>(16), dq, a.scale, a.dq, position.tile_rows(), x.qk_dim,
                          a.accumulate_dq, alignment.outputs);
  });
}

}  // namespace pleat::inline v0::attention_kernel
