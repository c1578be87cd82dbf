// Attention backward on Hopper for large head dims, whose gradients do not fit the registers of a CTA together: a
// kernel per gradient. Each keeps a tile of the rows that it differentiates and walks what they meet, so that no two
// CTAs write the same row and nothing has an order to keep; scores are computed once per gradient.
#pragma once

#include <algorithm>

#include <pleat/attention/cuda/hopper_gradients_loads.cuh>
#include <pleat/attention/cuda/hopper_rows.cuh>
#include <pleat/cuda/hopper/launch.cuh>
#include <pleat/cuda/hopper/wgmma.cuh>
#include <pleat/cuda/kernel.hpp>

namespace pleat::inline v0::attention_kernel {

namespace hopper_gradients_detail {

/// One warp group: 64 rows. What it must know lies in shared memory: registers are short.
template <class Tiling, class T>
class Consumer {
 public:
  __device__ Consumer(Shared<Tiling>& s, const Call& call)
      : s_(s),
        call_(call),
        place_(static_cast<int>(threadIdx.x) / warp_group_threads - 1),
        row_(64 * place_ + static_cast<int>(threadIdx.x) % warp_group_threads / 32 * 16 +
             static_cast<int>(threadIdx.x) % 32 / 4) {}

  __device__ void run() {
    while (work()) {
    }
  }

 private:
  using QkSlot = Slot<Tiling::qk_stages>;
  using VSlot = Slot<Tiling::v_stages>;
  using Scores = float[Tiling::columns / 2];
  using Pairs = std::uint32_t[Tiling::columns / 16][4];
  using Sums = float[Tiling::dim / 2];

  /// One tile of rows; false: there is none.
  __device__ bool work() {
    Sums sums;
#pragma unroll
    for (float& x : sums) x = 0;
    const TileRecord& first = await_tile();
    if (!first.exists) return false;
    const bool is_empty = first.is_empty;
    if (is_empty) {
      s_.qk_empty[QkSlot::stage(count_)].arrive();
      arrive(s_.v_empty[VSlot::stage(count_)]);
      ++count_;
    } else {
      begin(first.own);
      if constexpr (Tiling::needs_dp) {
        walk(sums);
      } else {
        walk_for_values(sums);
      }
    }
    if (is_empty && call_.accumulate) return true;
    const Own& own = s_.record[(count_ - 1) % 4].own;
    store_rows<Tiling::dim>(call_.result, sums, own.row + row_, tokens(), own.batch, own.head, call_.scale_result,
                            call_.accumulate);
    return true;
  }
  __device__ const TileRecord& await_tile() const {
    s_.qk_full[QkSlot::stage(count_)].wait(QkSlot::parity(count_));
    return s_.record[count_ % 4];
  }
  __device__ std::int64_t tokens() const {
    return Tiling::walks_keys ? call_.extents.q_tokens : call_.extents.k_tokens;
  }

  __device__ void begin(const Own& own) {
    if constexpr (Tiling::walks_keys) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int query = own.row + row_ + 8 * i;
        const float lse = query < tokens() ? call_.lse.at(own.batch, query, own.head) : -INFINITY;
        lse_log2_[i] = log2_of(lse);
        delta_[i] = lse == -INFINITY ? 0.0f : call_.delta.at(own.batch, query, own.head);
      }
    }
    s_.own_full.wait(own_parity_);
    own_parity_ ^= 1;
  }

  /// sums = dS x what the rows walk.
  __device__ void walk(Sums& sums) {
    bool is_final;
    do {
      const int qk = QkSlot::stage(count_), v = VSlot::stage(count_);
      const TileRecord& tile = await_tile();
      Scores scores, ds;
      Pairs pairs;
      zero_outside<Tiling::columns, Tiling::qk_dim>(s_.qk[qk], tile.begin, tile.end, 2 + place_);
      multiply<Tiling::qk_dim>(scores, s_.own_qk, s_.qk[qk]);
      s_.v_full[v].wait(VSlot::parity(count_));
      multiply<Tiling::v_dim>(ds, s_.own_v, s_.v[v]);
      wait<1>();
      pin(scores);
      mask(scores, tile, -INFINITY);
      weigh(scores);
      wait<0>();
      pin(ds);
      arrive(s_.v_empty[v]);
      mask(ds, tile, 0.0f);
      differentiate(ds, scores);
      round(pairs, ds);
      multiply_pairs(sums, pairs, Tile<Tiling::columns, Major::mn>(s_.qk[qk]));
      wait<0>();
      pin(sums);
      is_final = tile.is_final;
      s_.qk_empty[qk].arrive();  // each thread has read the statistics
      ++count_;
    } while (!is_final);
    arrive(s_.own_empty);
  }

  /// sums = P x output gradients; the weights of a tile are made under the product of the one before.
  __device__ void walk_for_values(Sums& sums) {
    Scores scores;
    Pairs pairs;
    multiply<Tiling::qk_dim>(scores, s_.own_qk, s_.qk[QkSlot::stage(count_)]);
    wait<0>();
    pin(scores);
    bool is_final = make_weights(scores);
    round(pairs, scores);
    while (!is_final) {
      ++count_;
      await_tile();
      multiply<Tiling::qk_dim>(scores, s_.own_qk, s_.qk[QkSlot::stage(count_)]);
      multiply_values(sums, pairs, count_ - 1);
      wait<1>();
      pin(scores);
      is_final = make_weights(scores);
      wait<0>();
      pin(sums);
      arrive(s_.v_empty[VSlot::stage(count_ - 1)]);
      round(pairs, scores);
    }
    arrive(s_.own_empty);
    multiply_values(sums, pairs, count_);
    wait<0>();
    pin(sums);
    arrive(s_.v_empty[VSlot::stage(count_)]);
    ++count_;
  }
  /// P in place of the scores of the tile at hand, whose queries are given back; whether it is the last one.
  __device__ bool make_weights(Scores& scores) {
    const TileRecord& tile = s_.record[count_ % 4];
    mask(scores, tile, -INFINITY);
    weigh(scores);
    s_.qk_empty[QkSlot::stage(count_)].arrive();
    return tile.is_final;
  }
  /// sums += weights of tile number `count` x its output gradients, under way.
  __device__ void multiply_values(Sums& sums, Pairs& weights, unsigned count) const {
    const int v = VSlot::stage(count);
    const TileRecord& tile = s_.record[count % 4];
    s_.v_full[v].wait(VSlot::parity(count));
    zero_outside<Tiling::columns, Tiling::v_dim>(s_.v[v], tile.begin, tile.end, 2 + place_);
    multiply_pairs(sums, weights, Tile<Tiling::columns, Major::mn>(s_.v[v]));
  }

  /// d [rows, columns] = own walked^T, under way.
  template <int Dim>
  __device__ void multiply(Scores& d, const std::uint16_t* own, const std::uint16_t* walked) const {
    const Tile<Tiling::rows, Major::k> a(own);
    const Tile<Tiling::columns, Major::k> b(walked);
    pin(d);
    fence();
#pragma unroll
    for (int k = 0; k < Dim; k += 16) wgmma<T>(d, a.at(64 * place_, k), b.k(k), k != 0);
    commit();
  }
  /// sums [rows, dim] += pairs [rows, columns] walked [columns, dim], under way.
  __device__ static void multiply_pairs(Sums& sums, Pairs& pairs, Tile<Tiling::columns, Major::mn> b) {
    pin(sums);
    fence();
#pragma unroll
    for (int k = 0; k < Tiling::columns; k += 16) wgmma<T, Major::mn>(sums, pairs[k / 16], b.k(k), true);
    commit();
  }

  /// Puts `value` where a row does not see a column.
  __device__ void mask(Scores& x, const TileRecord& tile, float value) const {
    if (!tile.is_masked) return;
    const int thread = 2 * static_cast<int>(threadIdx.x % 4);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = tile.own.row + row_ + 8 * i, from = row + tile.shift;
      int begin = Tiling::walks_keys ? tile.begin : max(tile.begin, from);
      if (row < tile.row_begin || row >= tile.row_end) begin = Tiling::columns;
      const int end = (Tiling::walks_keys ? min(tile.end, from) : tile.end) - thread;
      begin -= thread;
#pragma unroll
      for (int j = 2 * i; j < Tiling::columns / 2; j += 4) {
        const int column = 2 * j - 4 * i;
        if (column < begin || column >= end) x[j] = value;
        if (column + 1 < begin || column + 1 >= end) x[j + 1] = value;
      }
    }
  }
  /// This thread's columns of a row of statistics: those of x[4 j] and [4 j + 1].
  __device__ static float2 of_columns(const float* row, int j) {
    return reinterpret_cast<const float2*>(row)[4 * j + threadIdx.x % 4];
  }
  __device__ void weigh(Scores& scores) const {
#pragma unroll
    for (int j = 0; j < Tiling::columns / 8; ++j) {
      float2 lse = {};
      if constexpr (!Tiling::walks_keys) lse = of_columns(s_.lse_log2[QkSlot::stage(count_)], j);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& x = scores[4 * j + i];
        const float base = Tiling::walks_keys ? lse_log2_[i / 2] : i % 2 == 0 ? lse.x : lse.y;
        const float exponent = fmaf(x, call_.scale_log2, -base);
        asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(x) : "f"(exponent));
      }
    }
  }
  /// ds: dP in, P (dP - delta) out.
  __device__ void differentiate(Scores& ds, const Scores& p) const {
#pragma unroll
    for (int j = 0; j < Tiling::columns / 8; ++j) {
      float2 delta = {};
      if constexpr (!Tiling::walks_keys) delta = of_columns(s_.delta[QkSlot::stage(count_)], j);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float mean = Tiling::walks_keys ? delta_[i / 2] : i % 2 == 0 ? delta.x : delta.y;
        ds[4 * j + i] = p[4 * j + i] * (ds[4 * j + i] - mean);
      }
    }
  }
  __device__ static void round(Pairs& pairs, const Scores& x) {
#pragma unroll
    for (int i = 0; i < Tiling::columns / 4; ++i) pairs[i / 4][i % 4] = pack<T>(x[2 * i], x[2 * i + 1]);
  }
  /// Each warp: it is done with its part.
  __device__ static void arrive(Barrier& barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier.arrive();
  }

  Shared<Tiling>& s_;
  const Call& call_;
  const int place_, row_;         // among the consumers; this thread's first row of the tile
  float lse_log2_[2], delta_[2];  // of its rows, where they are queries
  unsigned count_ = 0;            // tiles behind it
  std::uint32_t own_parity_ = 0;
};

template <class Tiling, class T>
PLEAT_KERNEL void __launch_bounds__(is_target ? Tiling::threads : 32, 1)
    gradient_kernel(const __grid_constant__ Call call, const __grid_constant__ Maps maps) {
  if constexpr (is_target) {
    extern __shared__ __align__(1024) std::byte shared[];
    auto& s = *reinterpret_cast<Shared<Tiling>*>(shared);
    if (threadIdx.x == 0) {
      constexpr int consumer_warps = Tiling::consumers * warp_group_threads / 32;
      s.own_full.init(1);
      s.own_empty.init(consumer_warps);
      for (int i = 0; i < Tiling::qk_stages; ++i) {
        s.qk_full[i].init(32 + 1);
        s.qk_empty[i].init(32 * consumer_warps);
      }
      for (int i = 0; i < Tiling::v_stages; ++i) {
        s.v_full[i].init(1);
        s.v_empty[i].init(consumer_warps);
      }
      fence_barrier_init();
    }
    __syncthreads();
    if (threadIdx.x < warp_group_threads) {
      give_registers<24>();
      if (threadIdx.x < 32) Producer<Tiling>(s, call, maps).run();
    } else {
      take_registers<240>();
      Consumer<Tiling, T>(s, call).run();
    }
  }
}

template <class Tiling, class T>
void launch(const Backward<T>& a, cudaStream_t stream) {
  constexpr bool is_queries = Tiling::walks_keys;
  const Extents& e = a.extents;
  const auto queries = [&](int rows) {
    return head_map(a.q, e.batch, e.q_tokens, e.q_heads, Tiling::qk_dim, rows, Tiling::qk_dim);
  };
  const auto keys = [&](int rows) {
    return head_map(a.k, e.batch, e.k_tokens, e.kv_heads, Tiling::qk_dim, rows, Tiling::qk_dim);
  };
  const auto values = [&](int rows) {
    return head_map(a.v, e.batch, e.k_tokens, e.kv_heads, Tiling::v_dim, rows, Tiling::v_dim);
  };
  const auto douts = [&](int rows) {
    return head_map(a.dout, e.batch, e.q_tokens, e.q_heads, Tiling::v_dim, rows, Tiling::v_dim);
  };
  constexpr int rows = Tiling::rows, columns = Tiling::columns;
  const Maps maps = is_queries ? Maps{queries(rows), douts(rows), keys(columns), values(columns)}
                               : Maps{keys(rows), values(rows), queries(columns), douts(columns)};
  // Heads whose walked rows fill about 32 MiB of L2 run together.
  const std::int64_t tokens = is_queries ? e.q_tokens : e.k_tokens, walked = is_queries ? e.k_tokens : e.q_tokens;
  const int group = e.q_heads / e.kv_heads, heads = e.batch * (is_queries ? e.q_heads : e.kv_heads);
  const std::int64_t bytes_of_group = walked * (Tiling::qk_dim + Tiling::v_dim) * 2 * (is_queries ? 1 : group);
  const std::int64_t groups = std::max<std::int64_t>((std::int64_t{32} << 20) / bytes_of_group, 1);
  const int heads_at_once = static_cast<int>(std::min<std::int64_t>(groups * (is_queries ? group : 1), heads));
  const Items items{static_cast<int>((tokens + rows - 1) / rows), heads, heads_at_once};
  const bool is_value = Tiling::of == GradientOf::values;
  const Call call{e,
                  a.work,
                  a.scale * 1.44269504088896341f,
                  is_value ? 1.0f : a.scale,
                  a.lse,
                  a.delta,
                  is_queries ? a.dq
                  : is_value ? a.dv
                             : a.dk,
                  is_queries ? a.accumulate_dq
                  : is_value ? a.accumulate_dv
                             : a.accumulate_dk,
                  items};
  launch_persistent<Tiling::threads, sizeof(Shared<Tiling>)>(gradient_kernel<Tiling, T>, "hopper gradient_kernel",
                                                             static_cast<std::int64_t>(items.places) * heads,
                                                             a.max_ctas, stream, call, maps);
}

}  // namespace hopper_gradients_detail

/// AttentionBackward of bfloat16 or float16 for a pair of head dims, a kernel per gradient: always in a fixed order,
/// without a workspace.
template <class T, class Dims>
struct HopperGradients {
  /// Whether the kernels take this call on the current device: these head dims, strides of the inputs that the copy
  /// engine takes (multiples of 16 bytes), those of the gradients of two elements. Errors: cuda_error C20.
  static bool takes(const Backward<T>& a) {
    const Extents& e = a.extents;
    return Items::fits(std::max(e.q_tokens, e.k_tokens), 128, std::int64_t{e.batch} * e.q_heads) &&
           are_inputs_mappable(a, Dims::qk, Dims::v) && takes_pairs(a.dq) && takes_pairs(a.dk) && takes_pairs(a.dv) &&
           is_built_here<GradientOf::queries>() && is_built_here<GradientOf::keys>() &&
           is_built_here<GradientOf::values>();
  }
  /// What they take. Errors: cuda_error C20.
  static void run(const Backward<T>& a, cudaStream_t stream) {
    hopper_gradients_detail::launch<gradient_tiling<Dims, GradientOf::values>>(a, stream);
    hopper_gradients_detail::launch<gradient_tiling<Dims, GradientOf::keys>>(a, stream);
    hopper_gradients_detail::launch<gradient_tiling<Dims, GradientOf::queries>>(a, stream);
  }
  static void preload() {
    (void)is_built_here<GradientOf::queries>();
    (void)is_built_here<GradientOf::keys>();
    (void)is_built_here<GradientOf::values>();
  }

 private:
  template <GradientOf Which>
  static bool is_built_here() {
    using Tiling = gradient_tiling<Dims, Which>;
    return hopper::is_built(hopper_gradients_detail::gradient_kernel<Tiling, T>, Tiling::threads,
                            "hopper gradient_kernel");
  }
};

}  // namespace pleat::inline v0::attention_kernel
