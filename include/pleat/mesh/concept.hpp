// What a folded mesh is, and everything that can be asked of one: the same functions for a static and a run-time mesh.
#pragma once

#include <pleat/mesh/axis.hpp>
#include <pleat/mesh/checks.hpp>
#include <pleat/mesh/group.hpp>

namespace pleat::inline v0 {

/// A type with the sizes of a folded mesh, static or not; see FoldedMesh for what they mean.
template <class Mesh>
concept folded_mesh = requires(const Mesh& mesh) {
  int{mesh.pp};
  int{mesh.dp};
  int{mesh.cp};
  int{mesh.ep};
  int{mesh.expert_dp};
  int{mesh.replicas};
  int{mesh.stage_size};
  int{mesh.world_size};
};

/// A mesh whose sizes are part of its type.
template <class Mesh>
concept static_mesh = folded_mesh<Mesh> && requires {
  *&Mesh::world_size;
};  // not of a pointer to member

/// Where a rank stands in the attention view.
struct AttentionCoordinate {
  int pp = 0;
  int dp = 0;
  int cp = 0;
  friend constexpr bool operator==(const AttentionCoordinate&, const AttentionCoordinate&) = default;
};
/// Where a rank stands in the expert view.
struct ExpertCoordinate {
  int pp = 0;
  int expert_dp = 0;
  int ep = 0;
  friend constexpr bool operator==(const ExpertCoordinate&, const ExpertCoordinate&) = default;
};
/// Where a rank stands in both views. `dp` alone decides which data it reads, `ep` alone which experts it hosts.
struct Coordinate {
  int pp = 0;
  int dp = 0;
  int cp = 0;
  int expert_dp = 0;
  int ep = 0;
  friend constexpr bool operator==(const Coordinate&, const Coordinate&) = default;
};
constexpr void append_to(Message& message, const Coordinate& at) {
  message.append("pp=").append(at.pp).append(" dp=").append(at.dp).append(" cp=").append(at.cp);
  message.append(" expert_dp=").append(at.expert_dp).append(" ep=").append(at.ep);
}

/// The mesh as text, `pp2-dp4-cp4-ep2` or `pp2-dp4-cp4-ep2-r2`.
template <folded_mesh Mesh>
constexpr void append_to(Message& message, const Mesh& mesh) {
  message.append("pp").append(int{mesh.pp}).append("-dp").append(int{mesh.dp});
  message.append("-cp").append(int{mesh.cp}).append("-ep").append(int{mesh.ep});
  if (mesh.replicas != 1) message.append("-r").append(int{mesh.replicas});
}

namespace detail {

/// The same ranks seen twice: the one place where sizes and axes become strides. No template, since every mesh uses it.
struct Folding {
  Factorization<Axis, 3> attention;
  Factorization<Axis, 3> expert;

  /// Errors: M05 when `axes` are not of one view.
  PLEAT_HD constexpr GroupShape shape(const AxisSet& axes) const {
    require_one_view(axes);
    const auto wanted = [&](Axis axis) { return axes.contains(axis); };
    return axes.within(View::attention) ? attention.groups(wanted) : expert.groups(wanted);
  }
};
/// The shape of every single axis.
struct AxisShapes {
  GroupShape pp, dp, cp, expert_dp, ep;

  PLEAT_HD constexpr explicit AxisShapes(const Folding& folding)
      : pp(folding.shape(Axis::pp)),
        dp(folding.shape(Axis::dp)),
        cp(folding.shape(Axis::cp)),
        expert_dp(folding.shape(Axis::expert_dp)),
        ep(folding.shape(Axis::ep)) {}

  PLEAT_HD constexpr Coordinate coordinate(int rank) const {
    return {pp.index(rank), dp.index(rank), cp.index(rank), expert_dp.index(rank), ep.index(rank)};
  }
  PLEAT_HD constexpr int rank(const AttentionCoordinate& at) const {
    return pp.offset(at.pp) + dp.offset(at.dp) + cp.offset(at.cp);
  }
  PLEAT_HD constexpr int rank(const ExpertCoordinate& at) const {
    return pp.offset(at.pp) + expert_dp.offset(at.expert_dp) + ep.offset(at.ep);
  }
};

template <folded_mesh Mesh>
PLEAT_HD constexpr Folding folding(const Mesh& mesh) {
  return {attention_view(mesh.pp, mesh.dp, mesh.cp), expert_view(mesh.pp, mesh.expert_dp, mesh.ep)};
}
template <folded_mesh Mesh>
PLEAT_HD constexpr AxisShapes axis_shapes(const Mesh& mesh) {
  if constexpr (static_mesh<Mesh>) {
    constexpr AxisShapes shapes(folding(Mesh{}));
    return shapes;
  } else {
    return AxisShapes(folding(mesh));
  }
}

}  // namespace detail

/// The shape of the groups whose ranks differ only along `Axes`, of one view. A constant for a static mesh.
template <Axis... Axes, folded_mesh Mesh>
PLEAT_HD constexpr GroupShape group_shape(const Mesh& mesh) {
  if constexpr (!detail::axes_are_legal<Axes...>()) {
    return {};
  } else if constexpr (static_mesh<Mesh>) {
    constexpr GroupShape shape = detail::folding(Mesh{}).shape(AxisSet(Axes...));
    return shape;
  } else {
    return detail::folding(mesh).shape(AxisSet(Axes...));
  }
}
/// The same for axes known at run time. Errors: M05.
template <folded_mesh Mesh>
PLEAT_HD constexpr GroupShape group_shape(const Mesh& mesh, const AxisSet& axes) {
  return detail::folding(mesh).shape(axes);
}

/// The shape of the groups that share the shards of a parameter: within one replica, a contiguous block of S/R ranks
/// for a dense parameter, and expert_dp/R ranks EP apart for a routed expert's.
template <folded_mesh Mesh>
PLEAT_HD constexpr GroupShape shard_group_shape(const Mesh& mesh, Param param) {
  return param == Param::dense ? GroupShape{}.append(1, mesh.stage_size / mesh.replicas)
                               : GroupShape{}.append(mesh.ep, mesh.expert_dp / mesh.replicas);
}
/// The shape of the groups that hold the same shard: R ranks S/R apart, the same sets for dense and expert parameters.
template <folded_mesh Mesh>
PLEAT_HD constexpr GroupShape replica_group_shape(const Mesh& mesh) {
  return GroupShape{}.append(mesh.stage_size / mesh.replicas, mesh.replicas);
}

/// The ranks, ascending, that differ from `rank` only along `Axes`, in whatever order those are named.
/// Errors: M04; M05 does not compile.
template <Axis... Axes, folded_mesh Mesh>
PLEAT_HD constexpr Group group(const Mesh& mesh, int rank) {
  detail::require_rank(rank, mesh.world_size);
  return group_shape<Axes...>(mesh).of(rank);
}
/// The same for axes known at run time. Errors: M04, M05.
template <folded_mesh Mesh>
PLEAT_HD constexpr Group group(const Mesh& mesh, const AxisSet& axes, int rank) {
  detail::require_rank(rank, mesh.world_size);
  return group_shape(mesh, axes).of(rank);
}
/// Every group along `Axes`, in the order of first ranks.
template <Axis... Axes, folded_mesh Mesh>
PLEAT_HD constexpr GroupList groups(const Mesh& mesh) {
  return {mesh.world_size, group_shape<Axes...>(mesh)};
}
/// The same for axes known at run time. Errors: M05.
template <folded_mesh Mesh>
PLEAT_HD constexpr GroupList groups(const Mesh& mesh, const AxisSet& axes) {
  return {mesh.world_size, group_shape(mesh, axes)};
}

/// The ranks among which a parameter that `rank` holds is sharded. Errors: M04.
template <folded_mesh Mesh>
PLEAT_HD constexpr Group shard_group(const Mesh& mesh, Param param, int rank) {
  detail::require_rank(rank, mesh.world_size);
  return shard_group_shape(mesh, param).of(rank);
}
template <Param param, folded_mesh Mesh>
PLEAT_HD constexpr Group shard_group(const Mesh& mesh, int rank) {
  return shard_group(mesh, param, rank);
}
/// The ranks that hold the same shards as `rank`, one per replica. Errors: M04.
template <folded_mesh Mesh>
PLEAT_HD constexpr Group replica_group(const Mesh& mesh, int rank) {
  detail::require_rank(rank, mesh.world_size);
  return replica_group_shape(mesh).of(rank);
}

/// Where `rank` stands in both views. Errors: M04.
template <folded_mesh Mesh>
PLEAT_HD constexpr Coordinate coordinate(const Mesh& mesh, int rank) {
  detail::require_rank(rank, mesh.world_size);
  return detail::axis_shapes(mesh).coordinate(rank);
}

/// The rank at an attention coordinate. Errors: M04.
template <folded_mesh Mesh>
PLEAT_HD constexpr int rank(const Mesh& mesh, const AttentionCoordinate& at) {
  detail::require_coordinate(Axis::pp, at.pp, mesh.pp);
  detail::require_coordinate(Axis::dp, at.dp, mesh.dp);
  detail::require_coordinate(Axis::cp, at.cp, mesh.cp);
  return detail::axis_shapes(mesh).rank(at);
}
/// The rank at an expert coordinate. Errors: M04.
template <folded_mesh Mesh>
PLEAT_HD constexpr int rank(const Mesh& mesh, const ExpertCoordinate& at) {
  detail::require_coordinate(Axis::pp, at.pp, mesh.pp);
  detail::require_coordinate(Axis::expert_dp, at.expert_dp, mesh.expert_dp);
  detail::require_coordinate(Axis::ep, at.ep, mesh.ep);
  return detail::axis_shapes(mesh).rank(at);
}
/// The rank at a coordinate of both views, which must name the same one. Errors: M04.
template <folded_mesh Mesh>
PLEAT_HD constexpr int rank_of(const Mesh& mesh, const Coordinate& at) {
  const int attention_rank = rank(mesh, AttentionCoordinate{at.pp, at.dp, at.cp});
  const int expert_rank = rank(mesh, ExpertCoordinate{at.pp, at.expert_dp, at.ep});
  if (attention_rank != expert_rank) detail::M04_views_name_different_ranks(attention_rank, expert_rank);
  return attention_rank;
}

/// Whether two meshes have the same sizes, whatever their types.
template <folded_mesh A, folded_mesh B>
PLEAT_HD constexpr bool same_mesh(const A& a, const B& b) {
  return a.pp == b.pp && a.dp == b.dp && a.cp == b.cp && a.ep == b.ep && a.replicas == b.replicas;
}

}  // namespace pleat::inline v0
