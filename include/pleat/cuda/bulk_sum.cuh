// Sums in rank order on a few multiprocessors: bulk copies keep so many bytes in flight that few CTAs fill a link.
#pragma once

#include <algorithm>
#include <cstdint>

#include <pleat/core/dtype.hpp>
#include <pleat/cuda/hopper/tma.cuh>
#include <pleat/cuda/kernel.hpp>
#include <pleat/cuda/rank_parts.cuh>

namespace pleat::inline v0::detail {

/// A CTA works on tiles, each of one rank's term in turn; `stages` of them are in flight or being added.
struct BulkSum {
  static constexpr int adders = 512;
  static constexpr int threads = adders + 32;  // one more warp asks for the tiles
  static constexpr int tile_bytes = 32768;
  static constexpr int stages = 6;
  static constexpr int shared_bytes = stages * tile_bytes;

  /// What a number of elements must be a multiple of; addresses of terms are multiples of 16 bytes.
  template <class Part>
  static constexpr int granule = static_cast<int>(16 / sizeof(Part));
  /// Elements that a thread adds at once: 16 bytes of the sum.
  template <class Out>
  static constexpr int width = static_cast<int>(16 / sizeof(Out));
  template <class Part>
  static constexpr int tile_elems = static_cast<int>(tile_bytes / sizeof(Part));
};

/// out [elems] = (accumulate ? out : 0) + the terms in rank order, as sum_ranks_kernel adds them.
template <class Out, class Part>
PLEAT_KERNEL void __launch_bounds__(BulkSum::threads, 1)
    bulk_sum_kernel(Out* out, const __grid_constant__ RankParts parts, std::size_t elems, bool accumulate) {
  using Sum = std::common_type_t<accumulator_t<Out>, accumulator_t<Part>>;
  constexpr int width = BulkSum::width<Out>;
  using Term = Pack<Part, width>;
  const std::size_t packs = elems / width;
  auto* const to = reinterpret_cast<Pack<Out, width>*>(out);
  const auto finish = [&](std::size_t i, const Sum(&sum)[width]) {
    Pack<Out, width> result;
    if (accumulate) result = to[i];
#pragma unroll
    for (int k = 0; k < width; ++k) {
      result.elem[k] = static_cast<Out>(accumulate ? static_cast<Sum>(result.elem[k]) + sum[k] : sum[k]);
    }
    to[i] = result;
  };

  if constexpr (hopper::is_target) {
    constexpr int tile_packs = BulkSum::tile_elems<Part> / width;
    constexpr int batch = tile_packs / BulkSum::adders;
    extern __shared__ __align__(128) std::byte tiles[];
    __shared__ hopper::Barrier full[BulkSum::stages], empty[BulkSum::stages];
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < BulkSum::stages) {
      full[thread].init(1);
      empty[thread].init(BulkSum::adders);
    }
    hopper::fence_barrier_init();
    __syncthreads();
    hopper::Cycle<BulkSum::stages> at;
    const std::size_t step = static_cast<std::size_t>(gridDim.x) * tile_packs;
    if (thread >= BulkSum::adders) {
      if (!hopper::elect_one()) return;
      for (std::size_t first = blockIdx.x * std::size_t{tile_packs}; first < packs; first += step) {
        const std::size_t rest = packs - first;
        const auto bytes = static_cast<std::uint32_t>((rest < tile_packs ? rest : tile_packs) * sizeof(Term));
        for (int r = 0; r < parts.count; ++r, at.advance()) {
          empty[at.stage].wait(at.parity ^ 1);
          full[at.stage].arrive_expecting(bytes);
          hopper::load_bytes(tiles + at.stage * BulkSum::tile_bytes, parts[r] + first * sizeof(Term), full[at.stage],
                             bytes);
        }
      }
      return;
    }
    for (std::size_t first = blockIdx.x * std::size_t{tile_packs}; first < packs; first += step) {
      Sum sum[batch][width] = {};
      for (int r = 0; r < parts.count; ++r, at.advance()) {
        const auto* const tile = reinterpret_cast<const Term*>(tiles + at.stage * BulkSum::tile_bytes);
        full[at.stage].wait(at.parity);
#pragma unroll
        for (int b = 0; b < batch; ++b) {  // past the end of the last tile: something, which nobody stores
          const Term term = tile[thread + b * BulkSum::adders];
#pragma unroll
          for (int k = 0; k < width; ++k) sum[b][k] += static_cast<Sum>(term.elem[k]);
        }
        // Reads are ordered before the copy that overwrites them by a fence alone: the barrier does not suffice.
        hopper::fence_async_proxy();
        empty[at.stage].arrive();
      }
#pragma unroll
      for (int b = 0; b < batch; ++b) {
        const std::size_t i = first + static_cast<std::size_t>(thread + b * BulkSum::adders);
        if (i < packs) finish(i, sum[b]);
      }
    }
  } else {
    const std::size_t step = static_cast<std::size_t>(gridDim.x) * BulkSum::threads;
    for (std::size_t i = blockIdx.x * std::size_t{BulkSum::threads} + threadIdx.x; i < packs; i += step) {
      Sum sum[width] = {};
      for (int r = 0; r < parts.count; ++r) {
        const Term term = reinterpret_cast<const Term*>(parts[r])[i];
#pragma unroll
        for (int k = 0; k < width; ++k) sum[k] += static_cast<Sum>(term.elem[k]);
      }
      finish(i, sum);
    }
  }
}

/// Loads the kernel and lets it have its shared memory, on the current device; at bind.
template <class Out, class Part>
void prepare_bulk_sum() {
  const auto* const kernel = reinterpret_cast<const void*>(bulk_sum_kernel<Out, Part>);
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, BulkSum::shared_bytes),
             "bulk_sum_kernel");
}

/// On at most `ctas` CTAs.
template <class Out, class Part>
void launch_bulk_sum(Out* out, const RankParts& parts, std::size_t elems, bool accumulate, int ctas, cudaStream_t s) {
  constexpr std::size_t tile = BulkSum::tile_elems<Part>;
  const auto grid = static_cast<unsigned>(std::min((elems + tile - 1) / tile, static_cast<std::size_t>(ctas)));
  prepare_bulk_sum<Out, Part>();
  bulk_sum_kernel<Out, Part><<<grid, BulkSum::threads, BulkSum::shared_bytes, s>>>(out, parts, elems, accumulate);
  check_launch("bulk_sum_kernel");
}

}  // namespace pleat::inline v0::detail
