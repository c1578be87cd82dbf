// The library's collectives on peer-mapped memory, as operations that comm_bench times.
#pragma once

#include <deque>

#include <pleat/comm/peer_reduce_scatter.hpp>
#include <pleat/cuda/peer_collectives.cuh>

#include "operations.cuh"

namespace comm_bench {

/// Stores are measured beyond the sizes that the table gives them, with several numbers of CTAs: the table is made of
/// these rows.
inline constexpr std::size_t most_store_bytes = 64 * mib;
inline constexpr int store_ctas[] = {1, 2, 4, 8, 16, 32, 64, 132};

/// All of it bound to one arena.
class PeerOperations {
 public:
  using Collectives = pleat::PeerCollectives<pleat::CudaExecutor, pleat::MappedPeers, pleat::MappedStores>;
  using Sums = pleat::PeerReduceScatter<pleat::CudaExecutor, pleat::MappedPeers>;

  explicit PeerOperations(Site& site, std::size_t most_block_bytes)
      : site_(site),
        copies_(bind(copies_plan(most_block_bytes), site)),
        sums_(pleat::bind(sums_plan(most_block_bytes), pleat::CudaExecutor{}, group(site),
                          pleat::Memory<pleat::NcclArena>{.arena = &site.arena}, site.s)) {
    for (const int ctas : store_ctas) stores_.push_back(bind(stores_plan(ctas), site));
    site.world.wait(site.s);
    site.meet();
  }

  static std::size_t window_bytes(std::size_t most_block_bytes) {
    std::size_t bytes =
        copies_plan(most_block_bytes).footprint().symmetric + sums_plan(most_block_bytes).footprint().symmetric;
    for (const int ctas : store_ctas) bytes += stores_plan(ctas).footprint().symmetric;
    return bytes;
  }

  Operation copies_all_gather(std::size_t bytes) { return all_gather(copies_.op, bytes); }
  Operation copies_all_to_all(std::size_t bytes) { return all_to_all(copies_.op, bytes); }
  /// `i`: which of `store_ctas`.
  Operation stores_all_gather(std::size_t i, std::size_t bytes) { return all_gather(stores_[i].op, bytes); }
  Operation stores_all_to_all(std::size_t i, std::size_t bytes) { return all_to_all(stores_[i].op, bytes); }

  /// The own block is written where the result has it.
  Operation copies_all_gather_in_place(std::size_t bytes) {
    Operation operation = all_gather(copies_.op, bytes);
    operation.input = [this, bytes](int) { return copies_.op.own_block(bytes, DType::u8); };
    operation.most_in_a_row = 1;
    return operation;
  }
  Operation ordered_sum(std::size_t bytes) {
    return {Shape::sum,
            [this, bytes](int i, const std::byte*) {
              sums_.reduce_scatter(site_.out(i, bytes), DType::f32, bytes / 4, false, site_.s);
              return site_.out(i, bytes);
            },
            [this](int) { return sums_.input(site_.s); }, pleat::peer_slots};
  }

  /// Errors: comm_error C27.
  void check() {
    for (Bound& bound : stores_) bound.op.check_stores(site_.s);
  }

 private:
  struct Bound {
    pleat::CudaBuffer persistent;
    Collectives op;
  };

  static pleat::PeerCollectivesPlan copies_plan(std::size_t most_block_bytes) {
    return pleat::plan_peer_collectives<pleat::MappedStores>(ranks, most_block_bytes, {.stores = {}});
  }
  static pleat::PeerCollectivesPlan stores_plan(int ctas) {
    return pleat::plan_peer_collectives<pleat::MappedStores>(ranks, most_store_bytes,
                                                             {.stores = {{{most_store_bytes, ctas}}}});
  }
  static pleat::PeerReduceScatterPlan sums_plan(std::size_t most_block_bytes) {
    return {.ranks = ranks, .block_elems = most_block_bytes / 4};
  }
  static pleat::GroupComm<pleat::NcclComm> group(Site& site) { return site.world; }
  static Bound bind(const pleat::PeerCollectivesPlan& plan, Site& site) {
    pleat::CudaBuffer persistent(plan.footprint().persistent);
    const pleat::Memory<pleat::NcclArena> memory{.persistent = persistent.block(), .arena = &site.arena};
    return {std::move(persistent), pleat::bind<pleat::MappedStores>(plan, pleat::CudaExecutor{}, group(site), memory,
                                                                    site.s, std::chrono::seconds(5))};
  }

  /// Given back at once: the result lies there until the call after the next.
  Operation all_gather(Collectives& op, std::size_t bytes) {
    return {Shape::gather, [this, &op, bytes](int, const std::byte* in) {
              const std::byte* const out = op.all_gather(in, bytes, DType::u8, {site_.s, site_.side});
              op.release({site_.s, site_.side});
              return out;
            }};
  }
  Operation all_to_all(Collectives& op, std::size_t bytes) {
    return {Shape::to_all, [this, &op, bytes](int, const std::byte* in) {
              const std::byte* const out = op.all_to_all(in, bytes, DType::u8, {site_.s, site_.side});
              op.release({site_.s, site_.side});
              return out;
            }};
  }

  Site& site_;
  Bound copies_;
  Sums sums_;
  std::deque<Bound> stores_;
};

}  // namespace comm_bench
