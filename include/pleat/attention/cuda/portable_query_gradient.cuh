// The gradient of queries on sm_80 and up: one CTA per tile of queries, over all keys that they see, in order.
#pragma once

#include <pleat/attention/cuda/portable_key_gradients.cuh>

namespace pleat::inline v0::attention_kernel {

/// Each warp owns 16 queries and all keys of a step.
template <class T, int QkDim, int VDim>
struct QueryGradientTiles {
  static constexpr int warps = QkDim <= 64 ? 4 : 8, threads = 32 * warps;
  static constexpr int queries = 16 * warps, keys = QkDim <= 192 ? 64 : 32;
  static constexpr int ctas_per_sm = QkDim <= 64 ? 2 : 1;
  static constexpr bool holds_queries = QkDim + VDim <= 256;  // in registers

  using QueryTile = MmaTile<T, queries, QkDim>;
  using OutTile = MmaTile<T, queries, VDim>;
  using KeyTile = MmaTile<T, keys, QkDim>;
  using ValueTile = MmaTile<T, keys, VDim>;
  static constexpr int own_bytes = QueryTile::bytes + OutTile::bytes;
  static constexpr int stage_bytes = KeyTile::bytes + ValueTile::bytes;
  static constexpr int shared_bytes = own_bytes + 2 * stage_bytes;
};

template <class T, int QkDim, int VDim>
PLEAT_KERNEL void __launch_bounds__(QueryGradientTiles<T, QkDim, VDim>::threads,
                                    QueryGradientTiles<T, QkDim, VDim>::ctas_per_sm)
    portable_query_gradient_kernel(const __grid_constant__ Backward<T> a, const Alignment alignment) {
  using Tiles = QueryGradientTiles<T, QkDim, VDim>;
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

  const int lane = static_cast<int>(threadIdx.x) % 32, warp_row = static_cast<int>(threadIdx.x) / 32 * 16;
  const int column_in_pair = lane % 4 * 2;
  const auto q_blocks = q_tile.left(warp_row);
  const auto dout_blocks = dout_tile.left(warp_row);
  const float scale = log2_scale(a.scale);

  const Extents& x = a.extents;
  const auto q_tiles = static_cast<int>((x.q_tokens + Tiles::queries - 1) / Tiles::queries);
  for_each_tile(q_tiles, x.batch, x.q_heads, true, [&](int tile, int batch, int head) {
    const int kv_head = head / (x.q_heads / x.kv_heads);
    const std::int64_t q_begin = static_cast<std::int64_t>(tile) * Tiles::queries;
    const int rows = clamped(x.q_tokens - q_begin, 0, Tiles::queries), warp_end = min(warp_row + 16, rows);
    const auto meets = [&](const Rectangle& r) { return SeenKeys(r, q_begin, rows).seen_by_any(0, rows) > 0; };
    if (a.accumulate_dq && !meets_any(a.work, meets)) return;

    __syncthreads();  // nobody reads the queries of the last tile any more
    q_tile.template fill<threads>(a.q.at(batch, q_begin, head), a.q.token_stride, rows, x.qk_dim, alignment.inputs);
    dout_tile.template fill<threads>(a.dout.at(batch, q_begin, head), a.dout.token_stride, rows, x.v_dim,
                                     alignment.inputs);
    float lse[2], delta[2];  // lse in powers of 2; +inf where the query has seen nothing
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp_row + half * 8 + lane / 4;
      const float natural = row < rows ? a.lse.at(batch, q_begin + row, head) : minus_infinity;
      lse[half] = natural == minus_infinity ? -minus_infinity : natural * log2e;
      delta[half] = row < rows ? a.delta.at(batch, q_begin + row, head) : 0;
    }
    Left q_held[Tiles::holds_queries ? QkDim / 16 : 1], dout_held[Tiles::holds_queries ? VDim / 16 : 1];
    if constexpr (Tiles::holds_queries) {
      wait_for_copies();
      __syncthreads();
#pragma unroll
      for (int d = 0; d < QkDim; d += 16) q_held[d / 16] = q_blocks.at(0, d);
#pragma unroll
      for (int d = 0; d < VDim; d += 16) dout_held[d / 16] = dout_blocks.at(0, d);
    }

    Sums dq[QkDim / 8] = {};
    for_each_rectangle(a.work, meets, [&](const Rectangle& r) {
      const SeenKeys work(r, q_begin, rows);
      const int keys_end = work.seen_by_any(0, rows);
      const int warp_keys_end = work.seen_by_any(warp_row, warp_end);
      const int unmasked_end = work.seen_by_all(warp_row, warp_end);
      const T* const k_rows = a.k.at(batch, r.k0, kv_head);
      const T* const v_rows = a.v.at(batch, r.k0, kv_head);
      const auto fill = [&](int stage, int key) {
        const int count = work.keys - key;
        k_tile(stage).template fill<threads>(k_rows + key * a.k.token_stride, a.k.token_stride, count, x.qk_dim,
                                             alignment.inputs);
        v_tile(stage).template fill<threads>(v_rows + key * a.v.token_stride, a.v.token_stride, count, x.v_dim,
                                             alignment.inputs);
      };

      __syncthreads();  // nobody reads the stages any more
      fill(0, 0);
      int stage = 0;
      for (int key = 0; key < keys_end; key += keys, stage ^= 1) {
        wait_for_copies();
        __syncthreads();  // this stage is there, the other one free
        if (key + keys < keys_end) fill(stage ^ 1, key + keys);
        if (key >= warp_keys_end) continue;

        Sums p[keys / 8] = {}, ds[keys / 8] = {};
        const auto k_columns = k_tile(stage).right_transposed();
#pragma unroll
        for (int d = 0; d < QkDim; d += 16) {
          const Left q = Tiles::holds_queries ? q_held[d / 16] : q_blocks.at(0, d);
#pragma unroll
          for (int n = 0; n < keys / 16; ++n) multiply<T>(p[2 * n], p[2 * n + 1], q, k_columns.at(n * 16, d));
        }
        const auto v_columns = v_tile(stage).right_transposed();
#pragma unroll
        for (int d = 0; d < VDim; d += 16) {
          const Left dout = Tiles::holds_queries ? dout_held[d / 16] : dout_blocks.at(0, d);
#pragma unroll
          for (int n = 0; n < keys / 16; ++n) multiply<T>(ds[2 * n], ds[2 * n + 1], dout, v_columns.at(n * 16, d));
        }
        if (key + keys > unmasked_end) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int visible = work.seen_by(warp_row + half * 8 + lane / 4) - key - column_in_pair;
#pragma unroll
            for (int n = 0; n < keys / 8; ++n) {
#pragma unroll
              for (int i = 0; i < 2; ++i) {
                if (n * 8 + i < visible) continue;
                p[n].at[2 * half + i] = minus_infinity;
                ds[n].at[2 * half + i] = 0;
              }
            }
          }
        }
        const auto k_blocks = k_tile(stage).right();
#pragma unroll
        for (int n = 0; n < keys / 16; ++n) {
#pragma unroll
          for (Sums* const pair : {&p[2 * n], &p[2 * n + 1]}) {
            Sums& to = ds[pair - p];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              to.at[i] = exp2_of(fmaf(pair->at[i], scale, -lse[i / 2])) * (to.at[i] - delta[i / 2]);
            }
          }
          const Left left = left_of<T>(ds[2 * n], ds[2 * n + 1]);
#pragma unroll
          for (int d = 0; d < QkDim; d += 16) multiply<T>(dq[d / 8], dq[d / 8 + 1], left, k_blocks.at(n * 16, d));
        }
      }
    });
    wait_for_copies();  // also where there was no key
    store_gradient<QkDim>(dq, a.scale, a.dq.at(batch, q_begin + warp_row, head), a.dq.token_stride, rows - warp_row,
                          x.qk_dim, a.accumulate_dq, alignment.outputs);
  });
}

}  // namespace pleat::inline v0::attention_kernel
