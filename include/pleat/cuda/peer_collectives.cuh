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
  std::ptrdiff_t out_offset;  // of this rank's block of the result, in every window
  int released;               // results given back since the last call
  bool keeps_own;             // the own block is there already
};

/// out of peer p [words] = words p * stride_words and on of `in`. Each CTA moves a part of each block, and meets the
/// CTA of its number on the peers: it gives them the credits of results that are no longer used, takes one, stores, and
/// ends when theirs have stored.
template <class Word>
PLEAT_KERNEL void __launch_bounds__(store_threads)
    store_blocks_kernel(DeviceSignals signals, StoreCall call, const Word* in, std::size_t stride_words,
                        std::size_t words) {
  constexpr int batch = 4;
  const int full_slot = static_cast<int>(blockIdx.x), free_slot = full_slot + static_cast<int>(gridDim.x);
  const int thread = static_cast<int>(threadIdx.x);
  bool has_met = true;
  for (int peer = thread; peer < signals.ranks; peer += store_threads) {
    if (peer == signals.rank) continue;
    for (int i = 0; i < call.released; ++i) device_signal(signals, peer, free_slot);
    has_met = device_await(signals, peer, free_slot) && has_met;
  }
  if (__syncthreads_and(has_met) == 0) return;
  const std::size_t step = static_cast<std::size_t>(gridDim.x) * store_threads;
  const std::size_t start = blockIdx.x * static_cast<std::size_t>(store_threads) + threadIdx.x;
  for (int i = 1; i <= signals.ranks; ++i) {
    const int peer = (signals.rank + i) % signals.ranks;
    if (peer == signals.rank && call.keeps_own) continue;
    const Word* const from = in + static_cast<std::size_t>(peer) * stride_words;
    auto* const to = reinterpret_cast<Word*>(call.windows[peer] + call.out_offset);
    for (std::size_t first = start; first < words; first += batch * step) {
      Word word[batch];
#pragma unroll
      for (int b = 0; b < batch; ++b) {
        if (first + b * step < words) word[b] = from[first + b * step];
      }
#pragma unroll
      for (int b = 0; b < batch; ++b) {
        if (first + b * step < words) to[first + b * step] = word[b];
      }
    }
  }
  __syncthreads();
  for (int peer = thread; peer < signals.ranks; peer += store_threads) {
    if (peer != signals.rank) device_signal(signals, peer, full_slot);
  }
  for (int peer = thread; peer < signals.ranks; peer += store_threads) {
    if (peer != signals.rank) device_await(signals, peer, full_slot);
  }
}

}  // namespace detail

/// The `Stores` of PeerCollectives on MappedPeers.
class MappedStores {
 public:
  static constexpr bool exist = true;
  static constexpr int channels(int ctas) { return 2 * ctas; }
  static std::size_t persistent_bytes(int ranks, int ctas) {
    Carver memory;
    carve(memory, ranks, ctas);
    return memory.used_bytes();
  }

  /// Takes `channels(ctas)` channels of the window from `first_channel` on. Waits for `s`. Errors: C28, C20, T02.
  MappedStores(const MappedPeers& peers, int first_channel, int ctas, Block persistent,
               std::chrono::milliseconds deadline, cudaStream_t s)
      : ctas_(ctas), own_window_(peers.base(peers.rank())) {
    Carver memory(persistent);
    signals_ = bind_device_signals(peers, first_channel, channels(ctas), memory, deadline, s);
    windows_ = memory.take<std::byte*>(static_cast<std::size_t>(peers.size()));
    std::vector<std::byte*> bases;
    for (int peer = 0; peer < peers.size(); ++peer) bases.push_back(peers.base(peer));
    CudaExecutor{}.copy(windows_, bases.data(), bases.size() * sizeof(std::byte*), s);
    check_cuda(cudaStreamSynchronize(s), "cudaStreamSynchronize");  // before the list goes
    require_resident(detail::store_blocks_kernel<uint4>, "store_blocks_kernel", ctas, detail::store_threads);
    require_resident(detail::store_blocks_kernel<std::uint32_t>, "store_blocks_kernel", ctas, detail::store_threads);
    require_resident(detail::store_blocks_kernel<std::uint8_t>, "store_blocks_kernel", ctas, detail::store_threads);
  }

  /// Block p of `in`, p * stride_bytes behind its start, goes to rank p; `own` is where this rank's block of the result
  /// lies in its window. `released`: results given back since the last call.
  void move(const std::byte* in, std::size_t stride_bytes, std::size_t bytes, std::byte* own, int released,
            cudaStream_t s) {
    const std::byte* const own_in = in + static_cast<std::size_t>(signals_.rank) * stride_bytes;
    const detail::StoreCall call{windows_, own - own_window_, released, own == own_in};
    const auto addresses = reinterpret_cast<std::uintptr_t>(in) | reinterpret_cast<std::uintptr_t>(own) |
                           static_cast<std::uintptr_t>(stride_bytes | bytes);
    if (addresses % sizeof(uint4) == 0) return launch<uint4>(call, in, stride_bytes, bytes, s);
    if (addresses % sizeof(std::uint32_t) == 0) return launch<std::uint32_t>(call, in, stride_bytes, bytes, s);
    launch<std::uint8_t>(call, in, stride_bytes, bytes, s);
  }

  /// Waits for `s`. Errors: comm_error C27 when a kernel has waited too long for a peer; C20.
  void check(cudaStream_t s) const {
    std::uint64_t status = 0;
    CudaExecutor{}.copy(&status, signals_.status, sizeof status, s);
    check_cuda(cudaStreamSynchronize(s), "cudaStreamSynchronize");
    check_device_status(status, "store_blocks_kernel");
  }

 private:
  static void carve(Carver& memory, int ranks, int ctas) {
    carve_device_signals(memory, ranks, channels(ctas));
    memory.take<std::byte*>(static_cast<std::size_t>(ranks));
  }

  template <class Word>
  void launch(const detail::StoreCall& call, const std::byte* in, std::size_t stride_bytes, std::size_t bytes,
              cudaStream_t s) const {
    detail::store_blocks_kernel<Word><<<static_cast<unsigned>(ctas_), detail::store_threads, 0, s>>>(
        signals_, call, reinterpret_cast<const Word*>(in), stride_bytes / sizeof(Word), bytes / sizeof(Word));
    check_launch("store_blocks_kernel");
  }

  int ctas_;
  std::byte* own_window_;
  DeviceSignals signals_{};
  std::byte** windows_ = nullptr;  // [ranks] in device memory
};

}  // namespace pleat::inline v0
