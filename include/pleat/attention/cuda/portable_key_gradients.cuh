// The gradients of keys and values on sm_80 and up: one CTA per tile of keys, over all queries of all heads of a group.
#pragma once

#include <pleat/attention/cuda/mma_tile.cuh>
#include <pleat/attention/cuda/tile_work.cuh>
#include <pleat/cuda/kernel.hpp>

namespace pleat::inline v0::attention_kernel {

/// Which gradients one launch makes: both, unless their sums do not fit the registers together.
enum class Gradients { both, keys, values };

/// Each warp owns 16 keys and all queries of a step, so that P^T and dS^T are left operands without leaving the warp.
/// `MostShared`: bytes of shared memory that a CTA may have.
template <class T, int QkDim, int VDim, int MostShared>
struct KeyGradientTiles {
  static constexpr bool are_apart = QkDim + VDim > 320;
  static constexpr int warps = QkDim <= 128 ? 4 : 8, threads = 32 * warps;
  static constexpr int keys = 16 * warps, queries = QkDim + VDim <= 256                                   ? 64
                                                    : QkDim + VDim <= 320 || MostShared >= shared_of_sm90 ? 32
                                                                                                          : 16;
  static constexpr int ctas_per_sm = QkDim <= 128 ? 2 : 1;

  static constexpr Indices indices = QkDim == 128 || QkDim == 192 ? Indices::anew : Indices::kept;

  using KeyTile = MmaTile<T, keys, QkDim, indices>;
  using ValueTile = MmaTile<T, keys, VDim, indices>;
  using QueryTile = MmaTile<T, queries, QkDim, indices>;
  using OutTile = MmaTile<T, queries, VDim, indices>;
  struct Statistics {
    float lse[queries], delta[queries];  // lse in powers of 2; +inf where the query has seen nothing
  };
  static constexpr int stage_bytes = QueryTile::bytes + OutTile::bytes;
  static constexpr int own_bytes = KeyTile::bytes + ValueTile::bytes;
  static constexpr int shared_bytes = own_bytes + 2 * stage_bytes + 2 * static_cast<int>(sizeof(Statistics));
  static_assert(shared_bytes <= MostShared);
};

/// Rows of `tile` += or = scale * sums, of which each warp has 16 rows.
template <int Dim, Indices Are>
__device__ void store_gradient(const OwnSums<Are>& own, const Sums (&sums)[Dim / 8], float scale,
                               const HeadRows<float>& rows, const TileRows& tile, int dim, bool accumulate,
                               bool is_aligned) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = own.row(0, half);
    if (row >= tile.rows) continue;
    float* const to = rows.at(tile.batch, tile.begin + row, tile.head) + own.column;
#pragma unroll
    for (int n = 0; n < Dim / 8; ++n) {
      float2 pair{scale * sums[n].at[2 * half], scale * sums[n].at[2 * half + 1]};
      const int elems = dim - own.column - n * 8;
      if (accumulate) {
        const float2 old = load_pair(to + n * 8, elems, is_aligned);
        pair = {old.x + pair.x, old.y + pair.y};
      }
      store_pair(to + n * 8, pair, elems, is_aligned);
    }
  }
}

template <class T, int QkDim, int VDim, Gradients Which, int MostShared>
PLEAT_KERNEL void __launch_bounds__(KeyGradientTiles<T, QkDim, VDim, MostShared>::threads,
                                    KeyGradientTiles<T, QkDim, VDim, MostShared>::ctas_per_sm)
    portable_key_gradients_kernel(const __grid_constant__ Backward<T> a, const Alignment alignment) {
  using Tiles = KeyGradientTiles<T, QkDim, VDim, MostShared>;
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

  const float scale = log2_scale(a.scale);

  const Extents& x = a.extents;
  for_each_tile<keys>(x.k_tokens, x.batch, x.kv_heads, false, [&](auto& position) {
    using P = Position<keys>;
    const auto meets = [](const Rectangle& r, const TileRows& tile) {
      const SeeingQueries work(r, tile);
      return work.first < work.queries;
    };
    if (a.accumulate_dk && a.accumulate_dv && !meets_any(a.work, position, meets)) return;

    [[maybe_unused]] Sums dk[makes_keys ? QkDim / 8 : 1] = {}, dv[makes_values ? VDim / 8 : 1] = {};
    __syncthreads();  // nobody reads the keys of the last tile any more
    const auto fill_own = [&](const auto& own, const HeadRows<const T>& from, int dim) {
      const TileRows tile = position.tile_rows();
      own.template fill<threads>(from.at(tile.batch, tile.begin, tile.head), from.token_stride, tile.rows, dim,
                                 alignment.inputs);
    };
    fill_own(k_tile, a.k, x.qk_dim);
    if constexpr (makes_keys) fill_own(v_tile, a.v, x.v_dim);

    for_each_query_head(position, x.q_heads / x.kv_heads, [&] {
      for_each_rectangle(a.work, position, meets, [&](const Rectangle& r) {
        const SeeingQueries work(r, position.tile_rows());
        const T* q_rows = a.q.at(position[P::batch], r.q0 + work.first, position[P::query_head]);
        const T* dout_rows = a.dout.at(position[P::batch], r.q0 + work.first, position[P::query_head]);
        const auto stage_of = [&](int query) { return (query - work.first) / queries % 2; };
        const auto fill = [&](int query) {  // with the rows that follow the ones before
          const int stage = stage_of(query), count = work.queries - query, thread = thread_index<Tiles::indices>();
          q_tile(stage).template fill<threads>(q_rows, a.q.token_stride, count, x.qk_dim, alignment.inputs);
          dout_tile(stage).template fill<threads>(dout_rows, a.dout.token_stride, count, x.v_dim, alignment.inputs);
          q_rows += queries * a.q.token_stride;
          dout_rows += queries * a.dout.token_stride;
          const int batch = position[P::batch], head = position[P::query_head];
          const std::int64_t row = a.work.rectangles[position[P::rectangle]].q0 + query + thread;
          if (thread < queries) {
            copy_float(&statistics[stage].lse[thread], &a.lse.at(batch, row, head), thread < count);
            copy_float(&statistics[stage].delta[thread], &a.delta.at(batch, row, head), thread < count);
          }
        };

        __syncthreads();  // nobody reads the stages any more
        fill(work.first);
        for (int query = work.first; query < work.queries; query += queries) {
          const int stage = stage_of(query);
          wait_for_copies();
          if (const int thread = thread_index<Tiles::indices>(); thread < queries) {
            float& lse = statistics[stage].lse[thread];  // which this thread has copied
            lse = lse == minus_infinity ? -minus_infinity : lse * log2e;
          }
          __syncthreads();  // this stage is there, the other one free
          if (query + queries < work.queries) fill(query + queries);
          const OwnSums<Tiles::indices> own(16);
          if (query + queries > work.first_of_any(own.warp_row, own.warp_row + 16)) {
            Sums p[queries / 8] = {};  // transposed: [keys, queries]
            [[maybe_unused]] Sums ds[queries / 8];
            const bool is_masked = query < work.first_of_all(own.warp_row, own.warp_row + 16);
            const auto hide = [&](Sums(&sums)[queries / 8], float hidden_value) {
              if (!is_masked) return;
#pragma unroll
              for (int half = 0; half < 2; ++half) {
                const int hidden = work.first_of(own.row(0, half)) - query - own.column;
#pragma unroll
                for (int n = 0; n < queries / 8; ++n) {
                  if (n * 8 < hidden) sums[n].at[2 * half] = hidden_value;
                  if (n * 8 + 1 < hidden) sums[n].at[2 * half + 1] = hidden_value;
                }
              }
            };
            const auto k_blocks = k_tile.left(own.warp_row);
            const auto q_columns = q_tile(stage).right_transposed();
#pragma unroll
            for (int d = 0; d < QkDim; d += 16) {
              const Left k = k_blocks.at(0, d);
#pragma unroll
              for (int n = 0; n < queries / 16; ++n) multiply<T>(p[2 * n], p[2 * n + 1], k, q_columns.at(n * 16, d));
            }
            hide(p, minus_infinity);
#pragma unroll
            for (int n = 0; n < queries / 8; ++n) {
              const float2 lse = *reinterpret_cast<const float2*>(&statistics[stage].lse[n * 8 + own.column]);
#pragma unroll
              for (int i = 0; i < 4; ++i) p[n].at[i] = exp2_of(fmaf(p[n].at[i], scale, i % 2 == 0 ? -lse.x : -lse.y));
            }
            if constexpr (makes_keys) {
              const auto v_blocks = v_tile.left(own.warp_row);
              const auto dout_columns = dout_tile(stage).right_transposed();
#pragma unroll
              for (int n = 0; n < queries / 8; ++n) {
                const float2 delta = *reinterpret_cast<const float2*>(&statistics[stage].delta[n * 8 + own.column]);
                ds[n] = {{-delta.x, -delta.y, -delta.x, -delta.y}};
              }
#pragma unroll
              for (int d = 0; d < VDim; d += 16) {
                const Left v = v_blocks.at(0, d);
#pragma unroll
                for (int n = 0; n < queries / 16; ++n)
                  multiply<T>(ds[2 * n], ds[2 * n + 1], v, dout_columns.at(n * 16, d));
              }
              hide(ds, 0);
#pragma unroll
              for (int n = 0; n < queries / 8; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) ds[n].at[i] *= p[n].at[i];
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
        }
      });
    });
    wait_for_copies();  // also where there was no query
    const TileRows tile = position.tile_rows();
    const OwnSums<Tiles::indices> own(16);
    if constexpr (makes_keys)
      store_gradient<QkDim>(own, dk, a.scale, a.dk, tile, x.qk_dim, a.accumulate_dk, alignment.outputs);
    if constexpr (makes_values)
      store_gradient<VDim>(own, dv, 1, a.dv, tile, x.v_dim, a.accumulate_dv, alignment.outputs);
  });
}

}  // namespace pleat::inline v0::attention_kernel
