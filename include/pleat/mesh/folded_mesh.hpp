// The folded mesh as a type: all sizes and strides are constants, and an object of it is empty.
#pragma once

#include <pleat/mesh/concept.hpp>
#include <pleat/mesh/domain.hpp>

namespace pleat::inline v0 {

/// A mesh of `PP * DP * CP` ranks whose stages are factored twice: as (dp, cp) for attention, as (expert_dp, ep) for
/// the experts. `Replicas` copies of each parameter's shards are kept per stage (HSDP); the replica is the outer index.
/// Errors, all at compile time: M00, M02, M03; M04 in a constant expression, M04 thrown at run time.
/// source: MoE parallel folding, arXiv 2504.14960 section 3.2 (its Listing 1 orders ranks differently).
template <int PP, int DP, int CP, int EP, int Replicas = 1>
struct FoldedMesh {
 private:
  static constexpr detail::MeshSizes sizes = detail::static_sizes<PP, DP, CP, EP, Replicas>();
  static_assert(sizes.world >= 1);  // names the sizes, so that a type that is merely used is checked

 public:
  static constexpr int pp = PP;
  static constexpr int dp = DP;
  static constexpr int cp = CP;
  static constexpr int ep = EP;
  static constexpr int replicas = Replicas;
  static constexpr int expert_dp = sizes.expert_dp;  ///< ranks of a stage that host the same experts
  static constexpr int stage_size = sizes.stage;     ///< ranks that run one pipeline stage
  static constexpr int world_size = sizes.world;

  PLEAT_HD static constexpr Coordinate coordinate(int rank) { return pleat::coordinate(FoldedMesh{}, rank); }
  PLEAT_HD static constexpr int rank(const AttentionCoordinate& at) { return pleat::rank(FoldedMesh{}, at); }
  PLEAT_HD static constexpr int rank(const ExpertCoordinate& at) { return pleat::rank(FoldedMesh{}, at); }
  PLEAT_HD static constexpr int rank_of(const Coordinate& at) { return pleat::rank_of(FoldedMesh{}, at); }

  template <Axis... Axes>
  PLEAT_HD static constexpr Group group(int rank) {
    return pleat::group<Axes...>(FoldedMesh{}, rank);
  }
  template <Axis... Axes>
  PLEAT_HD static constexpr GroupList groups() {
    return pleat::groups<Axes...>(FoldedMesh{});
  }
  template <Param param>
  PLEAT_HD static constexpr Group shard_group(int rank) {
    return pleat::shard_group<param>(FoldedMesh{}, rank);
  }
  PLEAT_HD static constexpr Group replica_group(int rank) { return pleat::replica_group(FoldedMesh{}, rank); }
  template <Axis... Axes>
  PLEAT_HD static constexpr bool fits_domain(int gpus_per_domain) {
    return pleat::fits_domain<Axes...>(FoldedMesh{}, gpus_per_domain);
  }
};

/// The mesh that folds `World` ranks: `dp = World / PP / CP`. Errors at compile time: M01, and those of FoldedMesh.
template <int World, int PP, int CP, int EP, int Replicas = 1>
using fold_t = FoldedMesh<PP, detail::static_fold_dp<World, PP, CP>(), CP, EP, Replicas>;

}  // namespace pleat::inline v0
