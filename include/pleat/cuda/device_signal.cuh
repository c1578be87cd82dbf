// Signals and a barrier inside kernels, between the same CTAs of all ranks.
#pragma once

#include <pleat/cuda/device_signals.hpp>

namespace pleat::inline v0 {

namespace detail {
/// What the thread has written or seen before is visible, on every GPU, to whoever sees the value.
__device__ __forceinline__ void store_release(std::uint64_t* word, std::uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
__device__ __forceinline__ void store_relaxed(std::uint64_t* word, std::uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
__device__ __forceinline__ std::uint64_t load_acquire(const std::uint64_t* word) {
  std::uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}
__device__ __forceinline__ std::uint64_t global_time_ns() {
  std::uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)::"memory");
  return now;
}
__device__ __forceinline__ std::uint64_t next_count(std::uint64_t* counts, const DeviceSignals& signals, int peer,
                                                    int slot) {
  return ++counts[static_cast<std::size_t>(slot) * static_cast<std::size_t>(signals.ranks) +
                  static_cast<std::size_t>(peer)];
}
/// Waits for signal `wanted` of the peer in `word`; false once any wait of the operation has timed out.
__device__ inline bool await_count(const DeviceSignals& signals, const std::uint64_t* word, std::uint64_t wanted,
                                   int peer, int slot) {
  const auto has_come = [word, wanted] {  // looks several times, since the clock and the status take as long each
    for (int look = 0; look < 16; ++look) {
      if (ends_wait(load_acquire(word), wanted)) return true;
    }
    return false;
  };
  if (has_come()) return true;
  const std::uint64_t start = global_time_ns();
  while (!has_come()) {
    if (*static_cast<volatile std::uint64_t*>(signals.status) != 0) return false;
    if (global_time_ns() - start > signals.timeout_ns) {
      atomicCAS(reinterpret_cast<unsigned long long*>(signals.status), 0ULL,
                static_cast<unsigned long long>(DeviceTimeout{signals.rank, peer, slot}.packed()));
      return false;
    }
  }
  return true;
}
}  // namespace detail

/// One more signal to the peer on the slot, by the calling thread: releases what it has written, and what others have
/// written before a barrier with it.
__device__ inline void device_signal(const DeviceSignals& signals, int peer, int slot) {
  detail::store_release(signals.links[peer].outgoing + static_cast<std::ptrdiff_t>(slot) * signals.slot_stride,
                        detail::next_count(signals.sent, signals, peer, slot));
}

/// Waits, in the calling thread, for the next signal of the peer on the slot, and acquires what it released. False once
/// any wait of the operation has timed out: the kernel then ends, its results are undefined, its status word tells.
[[nodiscard]] __device__ inline bool device_await(const DeviceSignals& signals, int peer, int slot) {
  const std::uint64_t* const word =
      signals.links[peer].incoming + static_cast<std::ptrdiff_t>(slot) * signals.slot_stride;
  return detail::await_count(signals, word, detail::next_count(signals.awaited, signals, peer, slot), peer, slot);
}

/// No thread of this CTA passes before the CTA of the same slot has arrived on every rank; called by all threads of the
/// CTA, whose x extent is counted only. Orders what this CTA and those wrote before (all of it, in both directions: a
/// peer's reads before, this CTA's writes after), not what other CTAs of this grid did: for these, the next kernel.
/// False, for all threads, after a time-out. All CTAs of the grid must be resident: `require_resident`.
[[nodiscard]] __device__ inline bool device_barrier(const DeviceSignals& signals, int slot) {
  __syncthreads();
  const int first = static_cast<int>(threadIdx.x), step = static_cast<int>(blockDim.x);
  const bool takes_part = threadIdx.y == 0 && threadIdx.z == 0;
  bool has_met = true;
  for (int peer = first; takes_part && peer < signals.ranks; peer += step) {
    if (peer != signals.rank) device_signal(signals, peer, slot);
  }
  for (int peer = first; takes_part && peer < signals.ranks; peer += step) {
    if (peer != signals.rank) has_met = device_await(signals, peer, slot) && has_met;
  }
  return __syncthreads_and(has_met) != 0;
}

/// A grid goes on when the kernel of the same call runs on every rank: there, what stood before it on its stream is
/// done, and the end of a stream's work has made it visible. That needs no release, which takes more than a
/// microsecond. Nothing of these kernels themselves is ordered. All threads of every CTA call it, once and first of
/// all, in a grid of the same size on every rank, at most as many CTAs as `signals` has slots. The first CTA signals,
/// on the flag of the first slot, and waits for nothing before; so the CTAs need not be resident all at once. False,
/// for all threads, after a time-out.
[[nodiscard]] __device__ inline bool device_meet(const DeviceSignals& signals) {
  const int first = static_cast<int>(threadIdx.x), step = static_cast<int>(blockDim.x);
  const int slot = static_cast<int>(blockIdx.x);
  const auto count = [&](int of_slot, int peer) -> std::uint64_t& {
    return signals.awaited[static_cast<std::size_t>(of_slot) * static_cast<std::size_t>(signals.ranks) +
                           static_cast<std::size_t>(peer)];
  };
  for (int peer = first; peer < signals.ranks; peer += step) {
    const std::uint64_t mine = count(slot, peer) + 1;
    if (slot == 0 && peer != signals.rank) detail::store_relaxed(signals.links[peer].outgoing, mine);
    // Also for the CTAs that only larger grids have.
    for (int of = slot; of < signals.slots; of += static_cast<int>(gridDim.x)) count(of, peer) = mine;
  }
  bool has_met = true;
  for (int peer = first; peer < signals.ranks; peer += step) {
    if (peer == signals.rank) continue;
    has_met = detail::await_count(signals, signals.links[peer].incoming, count(slot, peer), peer, 0) && has_met;
  }
  return __syncthreads_and(has_met) != 0;
}

}  // namespace pleat::inline v0
