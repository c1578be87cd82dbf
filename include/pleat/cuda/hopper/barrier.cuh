// What the asynchronous parts of a Hopper SM meet at: mbarriers in shared memory, named barriers, proxy fences, and the
// registers that warp groups lend each other.
#pragma once

#include <cstdint>

#include <pleat/core/config.hpp>

namespace pleat::inline v0::hopper {

/// Whether the code at hand is compiled for sm_90a. The body of a kernel that uses anything of this folder stands in
/// `if constexpr (is_target)`, so that it compiles, to nothing, for other targets too.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
inline constexpr bool is_target = true;
#else
inline constexpr bool is_target = false;
#endif

inline constexpr int warp_group_threads = 128;

/// The address of shared memory as instructions take it.
__device__ inline std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

/// True in exactly one thread of the converged warp, the same one each time.
__device__ inline bool elect_one() {
  std::uint32_t elected;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(elected));
  return elected != 0;
}

/// The side of a phase that a waiter has in mind: `stage` cycles through `Stages` slots, `parity` flips with each
/// round.
template <int Stages>
struct Cycle {
  int stage = 0;
  std::uint32_t parity = 0;

  __device__ void advance() {
    if (++stage == Stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

/// An mbarrier; lives in shared memory. A phase ends when `arrivals` threads have arrived and all bytes that they
/// announced have landed.
struct Barrier {
  std::uint64_t word;

  /// One thread, before `fence_barrier_init` and a barrier of the CTA.
  __device__ void init(std::uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&word)), "r"(arrivals) : "memory");
  }
  __device__ void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&word)) : "memory");
  }
  /// Arrives, and lets the phase wait for `bytes` that copies will report.
  __device__ void arrive_expecting(std::uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&word)), "r"(bytes)
                 : "memory");
  }
  /// Whether the phase of this parity is over. A new barrier is in phase 0, and its phase of parity 1 counts as over.
  __device__ bool is_over(std::uint32_t parity) const {
    std::uint32_t over;
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(over)
                 : "r"(shared_address(&word)), "r"(parity)
                 : "memory");
    return over != 0;
  }
  /// Returns once the phase of this parity is over; what its copies wrote is then visible to the caller.
  __device__ void wait(std::uint32_t parity) const {
    while (!is_over(parity)) {
    }
  }
};

/// Makes initialized mbarriers visible to the copy engine; then a barrier of the CTA for its threads.
__device__ inline void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
/// Each thread that wrote shared memory calls this before the barrier after which tensor cores or the copy engine touch
/// what it wrote.
__device__ inline void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/// Barrier `id` (1 to 15; 0 is that of __syncthreads) among `threads` threads, whole warps: `sync` waits for all of
/// them, `arrive` counts without waiting.
__device__ inline void named_sync(int id, int threads) {
  asm volatile("barrier.cta.sync.aligned %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ inline void named_arrive(int id, int threads) {
  asm volatile("barrier.cta.arrive.aligned %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// All warps of a warp group: gives registers back down to, or takes them up to, `Registers` per thread, a multiple of
/// 8 from 24 to 256. Needs a register limit on the kernel (`__launch_bounds__(threads, 1)`).
template <int Registers>
__device__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <int Registers>
__device__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}

}  // namespace pleat::inline v0::hopper
