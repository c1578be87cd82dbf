// The forward kernel of sm_80 and up: one CTA per tile of queries, running softmax over tiles of keys by mma.sync.
#pragma once

#include <pleat/attention/cuda/mma_tile.cuh>
#include <pleat/attention/cuda/tile_work.cuh>
#include <pleat/cuda/kernel.hpp>

namespace pleat::inline v0::attention_kernel {

/// How the work of one CTA is cut: each warp owns some rows of queries and all columns.
template <class T, int QkDim, int VDim>
struct ForwardTiles {
  static constexpr int queries = 128, keys = 64;
  static constexpr int warps = VDim <= 128 ? 4 : 8, threads = 32 * warps;
  static constexpr int blocks = queries / warps / 16;  // of 16 rows that a warp has: a loaded key serves all of them
  static constexpr int ctas_per_sm = VDim <= 128 ? 2 : 1;

  static constexpr Indices indices = VDim == 128 ? Indices::anew : Indices::kept;

  using QueryTile = MmaTile<T, queries, QkDim, indices>;
  using KeyTile = MmaTile<T, keys, QkDim, indices>;
  using ValueTile = MmaTile<T, keys, VDim, indices>;
  static constexpr int shared_bytes = QueryTile::bytes + KeyTile::bytes + ValueTile::bytes;
  static_assert(shared_bytes <= shared_of_sm80);
};

template <class T, int QkDim, int VDim>
PLEAT_KERNEL void __launch_bounds__(ForwardTiles<T, QkDim, VDim>::threads, ForwardTiles<T, QkDim, VDim>::ctas_per_sm)
    portable_forward_kernel(const __grid_constant__ Forward<T> a, const Alignment alignment) {
  using Tiles = ForwardTiles<T, QkDim, VDim>;
  constexpr int blocks = Tiles::blocks, threads = Tiles::threads, keys = Tiles::keys, warp_rows = 16 * blocks;
  extern __shared__ __align__(128) std::byte shared[];
  const typename Tiles::QueryTile q_tile(shared);
  const typename Tiles::KeyTile k_tile(shared + Tiles::QueryTile::bytes);
  const typename Tiles::ValueTile v_tile(shared + Tiles::QueryTile::bytes + Tiles::KeyTile::bytes);
  const float scale = log2_scale(a.scale);

  const Extents& x = a.extents;
  for_each_tile<Tiles::queries>(x.q_tokens, x.batch, x.q_heads, true, [&](auto& position) {
    const auto meets = [](const Rectangle& r, const TileRows& tile) { return SeenKeys(r, tile).keys > 0; };
    if (!a.first && !a.last && !meets_any(a.work, position, meets)) return;

    float peak[blocks][2], weight[blocks][2];  // of each row: the largest score; this thread's share of the weights
    Sums o[blocks][VDim / 8];
    const auto for_each_row = [&](auto f) {
      const TileRows tile = position.tile_rows();
      const OwnSums<Tiles::indices> own(warp_rows);
#pragma unroll
      for (int block = 0; block < blocks; ++block) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = own.row(block, half);
          if (row < tile.rows) f(block, half, tile, tile.begin + row, own);
        }
      }
    };
#pragma unroll
    for (int block = 0; block < blocks; ++block) {
      peak[block][0] = peak[block][1] = minus_infinity;
      weight[block][0] = weight[block][1] = 0;
#pragma unroll
      for (Sums& sums : o[block]) sums = {};
    }

    if (!a.first) {
      for_each_row(
          [&](int block, int half, const TileRows& tile, std::int64_t query, const OwnSums<Tiles::indices>& own) {
            const float lse = a.lse.at(tile.batch, query, tile.head);
            peak[block][half] = resumed_peak(lse);
            weight[block][half] = lse != minus_infinity && own.column == 0 ? resumed_weight : 0;
            const float* const from = a.o_acc.at(tile.batch, query, tile.head) + own.column;
#pragma unroll
            for (int n = 0; n < VDim / 8; ++n) {
              const float2 pair = load_pair(from + n * 8, x.v_dim - own.column - n * 8, alignment.outputs);
              o[block][n].at[2 * half] = resumed_weight * pair.x;
              o[block][n].at[2 * half + 1] = resumed_weight * pair.y;
            }
          });
    }
    {
      const TileRows tile = position.tile_rows();
      q_tile.template fill<threads>(a.q.at(tile.batch, tile.begin, tile.head), a.q.token_stride, tile.rows, x.qk_dim,
                                    alignment.inputs);
    }

    for_each_rectangle(a.work, position, meets, [&](const Rectangle& r) {
      const TileRows tile = position.tile_rows();
      const SeenKeys work(r, tile);
      const int kv_head = tile.head / (x.q_heads / x.kv_heads);
      const T* k_rows = a.k.at(tile.batch, r.k0, kv_head);
      const T* v_rows = a.v.at(tile.batch, r.k0, kv_head);
      const auto fill_keys = [&](int key) {
        k_tile.template fill<threads>(k_rows, a.k.token_stride, work.keys - key, x.qk_dim, alignment.inputs);
        k_rows += keys * a.k.token_stride;
      };

      fill_keys(0);
      for (int key = 0; key < work.keys; key += keys) {
        wait_for_copies();
        __syncthreads();  // the keys are there; nobody reads the last values any more
        v_tile.template fill<threads>(v_rows, a.v.token_stride, work.keys - key, x.v_dim, alignment.inputs);
        v_rows += keys * a.v.token_stride;

        const OwnSums<Tiles::indices> own(warp_rows);
        Sums s[blocks][keys / 8] = {};
        const bool sees = key < work.seen_by_any(own.warp_row, own.warp_row + warp_rows);
        if (sees) {
          const auto q_blocks = q_tile.left(own.warp_row);
          const auto k_blocks = k_tile.right_transposed();
#pragma unroll
          for (int d = 0; d < QkDim; d += 16) {
            Left q[blocks];
#pragma unroll
            for (int block = 0; block < blocks; ++block) q[block] = q_blocks.at(block * 16, d);
#pragma unroll
            for (int n = 0; n < keys / 16; ++n) {
              const RightPair k = k_blocks.at(n * 16, d);
#pragma unroll
              for (int block = 0; block < blocks; ++block)
                multiply<T>(s[block][2 * n], s[block][2 * n + 1], q[block], k);
            }
          }
        }
        wait_for_copies();
        __syncthreads();  // the values are there; nobody reads these keys any more
        if (key + keys < work.keys) fill_keys(key + keys);
        if (!sees) continue;

        if (key + keys > work.seen_by_all(own.warp_row, own.warp_row + warp_rows)) {
#pragma unroll
          for (int block = 0; block < blocks; ++block) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const int visible = work.seen_by(own.row(block, half)) - key - own.column;
#pragma unroll
              for (int n = 0; n < keys / 8; ++n) {
                if (n * 8 >= visible) s[block][n].at[2 * half] = minus_infinity;
                if (n * 8 + 1 >= visible) s[block][n].at[2 * half + 1] = minus_infinity;
              }
            }
          }
        }

#pragma unroll
        for (int block = 0; block < blocks; ++block) {
          float keep[2];
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float largest = minus_infinity;
#pragma unroll
            for (int n = 0; n < keys / 8; ++n) {
              largest = fmaxf(largest, fmaxf(s[block][n].at[2 * half], s[block][n].at[2 * half + 1]));
            }
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
            const float new_peak = fmaxf(peak[block][half], largest * scale);
            const float shift = new_peak == minus_infinity ? 0 : new_peak;  // -inf - -inf would be NaN
            keep[half] = exp2_of(peak[block][half] - shift);
            peak[block][half] = new_peak;
            float sum = 0;
#pragma unroll
            for (int n = 0; n < keys / 8; ++n) {
              float& low = s[block][n].at[2 * half];
              float& high = s[block][n].at[2 * half + 1];
              low = exp2_of(fmaf(low, scale, -shift));
              high = exp2_of(fmaf(high, scale, -shift));
              sum += low + high;
            }
            weight[block][half] = fmaf(weight[block][half], keep[half], sum);
          }
          if (__any_sync(0xffffffffu, keep[0] != 1 || keep[1] != 1)) {
#pragma unroll
            for (Sums& sums : o[block]) {
              sums.at[0] *= keep[0];
              sums.at[1] *= keep[0];
              sums.at[2] *= keep[1];
              sums.at[3] *= keep[1];
            }
          }
        }
        const auto v_blocks = v_tile.right();
#pragma unroll
        for (int n = 0; n < keys / 16; ++n) {
          Left p[blocks];
#pragma unroll
          for (int block = 0; block < blocks; ++block) p[block] = left_of<T>(s[block][2 * n], s[block][2 * n + 1]);
#pragma unroll
          for (int d = 0; d < VDim; d += 16) {
            const RightPair v = v_blocks.at(n * 16, d);
#pragma unroll
            for (int block = 0; block < blocks; ++block) multiply<T>(o[block][d / 8], o[block][d / 8 + 1], p[block], v);
          }
        }
      }
    });

    wait_for_copies();  // also where there was no key
    for_each_row(
        [&](int block, int half, const TileRows& tile, std::int64_t query, const OwnSums<Tiles::indices>& own) {
          float sum = weight[block][half];
          const unsigned quad = 0xfu << (own.lane / 4 * 4);
          sum += __shfl_xor_sync(quad, sum, 1);
          sum += __shfl_xor_sync(quad, sum, 2);
          const float inverse = sum > 0 ? 1 / sum : 0;
          if (own.column == 0) {
            float& lse = a.lse.at(tile.batch, query, tile.head);
            const bool is_unchanged = !a.first && sum == resumed_weight && peak[block][half] == resumed_peak(lse);
            if (!is_unchanged) lse = sum > 0 ? fmaf(peak[block][half], ln2, logf(sum)) : minus_infinity;
          }
          float* const acc = a.o_acc.at(tile.batch, query, tile.head) + own.column;
          T* const out = a.last ? a.out.at(tile.batch, query, tile.head) + own.column : nullptr;
#pragma unroll
          for (int n = 0; n < VDim / 8; ++n) {
            const float2 pair{o[block][n].at[2 * half] * inverse, o[block][n].at[2 * half + 1] * inverse};
            const int count = x.v_dim - own.column - n * 8;
            if (a.last) {
              store_pair(out + n * 8, pair, count, alignment.outputs);
            } else {
              store_pair(acc + n * 8, pair, count, alignment.outputs);
            }
          }
        });
  });
}

}  // namespace pleat::inline v0::attention_kernel
