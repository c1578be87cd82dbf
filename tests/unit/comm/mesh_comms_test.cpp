// MeshComms: every planned group of a mesh is a communicator of exactly its ranks; lanes are apart; M08 and M11.
#include <pleat/comm/mesh_comms.hpp>
#include <pleat/comm/run_ranks.hpp>

#include <atomic>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <doctest/doctest.h>

#include <support/watchdog.hpp>

namespace {

using namespace pleat;
using Handle = GroupComm<ThreadComm>;

void require(bool holds, const std::string& text) {
  if (!holds) throw std::logic_error(text);
}
template <class F>
std::string text_of_error(F f) {
  try {
    f();
  } catch (const mesh_error& e) {
    return e.what();
  }
  return "";
}

/// That `handle` is a communicator of exactly the ranks of `group`, in its order.
void require_group(const Handle& handle, const Group& group, int world_rank, const std::string& what) {
  require(handle.ranks() == group || (group.size() == 1 && handle.size() == 1 && handle.ranks()[0] == world_rank),
          what + ": other ranks");
  require(group[handle.rank()] == world_rank, what + ": another place");
  require((handle.comm() == nullptr) == (group.size() == 1),
          what + ": a group of one, and only it, has no communicator");
  std::vector<int> ranks(static_cast<std::size_t>(group.size()));
  handle.all_gather(&world_rank, ranks.data(), 1, DType::i32, {});
  for (int i = 0; i < group.size(); ++i)
    require(ranks[static_cast<std::size_t>(i)] == group[i], what + ": other members");
}

template <class Mesh>
void check_mesh(const Mesh& mesh) {
  const testing_support::Watchdog watchdog(message_of("MeshComms of ", mesh).c_str());
  run_ranks(mesh.world_size, [&](ThreadComm& world) {
    const MeshComms comms(mesh, world, LaneSet{Lane::main, Lane::gather, Lane::reduce, Lane::overlap});
    const int me = world.rank();
    require_group(comms.world(), Group{0, GroupShape{}.append(1, mesh.world_size)}, me, "world");
    for (const Lane lane : {Lane::main, Lane::overlap}) {
      require_group(comms.template get<Axis::pp>(lane), group<Axis::pp>(mesh, me), me, "pp");
      require_group(comms.template get<Axis::cp>(lane), group<Axis::cp>(mesh, me), me, "cp");
      require_group(comms.template get<Axis::ep>(lane), group<Axis::ep>(mesh, me), me, "ep");
    }
    require_group(comms.template get<Axis::expert_dp>(), group<Axis::expert_dp>(mesh, me), me, "expert_dp");
    require_group(comms.template get<Axis::dp, Axis::cp>(), group<Axis::dp, Axis::cp>(mesh, me), me, "dp x cp");
    for (const Lane lane : {Lane::main, Lane::gather, Lane::reduce}) {
      require_group(comms.shard(Param::dense, lane), shard_group<Param::dense>(mesh, me), me, "dense shard");
      require_group(comms.shard(Param::expert, lane), shard_group<Param::expert>(mesh, me), me, "expert shard");
    }
    for (const Lane lane : {Lane::main, Lane::reduce}) {
      require_group(comms.replica(lane), replica_group(mesh, me), me, "replica");
    }
    // Lanes never share a communicator; within a lane equal groups do.
    const auto dense = [&](Lane lane) { return comms.shard(Param::dense, lane).comm(); };
    const auto expert = [&](Lane lane) { return comms.shard(Param::expert, lane).comm(); };
    for (const Lane a : {Lane::main, Lane::gather, Lane::reduce}) {
      for (const Lane b : {Lane::main, Lane::gather, Lane::reduce}) {
        if (dense(a) != nullptr) require((dense(a) == dense(b)) == (a == b), "lanes share a communicator");
        if (expert(a) != nullptr) require((expert(a) == expert(b)) == (a == b), "lanes share a communicator");
      }
    }
    const bool are_one = shard_group<Param::dense>(mesh, me) == shard_group<Param::expert>(mesh, me);
    if (dense(Lane::gather) != nullptr) require((dense(Lane::gather) == expert(Lane::gather)) == are_one, "merging");
    require(text_of_error([&] { comms.template get<Axis::dp>(); }).find("pleat[M11]") == 0, "dp alone is M11");
    require(text_of_error([&] { comms.template get<Axis::pp>(Lane::gather); }).find("pleat[M11]") == 0, "pp in gather");
    require(text_of_error([&] { comms.replica(Lane::gather); }).find("pleat[M11]") == 0, "replica in gather");
  });
}

TEST_CASE("every group of static meshes") {
  check_mesh(FoldedMesh<1, 1, 1, 1>{});
  check_mesh(FoldedMesh<1, 8, 1, 8>{});
  check_mesh(FoldedMesh<2, 2, 2, 2>{});
  check_mesh(FoldedMesh<1, 4, 4, 4, 2>{});
  check_mesh(FoldedMesh<1, 2, 3, 2>{});  // ep groups straddle cp groups
}

TEST_CASE("every group of run-time meshes") {
  for (const MeshDegrees& degrees :
       {MeshDegrees{.pp = 3, .dp = 2, .cp = 1, .ep = 2}, MeshDegrees{.dp = 3, .cp = 4, .ep = 6},
        MeshDegrees{.pp = 2, .dp = 4, .cp = 2, .ep = 2, .replicas = 4}, MeshDegrees{.dp = 8, .ep = 1, .replicas = 8},
        MeshDegrees{.pp = 4}}) {
    check_mesh(RuntimeMesh(degrees));
  }
}

TEST_CASE("lanes run at the same time") {
  const testing_support::Watchdog watchdog("lanes at the same time");
  run_ranks(8, [](ThreadComm& world) {
    const MeshComms comms(FoldedMesh<1, 4, 2, 2>{}, world);
    std::atomic<int> wrong = 0;
    {
      std::vector<std::jthread> threads;
      for (const Lane lane : {Lane::gather, Lane::reduce}) {
        threads.emplace_back([&, lane] {
          const Handle shard = comms.shard(Param::dense, lane);
          for (int round = 0; round < 40; ++round) {
            const int mine = round * 2 + (lane == Lane::gather);
            int all[8] = {};
            shard.all_gather(&mine, all, 1, DType::i32, {});
            for (const int value : all) wrong += value != mine;
          }
        });
      }
    }
    require(wrong == 0, "lanes mixed");
  });
}

TEST_CASE("MeshComms can move, its handles stay") {
  run_ranks(4, [](ThreadComm& world) {
    MeshComms first(FoldedMesh<1, 2, 2, 2>{}, world);
    const Handle cp = first.get<Axis::cp>();
    const MeshComms second = std::move(first);
    require(cp.comm() == second.get<Axis::cp>().comm(), "the communicator moved");
    cp.barrier({});
  });
}

TEST_CASE("M08: a world of another size") {
  const auto run = [] {
    run_ranks(4, [](ThreadComm& world) { const MeshComms comms(FoldedMesh<1, 2, 4, 2>{}, world); });
  };
  CHECK_THROWS_WITH_AS(
      run(), "pleat[M08]: a communicator of 4 ranks cannot carry the mesh pp1-dp2-cp4-ep2; valid ranks: 8", mesh_error);
}

TEST_CASE("M11: a lane that was not asked for") {
  run_ranks(4, [](ThreadComm& world) {
    const MeshComms comms(FoldedMesh<1, 2, 2, 2>{}, world, LaneSet{Lane::main});
    require(text_of_error([&] {
              comms.shard(Param::dense, Lane::gather);
            }).find("pleat[M11]: no communicator for dense shard is planned in lane gather; valid: main: ") == 0,
            "text of M11");
  });
}

}  // namespace
