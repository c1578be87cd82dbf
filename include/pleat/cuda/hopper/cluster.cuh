// Pairs of CTAs: loads that land in both, arrivals at the other's barriers; and 8 x 8 matrices between registers and
// shared memory.
#pragma once

#include <cstdint>

#include <pleat/cuda/hopper/barrier.cuh>
#include <pleat/cuda/hopper/tma.cuh>

namespace pleat::inline v0::hopper {

/// The rank of this CTA in its cluster.
__device__ inline int cluster_rank() {
  std::uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}
/// Waits for all threads of the cluster; what they wrote before is then visible.
__device__ inline void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}

/// Arrives at the barrier that has the same place in the shared memory of CTA `rank` of the cluster. Orders this
/// thread's writes for the threads of its own CTA only: what it releases to others is memory that it has read.
__device__ inline void arrive_at(Barrier& barrier, int rank) {
  asm volatile(
      "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(shared_address(&barrier.word)),
      "r"(rank)
      : "memory");
}

/// As `load`, to the same place in the shared memory of each CTA of the cluster whose bit of `ctas` is set, where the
/// barrier of the same place is told.
__device__ inline void load_to(std::uint16_t ctas, void* to, const CUtensorMap& map, Barrier& done, int x0, int x1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, "
      "{%3, %4}], [%2], %5;" ::"r"(shared_address(to)),
      "l"(&map), "r"(shared_address(&done.word)), "r"(x0), "r"(x1), "h"(ctas)
      : "memory");
}
__device__ inline void load_to(std::uint16_t ctas, void* to, const CUtensorMap& map, Barrier& done, int x0, int x1,
                               int x2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, "
      "{%3, %4, %5}], [%2], %6;" ::"r"(shared_address(to)),
      "l"(&map), "r"(shared_address(&done.word)), "r"(x0), "r"(x1), "r"(x2), "h"(ctas)
      : "memory");
}

/// Four 8 x 8 matrices of 16-bit elements: thread t gives or gets elements 2 (t % 4) + {0, 1} of row t / 4 of each, and
/// threads 8 i to 8 i + 7 name the rows of matrix i, 16 bytes each. All threads of a warp.
__device__ inline void load_matrices(std::uint32_t (&pairs)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(pairs[0]), "=r"(pairs[1]), "=r"(pairs[2]), "=r"(pairs[3])
               : "r"(shared_address(row))
               : "memory");
}
__device__ inline void store_matrices(void* row, const std::uint32_t (&pairs)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
               "r"(pairs[0]), "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3])
               : "memory");
}

}  // namespace pleat::inline v0::hopper
