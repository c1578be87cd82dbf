// The folded mesh with sizes known at run time, and the way from it to a type.
#pragma once

#include <pleat/mesh/concept.hpp>
#include <pleat/mesh/domain.hpp>

namespace pleat::inline v0 {

/// What FoldedMesh is, as a value: the same members, checked when it is made. The sizes are for reading; one that is
/// assigned to alone makes the others wrong.
struct RuntimeMesh {
  int pp = 1;
  int dp = 1;
  int cp = 1;
  int ep = 1;
  int replicas = 1;
  int expert_dp = 1;
  int stage_size = 1;
  int world_size = 1;

  /// The mesh of one rank.
  RuntimeMesh() = default;
  /// Errors: M00, M02, M03.
  PLEAT_HD constexpr explicit RuntimeMesh(const MeshDegrees& d) : RuntimeMesh(d, detail::checked_sizes(d)) {}
  /// Any other mesh by value.
  template <static_mesh Mesh>
  PLEAT_HD constexpr RuntimeMesh(const Mesh& mesh)
      : RuntimeMesh(MeshDegrees{mesh.pp, mesh.dp, mesh.cp, mesh.ep, mesh.replicas}) {}

  /// Folds a world: `dp = world / pp / cp`, `expert_dp = world / pp / ep`. Errors: M00, M01, M02, M03.
  PLEAT_HD static constexpr RuntimeMesh fold(const FoldDegrees& d) {
    return RuntimeMesh(MeshDegrees{d.pp, detail::checked_fold_dp(d), d.cp, d.ep, d.replicas});
  }

  PLEAT_HD constexpr Coordinate coordinate(int rank) const { return pleat::coordinate(*this, rank); }
  PLEAT_HD constexpr int rank(const AttentionCoordinate& at) const { return pleat::rank(*this, at); }
  PLEAT_HD constexpr int rank(const ExpertCoordinate& at) const { return pleat::rank(*this, at); }
  PLEAT_HD constexpr int rank_of(const Coordinate& at) const { return pleat::rank_of(*this, at); }

  template <Axis... Axes>
  PLEAT_HD constexpr Group group(int rank) const {
    return pleat::group<Axes...>(*this, rank);
  }
  template <Axis... Axes>
  PLEAT_HD constexpr GroupList groups() const {
    return pleat::groups<Axes...>(*this);
  }
  template <Param param>
  PLEAT_HD constexpr Group shard_group(int rank) const {
    return pleat::shard_group<param>(*this, rank);
  }
  PLEAT_HD constexpr Group replica_group(int rank) const { return pleat::replica_group(*this, rank); }
  template <Axis... Axes>
  PLEAT_HD constexpr bool fits_domain(int gpus_per_domain) const {
    return pleat::fits_domain<Axes...>(*this, gpus_per_domain);
  }

  friend constexpr bool operator==(const RuntimeMesh&, const RuntimeMesh&) = default;

 private:
  PLEAT_HD constexpr RuntimeMesh(const MeshDegrees& d, const detail::MeshSizes& sizes)
      : pp(d.pp),
        dp(d.dp),
        cp(d.cp),
        ep(d.ep),
        replicas(d.replicas),
        expert_dp(sizes.expert_dp),
        stage_size(sizes.stage),
        world_size(sizes.world) {}
};

namespace detail {

/// Meshes by name, for an error text.
template <class... Meshes>
struct MeshList {};
template <class... Meshes>
constexpr void append_to(Message& message, MeshList<Meshes...>) {
  const char* separator = "";
  ((message.append(separator), append_part(message, Meshes{}), separator = " "), ...);
}

template <class All, class First, class... Rest, class Function>
constexpr decltype(auto) with_first_match(const RuntimeMesh& mesh, Function&& function) {
  if constexpr (!static_mesh<First>) {
    return static_cast<Function&&>(function)(mesh);
  } else {
    if (same_mesh(mesh, First{})) return static_cast<Function&&>(function)(First{});
    if constexpr (sizeof...(Rest) > 0) {
      return with_first_match<All, Rest...>(mesh, static_cast<Function&&>(function));
    } else {
      fail<mesh_error>("pleat[M10]: no mesh ", mesh, " is compiled in; valid meshes: ", All{});
    }
  }
}

}  // namespace detail

/// Calls `function` with the one of `Meshes` that has the sizes of `mesh`, and returns what it returns (one type for
/// all). `RuntimeMesh` as the last of them takes what no other matches. Errors: M10, with the meshes that are named.
template <folded_mesh... Meshes, class Function>
constexpr decltype(auto) with_mesh(const RuntimeMesh& mesh, Function&& function) {
  static_assert(sizeof...(Meshes) > 0, "pleat[M10]: with_mesh needs the meshes to compile in: name at least one");
  return detail::with_first_match<detail::MeshList<Meshes...>, Meshes...>(mesh, static_cast<Function&&>(function));
}

}  // namespace pleat::inline v0
