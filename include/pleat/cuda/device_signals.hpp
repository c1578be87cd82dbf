// Signals between kernels of different ranks: their memory, their time-out, and the check that a grid may wait at all.
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

#include <pleat/core/carve.hpp>
#include <pleat/core/config.hpp>
#include <pleat/cuda/kernel.hpp>
#include <pleat/cuda/mapped_peers.hpp>

namespace pleat::inline v0 {

/// A wait of a kernel that took too long, as kept in one word; 0 says that none did.
struct DeviceTimeout {
  int rank, peer, slot;

  /// To the word, and back.
  PLEAT_HD constexpr std::uint64_t packed() const {
    return set_bit | static_cast<std::uint64_t>(rank) << 44 | static_cast<std::uint64_t>(peer) << 24 |
           static_cast<std::uint64_t>(slot);
  }
  PLEAT_HD static constexpr DeviceTimeout of(std::uint64_t status) {
    return {static_cast<int>(status >> 44 & 0x7FFFF), static_cast<int>(status >> 24 & 0xFFFFF),
            static_cast<int>(status & 0xFFFFFF)};
  }

  static constexpr std::uint64_t set_bit = std::uint64_t{1} << 63;
};

/// Throws what a kernel has left in its status word; `kernel` names it. Errors: comm_error C27.
inline void check_device_status(std::uint64_t status, const char* kernel) {
  if (status == 0) return;
  const DeviceTimeout timeout = DeviceTimeout::of(status);
  fail<comm_error>("pleat[C27]: in ", kernel, ", rank ", timeout.rank, " of the window waited too long for rank ",
                   timeout.peer, " on slot ", timeout.slot,
                   "; the peer failed, never ran the kernel, or not all of its CTAs were resident");
}

/// The two flags between this rank and a peer in the first slot: the peer's, and the own one.
struct DeviceLink {
  std::uint64_t* outgoing;
  const std::uint64_t* incoming;
};

/// What a kernel needs to signal its peers (device_signal.cuh); an argument passed by value. A slot is what a signal is
/// about, a CTA or a chunk; each is used by one thread per peer at a time. The counts lie in device memory and go on
/// from launch to launch, so that a captured launch may be replayed.
struct DeviceSignals {
  const DeviceLink* links;  // [ranks]
  std::uint64_t* sent;      // [slots, ranks]
  std::uint64_t* awaited;   // [slots, ranks]
  std::uint64_t* status;    // sticky: the first DeviceTimeout
  std::uint64_t timeout_ns;
  int rank, ranks, slots;
  int slot_stride;  // words from a slot's flag to the next slot's
};

/// The device memory of `bind_device_signals`: measures, or hands out.
inline DeviceSignals carve_device_signals(Carver& persistent, int ranks, int slots) {
  const auto counts = static_cast<std::size_t>(ranks) * static_cast<std::size_t>(slots);
  DeviceSignals signals = {};
  signals.links = persistent.take<DeviceLink>(static_cast<std::size_t>(ranks));
  signals.sent = persistent.take<std::uint64_t>(2 * counts + 1);
  signals.awaited = signals.sent + counts;
  signals.status = signals.awaited + counts;
  signals.ranks = ranks;
  signals.slots = slots;
  return signals;
}

/// Binds channels `first_channel` to `first_channel + slots - 1` of the window, which `signal` and `await` leave alone,
/// to kernels, and zeroes their counts on `s`, waiting for it. Every rank calls it alike. Errors: C35, C20, T02.
inline DeviceSignals bind_device_signals(const MappedPeers& peers, int first_channel, int slots, Carver& persistent,
                                         std::chrono::milliseconds timeout, cudaStream_t s) {
  DeviceSignals signals = carve_device_signals(persistent, peers.size(), slots);
  const std::chrono::nanoseconds limit = detail::checked_deadline(timeout);
  signals.timeout_ns = static_cast<std::uint64_t>(limit.count());
  signals.rank = peers.rank();
  signals.slot_stride = peers.words_per_channel();
  std::vector<DeviceLink> links;
  for (int peer = 0; peer < peers.size(); ++peer) {
    links.push_back({peers.outgoing(peer, first_channel), peers.incoming(peer, first_channel)});
  }
  const auto counts = static_cast<std::size_t>(signals.status - signals.sent) + 1;
  check_cuda(cudaMemsetAsync(signals.sent, 0, counts * sizeof(std::uint64_t), s), "cudaMemsetAsync");
  check_cuda(cudaMemcpyAsync(const_cast<DeviceLink*>(signals.links), links.data(), links.size() * sizeof(DeviceLink),
                             cudaMemcpyHostToDevice, s),
             "cudaMemcpyAsync");
  check_cuda(cudaStreamSynchronize(s), "cudaStreamSynchronize");  // before the list goes
  return signals;
}

/// Throws what kernels have left in the status word of `signals`, after what is on `s`; waits for it. `kernel` names
/// them. Errors: comm_error C27; C20.
inline void check_device_signals(const DeviceSignals& signals, const char* kernel, cudaStream_t s) {
  std::uint64_t status = 0;
  check_cuda(cudaMemcpyAsync(&status, signals.status, sizeof status, cudaMemcpyDeviceToHost, s), "cudaMemcpyAsync");
  check_cuda(cudaStreamSynchronize(s), "cudaStreamSynchronize");
  check_device_status(status, kernel);
}

/// Loads `kernel` and checks that `ctas` of it fit on the current device at once: CTAs that wait for CTAs of a peer
/// must all be resident there too. At bind, on every rank. Errors: comm_error C28, C20.
template <class Kernel>
void require_resident(Kernel* kernel, const char* name, int ctas, int threads, std::size_t shared_bytes = 0) {
  preload_kernel(kernel, name);
  int device = 0, multiprocessors = 0, per_multiprocessor = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device),
             "cudaDeviceGetAttribute");
  check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_multiprocessor, reinterpret_cast<const void*>(kernel),
                                                           threads, shared_bytes),
             "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  if (ctas > per_multiprocessor * multiprocessors) {
    fail<comm_error>("pleat[C28]: ", name, " waits for peers, so its ", ctas, " CTAs of ", threads,
                     " threads must be resident at once; device ", device, " holds at most ",
                     per_multiprocessor * multiprocessors);
  }
}

}  // namespace pleat::inline v0
