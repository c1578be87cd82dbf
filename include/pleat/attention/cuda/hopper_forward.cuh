// Attention forward on Hopper: one warp loads by TMA, warp groups of 64 queries each multiply by wgmma, the softmax of
// one tile of keys runs under the products of the next.
#pragma once

#include <algorithm>
#include <cmath>

#include <pleat/attention/cuda/hopper_forward_loads.cuh>
#include <pleat/cuda/hopper/launch.cuh>
#include <pleat/cuda/hopper/wgmma.cuh>
#include <pleat/cuda/kernel.hpp>

namespace pleat::inline v0::attention_kernel {

namespace hopper_forward_detail {

__device__ inline float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// The softmax of this thread's two rows, in units of log2: weights relative to `peak`, of which `sum` has this
/// thread's part until the end.
struct Softmax {
  float peak[2], sum[2], factor[2];

  /// Turns scores into weights, and leaves in `factor` what earlier results are to be multiplied with.
  template <int Count>
  __device__ void weigh(float (&scores)[Count], float scale_log2) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float most = -INFINITY;
#pragma unroll
      for (int j = 2 * i; j < Count; j += 4) most = fmaxf(most, fmaxf(scores[j], scores[j + 1]));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
      const float before = peak[i];
      peak[i] = fmaxf(before, most * scale_log2);
      const float base = peak[i] == -INFINITY ? 0.0f : peak[i];  // a row that has seen no key yet
      factor[i] = exp2_approximate(before - base);
      float part = 0;
#pragma unroll
      for (int j = 2 * i; j < Count; j += 4) {
        scores[j] = exp2_approximate(fmaf(scores[j], scale_log2, -base));
        scores[j + 1] = exp2_approximate(fmaf(scores[j + 1], scale_log2, -base));
        part += scores[j] + scores[j + 1];
      }
      sum[i] = fmaf(sum[i], factor[i], part);
    }
  }
  template <int Count>
  __device__ void rescale(float (&o)[Count]) const {
    if (!__any_sync(~0u, factor[0] != 1.0f || factor[1] != 1.0f)) return;  // peaks soon stop rising
#pragma unroll
    for (int j = 0; j < Count; ++j) o[j] *= factor[j % 4 / 2];
  }
};

/// One warp group's part of the CTA's tile: 64 queries.
template <class Tiling, class T>
class Consumer {
 public:
  __device__ Consumer(Shared<Tiling>& s, const Call<T>& call)
      : s_(s), call_(call), place_(static_cast<int>(threadIdx.x) / warp_group_threads - 1) {
    if (Tiling::take_turns && place_ == Tiling::consumers - 1) pass_turn();
  }

  __device__ void run() {
    for_each_item(s_, [&](const ForwardItem& item) { work_on(item); });
  }

 private:
  __device__ void work_on(const ForwardItem& item) {
    const int begin = item.tile * Tiling::queries;
    const int end = static_cast<int>(min(static_cast<std::int64_t>(begin) + Tiling::queries, call_.extents.q_tokens));
    const int t = static_cast<int>(threadIdx.x) % warp_group_threads;
    const int row = begin + 64 * place_ + t / 32 * 16 + t % 32 / 4;
    KeyTiles<Tiling::keys> tiles(call_.work, begin, end);
    const bool any = tiles.next();
    if (!any && !call_.first && !call_.last) return;

    float o[Tiling::v_dim / 2];
    Softmax softmax;
    start(o, softmax, row, item.head, item.batch);
    if (any) attend(o, softmax, tiles, row);
    finish(o, softmax, row, item.head, item.batch);
  }

  __device__ void attend(float (&o)[Tiling::v_dim / 2], Softmax& softmax, KeyTiles<Tiling::keys>& tiles, int row) {
    float scores[Tiling::keys / 2];
    std::uint32_t weights[Tiling::keys / 16][4];
    s_.q_full.wait(q_parity_);
    q_parity_ ^= 1;
    s_.k_full[k_at_.place()].wait(k_at_.parity());
    await_turn();
    multiply_keys(scores);
    pass_turn();
    wait<0>();
    pin(scores);
    release_keys();
    mask(scores, tiles, row);
    softmax.weigh(scores, call_.scale_log2);
    softmax.rescale(o);
    round(weights, scores);
    int keys = tiles.keys();
    bool more = tiles.next();
    while (more) {
      s_.k_full[k_at_.place()].wait(k_at_.parity());
      await_turn();
      multiply_keys(scores);
      await_values(keys);
      multiply_values(o, weights);
      pass_turn();
      wait<1>();
      pin(scores);
      release_keys();
      mask(scores, tiles, row);
      softmax.weigh(scores, call_.scale_log2);
      keys = tiles.keys();
      more = tiles.next();  // its branches also keep the assembler from moving the softmax behind the wait
      wait<0>();
      pin(o);
      release_values();
      softmax.rescale(o);
      round(weights, scores);
    }
    arrive(s_.q_empty);
    await_values(keys);
    multiply_values(o, weights);
    wait<0>();
    pin(o);
    release_values();
  }

  /// scores = Q K^T, under way.
  __device__ void multiply_keys(float (&scores)[Tiling::keys / 2]) {
    const Tile<Tiling::queries, Major::k> q(s_.q);
    const Tile<Tiling::keys, Major::k> k(s_.k[k_at_.place()]);
    pin(scores);
    fence();
#pragma unroll
    for (int d = 0; d < Tiling::qk_dim; d += 16) wgmma<T>(scores, q.at(64 * place_, d), k.k(d), d != 0);
    commit();
  }
  /// o += weights V, under way.
  __device__ void multiply_values(float (&o)[Tiling::v_dim / 2], std::uint32_t (&weights)[Tiling::keys / 16][4]) {
    const Tile<Tiling::keys, Major::mn> v(s_.v[v_at_.place()]);
    pin(o);
    fence();
#pragma unroll
    for (int k = 0; k < Tiling::keys; k += 16) wgmma<T, Major::mn>(o, weights[k / 16], v.k(k), true);
    commit();
  }
  __device__ static void round(std::uint32_t (&weights)[Tiling::keys / 16][4], const float (&p)[Tiling::keys / 2]) {
#pragma unroll
    for (int i = 0; i < Tiling::keys / 4; ++i) weights[i / 4][i % 4] = pack<T>(p[2 * i], p[2 * i + 1]);
  }
  __device__ static void mask(float (&scores)[Tiling::keys / 2], const KeyTiles<Tiling::keys>& tiles, int row) {
    if (!tiles.is_masked()) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int seen = tiles.seen_by(row + 8 * i) - 2 * static_cast<int>(threadIdx.x % 4);
#pragma unroll
      for (int j = 2 * i; j < Tiling::keys / 2; j += 4) {
        if (2 * j - 4 * i >= seen) scores[j] = -INFINITY;
        if (2 * j - 4 * i + 1 >= seen) scores[j + 1] = -INFINITY;
      }
    }
  }

  /// Waits for the values of the oldest tile; rows after `keys` are no part of the work: their weight is 0, but they
  /// may hold anything.
  __device__ void await_values(int keys) {
    s_.v_full[v_at_.place()].wait(v_at_.parity());
    zero_outside<Tiling::keys, Tiling::v_dim>(s_.v[v_at_.place()], 0, keys, 1 + Tiling::consumers + place_);
  }
  __device__ void release_keys() {
    arrive(s_.k_empty[k_at_.place()]);
    ++k_at_.count;
  }
  __device__ void release_values() {
    arrive(s_.v_empty[v_at_.place()]);
    ++v_at_.count;
  }
  /// Each warp: its part of the products is done.
  __device__ static void arrive(Barrier& empty) {
    if (threadIdx.x % 32 == 0) empty.arrive();
  }
  __device__ void await_turn() const {
    if constexpr (Tiling::take_turns) named_sync(1 + place_, 2 * warp_group_threads);
  }
  __device__ void pass_turn() const {
    if constexpr (Tiling::take_turns) {
      named_arrive(place_ + 1 == Tiling::consumers ? 1 : 2 + place_, 2 * warp_group_threads);
    }
  }

  /// Resumes what earlier calls left: as maximum = LSE, sum = 1, both shifted (resumed_peak tells why).
  __device__ void start(float (&o)[Tiling::v_dim / 2], Softmax& softmax, int row, int head, int batch) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int q = row + 8 * i;
      const bool resumes = !call_.first && q < call_.extents.q_tokens;
      const float lse = resumes ? call_.lse.at(batch, q, head) : -INFINITY;
      softmax.peak[i] = resumed_peak(lse);
      softmax.sum[i] = lse != -INFINITY && threadIdx.x % 4 == 0 ? resumed_weight : 0.0f;
      const float2* const row_of_o =
          reinterpret_cast<const float2*>(lse != -INFINITY ? call_.o_acc.at(batch, q, head) : nullptr);
#pragma unroll
      for (int j = 0; j < Tiling::v_dim / 8; ++j) {
        const float2 pair = row_of_o != nullptr ? row_of_o[4 * j + threadIdx.x % 4] : float2{0, 0};
        o[4 * j + 2 * i] = resumed_weight * pair.x;
        o[4 * j + 2 * i + 1] = resumed_weight * pair.y;
      }
    }
  }
  __device__ void finish(const float (&o)[Tiling::v_dim / 2], const Softmax& softmax, int row, int head,
                         int batch) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sum = softmax.sum[i];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      const float inverse = sum > 0 ? 1 / sum : 0.0f;
      const int q = row + 8 * i;
      if (q >= call_.extents.q_tokens) continue;
      if (threadIdx.x % 4 == 0) {
        float& lse = call_.lse.at(batch, q, head);
        // A row that saw nothing new keeps its bits.
        const bool unchanged = !call_.first && sum == resumed_weight && softmax.peak[i] == resumed_peak(lse);
        if (!unchanged) lse = sum > 0 ? softmax.peak[i] * ln_2 + logf(sum) : -INFINITY;
      }
      if (call_.last) {
        auto* const to = reinterpret_cast<std::uint32_t*>(call_.out.at(batch, q, head));
#pragma unroll
        for (int j = 0; j < Tiling::v_dim / 8; ++j) {
          to[4 * j + threadIdx.x % 4] = pack<T>(o[4 * j + 2 * i] * inverse, o[4 * j + 2 * i + 1] * inverse);
        }
      } else {
        auto* const to = reinterpret_cast<float2*>(call_.o_acc.at(batch, q, head));
#pragma unroll
        for (int j = 0; j < Tiling::v_dim / 8; ++j) {
          to[4 * j + threadIdx.x % 4] = {o[4 * j + 2 * i] * inverse, o[4 * j + 2 * i + 1] * inverse};
        }
      }
    }
  }

  static constexpr float log2_e = 1.44269504088896341f, ln_2 = 0.693147180559945309f;
  Shared<Tiling>& s_;
  const Call<T>& call_;
  const int place_;           // among the consumers
  DoubleBuffer k_at_, v_at_;  // how many are behind it
  std::uint32_t q_parity_ = 0;
};

template <class Tiling, class T>
PLEAT_KERNEL void __launch_bounds__(is_target ? Tiling::threads : 32, 1)
    forward_kernel(const __grid_constant__ Call<T> call, const __grid_constant__ Maps maps) {
  if constexpr (is_target) {
    extern __shared__ __align__(1024) std::byte shared[];
    auto& s = *reinterpret_cast<Shared<Tiling>*>(shared);
    static_assert(sizeof s.q >= sizeof(unsigned) * s.order.most);
    s.order.make(reinterpret_cast<unsigned*>(s.q), call.work, call.tiles, call.first || call.last);
    if (threadIdx.x == 0) {
      constexpr int consumer_warps = Tiling::consumers * warp_group_threads / 32;
      s.q_full.init(1);
      s.q_empty.init(consumer_warps);
      for (int i = 0; i < 2; ++i) {
        s.item_full[i].init(1);
        s.item_empty[i].init(32 * (consumer_warps + 1));
      }
      for (int i = 0; i < 2; ++i) {
        s.k_full[i].init(1);
        s.v_full[i].init(1);
        s.k_empty[i].init(consumer_warps);
        s.v_empty[i].init(consumer_warps);
      }
      fence_barrier_init();
    }
    __syncthreads();
    if (threadIdx.x < warp_group_threads) {
      give_registers<Tiling::producer_registers>();
      if (threadIdx.x < 32) {
        produce<Tiling>(s, call, maps);
      } else if (threadIdx.x < 64) {
        deal<Tiling>(s, call);
      }
    } else {
      take_registers<Tiling::consumer_registers>();
      Consumer<Tiling, T>(s, call).run();
    }
  }
}

template <class Tiling, class T>
void launch(const Forward<T>& a, int heads_at_once, cudaStream_t stream) {
  const Extents& e = a.extents;
  const auto keys_map = [&](const HeadRows<const T>& rows, std::int64_t tokens, int dim) {
    return head_map(rows, e.batch, tokens, e.kv_heads, dim, Tiling::keys, dim);
  };
  const auto& others = a.others;
  const CUtensorMap k = keys_map(a.k, e.k_tokens, Tiling::qk_dim), v = keys_map(a.v, e.k_tokens, Tiling::v_dim);
  const Maps maps{head_map(a.q, e.batch, e.q_tokens, e.q_heads, Tiling::qk_dim, Tiling::queries, Tiling::qk_dim), k, v,
                  others.tokens > 0 ? keys_map(others.k, others.tokens, Tiling::qk_dim) : k,
                  others.tokens > 0 ? keys_map(others.v, others.tokens, Tiling::v_dim) : v};
  const int tiles = static_cast<int>((e.q_tokens + Tiling::queries - 1) / Tiling::queries), heads = e.batch * e.q_heads;
  const Call<T> call{e,
                     a.work,
                     a.scale * 1.44269504088896341f,
                     a.o_acc,
                     a.lse,
                     a.out,
                     a.first,
                     a.last,
                     tiles,
                     heads,
                     std::min(heads_at_once, heads),
                     static_cast<int>(e.k_tokens),
                     static_cast<int>(others.block_rows),
                     others.arrivals};
  launch_persistent<Tiling::threads, sizeof(Shared<Tiling>)>(forward_kernel<Tiling, T>, "hopper forward_kernel",
                                                             static_cast<std::int64_t>(tiles) * heads, a.max_ctas,
                                                             stream, call, maps);
}

/// How many query heads at a time serve L2 best: their keys and values fill about 32 MiB of it.
template <class Tiling>
int heads_at_once(const Extents& e, std::int64_t other_keys) {
  const std::int64_t bytes = (e.k_tokens + other_keys) * (Tiling::qk_dim + Tiling::v_dim) * 2;
  const std::int64_t kv_heads = std::max<std::int64_t>((std::int64_t{32} << 20) / bytes, 1);
  return static_cast<int>(std::min<std::int64_t>(kv_heads, e.batch * e.kv_heads)) * (e.q_heads / e.kv_heads);
}

}  // namespace hopper_forward_detail

/// AttentionForward of bfloat16 or float16 by the kernel of a tiling.
template <class T, class Tiling>
struct HopperForward {
  /// Whether the kernel takes this call on the current device: head dims of the tiling, a positive scale, strides of q,
  /// k and v that the copy engine takes (multiples of 16 bytes), those of out and o_acc of two elements.
  /// Errors: cuda_error C20.
  static bool takes(const Forward<T>& a) {
    const Extents& e = a.extents;
    const auto stores = [](const auto& x) {
      return reinterpret_cast<std::uintptr_t>(x.data) % (2 * sizeof(*x.data)) == 0 && x.batch_stride % 2 == 0 &&
             x.token_stride % 2 == 0 && x.head_stride % 2 == 0;
    };
    return e.qk_dim == Tiling::qk_dim && e.v_dim == Tiling::v_dim && a.scale > 0 && e.q_tokens < most_tokens &&
           e.k_tokens + a.others.tokens < most_tokens &&
           Items::fits(e.q_tokens, Tiling::queries, std::int64_t{e.batch} * e.q_heads) &&
           is_head_mappable(a.q, e.batch, e.q_tokens, e.q_heads, e.qk_dim) &&
           is_head_mappable(a.k, e.batch, e.k_tokens, e.kv_heads, e.qk_dim) &&
           is_head_mappable(a.v, e.batch, e.k_tokens, e.kv_heads, e.v_dim) &&
           (a.others.tokens == 0 || (is_head_mappable(a.others.k, e.batch, a.others.tokens, e.kv_heads, e.qk_dim) &&
                                     is_head_mappable(a.others.v, e.batch, a.others.tokens, e.kv_heads, e.v_dim))) &&
           (!a.last || stores(a.out)) && ((a.first && a.last) || stores(a.o_acc)) && is_built_here();
  }
  /// What it takes. Errors: cuda_error C20.
  static void run(const Forward<T>& a, cudaStream_t stream) {
    using hopper_forward_detail::heads_at_once;
    hopper_forward_detail::launch<Tiling>(a, heads_at_once<Tiling>(a.extents, a.others.tokens), stream);
  }
  static void preload() { (void)is_built_here(); }

 private:
  static bool is_built_here() {
    return hopper::is_built(hopper_forward_detail::forward_kernel<Tiling, T>, Tiling::threads, "hopper forward_kernel");
  }
};

}  // namespace pleat::inline v0::attention_kernel
