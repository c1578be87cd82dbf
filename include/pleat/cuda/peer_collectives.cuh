// MappedStores: small blocks of PeerCollectives in one kernel that stores to the peers and signals from inside.
#pragma once

#include <chrono>
#include <cstdint>

#include <pleat/comm/peer_collectives.hpp>
#include <pleat/cuda/device_signal.cuh>
#include <pleat/cuda/executor.hpp>
#include <pleat/cuda/kernel.hpp>

namespace pleat::inline v0 {

namespace detail {

inline constexpr int store_threads = 512;

/// An operation of the kernel below.
struct StoreCall {
  std::byte* const* windows;  // [ranks]
  int* credits;  // [most_ctas]: results that every peer is known to have given back, less those overwritten
  std::ptrdiff_t out_offset;  // of this rank's block of the result, in every window
  int most_ctas;              // of all launches
  int released;               // results given back since the last call
  bool keeps_own;             // the own block is there already
};

/// Brings the line of a word that is needed later into the L1 cache, and waits for nothing.
template <class T>
__device__ __forceinline__ void touch(const T* word) {
  std::uint64_t ignored;
  asm volatile("ld.global.ca.u64 %0, [%1];" : "=l"(ignored) : "l"(word));
}
/// The words that device_barrier on `slot` reads.
__device__ __forceinline__ void touch_barrier(const DeviceSignals& signals, int slot) {
  const int peer = static_cast<int>(threadIdx.x);
  if (peer >= signals.ranks) return;
  const std::size_t count = static_cast<std::size_t>(slot) * static_cast<std::size_t>(signals.ranks) + threadIdx.x;
  touch(signals.links + peer);
  touch(signals.sent + count);
  touch(signals.awaited + count);
}

/// out of peer p [words] = words p * stride_words and on of `in`. Each CTA moves a part of each block, and ends when
/// the CTAs of its number on the peers have stored theirs. Where one of them has ended, the work before its launch is
/// done and so is the reading of results given back by then; all ranks give back alike, so each counts the peers'
/// credits by itself. Only where the last call has left none do they meet before they store.
template <class Word>
PLEAT_KERNEL void __launch_bounds__(store_threads)
    store_blocks_kernel(DeviceSignals signals, StoreCall call, const Word* in, std::size_t stride_words,
                        std::size_t words) {
  constexpr int batch = 4;
  const int full_slot = static_cast<int>(blockIdx.x), free_slot = call.most_ctas + full_slot;
  const int credits = call.credits[blockIdx.x];
  const std::size_t step = static_cast<std::size_t>(gridDim.x) * store_threads;
  const std::size_t start = blockIdx.x * static_cast<std::size_t>(store_threads) + threadIdx.x;
  const auto peer_of = [&](int i) {
    const int peer = signals.rank + i;
    return peer < signals.ranks ? peer : peer - signals.ranks;
  };
  Word word[batch];
  const auto load = [&](int peer, std::size_t first) {
    const Word* const from = in + static_cast<std::size_t>(peer) * stride_words;
#pragma unroll
    for (int b = 0; b < batch; ++b) {
      if (first + b * step < words) word[b] = from[first + b * step];
    }
  };
  load(peer_of(1), start);  // arrives while the rest is looked up
  touch_barrier(signals, full_slot);
  if (threadIdx.x < static_cast<unsigned>(signals.ranks)) touch(call.windows + threadIdx.x);
  if (credits == 0 && !device_barrier(signals, free_slot)) return;
  for (std::size_t first = start; first < words; first += batch * step) {
    for (int i = 1; i <= signals.ranks; ++i) {
      const int peer = peer_of(i);
      if (peer == signals.rank && call.keeps_own) continue;
      const bool is_loaded = i == 1 ? first == start : stride_words == 0;  // all get the same words
      if (!is_loaded) load(peer, first);
      auto* const to = reinterpret_cast<Word*>(call.windows[peer] + call.out_offset);
#pragma unroll
      for (int b = 0; b < batch; ++b) {
        if (first + b * step < words) to[first + b * step] = word[b];
      }
    }
  }
  (void)device_barrier(signals, full_slot);
  // Also for the CTAs that only larger grids have; nobody reads these now.
  for (unsigned i = blockIdx.x + threadIdx.x * gridDim.x; i < static_cast<unsigned>(call.most_ctas);
       i += store_threads * gridDim.x) {
    call.credits[i] = credits + call.released - 1;
  }
}

}  // namespace detail

/// The `Stores` of PeerCollectives on MappedPeers.
class MappedStores {
 public:
  static constexpr bool exist = true;
  /// Signal channels that it takes.
  static constexpr int channels(int ctas) { return 2 * ctas; }
  static std::size_t persistent_bytes(int ranks, int ctas) {
    Carver memory;
    carve(memory, ranks, ctas);
    return memory.used_bytes();
  }

  /// For kernels of at most `ctas` CTAs. Takes `channels(ctas)` channels of the window from `first_channel` on. Waits
  /// for `s`. Errors: C28, C20, T02.
  MappedStores(const MappedPeers& peers, int first_channel, int ctas, Block persistent,
               std::chrono::milliseconds deadline, cudaStream_t s)
      : most_ctas_(ctas), own_window_(peers.base(peers.rank())) {
    Carver memory(persistent);
    signals_ = bind_device_signals(peers, first_channel, channels(ctas), memory, deadline, s);
    windows_ = memory.take<std::byte*>(static_cast<std::size_t>(peers.size()));
    credits_ = memory.take<int>(static_cast<std::size_t>(ctas));
    CudaExecutor{}.zero(credits_, static_cast<std::size_t>(ctas) * sizeof(int), s);
    std::vector<std::byte*> bases;
    for (int peer = 0; peer < peers.size(); ++peer) bases.push_back(peers.base(peer));
    CudaExecutor{}.copy(windows_, bases.data(), bases.size() * sizeof(std::byte*), s);
    check_cuda(cudaStreamSynchronize(s), "cudaStreamSynchronize");  // before the list goes
    require_resident(detail::store_blocks_kernel<uint4>, "store_blocks_kernel", ctas, detail::store_threads);
    require_resident(detail::store_blocks_kernel<std::uint32_t>, "store_blocks_kernel", ctas, detail::store_threads);
    require_resident(detail::store_blocks_kernel<std::uint8_t>, "store_blocks_kernel", ctas, detail::store_threads);
  }

  /// Block p of `in`, p * stride_bytes behind its start, goes to rank p; `own` is where this rank's block of the result
  /// lies in its window. `released`: results given back since the last call, as on every rank.
  void move(const std::byte* in, std::size_t stride_bytes, std::size_t bytes, std::byte* own, int released, int ctas,
            cudaStream_t s) {
    const std::byte* const own_in = in + static_cast<std::size_t>(signals_.rank) * stride_bytes;
    const detail::StoreCall call{windows_, credits_, own - own_window_, most_ctas_, released, own == own_in};
    const auto addresses = reinterpret_cast<std::uintptr_t>(in) | reinterpret_cast<std::uintptr_t>(own) |
                           static_cast<std::uintptr_t>(stride_bytes | bytes);
    if (addresses % sizeof(uint4) == 0) return launch<uint4>(call, ctas, in, stride_bytes, bytes, s);
    if (addresses % sizeof(std::uint32_t) == 0) return launch<std::uint32_t>(call, ctas, in, stride_bytes, bytes, s);
    launch<std::uint8_t>(call, ctas, in, stride_bytes, bytes, s);
  }

  /// Waits for `s`. Errors: comm_error C27 when a kernel has waited too long for a peer; C20.
  void check(cudaStream_t s) const { check_device_signals(signals_, "store_blocks_kernel", s); }

 private:
  static void carve(Carver& memory, int ranks, int ctas) {
    carve_device_signals(memory, ranks, channels(ctas));
    memory.take<std::byte*>(static_cast<std::size_t>(ranks));
    memory.take<int>(static_cast<std::size_t>(ctas));
  }

  template <class Word>
  void launch(const detail::StoreCall& call, int ctas, const std::byte* in, std::size_t stride_bytes, std::size_t bytes,
              cudaStream_t s) const {
    detail::store_blocks_kernel<Word><<<static_cast<unsigned>(ctas), detail::store_threads, 0, s>>>(
        signals_, call, reinterpret_cast<const Word*>(in), stride_bytes / sizeof(Word), bytes / sizeof(Word));
    check_launch("store_blocks_kernel");
  }

  int most_ctas_;
  std::byte* own_window_;
  DeviceSignals signals_{};
  std::byte** windows_ = nullptr;  // [ranks] in device memory
  int* credits_ = nullptr;         // [most_ctas_] in device memory
};

}  // namespace pleat::inline v0
