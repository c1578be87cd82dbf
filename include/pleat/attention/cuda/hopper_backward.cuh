// Attention backward on Hopper: a CTA keeps a tile of keys and values and walks the queries that see it. Scores and
// their gradients are computed transposed, [keys, queries], so that they are operands of dV and dK in registers; dQ
// leaves through bulk adds, in a fixed order when asked for.
#pragma once

#include <algorithm>
#include <cmath>

#include <pleat/attention/cuda/hopper_backward_adds.cuh>
#include <pleat/attention/cuda/hopper_backward_loads.cuh>
#include <pleat/attention/cuda/hopper_rows.cuh>
#include <pleat/cuda/hopper/cluster.cuh>
#include <pleat/cuda/hopper/launch.cuh>
#include <pleat/cuda/hopper/wgmma.cuh>
#include <pleat/cuda/kernel.hpp>

namespace pleat::inline v0::attention_kernel {

namespace hopper_backward_detail {

/// One warp group: 64 keys.
template <class Tiling, class T>
class Consumer {
 public:
  __device__ Consumer(Shared<Tiling>& s, const Call<T>& call)
      : s_(s),
        call_(call),
        place_(static_cast<int>(threadIdx.x) / warp_group_threads - 1),
        row_(64 * place_ + static_cast<int>(threadIdx.x) % warp_group_threads / 32 * 16 +
             static_cast<int>(threadIdx.x) % 32 / 4) {}

  __device__ void run() {
    while (true) {
      s_.item_full[item_.place()].wait(item_.parity());
      if (s_.item[item_.place()] >= call_.items) break;
      work_on(s_.item[item_.place()], s_.any[item_.place()]);
      s_.item_empty[item_.place()].arrive();  // each thread has read the item
      ++item_.count;
    }
    for (int i = 0; i < 2; ++i, ++at_.count) {
      s_.dq_empty[at_.place()].wait(at_.parity() ^ 1);
      arrive(s_.dq_full[at_.place()]);  // the record says that no more will come
    }
  }

 private:
  using Scores = float[Tiling::queries / 2];
  using Pairs = std::uint32_t[Tiling::queries / 16][4];

  using KeyGradient = float[Tiling::qk_dim / 2];
  using ValueGradient = float[Tiling::v_dim / 2];

  __device__ void work_on(const unsigned& ticket, bool any) {  // in shared memory: registers are short
    KeyGradient dk;
    ValueGradient dv;
#pragma unroll
    for (float& x : dk) x = 0;
#pragma unroll
    for (float& x : dv) x = 0;
    const int key = call_.item(ticket).tile * Tiling::keys;
    s_.kv_full.wait(item_.count % 2);
    if (any) {
      zero_unseen(key);
      bool is_final;
      do {
        is_final = step(dk, dv, key);
      } while (!is_final);
    }
    arrive(s_.kv_empty);
    const auto item = call_.item(ticket);
    const std::int64_t tokens = call_.extents.k_tokens;
    store_rows<Tiling::qk_dim>(call_.dk, dk, key + row_, tokens, item.batch, item.head, call_.scale,
                               call_.accumulate_dk);
    store_rows<Tiling::v_dim>(call_.dv, dv, key + row_, tokens, item.batch, item.head, 1.0f, call_.accumulate_dv);
  }

  /// One tile of queries; whether it was the item's last.
  __device__ bool step(KeyGradient& dk, ValueGradient& dv, int key) {
    Scores scores, ds;
    Pairs p_pairs, ds_pairs;
    const TileOfQueries& tile = s_.record[at_.count % Shared<Tiling>::records].queries;
    s_.q_full[at_.place()].wait(at_.parity());
    zero_outside<Tiling::queries, Tiling::qk_dim>(s_.q[at_.place()], tile.first, tile.last, 2 + place_);
    multiply(scores, Tile<Tiling::keys, Major::k>(s_.k), Tile<Tiling::queries, Major::k>(s_.q[at_.place()]),
             Tiling::qk_dim);
    s_.dout_full[at_.place()].wait(at_.parity());
    zero_outside<Tiling::queries, Tiling::v_dim>(s_.dout[at_.place()], tile.first, tile.last, 2 + place_);
    multiply(ds, Tile<Tiling::keys, Major::k>(s_.v), Tile<Tiling::queries, Major::k>(s_.dout[at_.place()]),
             Tiling::v_dim);
    wait<1>();
    pin(scores);
    mask(scores, tile, key);
    weigh(scores);
    round(p_pairs, scores);
    multiply_pairs(dv, p_pairs, Tile<Tiling::queries, Major::mn>(s_.dout[at_.place()]));
    wait<1>();
    pin(ds);
    differentiate(ds, scores);
    round(ds_pairs, ds);
    share(ds_pairs);
    named_sync(1, Tiling::consumers * warp_group_threads);  // all of dS is there, and nobody reads the one before
    float dq[Tiling::half / 2];
    multiply_shared(dq);
    multiply_pairs(dk, ds_pairs, Tile<Tiling::queries, Major::mn>(s_.q[at_.place()]));
    const bool is_final = tile.is_final;
    s_.dq_empty[at_.place()].wait(at_.parity() ^ 1);
    wait<1>();
    pin(dv);
    pin(dq);
    arrive(s_.dout_empty[at_.place()]);
    hand_over(dq);
    wait<0>();
    pin(dk);
    s_.q_empty[at_.place()].arrive();  // each thread, which has read the record and the statistics
    ++at_.count;
    return is_final;
  }

  /// d [keys, queries] = A B^T, A: this warp group's rows of a tile of keys; under way.
  __device__ void multiply(Scores& d, Tile<Tiling::keys, Major::k> a, Tile<Tiling::queries, Major::k> b,
                           int depth) const {
    pin(d);
    fence();
#pragma unroll
    for (int k = 0; k < depth; k += 16) wgmma<T>(d, a.at(64 * place_, k), b.k(k), k != 0);
    commit();
  }
  /// d [keys, dim] += pairs [keys, queries] B [queries, dim], under way.
  template <int Count>
  __device__ static void multiply_pairs(float (&d)[Count], Pairs& pairs, Tile<Tiling::queries, Major::mn> b) {
    pin(d);
    fence();
#pragma unroll
    for (int q = 0; q < Tiling::queries; q += 16) wgmma<T, Major::mn>(d, pairs[q / 16], b.k(q), true);
    commit();
  }
  /// This warp group's columns of dQ / scale = dS K, under way.
  __device__ void multiply_shared(float (&dq)[Tiling::half / 2]) {
    const Tile<Tiling::keys, Major::mn> ds(s_.ds[at_.place()]), k(s_.k);
    pin(dq);
    fence();
#pragma unroll
    for (int key = 0; key < Tiling::keys; key += 16) {
      wgmma<T, Major::mn, Major::mn>(dq, ds.k(key), k.at(Tiling::half * place_, key), key != 0);
    }
    commit();
  }

  __device__ void mask(Scores& scores, const TileOfQueries& tile, int key) const {
    if (!tile.is_masked) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int k = key + row_ + 8 * i;
      const int first =
          (k >= tile.k0 && k < tile.k1 ? k + tile.shift : Tiling::queries) - 2 * static_cast<int>(threadIdx.x % 4);
#pragma unroll
      for (int j = 2 * i; j < Tiling::queries / 2; j += 4) {
        if (2 * j - 4 * i < first) scores[j] = -INFINITY;
        if (2 * j - 4 * i + 1 < first) scores[j + 1] = -INFINITY;
      }
    }
  }
  /// This thread's columns of a row of statistics: those of scores[4 j] and [4 j + 1].
  __device__ static float2 statistics(const float* row, int j) {
    return reinterpret_cast<const float2*>(row)[4 * j + threadIdx.x % 4];
  }
  __device__ void weigh(Scores& scores) const {
#pragma unroll
    for (int j = 0; j < Tiling::queries / 8; ++j) {
      const float2 lse = statistics(s_.lse_log2[at_.place()], j);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& x = scores[4 * j + i];
        const float exponent = fmaf(x, call_.scale_log2, i % 2 == 0 ? -lse.x : -lse.y);
        asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(x) : "f"(exponent));
      }
    }
  }
  /// ds: dP in, P (dP - delta) out.
  __device__ void differentiate(Scores& ds, const Scores& p) const {
#pragma unroll
    for (int j = 0; j < Tiling::queries / 8; ++j) {
      const float2 delta = statistics(s_.delta[at_.place()], j);
#pragma unroll
      for (int i = 0; i < 4; ++i) ds[4 * j + i] = p[4 * j + i] * (ds[4 * j + i] - (i % 2 == 0 ? delta.x : delta.y));
    }
  }
  __device__ static void round(Pairs& pairs, const Scores& x) {
#pragma unroll
    for (int i = 0; i < Tiling::queries / 4; ++i) pairs[i / 4][i % 4] = pack<T>(x[2 * i], x[2 * i + 1]);
  }
  /// Writes this warp group's rows of dS^T [keys, queries] for both of them to read.
  __device__ void share(const Pairs& pairs) const {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int row = row_ - lane / 4 + lane % 16;  // of the matrices that this lane names
    char* const to = reinterpret_cast<char*>(s_.ds[at_.place()]) + row * 128;
#pragma unroll
    for (int q = 0; q < Tiling::queries / 16; ++q)
      store_matrices(to + ((2 * q + lane / 16) ^ (row % 8)) * 16, pairs[q]);
    fence_async_proxy();
  }
  /// Gives this warp group's columns of dQ to the warp that adds them. Odd rows begin two groups of columns further, so
  /// that the threads of a store find different banks.
  __device__ void hand_over(const float (&dq)[Tiling::half / 2]) {
    const int row = row_ - 64 * place_, t = static_cast<int>(threadIdx.x % 4);
    const bool is_odd = row % 2 != 0;
    const int word = t / 2 ^ row % 8 ^ (is_odd ? 4 : 0);  // of group 0 of the columns of a panel; all rows 8 apart
    float* const to = s_.dq[at_.place()][place_] + row * 32 + t % 2 * 2;
#pragma unroll
    for (int j = 0; j < Tiling::half / 8; ++j) {
      const int other = j ^ 2;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 pair = is_odd ? float2{dq[4 * other + 2 * i], dq[4 * other + 2 * i + 1]}
                                   : float2{dq[4 * j + 2 * i], dq[4 * j + 2 * i + 1]};
        *reinterpret_cast<float2*>(to + j / 4 * Tiling::queries * 32 + i * 8 * 32 + (word ^ 2 * (j % 4)) * 4) = {
            pair.x * call_.scale, pair.y * call_.scale};
      }
    }
    fence_async_proxy();
    arrive(s_.dq_full[at_.place()]);
  }

  /// Keys and values that no rectangle of this tile shows may hold anything.
  __device__ void zero_unseen(int key) const {
    int low = key + Tiling::keys, high = key;
    for (int i = static_cast<int>(threadIdx.x % 32); i < call_.work.count; i += 32) {
      const Rectangle& r = call_.work.rectangles[i];
      if (r.k0 >= key + Tiling::keys || r.k1 <= key) continue;
      low = min(low, static_cast<int>(r.k0));
      high = max(high, static_cast<int>(min(r.k1, static_cast<std::int64_t>(key) + Tiling::keys)));
    }
    low = max(__reduce_min_sync(~0u, low) - key, 0);
    high = max(__reduce_max_sync(~0u, high) - key, low);
    zero_outside<Tiling::keys, Tiling::qk_dim>(s_.k, low, high, 2 + place_);
    zero_outside<Tiling::keys, Tiling::v_dim>(s_.v, low, high, 2 + place_);
  }

  /// Each warp: it is done with, or has written, its part.
  __device__ static void arrive(Barrier& barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier.arrive();
  }

  Shared<Tiling>& s_;
  const Call<T>& call_;
  const int place_, row_;   // among the consumers; this thread's first row of the tile of keys
  DoubleBuffer item_, at_;  // how many items, and tiles of queries, are behind it
};

template <class Tiling, class T>
PLEAT_KERNEL void __launch_bounds__(is_target ? Tiling::threads : 32, 1)
    backward_kernel(const __grid_constant__ Call<T> call, const __grid_constant__ Maps maps) {
  if constexpr (is_target) {
    extern __shared__ __align__(1024) std::byte shared[];
    auto& s = *reinterpret_cast<Shared<Tiling>*>(shared);
    constexpr int consumer_warps = Tiling::consumers * warp_group_threads / 32;
    if (threadIdx.x == 0) {
      s.kv_full.init(1);
      s.kv_empty.init(consumer_warps);
      for (int i = 0; i < 2; ++i) {
        s.item_full[i].init(1);
        s.item_empty[i].init(32 * consumer_warps);
        s.q_full[i].init(32 + 1);
        s.dout_full[i].init(1);
        s.q_empty[i].init(32 * consumer_warps);
        s.dout_empty[i].init(consumer_warps);
        s.dq_full[i].init(consumer_warps);
        s.dq_empty[i].init(32);
      }
      fence_barrier_init();
    }
    __syncthreads();
    if (threadIdx.x < warp_group_threads) {
      give_registers<Tiling::producer_registers>();
      if (threadIdx.x < 32) {
        produce<Tiling>(s, call, maps);
      } else if (threadIdx.x < 96) {
        add_queries<Tiling>(s, call, maps, static_cast<int>(threadIdx.x) / 32 - 1);
      }
    } else {
      take_registers<Tiling::consumer_registers>();
      Consumer<Tiling, T>(s, call).run();
    }
  }
}

/// Starts a call: no tickets taken, no turns had, and dq 0 where it is not added to.
template <class T>
PLEAT_KERNEL void start_kernel(HeadRows<float> dq, Extents e, bool zero, unsigned* words, std::int64_t count) {
  const std::int64_t thread = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x;
  const std::int64_t threads = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = thread; i < count; i += threads) words[i] = 0;
  if (!zero) return;
  const int words_of_row = e.qk_dim / 4;
  const std::int64_t all = e.batch * e.q_tokens * e.q_heads * words_of_row;
  for (std::int64_t i = thread; i < all; i += threads) {
    const std::int64_t row = i / words_of_row, token = row / e.q_heads;
    reinterpret_cast<float4*>(dq.at(token / e.q_tokens, token % e.q_tokens, row % e.q_heads))[i % words_of_row] = {};
  }
}

template <class Tiling, class T>
void launch(const Backward<T>& a, int heads_at_once, cudaStream_t stream) {
  const Extents& e = a.extents;
  const Maps maps{head_map(a.q, e.batch, e.q_tokens, e.q_heads, Tiling::qk_dim, Tiling::queries, Tiling::qk_dim),
                  head_map(a.k, e.batch, e.k_tokens, e.kv_heads, Tiling::qk_dim, Tiling::keys, Tiling::qk_dim),
                  head_map(a.v, e.batch, e.k_tokens, e.kv_heads, Tiling::v_dim, Tiling::keys, Tiling::v_dim),
                  head_map(a.dout, e.batch, e.q_tokens, e.q_heads, Tiling::v_dim, Tiling::queries, Tiling::v_dim),
                  head_map(a.dq, e.batch, e.q_tokens, e.q_heads, Tiling::qk_dim, Tiling::queries, Tiling::half)};
  const auto tiles = [](std::int64_t tokens, int tile) { return static_cast<int>((tokens + tile - 1) / tile); };
  const int heads = e.batch * e.kv_heads, at_once = std::min(heads_at_once, heads);
  const int key_tiles = tiles(e.k_tokens, Tiling::keys);
  const Call<T> call{e,
                     a.work,
                     a.scale,
                     a.scale * 1.44269504088896341f,
                     a.lse,
                     a.delta,
                     a.dk,
                     a.dv,
                     a.accumulate_dk,
                     a.accumulate_dv,
                     a.workspace,
                     a.deterministic ? a.workspace + 1 : nullptr,
                     key_tiles,
                     tiles(e.q_tokens, Tiling::queries),
                     heads,
                     at_once,
                     e.q_heads / e.kv_heads,
                     static_cast<unsigned>(key_tiles) * static_cast<unsigned>(heads),
                     static_cast<unsigned>(key_tiles) * static_cast<unsigned>(at_once)};
  const unsigned ctas = a.max_ctas > 0 ? static_cast<unsigned>(a.max_ctas) : 528u;
  start_kernel<T><<<ctas, 512, 0, stream>>>(
      a.dq, e, !a.accumulate_dq, a.workspace,
      static_cast<std::int64_t>(attention_workspace_bytes(e.batch, e.q_heads, e.q_tokens) / sizeof(unsigned)));
  check_launch("hopper start_kernel");
  launch_persistent<Tiling::threads, sizeof(Shared<Tiling>)>(backward_kernel<Tiling, T>, "hopper backward_kernel",
                                                             call.items, a.max_ctas, stream, call, maps);
}

}  // namespace hopper_backward_detail

/// AttentionBackward of bfloat16 or float16 by the kernel of a tiling.
template <class T, class Tiling>
struct HopperBackward {
  /// Whether the kernel takes this call on the current device: head dims of the tiling, a workspace, strides of q, k,
  /// v, dout and dq that the copy engine takes (multiples of 16 bytes), those of dk and dv of two elements. Errors:
  /// cuda_error C20.
  static bool takes(const Backward<T>& a) {
    const Extents& e = a.extents;
    return a.workspace != nullptr && Items::fits(e.k_tokens, Tiling::keys, std::int64_t{e.batch} * e.kv_heads) &&
           are_inputs_mappable(a, Tiling::qk_dim, Tiling::v_dim) &&
           is_head_mappable(a.dq, e.batch, e.q_tokens, e.q_heads, e.qk_dim) && takes_pairs(a.dk) && takes_pairs(a.dv) &&
           is_built_here();
  }
  /// What it takes. Tiles of keys of few heads run together, because they share queries in L2; in a fixed order each
  /// waits for those before it, so that too few cost as much. Errors: cuda_error C20.
  static void run(const Backward<T>& a, cudaStream_t stream) {
    hopper_backward_detail::launch<Tiling>(a, heads_at_once, stream);
  }
  static void preload() {
    (void)is_built_here();
    preload_kernel(hopper_backward_detail::start_kernel<T>, "hopper start_kernel");
  }

 private:
  static constexpr int heads_at_once = 16;

  static bool is_built_here() {
    return hopper::is_built(hopper_backward_detail::backward_kernel<Tiling, T>, Tiling::threads,
                            "hopper backward_kernel");
  }
};

}  // namespace pleat::inline v0::attention_kernel
