// What holds for every mesh, on every legal mesh of up to 64 ranks.
#include <doctest/doctest.h>

#include <pleat/mesh.hpp>
#include <pleat/mesh/text.hpp>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "support/meshes.hpp"

using pleat::Axis;
using pleat::AxisSet;
using pleat::Param;
using pleat::RuntimeMesh;
using testing_support::partition_by;
using testing_support::ranks_of;

namespace {

struct At {
  int pp, dp, cp, expert_dp, ep, replica;
};
/// The definition of the mesh, in arithmetic of its own.
At at(const RuntimeMesh& mesh, int rank) {
  const int stage = mesh.dp * mesh.cp;
  const int i = rank % stage;
  return {rank / stage, i / mesh.cp, i % mesh.cp, i / mesh.ep, i % mesh.ep, i / (stage / mesh.replicas)};
}

bool groups_are(const pleat::GroupList& ours, const std::vector<std::vector<int>>& wanted) {
  if (ours.size() != static_cast<int>(wanted.size())) return false;
  for (int i = 0; i < ours.size(); ++i) {
    const std::vector<int>& ranks = wanted[static_cast<std::size_t>(i)];
    if (ranks_of(ours[i]) != ranks) return false;
    for (std::size_t j = 0; j < ranks.size(); ++j) {
      if (ours.shape.of(ranks[j]) != ours[i] || ours[i].index_of(ranks[j]) != static_cast<int>(j)) return false;
    }
  }
  return true;
}

/// The groups along some axes of a view, by definition: ranks that agree on all other axes of the view.
bool view_is_right(const RuntimeMesh& mesh, Axis outer, Axis inner) {
  for (int wanted = 0; wanted < 8; ++wanted) {
    AxisSet axes;
    if (wanted & 1) axes.add(Axis::pp);
    if (wanted & 2) axes.add(outer);
    if (wanted & 4) axes.add(inner);
    const auto others = [&](int rank) {
      const At a = at(mesh, rank);
      const bool attention = outer == Axis::dp;
      return std::tuple(wanted & 1 ? 0 : a.pp,
                        wanted & 2  ? 0
                        : attention ? a.dp
                                    : a.expert_dp,
                        wanted & 4  ? 0
                        : attention ? a.cp
                                    : a.ep);
    };
    if (!groups_are(groups(mesh, axes), partition_by(mesh.world_size, others))) return false;
  }
  return true;
}

std::string breach_of(const RuntimeMesh& mesh) {
  for (int rank = 0; rank < mesh.world_size; ++rank) {
    const At a = at(mesh, rank);
    const pleat::Coordinate c = mesh.coordinate(rank);
    if (c != pleat::Coordinate{a.pp, a.dp, a.cp, a.expert_dp, a.ep}) return "coordinate";
    if (mesh.rank({.pp = c.pp, .dp = c.dp, .cp = c.cp}) != rank) return "rank of an attention coordinate";
    if (mesh.rank({.pp = c.pp, .expert_dp = c.expert_dp, .ep = c.ep}) != rank) return "rank of an expert coordinate";
    if (mesh.rank_of(c) != rank) return "rank of a coordinate";
    // dp is what decides the data and ep what decides the experts: they count from 0 without a gap.
    if (mesh.group<Axis::dp>(rank).index_of(rank) != c.dp) return "dp as a place in its group";
    if (mesh.group<Axis::ep>(rank).index_of(rank) != c.ep) return "ep as a place in its group";
  }
  if (mesh.replicas == 1) {
    if (!view_is_right(mesh, Axis::dp, Axis::cp)) return "groups of the attention view";
    if (!view_is_right(mesh, Axis::expert_dp, Axis::ep)) return "groups of the expert view";
  } else {
    const RuntimeMesh one_replica(pleat::MeshDegrees{mesh.pp, mesh.dp, mesh.cp, mesh.ep});
    for (const Axis axis : {Axis::pp, Axis::dp, Axis::cp, Axis::expert_dp, Axis::ep}) {
      if (group_shape(mesh, axis) != group_shape(one_replica, axis)) return "groups of a view depend on replicas";
    }
  }

  // HSDP by definition: the replica is the outer part of the dense shard index, and of expert_dp.
  const auto list = [&](const pleat::GroupShape& shape) { return pleat::GroupList{mesh.world_size, shape}; };
  if (!groups_are(list(shard_group_shape(mesh, Param::dense)), partition_by(mesh.world_size, [&](int rank) {
                    return std::tuple(at(mesh, rank).pp, at(mesh, rank).replica);
                  }))) {
    return "dense shard groups";
  }
  if (!groups_are(list(shard_group_shape(mesh, Param::expert)), partition_by(mesh.world_size, [&](int rank) {
                    return std::tuple(at(mesh, rank).pp, at(mesh, rank).ep,
                                      at(mesh, rank).expert_dp / (mesh.expert_dp / mesh.replicas));
                  }))) {
    return "expert shard groups";
  }
  const auto dense_replicas = partition_by(mesh.world_size, [&](int rank) {
    return std::tuple(at(mesh, rank).pp, rank % mesh.stage_size % (mesh.stage_size / mesh.replicas));
  });
  const auto expert_replicas = partition_by(mesh.world_size, [&](int rank) {
    return std::tuple(at(mesh, rank).pp, at(mesh, rank).ep,
                      at(mesh, rank).expert_dp % (mesh.expert_dp / mesh.replicas));
  });
  using Sets = std::set<std::vector<int>>;
  if (Sets(dense_replicas.begin(), dense_replicas.end()) != Sets(expert_replicas.begin(), expert_replicas.end())) {
    return "the views have different replica groups";
  }
  if (!groups_are(list(replica_group_shape(mesh)), dense_replicas)) return "replica groups";

  if (pleat::parse_mesh(pleat::to_string(mesh)) != mesh) return "text";
  return {};
}

}  // namespace

TEST_CASE("every legal mesh of up to 64 ranks") {
  int meshes = 0;
  testing_support::for_each_mesh(64, [&](const RuntimeMesh& mesh) {
    ++meshes;
    const std::string breach = breach_of(mesh);
    if (!breach.empty()) FAIL_CHECK(pleat::to_string(mesh) << ": " << breach);
  });
  CHECK(meshes > 5000);
}
