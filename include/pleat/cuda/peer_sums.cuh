// MappedSums: small sums of PeerReduceScatter in one kernel that meets its peers from inside.
#pragma once

#include <chrono>
#include <vector>

#include <pleat/comm/peer_reduce_scatter.hpp>
#include <pleat/cuda/device_signal.cuh>
#include <pleat/cuda/early_launch.cuh>
#include <pleat/cuda/leaf.cuh>

namespace pleat::inline v0 {

namespace detail {
/// Where the terms lie, as a kernel has looked it up.
struct TermsInWindows {
  const std::byte* const* part;
  int count;
  __device__ const std::byte* operator[](int r) const { return part[r]; }
};

/// What sum_ranks_kernel does with what lies `offset` bytes into each window: in packs as far as they go and then one
/// by one, when this kernel runs on every rank. Dynamic shared memory: a pointer per rank.
template <class Out, class Part>
PLEAT_KERNEL void __launch_bounds__(leaf_threads)
    meet_and_sum_kernel(DeviceSignals signals, const std::byte* const* windows, std::ptrdiff_t offset, Out* out,
                        std::size_t packs, std::size_t elems, bool accumulate) {
  extern __shared__ const std::byte* term_of_rank[];
  for (int r = static_cast<int>(threadIdx.x); r < signals.ranks; r += leaf_threads)
    term_of_rank[r] = windows[r] + offset;
  wait_for_stream();
  if (!device_meet(signals)) return;
  let_next_launch();  // not before: what is launched would get in the way of the meeting
  const TermsInWindows terms{term_of_rank, signals.ranks};
  constexpr int width = sum_width<Out, Part>;
  const std::size_t packed = packs * width;
  add_parts<Out, Part, width>(out, terms, 0, packs, accumulate);
  add_parts<Out, Part, 1>(out + packed, terms, packed * sizeof(Part), elems - packed, accumulate);
}
}  // namespace detail

/// The `Sums` of PeerReduceScatter on MappedPeers.
class MappedSums {
 public:
  static constexpr bool exist = true;
  /// Signal channels that it takes; bytes that it keeps.
  static constexpr int channels = 1;
  static std::size_t persistent_bytes(int ranks, int ctas) {
    Carver memory;
    carve(memory, ranks, ctas);
    return memory.used_bytes();
  }

  /// For kernels of at most `ctas` CTAs. Takes `channels` channels of the window from `first_channel` on. Waits for
  /// `s`. Errors: C20, T02.
  MappedSums(const MappedPeers& peers, int first_channel, int ctas, Block persistent,
             std::chrono::milliseconds deadline, cudaStream_t s)
      : own_window_(peers.base(peers.rank())) {
    Carver memory(persistent);
    signals_ = bind_device_signals(peers, first_channel, ctas, memory, deadline, s);
    windows_ = memory.take<const std::byte*>(static_cast<std::size_t>(peers.size()));
    std::vector<const std::byte*> bases;
    for (int peer = 0; peer < peers.size(); ++peer) bases.push_back(peers.base(peer));
    CudaExecutor{}.copy(windows_, bases.data(), bases.size() * sizeof(bases[0]), s);
    check_cuda(cudaStreamSynchronize(s), "cudaStreamSynchronize");  // before the list goes
    for_each_type(FloatTypes{}, [&](auto out_type) {
      for_each_type(FloatTypes{}, [&](auto part_type) {
        using Out = typename decltype(out_type)::type;
        using Part = typename decltype(part_type)::type;
        preload_kernel(detail::meet_and_sum_kernel<Out, Part>, "meet_and_sum_kernel");
      });
    });
  }

  /// As core_leaf's sum_ranks, of the terms that lie where `mine` is in this rank's window, when the peers' streams
  /// have come to the same call. Errors: shape_error T01; C20.
  void add(void* out, DType out_dtype, const std::byte* mine, DType part_dtype, std::size_t elems, bool accumulate,
           int ctas, cudaStream_t s) const {
    dispatch_dtype(FloatTypes{}, out_dtype, [&](auto out_type) {
      dispatch_dtype(FloatTypes{}, part_dtype, [&](auto part_type) {
        using Out = typename decltype(out_type)::type;
        using Part = typename decltype(part_type)::type;
        constexpr int width = detail::sum_width<Out, Part>;
        const bool packs = detail::is_packable<Out>(out, width) && detail::is_packable<Part>(mine, width);
        launch_early(detail::meet_and_sum_kernel<Out, Part>, "meet_and_sum_kernel", static_cast<unsigned>(ctas),
                     detail::leaf_threads, shared_bytes(), s, signals_, windows_, mine - own_window_,
                     static_cast<Out*>(out), packs ? elems / width : 0, elems, accumulate);
      });
    });
  }

  /// Waits for `s`. Errors: comm_error C27 when a kernel has waited too long for a peer; C20.
  void check(cudaStream_t s) const { check_device_signals(signals_, "meet_and_sum_kernel", s); }

 private:
  static void carve(Carver& memory, int ranks, int ctas) {
    carve_device_signals(memory, ranks, ctas);
    memory.take<const std::byte*>(static_cast<std::size_t>(ranks));
  }
  std::size_t shared_bytes() const { return static_cast<std::size_t>(signals_.ranks) * sizeof(const std::byte*); }

  const std::byte* own_window_;
  DeviceSignals signals_{};
  const std::byte** windows_ = nullptr;  // [ranks] in device memory
};

}  // namespace pleat::inline v0
