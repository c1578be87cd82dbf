// The library's collectives on peer-mapped memory, as operations that comm_bench times.
#pragma once

#include <deque>

#include <pleat/cuda/peer_collectives.cuh>
#include <pleat/cuda/peer_sums.cuh>

#include "operations.cuh"

namespace comm_bench {

/// Stores are measured beyond the sizes that the table gives them, with several numbers of CTAs: the table is made of
/// these rows.
inline constexpr std::size_t most_store_bytes = 64 * mib, most_sum_bytes = 64 * mib;
inline constexpr int store_ctas[] = {1, 2, 4, 8, 16, 32, 64, 132};
inline constexpr int sum_ctas[] = {0, 32, 64, 132};  // 0: streams meet

/// All of it bound to one arena.
class PeerOperations {
 public:
  using Collectives = pleat::PeerCollectives<pleat::CudaExecutor, pleat::MappedPeers, pleat::MappedStores>;
  using Sums = pleat::PeerReduceScatter<pleat::CudaExecutor, pleat::MappedPeers, pleat::MappedSums>;

  explicit PeerOperations(Site& site, std::size_t most_block_bytes)
      : site_(site), copies_(bind<pleat::MappedStores, Collectives>(copies_plan(site.ranks(), most_block_bytes))) {
    for (const int ctas : store_ctas)
      stores_.push_back(bind<pleat::MappedStores, Collectives>(stores_plan(site.ranks(), ctas)));
    for (const int ctas : sum_ctas)
      sums_.push_back(bind<pleat::MappedSums, Sums>(sums_plan(site.ranks(), ctas, most_block_bytes)));
    site.world.wait(site.s);
    site.meet();
  }

  static std::size_t window_bytes(int ranks, std::size_t most_block_bytes) {
    std::size_t bytes = copies_plan(ranks, most_block_bytes).footprint().symmetric;
    for (const int ctas : store_ctas) bytes += stores_plan(ranks, ctas).footprint().symmetric;
    for (const int ctas : sum_ctas) bytes += sums_plan(ranks, ctas, most_block_bytes).footprint().symmetric;
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
  /// `i`: which of `sum_ctas`. The terms lie there from the last two inputs on.
  Operation ordered_sum(std::size_t i, std::size_t bytes) {
    Sums& op = sums_[i].op;
    return {.shape = Shape::sum,
            .enqueue =
                [this, &op, bytes](int k, const std::byte*) {
                  if (k >= pleat::peer_slots) (void)op.input(site_.s);
                  op.reduce_scatter(site_.out(k, bytes), DType::f32, bytes / 4, false, site_.s);
                  return site_.out(k, bytes);
                },
            .input = [this, &op](int) { return op.input(site_.s); },
            .inputs = pleat::peer_slots};
  }

  /// Errors: comm_error C27.
  void check() {
    for (Bound<Collectives>& bound : stores_) bound.op.check_stores(site_.s);
    for (Bound<Sums>& bound : sums_) bound.op.check_sums(site_.s);
  }

 private:
  template <class Op>
  struct Bound {
    pleat::CudaBuffer persistent;
    Op op;
  };

  static pleat::PeerCollectivesPlan copies_plan(int ranks, std::size_t most_block_bytes) {
    return pleat::plan_peer_collectives<pleat::MappedStores>(ranks, most_block_bytes, {.stores = {}});
  }
  static pleat::PeerCollectivesPlan stores_plan(int ranks, int ctas) {
    return pleat::plan_peer_collectives<pleat::MappedStores>(ranks, most_store_bytes,
                                                             {.stores = {{{most_store_bytes, ctas}}}});
  }
  static pleat::PeerReduceScatterPlan sums_plan(int ranks, int ctas, std::size_t most_block_bytes) {
    return pleat::plan_peer_reduce_scatter<pleat::MappedSums>(
        ranks, (ctas == 0 ? most_block_bytes : most_sum_bytes) / 4, DType::f32,
        {.sums = {{{ctas == 0 ? 0 : most_sum_bytes, ctas}}}});
  }
  template <class Kernels, class Op, class Plan>
  Bound<Op> bind(const Plan& plan) const {
    pleat::CudaBuffer persistent(plan.footprint().persistent);
    const pleat::Memory<pleat::NcclArena> memory{.persistent = persistent.block(), .arena = &site_.arena};
    return {std::move(persistent),
            pleat::bind<Kernels>(plan, pleat::CudaExecutor{}, pleat::GroupComm<pleat::NcclComm>(site_.world), memory,
                                 site_.s, std::chrono::seconds(5))};
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
  Bound<Collectives> copies_;
  std::deque<Bound<Collectives>> stores_;
  std::deque<Bound<Sums>> sums_;
};

}  // namespace comm_bench
