// The gradients of keys and values on sm_80 and up: one CTA per tile of keys, over all queries of all heads of a group.
#pragma once

#include <pleat/attention/cuda/mma_tile.cuh>
#include <pleat/attention/cuda/tile_work.cuh>
#include <pleat/cuda/kernel.hpp>

namespace pleat::inline v0::attention_kernel {

/// Which gradients one launch makes: both, unless their sums do not fit the registers together.
enum class Gradients { both, keys, values };

/// Each warp owns 16 keys and all queries of a step, so that P^T and dS^T are left operands without leaving the warp.
template <class T, int QkDim, int VDim>
struct KeyGradientTiles {
  static constexpr bool are_apart = QkDim + VDim > 320;
  static constexpr int warps = QkDim <= 128 ? 4 : 8, threads = 32 * warps;
  static constexpr int keys = 16 * warps, queries = QkDim + VDim <= 256 ? 64 : 32;
  static constexpr int ctas_per_sm = QkDim <= 128 ? 2 : 1;

  using KeyTile = MmaTile<T, keys, QkDim>;
  using ValueTile = MmaTile<T, keys, VDim>;
  using QueryTile = MmaTile<T, queries, QkDim>;
  using OutTile = MmaTile<T, queries, VDim>;
  struct Statistics {
    float lse[queries], delta[queries];  // lse in powers of 2; +inf where the query has seen nothing
  };
  static constexpr int stage_bytes = QueryTile::bytes + OutTile::bytes;
  static constexpr int own_bytes = KeyTile::bytes + ValueTile::bytes;
  static constexpr int shared_bytes = own_bytes + 2 * stage_bytes + 2 * static_cast<int>(sizeof(Statistics));
};

/// `rows` of accumulators += or = scale * sums; a warp's 16 rows, of which `count` exist.
template <int Dim>
__device__ void store_gradient(const Sums (&sums)[Dim / 8], float scale, float* rows, std::int64_t stride, int count,
                               int dim, bool accumulate, bool is_aligned) {
  const int lane = static_cast<int>(threadIdx.x) % 32, column = lane % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = half * 8 + lane / 4;
    if (row >= count) continue;
    float* const to = rows + row * stride + column;
#pragma unroll
    for (int n = 0; n < Dim / 8; ++n) {
      float2 pair{scale * sums[n].at[2 * half], scale * sums[n].at[2 * half + 1]};
      const int elems = dim - column - n * 8;
      if (accumulate) {
        const float2 old = load_pair(to + n * 8, elems, is_aligned);
        pair = {old.x + pair.x, old.y + pair.y};
      }
      store_pair(to + n * 8, pair, elems, is_aligned);
    }
  }
}

template <class T, int QkDim, int VDim, Gradients Which>
PLEAT_KERNEL void __launch_bounds__(KeyGradientTiles<T, QkDim, VDim>::threads,
                                    KeyGradientTiles<T, QkDim, VDim>::ctas_per_sm)
    portable_key_gradients_kernel(const __grid_constant__ Backward<T> a, const Alignment alignment) {
  using Tiles = KeyGradientTiles<T, QkDim, VDim>;
  constexpr bool makes_keys = Which != Gradients::values, makes_values = Which != Gradients::keys;
  constexpr int threads = Tiles::threads, queries = Tiles::queries, keys = Tiles::keys;
  extern __shared__ __align__(128) std::byte shared[];
  const typename Tiles::KeyTile k_tile(shared);
  const typename Tiles::ValueTile v_tile(shared + Tiles::KeyTile::bytes);
  const auto q_tile = [&](int stage) {
    return typename Tiles::QueryTile(shared + Tiles::own_bytes + stage * Tiles::stage_bytes);
  };
  const auto dout_tile = [&](int stage) {
    return typename Tiles::OutTile(shared + Tiles::own_bytes + stage * Tiles::stage_bytes + Tiles::QueryTile::bytes);
  };
  auto* const statistics =
      reinterpret_cast<typename Tiles::Statistics*>(shared + Tiles::own_bytes + 2 * Tiles::stage_bytes);

  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int warp_row = thread / 32 * 16, column_in_pair = lane % 4 * 2;
  const auto k_blocks = k_tile.left(warp_row);
  const auto v_blocks = v_tile.left(warp_row);
  const float scale = log2_scale(a.scale);

  const Extents& x = a.extents;
  const int group = x.q_heads / x.kv_heads;
  const auto k_tiles = static_cast<int>((x.k_tokens + keys - 1) / keys);
  for_each_tile(k_tiles, x.batch, x.kv_heads, false, [&](int tile, int batch, int kv_head) {
    const std::int64_t k_begin = static_cast<std::int64_t>(tile) * keys;
    const int rows = clamped(x.k_tokens - k_begin, 0, keys);
    const auto meets = [&](const Rectangle& r) {
      const SeeingQueries work(r, k_begin, rows);
      return work.first_of_any(0, rows) < work.queries;
    };
    if (a.accumulate_dk && a.accumulate_dv && !meets_any(a.work, meets)) return;

    Sums dk[makes_keys ? QkDim / 8 : 1] = {}, dv[makes_values ? VDim / 8 : 1] = {};
    __syncthreads();  // nobody reads the keys of the last tile any more
    k_tile.template fill<threads>(a.k.at(batch, k_begin, kv_head), a.k.token_stride, rows, x.qk_dim, alignment.inputs);
    if constexpr (makes_keys) {
      v_tile.template fill<threads>(a.v.at(batch, k_begin, kv_head), a.v.token_stride, rows, x.v_dim, alignment.inputs);
    }

    for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      for_each_rectangle(a.work, meets, [&](const Rectangle& r) {
        const SeeingQueries work(r, k_begin, rows);
        const int warp_end = min(warp_row + 16, rows);
        const int warp_first = work.first_of_any(warp_row, warp_end);
        const int unmasked_first = work.first_of_all(warp_row, warp_end);
        const T* const q_rows = a.q.at(batch, r.q0, head);
        const T* const dout_rows = a.dout.at(batch, r.q0, head);
        const auto fill = [&](int stage, int query) {
          const int count = work.queries - query;
          q_tile(stage).template fill<threads>(q_rows + query * a.q.token_stride, a.q.token_stride, count, x.qk_dim,
                                               alignment.inputs);
          dout_tile(stage).template fill<threads>(dout_rows + query * a.dout.token_stride, a.dout.token_stride, count,
                                                  x.v_dim, alignment.inputs);
        };
        float next_lse = 0, next_delta = 0;  // under way while a step is computed
        const auto fetch = [&](int query) {
          if (thread >= queries) return;
          const bool exists = query + thread < work.queries;
          next_lse = exists ? a.lse.at(batch, r.q0 + query + thread, head) : minus_infinity;
          next_delta = exists ? a.delta.at(batch, r.q0 + query + thread, head) : 0;
        };
        const auto put = [&](int stage) {
          if (thread >= queries) return;
          statistics[stage].lse[thread] = next_lse == minus_infinity ? -minus_infinity : next_lse * log2e;
          statistics[stage].delta[thread] = next_delta;
        };

        __syncthreads();  // nobody reads the stages any more
        const int first = work.first_of_any(0, rows);
        fill(0, first);
        fetch(first);
        put(0);
        int stage = 0;
        for (int query = first; query < work.queries; query += queries, stage ^= 1) {
          wait_for_copies();
          __syncthreads();  // this stage is there, the other one free
          const bool has_next = query + queries < work.queries;
          if (has_next) {
            fill(stage ^ 1, query + queries);
            fetch(query + queries);
          }
          if (query + queries > warp_first) {
            Sums p[queries / 8] = {}, ds[queries / 8] = {};  // transposed: [keys, queries]
            const auto q_columns = q_tile(stage).right_transposed();
#pragma unroll
            for (int d = 0; d < QkDim; d += 16) {
              const Left k = k_blocks.at(0, d);
#pragma unroll
              for (int n = 0; n < queries / 16; ++n) multiply<T>(p[2 * n], p[2 * n + 1], k, q_columns.at(n * 16, d));
            }
            if constexpr (makes_keys) {
              const auto dout_columns = dout_tile(stage).right_transposed();
#pragma unroll
              for (int d = 0; d < VDim; d += 16) {
                const Left v = v_blocks.at(0, d);
#pragma unroll
                for (int n = 0; n < queries / 16; ++n)
                  multiply<T>(ds[2 * n], ds[2 * n + 1], v, dout_columns.at(n * 16, d));
              }
            }
            if (query < unmasked_first) {
#pragma unroll
              for (int half = 0; half < 2; ++half) {
                const int hidden = work.first_of(warp_row + half * 8 + lane / 4) - query - column_in_pair;
#pragma unroll
                for (int n = 0; n < queries / 8; ++n) {
#pragma unroll
                  for (int i = 0; i < 2; ++i) {
                    if (n * 8 + i >= hidden) continue;
                    p[n].at[2 * half + i] = minus_infinity;
                    ds[n].at[2 * half + i] = 0;
                  }
                }
              }
            }
#pragma unroll
            for (int n = 0; n < queries / 8; ++n) {
              const float2 lse = *reinterpret_cast<const float2*>(&statistics[stage].lse[n * 8 + column_in_pair]);
              const float2 delta = *reinterpret_cast<const float2*>(&statistics[stage].delta[n * 8 + column_in_pair]);
#pragma unroll
              for (int i = 0; i < 4; ++i) {
                p[n].at[i] = exp2_of(fmaf(p[n].at[i], scale, i % 2 == 0 ? -lse.x : -lse.y));
                ds[n].at[i] = p[n].at[i] * (ds[n].at[i] - (i % 2 == 0 ? delta.x : delta.y));
              }
            }
            if constexpr (makes_values) {
              const auto dout_blocks = dout_tile(stage).right();
#pragma unroll
              for (int n = 0; n < queries / 16; ++n) {
                const Left left = left_of<T>(p[2 * n], p[2 * n + 1]);
#pragma unroll
                for (int d = 0; d < VDim; d += 16)
                  multiply<T>(dv[d / 8], dv[d / 8 + 1], left, dout_blocks.at(n * 16, d));
              }
            }
            if constexpr (makes_keys) {
              const auto q_blocks = q_tile(stage).right();
#pragma unroll
              for (int n = 0; n < queries / 16; ++n) {
                const Left left = left_of<T>(ds[2 * n], ds[2 * n + 1]);
#pragma unroll
                for (int d = 0; d < QkDim; d += 16) multiply<T>(dk[d / 8], dk[d / 8 + 1], left, q_blocks.at(n * 16, d));
              }
            }
          }
          if (has_next) put(stage ^ 1);
        }
      });
    }
    wait_for_copies();  // also where there was no query
    if constexpr (makes_keys) {
      store_gradient<QkDim>(dk, a.scale, a.dk.at(batch, k_begin + warp_row, kv_head), a.dk.token_stride,
                            rows - warp_row, x.qk_dim, a.accumulate_dk, alignment.outputs);
    }
    if constexpr (makes_values) {
      store_gradient<VDim>(dv, 1, a.dv.at(batch, k_begin + warp_row, kv_head), a.dv.token_stride, rows - warp_row,
                           x.v_dim, a.accumulate_dv, alignment.outputs);
    }
  });
}

}  // namespace pleat::inline v0::attention_kernel
