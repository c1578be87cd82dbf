#include <doctest/doctest.h>

#include <map>
#include <pleat/mesh.hpp>
#include <pleat/mesh/communicator_plan.hpp>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "support/meshes.hpp"

using pleat::Axis;
using pleat::CommunicatorPlan;
using pleat::FoldedMesh;
using pleat::GroupUse;
using pleat::Lane;
using pleat::Param;
using pleat::RuntimeMesh;
using testing_support::at_compile_time;
using testing_support::ranks_of;

namespace {
constexpr Lane all_lanes[] = {Lane::main, Lane::gather, Lane::reduce, Lane::overlap};
constexpr GroupUse all_uses[] = {GroupUse::pp,        GroupUse::cp,          GroupUse::stage,        GroupUse::ep,
                                 GroupUse::expert_dp, GroupUse::dense_shard, GroupUse::expert_shard, GroupUse::replica};

pleat::Group expected_group(const RuntimeMesh& mesh, GroupUse use, int rank) {
  switch (use) {
    case GroupUse::pp:
      return mesh.group<Axis::pp>(rank);
    case GroupUse::cp:
      return mesh.group<Axis::cp>(rank);
    case GroupUse::stage:
      return mesh.group<Axis::dp, Axis::cp>(rank);
    case GroupUse::ep:
      return mesh.group<Axis::ep>(rank);
    case GroupUse::expert_dp:
      return mesh.group<Axis::expert_dp>(rank);
    case GroupUse::dense_shard:
      return mesh.shard_group<Param::dense>(rank);
    case GroupUse::expert_shard:
      return mesh.shard_group<Param::expert>(rank);
    case GroupUse::replica:
      return mesh.replica_group(rank);
  }
  return {};
}

/// What is wrong with the plans of all ranks of a mesh, empty when nothing is.
std::string breach_of_plans(const RuntimeMesh& mesh) {
  std::vector<CommunicatorPlan> plans;
  for (int rank = 0; rank < mesh.world_size; ++rank) {
    plans.push_back(plan_communicators(mesh, rank, std::span<const Lane>(all_lanes)));
  }
  for (const CommunicatorPlan& plan : plans) {
    if (plan.size() != plans[0].size()) return "ranks make different numbers of communicators";
  }
  for (int i = 0; i < plans[0].size(); ++i) {
    // What one split by (color, key) makes of the world.
    std::map<int, std::map<int, int>> made;
    for (int rank = 0; rank < mesh.world_size; ++rank) {
      const pleat::PlannedCommunicator& entry = plans[static_cast<std::size_t>(rank)][i];
      if (entry.lane != plans[0][i].lane || entry.uses != plans[0][i].uses) return "ranks disagree on an entry";
      if (!made[entry.color].emplace(entry.key, rank).second) return "two ranks have one color and key";
    }
    for (int rank = 0; rank < mesh.world_size; ++rank) {
      const pleat::PlannedCommunicator& entry = plans[static_cast<std::size_t>(rank)][i];
      std::vector<int> members;
      for (const auto& [key, member] : made[entry.color]) members.push_back(member);
      if (members != ranks_of(entry.group)) return "a split makes another group than the entry says";
      if (entry.group.size() == 1) return "a group of one";
      for (const GroupUse use : all_uses) {
        if (entry.serves(use) && ranks_of(expected_group(mesh, use, rank)) != members) return "merged sets differ";
      }
      for (int j = 0; j < i; ++j) {
        const pleat::PlannedCommunicator& before = plans[static_cast<std::size_t>(rank)][j];
        if (before.lane == entry.lane && ranks_of(before.group) == members) return "one rank set twice in a lane";
      }
    }
  }
  for (int rank = 0; rank < mesh.world_size; ++rank) {
    const CommunicatorPlan& plan = plans[static_cast<std::size_t>(rank)];
    for (const Lane lane : all_lanes) {
      for (const GroupUse use : all_uses) {
        if (!in_use(use, lane)) continue;
        const pleat::Group wanted = expected_group(mesh, use, rank);
        const int i = plan.find(use, lane);
        if ((i < 0) != (wanted.size() == 1)) return "a needed group is missing, or a group of one is there";
        if (i >= 0 && (plan[i].group != wanted || plan[i].lane != lane || !plan[i].serves(use))) return "find is wrong";
      }
    }
  }
  return {};
}

}  // namespace

TEST_CASE("a plan is a constant where the mesh is") {
  static constexpr CommunicatorPlan plan = plan_communicators(FoldedMesh<2, 4, 4, 2>{}, 13, {Lane::main, Lane::gather});
  CHECK(at_compile_time(plan[plan.find<Axis::cp>()].group == FoldedMesh<2, 4, 4, 2>::group<Axis::cp>(13)));
  CHECK(at_compile_time(plan.find<Axis::dp, Axis::cp>() == plan.find<Axis::ep, Axis::expert_dp>()));  // both the stage
  CHECK(at_compile_time(plan.find<Axis::dp, Axis::cp>() == plan.find_shard(Param::dense)));  // one replica: it shards
  CHECK(at_compile_time(plan.find_shard(Param::dense, Lane::gather) != plan.find_shard(Param::dense)));
  CHECK(at_compile_time(plan.find_replica() == -1));
}

TEST_CASE("every rank makes the same communicators in the same order") {
  int meshes = 0;
  testing_support::for_each_mesh(24, [&](const RuntimeMesh& mesh) {
    ++meshes;
    const std::string breach = breach_of_plans(mesh);
    if (breach.empty()) return;
    pleat::Message name;
    append_to(name, mesh);
    FAIL_CHECK(name.c_str() << ": " << breach);
  });
  CHECK(meshes > 500);
}

TEST_CASE("the order is the enumeration's, however the lanes are named") {
  const RuntimeMesh mesh = RuntimeMesh::fold({.world = 16, .cp = 2, .ep = 4, .replicas = 2});
  const CommunicatorPlan a = plan_communicators(mesh, 5, {Lane::main, Lane::reduce});
  const CommunicatorPlan b = plan_communicators(mesh, 5, {Lane::reduce, Lane::main, Lane::reduce});
  REQUIRE(a.size() == b.size());
  for (int i = 0; i < a.size(); ++i) CHECK(a[i].group == b[i].group);
}

TEST_CASE("equal rank sets are one communicator") {
  // cp and ep on the same ranks; expert_dp and the expert shard as well.
  const CommunicatorPlan merged =
      plan_communicators(RuntimeMesh::fold({.world = 8, .cp = 4, .ep = 4}), 0, {Lane::main});
  CHECK(merged.find<Axis::cp>() == merged.find<Axis::ep>());
  CHECK(merged.find<Axis::expert_dp>() == merged.find_shard(Param::expert));
  CHECK(merged.size() == 3);  // cp = ep, the stage, expert_dp
  // ep over the whole stage is the stage.
  const CommunicatorPlan wide = plan_communicators(RuntimeMesh::fold({.world = 8, .ep = 8}), 0, {Lane::main});
  CHECK(wide.size() == 1);
  CHECK(wide.find<Axis::ep>() == wide.find<Axis::dp, Axis::cp>());
  // One rank needs none.
  CHECK(plan_communicators(RuntimeMesh{}, 0, {Lane::main, Lane::overlap}).size() == 0);
}

TEST_CASE("a large mesh needs few") {
  // Megatron makes 5361 groups here.
  const RuntimeMesh mesh = RuntimeMesh::fold({.world = 1024, .pp = 8, .cp = 16, .ep = 8});
  CHECK(plan_communicators(mesh, 700, {Lane::main}).size() == 5);
  CHECK(plan_communicators(mesh, 700, {Lane::main, Lane::gather, Lane::reduce}).size() == 9);
}

TEST_CASE("[M11] what no lane has is an error, the same for every size") {
  for (const int cp : {1, 4}) {  // with cp 1 the dp group would be the stage
    const CommunicatorPlan any = plan_communicators(RuntimeMesh::fold({.world = 8, .cp = cp}), 0, {Lane::gather});
    CHECK_THROWS_WITH_AS((void)any.find<Axis::dp>(Lane::gather),
                         "pleat[M11]: no template communicates along dp; valid: gather: dense shard, expert shard",
                         pleat::mesh_error);
    CHECK_THROWS_WITH_AS(
        (void)any.find<Axis::cp>(Lane::gather),
        "pleat[M11]: no communicator for cp is planned in lane gather; valid: gather: dense shard, expert "
        "shard",
        pleat::mesh_error);
    CHECK_THROWS_AS((void)any.find<Axis::cp>(Lane::main), pleat::mesh_error);
  }
  CHECK_THROWS_AS((void)plan_communicators(RuntimeMesh{}, 1, {Lane::main}), pleat::mesh_error);
}
