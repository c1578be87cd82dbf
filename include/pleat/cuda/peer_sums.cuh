// MappedSums: small sums of PeerReduceScatter in one kernel that meets its peers from inside.
#pragma once

#include <chrono>
#include <span>

#include <pleat/comm/peer_reduce_scatter.hpp>
#include <pleat/cuda/device_signal.cuh>
#include <pleat/cuda/leaf.cuh>

namespace pleat::inline v0 {

namespace detail {
/// What sum_ranks_kernel does, in packs as far as they go and then one by one, after the work before this kernel is
/// done on every rank: a CTA of it runs there.
template <class Out, class Part>
PLEAT_KERNEL void __launch_bounds__(leaf_threads)
    meet_and_sum_kernel(DeviceSignals signals, Out* out, const __grid_constant__ RankParts parts, std::size_t packs,
                        std::size_t elems, bool accumulate) {
  if (!device_barrier(signals, static_cast<int>(blockIdx.x))) return;
  constexpr int width = sum_width<Out, Part>;
  const std::size_t packed = packs * width;
  add_parts<Out, Part, width>(out, parts, 0, packs, accumulate);
  add_parts<Out, Part, 1>(out + packed, parts, packed * sizeof(Part), elems - packed, accumulate);
}
}  // namespace detail

/// The `Sums` of PeerReduceScatter on MappedPeers.
class MappedSums {
 public:
  static constexpr bool exist = true;
  static constexpr int channels(int ctas) { return ctas; }
  static std::size_t persistent_bytes(int ranks, int ctas) {
    Carver memory;
    carve_device_signals(memory, ranks, channels(ctas));
    return memory.used_bytes();
  }

  /// For kernels of at most `ctas` CTAs. Takes `channels(ctas)` channels of the window from `first_channel` on. Waits
  /// for `s`. Errors: C28, C20, T02.
  MappedSums(const MappedPeers& peers, int first_channel, int ctas, Block persistent,
             std::chrono::milliseconds deadline, cudaStream_t s) {
    Carver memory(persistent);
    signals_ = bind_device_signals(peers, first_channel, channels(ctas), memory, deadline, s);
    for_each_type(FloatTypes{}, [&](auto out_type) {
      for_each_type(FloatTypes{}, [&](auto part_type) {
        require_resident(
            detail::meet_and_sum_kernel<typename decltype(out_type)::type, typename decltype(part_type)::type>,
            "meet_and_sum_kernel", ctas, detail::leaf_threads);
      });
    });
  }

  /// As core_leaf's sum_ranks, after the peers' streams have come to the same call. Errors: shape_error T01, T09; C20.
  void add(void* out, DType out_dtype, std::span<const void* const> parts, DType part_dtype, std::size_t elems,
           bool accumulate, int ctas, cudaStream_t s) const {
    const detail::RankParts table = detail::rank_parts(parts, 0);
    dispatch_dtype(FloatTypes{}, out_dtype, [&](auto out_type) {
      dispatch_dtype(FloatTypes{}, part_dtype, [&](auto part_type) {
        using Out = typename decltype(out_type)::type;
        using Part = typename decltype(part_type)::type;
        constexpr int width = detail::sum_width<Out, Part>;
        const std::size_t packs = detail::are_packable<Out, Part>(out, parts, width) ? elems / width : 0;
        detail::meet_and_sum_kernel<Out, Part><<<static_cast<unsigned>(ctas), detail::leaf_threads, 0, s>>>(
            signals_, static_cast<Out*>(out), table, packs, elems, accumulate);
        check_launch("meet_and_sum_kernel");
      });
    });
  }

  /// Waits for `s`. Errors: comm_error C27 when a kernel has waited too long for a peer; C20.
  void check(cudaStream_t s) const { check_device_signals(signals_, "meet_and_sum_kernel", s); }

 private:
  DeviceSignals signals_{};
};

}  // namespace pleat::inline v0
