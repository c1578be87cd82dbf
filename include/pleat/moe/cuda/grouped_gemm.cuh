// Grouped products on Hopper (sm_90a): persistent CTAs, one or two to a cluster, that find their tiles on the device.
// One warp group loads, two multiply 64 x 256 each; what a pair of CTAs has in common is loaded once.
#pragma once

#include <algorithm>
#include <cstdint>

#include <pleat/cuda/hopper/launch.cuh>
#include <pleat/cuda/kernel.hpp>
#include <pleat/moe/cuda/grouped_epilogue.cuh>

namespace pleat::inline v0::moe::detail {

/// The tiles of a kernel's CTA, in the order in which it computes them.
template <Grouped Op, int Ctas>
__device__ auto grouped_tiles(const GroupedArguments& args, const GroupedShared<Op>& shared, int rank) {
  constexpr int width = GroupedTraits<Op>::width;
  if constexpr (GroupedTraits<Op>::is_matrix) {
    return MatrixTiles<Ctas>(args.offsets, args.experts, args.rows, args.columns, width, rank, shared.order);
  } else {
    return RowTiles<Ctas>(args.offsets, args.experts, args.columns, width, args.depth, rank);
  }
}

/// Depth steps of a tile, over all sources.
template <Grouped Op>
__device__ int steps_of(const GroupedArguments& args, const GroupedTile& tile) {
  return tiles_of(tile.depth, GroupedTraits<Op>::step) * (GroupedTraits<Op>::is_matrix ? 1 : args.sources);
}

/// Loads step `k` (in elements) of a source into a stage: what the pair shares, half by each CTA into both.
template <Grouped Op, int Ctas>
__device__ void load_step(const GroupedArguments& args, GroupedShared<Op>& shared, const GroupedTile& tile, int stage,
                          int source, int k, int rank) {
  using Traits = GroupedTraits<Op>;
  using hopper::Major;
  hopper::Barrier& full = shared.full[stage];
  full.arrive_expecting(GroupedShared<Op>::stage_bytes);
  const auto load = [&](bool to_both, void* to, const CUtensorMap& map, auto... x) {
    if (Ctas == 2 && to_both) {
      hopper::load_to(3, to, map, full, x...);
    } else {
      hopper::load(to, map, full, x...);
    }
  };
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (Ctas == 2 && !tile.shares_b && half != rank) continue;
    unsigned char* to = shared.a[stage][half];
    if constexpr (Traits::major_a == Major::k) {
      load(!tile.shares_b, to, args.a[source], k, tile.row + 64 * half);
    } else {
      load(!tile.shares_b, to, args.a[source], tile.row + 64 * half, tile.depth_first + k);
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (Ctas == 2 && tile.shares_b && half != rank) continue;
    unsigned char* to = shared.b[stage][half];
    if constexpr (Op == Grouped::gate_up) {
      load(tile.shares_b, to, args.b[half], k, tile.column, tile.expert);
    } else if constexpr (Traits::major_b == Major::k) {
      load(tile.shares_b, to, args.b[source], k, tile.column + 128 * half, tile.expert);
    } else {
#pragma unroll
      for (int box = 0; box < 2; ++box) {
        load(tile.shares_b, to + box * Traits::panel_bytes, args.b[source], tile.column + 128 * half + 64 * box,
             Traits::is_matrix ? tile.depth_first + k : k, Traits::is_matrix ? 0 : tile.expert);
      }
    }
  }
}

/// One warp: finds the tiles, tells them to the consumers, and keeps the stages full.
template <Grouped Op, int Ctas>
__device__ void produce(const GroupedArguments& args, GroupedShared<Op>& shared, int rank) {
  hopper::Cycle<GroupedTraits<Op>::stages> at;
  hopper::Cycle<2> slot;
  auto tiles = grouped_tiles<Op, Ctas>(args, shared, rank);
  const int worker = static_cast<int>(blockIdx.x) / Ctas, workers = static_cast<int>(gridDim.x) / Ctas;
  const bool loads = threadIdx.x % 32 == 0;
  for (int round = 0;; ++round) {
    const GroupedTile tile = tiles.find(unit_of_round(round, worker, workers));
    const bool is_last = tile.expert < 0;
    if (GroupedTraits<Op>::is_matrix && !is_last && tile.depth == 0 && args.accumulate) continue;
    if (loads) {
      shared.tile_empty[slot.stage].wait(slot.parity ^ 1);
      shared.tiles[slot.stage] = tile;
      shared.tile_full[slot.stage].arrive();
      const int sources = is_last ? 0 : GroupedTraits<Op>::is_matrix ? 1 : args.sources;
      for (int source = 0; source < sources; ++source) {
        for (int k = 0; k < tile.depth; k += GroupedTraits<Op>::step) {
          shared.empty[at.stage].wait(at.parity ^ 1);
          load_step<Op, Ctas>(args, shared, tile, at.stage, source, k, rank);
          at.advance();
        }
      }
    }
    slot.advance();
    __syncwarp();
    if (is_last) return;
  }
}

/// Rows that a step of a weight gradient must not read count as zeros, in both operands: 0 x NaN is NaN.
template <Grouped Op>
__device__ void clear_rows_from(int row, GroupedShared<Op>& shared, int stage, int group) {
  constexpr int panel_bytes = GroupedTraits<Op>::panel_bytes;
  const int thread = static_cast<int>(threadIdx.x) % 128;
  const auto clear = [&](unsigned char* panel) {
    for (int at = row * 128 + thread * 16; at < panel_bytes; at += 128 * 16) {
      *reinterpret_cast<uint4*>(panel + at) = uint4{0, 0, 0, 0};
    }
  };
  clear(shared.a[stage][group]);
  for (int panel = 0; panel < 4; ++panel) clear(shared.b[stage][0] + panel * panel_bytes);
  hopper::fence_async_proxy();
  hopper::named_sync(1 + group, 128);
}

/// One warp group: rows 64 * group to + 63 of each tile.
template <Grouped Op, int Ctas>
__device__ void consume(const GroupedArguments& args, GroupedShared<Op>& shared, int group) {
  using Traits = GroupedTraits<Op>;
  using hopper::Major;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  hopper::Cycle<Traits::stages> at;
  hopper::Cycle<2> slot;
  GroupedEpilogue<Op> epilogue(args, shared, group);
  const auto release = [&](int stage) {
    if constexpr (Ctas == 1) {
      if (lane == 0) shared.empty[stage].arrive();
    } else {
      if (lane < Ctas) hopper::arrive_at(shared.empty[stage], lane);
    }
  };
  for (;;) {
    shared.tile_full[slot.stage].wait(slot.parity);
    const GroupedTile tile = shared.tiles[slot.stage];
    __syncwarp();
    if (lane == 0) shared.tile_empty[slot.stage].arrive();
    slot.advance();
    if (tile.expert < 0) break;

    const int steps = steps_of<Op>(args, tile);
    float sums[128];
    if (steps == 0) {
#pragma unroll
      for (float& sum : sums) sum = 0;
    }
    int previous = 0;
    for (int step = 0; step < steps; ++step) {
      shared.full[at.stage].wait(at.parity);
      if constexpr (Traits::is_matrix) {
        const int rest = tile.depth - step * Traits::step;
        if (rest < Traits::step) clear_rows_from<Op>(rest, shared, at.stage, group);
      }
      const hopper::Tile<Traits::major_a == Major::k ? 64 : Traits::step, Traits::major_a> a(shared.a[at.stage][group]);
      const hopper::Tile<Traits::major_b == Major::k ? 256 : Traits::step, Traits::major_b> b(shared.b[at.stage]);
      hopper::fence();
#pragma unroll
      for (int k = 0; k < Traits::step; k += 16) {
        hopper::wgmma<bfloat16, Traits::major_a, Traits::major_b>(sums, a.k(k), b.k(k), step > 0 || k > 0);
      }
      hopper::commit();
      if (step == 0) {
        epilogue.begin(tile);
      } else {
        hopper::wait<1>();
        release(previous);
      }
      previous = at.stage;
      at.advance();
    }
    hopper::wait<0>();
    hopper::pin(sums);
    if (steps > 0) release(previous);
    epilogue.finish(tile, sums);
  }
  epilogue.end();
}

template <int Ctas>
__device__ void sync_ctas() {
  if constexpr (Ctas == 1) {
    __syncthreads();
  } else {
    hopper::cluster_sync();
  }
}

template <Grouped Op, int Ctas>
PLEAT_KERNEL void __launch_bounds__(hopper::is_target ? grouped_threads : 32, 1)
    grouped_kernel(const __grid_constant__ GroupedArguments args) {
  if constexpr (hopper::is_target) {
    extern __shared__ __align__(1024) unsigned char memory[];
    auto& shared = *reinterpret_cast<GroupedShared<Op>*>(memory);
    const int rank = Ctas == 1 ? 0 : hopper::cluster_rank();
    const int group = static_cast<int>(threadIdx.x) / hopper::warp_group_threads;
    if (threadIdx.x == 0) {
      constexpr int consumer_warps = grouped_consumers * 4;
      for (hopper::Barrier& barrier : shared.full) barrier.init(1);
      for (hopper::Barrier& barrier : shared.empty) barrier.init(consumer_warps * Ctas);
      for (hopper::Barrier& barrier : shared.tile_full) barrier.init(1);
      for (hopper::Barrier& barrier : shared.tile_empty) barrier.init(consumer_warps);
      for (auto& barriers : shared.saved_full) {
        for (hopper::Barrier& barrier : barriers) barrier.init(1);
      }
      hopper::fence_barrier_init();
    }
    if constexpr (GroupedTraits<Op>::is_matrix) {
      shared.order.sort(args.offsets, args.experts, reinterpret_cast<int*>(shared.staged));
    }
    sync_ctas<Ctas>();
    if (group == grouped_consumers) {
      hopper::give_registers<56>();
      if (threadIdx.x / 32 == grouped_consumers * 4) produce<Op, Ctas>(args, shared, rank);
    } else {
      hopper::take_registers<224>();
      consume<Op, Ctas>(args, shared, group);
    }
    sync_ctas<Ctas>();  // no CTA of a pair ends while the other one may still reach its shared memory
  }
}

/// Whether the current device can run the kernel: it is a Hopper GPU, and this program was compiled for sm_90a (else
/// the kernel is empty, and bounded to fewer threads). Errors: cuda_error C20.
template <Grouped Op, int Ctas>
bool has_grouped_kernel() {
  return hopper::is_built(grouped_kernel<Op, Ctas>, grouped_threads, "grouped_kernel");
}

/// On at most `ctas` CTAs, but one cluster, and at most one CTA per multiprocessor; 0: all. Errors: cuda_error C20.
template <Grouped Op, int Ctas>
void launch_grouped(const GroupedArguments& args, int ctas, cudaStream_t s) {
  constexpr std::size_t shared_bytes = sizeof(GroupedShared<Op>);
  static_assert(shared_bytes <= 227 * 1024);
  int device = 0, multiprocessors = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device),
             "cudaDeviceGetAttribute");
  check_cuda(cudaFuncSetAttribute(grouped_kernel<Op, Ctas>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
             "cudaFuncSetAttribute");
  const int grid = std::max((ctas == 0 ? multiprocessors : std::min(ctas, multiprocessors)) / Ctas, 1) * Ctas;
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {Ctas, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(grid));
  config.blockDim = dim3(grouped_threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = s;
  config.attrs = &cluster;
  config.numAttrs = 1;
  check_cuda(cudaLaunchKernelEx(&config, grouped_kernel<Op, Ctas>, args), "grouped_kernel");
}

}  // namespace pleat::inline v0::moe::detail
