// The operations that comm_bench times: bare transfers, NCCL, and the library's communicators.
#pragma once

#include <pleat/comm/ordered_sum.hpp>
#include <pleat/cuda/leaf.cuh>
#include <pleat/cuda/thread_comm.hpp>

#include "site.cuh"

namespace comm_bench {

using pleat::DType;

// Bare transfers: all ranks at once, nothing that says when they are done.

/// The other ranks, the next one first: no two ranks are at the same target.
template <class F>
void for_others(const Site& site, F&& f) {
  for (int step = 1; step < site.ranks(); ++step) f((site.rank() + step) % site.ranks());
}

inline Operation bare_copy(Site& site, std::size_t bytes) {
  return {Shape::exchange, [&site, bytes](int i, const std::byte* in) {
            for_others(site, [&](int peer) {
              std::byte* const to = site.window_out(peer, i, bytes) + static_cast<std::size_t>(site.rank()) * bytes;
              check_cuda(cudaMemcpyAsync(to, in, bytes, cudaMemcpyDeviceToDevice, site.s), "cudaMemcpyAsync");
            });
            return site.window_out(site.rank(), i, bytes);
          }};
}
inline Operation bare_stores(Site& site, std::size_t bytes, unsigned ctas) {
  return {Shape::exchange, [&site, bytes, ctas](int i, const std::byte* in) {
            for_others(site, [&](int peer) {
              std::byte* const to = site.window_out(peer, i, bytes) + static_cast<std::size_t>(site.rank()) * bytes;
              bare_store<<<ctas, bare_threads, 0, site.s>>>(reinterpret_cast<uint4*>(to),
                                                            reinterpret_cast<const uint4*>(in), bytes / sizeof(uint4));
              check_launch("bare_store");
            });
            return site.window_out(site.rank(), i, bytes);
          }};
}
/// The terms lie in the ranks' windows, as they do for the library's sum.
inline Operation bare_sum(Site& site, std::size_t bytes, unsigned ctas) {
  const auto terms = [&site, bytes] {
    BareTerms result{};
    for (int r = 0; r < site.ranks(); ++r) {
      result.at[r] = reinterpret_cast<const float4*>(site.window_in(r) + static_cast<std::size_t>(site.rank()) * bytes);
    }
    return result;
  };
  return {.shape = Shape::sum,
          .enqueue =
              [&site, bytes, ctas, terms](int i, const std::byte*) {
                launch_bare_sum(ctas, site.s, reinterpret_cast<float4*>(site.out(i, bytes)), terms(), site.ranks(),
                                bytes / sizeof(float4));
                check_launch("bare_pull_and_add");
                return site.out(i, bytes);
              },
          .input = [&site](int) { return site.window_in(site.rank()); },
          .inputs = 1};
}
/// The leaf alone on the same terms.
inline Operation leaf_sum(Site& site, std::size_t bytes) {
  return {.shape = Shape::sum,
          .enqueue =
              [&site, bytes](int i, const std::byte*) {
                const std::size_t mine = static_cast<std::size_t>(site.rank()) * bytes;
                std::vector<const void*> terms;
                for (int r = 0; r < site.ranks(); ++r) terms.push_back(site.window_in(r) + mine);
                pleat::core_leaf<pleat::cuda_device>::sum_ranks(site.out(i, bytes), DType::f32, terms, DType::f32,
                                                                bytes / 4, false, site.s);
                return site.out(i, bytes);
              },
          .input = [&site](int) { return site.window_in(site.rank()); },
          .inputs = 1};
}

// NCCL itself.

inline Operation nccl_all_gather(Site& site, std::size_t bytes) {
  return {Shape::gather, [&site, bytes](int i, const std::byte* in) {
            site.world.settle(ncclAllGather(in, site.out(i, bytes), bytes, ncclUint8, site.world.native(), site.s),
                              "ncclAllGather");
            return site.out(i, bytes);
          }};
}
/// All of it in memory that NCCL has a window on.
inline Operation nccl_window_all_gather(Site& site, std::size_t bytes) {
  return {Shape::gather,
          [&site, bytes](int i, const std::byte* in) {
            std::byte* const out = site.window_out(site.rank(), i, bytes);
            site.world.settle(ncclAllGather(in, out, bytes, ncclUint8, site.world.native(), site.s), "ncclAllGather");
            return out;
          },
          [&site](int) { return site.window_in(site.rank()); }, 0, 1};
}
inline void nccl_swap(Site& site, const std::byte* in, std::byte* out, std::size_t bytes) {
  const std::size_t mine = static_cast<std::size_t>(site.rank()) * bytes;
  check_cuda(cudaMemcpyAsync(out + mine, in + mine, bytes, cudaMemcpyDeviceToDevice, site.s), "cudaMemcpyAsync");
  site.world.settle(ncclGroupStart(), "ncclGroupStart");
  for_others(site, [&](int peer) {
    const std::size_t at = static_cast<std::size_t>(peer) * bytes;
    site.world.settle(ncclSend(in + at, bytes, ncclUint8, peer, site.world.native(), site.s), "ncclSend");
    site.world.settle(ncclRecv(out + at, bytes, ncclUint8, peer, site.world.native(), site.s), "ncclRecv");
  });
  site.world.settle(ncclGroupEnd(), "ncclGroupEnd");
}
inline Operation nccl_all_to_all(Site& site, std::size_t bytes) {
  return {Shape::to_all, [&site, bytes](int i, const std::byte* in) {
            nccl_swap(site, in, site.out(i, bytes), bytes);
            return site.out(i, bytes);
          }};
}
inline Operation nccl_window_all_to_all(Site& site, std::size_t bytes) {
  return {Shape::to_all,
          [&site, bytes](int i, const std::byte* in) {
            std::byte* const out = site.window_out(site.rank(), i, bytes);
            nccl_swap(site, in, out, bytes);
            return out;
          },
          [&site](int) { return site.window_in(site.rank()); }, 0, 1};
}
inline Operation nccl_reduce_scatter(Site& site, std::size_t bytes) {
  return {Shape::sum, [&site, bytes](int i, const std::byte* in) {
            site.world.settle(
                ncclReduceScatter(in, site.out(i, bytes), bytes / 4, ncclFloat32, ncclSum, site.world.native(), site.s),
                "ncclReduceScatter");
            return site.out(i, bytes);
          }};
}

// The library's communicators: NcclComm, and CudaThreadComm where ranks are threads.

template <class Comm>
Operation comm_all_gather(Site& site, Comm& comm, std::size_t bytes) {
  return {Shape::gather, [&site, &comm, bytes](int i, const std::byte* in) {
            comm.all_gather(in, site.out(i, bytes), bytes, DType::u8, site.s);
            return site.out(i, bytes);
          }};
}
template <class Comm>
Operation comm_all_to_all(Site& site, Comm& comm, std::size_t bytes) {
  return {Shape::to_all, [&site, &comm, bytes](int i, const std::byte* in) {
            comm.all_to_all(in, site.out(i, bytes), bytes, DType::u8, site.s);
            return site.out(i, bytes);
          }};
}
template <class Comm>
Operation comm_ordered_sum(Site& site, Comm& comm, std::size_t bytes) {
  return {.shape = Shape::sum,
          .enqueue =
              [&site, &comm, bytes](int i, const std::byte* in) {
                const std::vector<std::size_t> counts(site.blocks(), bytes / 4);
                const pleat::Block scratch{site.out(i + 1, bytes), site.blocks() * bytes};
                pleat::reduce_scatter_ordered(pleat::GroupComm<Comm>(comm), in, DType::f32, counts, site.out(i, bytes),
                                              DType::f32, false, scratch, site.s);
                return site.out(i, bytes);
              },
          .most_in_a_row = 1};
}

}  // namespace comm_bench
