#include <doctest/doctest.h>

#include <pleat/mesh/folded_mesh.hpp>
#include <pleat/mesh/runtime_mesh.hpp>
#include <string>
#include <type_traits>

#include "support/meshes.hpp"

using pleat::Axis;
using pleat::FoldedMesh;
using pleat::MeshDegrees;
using pleat::RuntimeMesh;
using testing_support::at_compile_time;
using testing_support::ranks_of;

static_assert(pleat::folded_mesh<RuntimeMesh> && !pleat::static_mesh<RuntimeMesh>);
static_assert(std::is_trivially_copyable_v<RuntimeMesh>, "kernels take it by value");

TEST_CASE("fold derives dp and expert_dp") {
  CHECK(at_compile_time(RuntimeMesh{}.world_size == 1));
  CHECK(at_compile_time(RuntimeMesh::fold({.world = 32, .pp = 2, .cp = 4, .ep = 2}) ==
                        RuntimeMesh(FoldedMesh<2, 4, 4, 2>{})));
  const RuntimeMesh mesh = RuntimeMesh::fold({.world = 32, .pp = 1, .cp = 4, .ep = 8, .replicas = 2});
  CHECK(mesh == RuntimeMesh(MeshDegrees{.pp = 1, .dp = 8, .cp = 4, .ep = 8, .replicas = 2}));
  CHECK(mesh.dp == 8);
  CHECK(mesh.expert_dp == 4);
  CHECK(mesh.stage_size == 32);
}

TEST_CASE("with_mesh calls with the matching type") {
  const RuntimeMesh mesh = RuntimeMesh::fold({.world = 32, .pp = 2, .cp = 4, .ep = 2});
  using A = FoldedMesh<1, 8, 4, 8>;
  using B = FoldedMesh<2, 4, 4, 2>;
  const auto which = [](auto found) { return pleat::static_mesh<decltype(found)> ? found.expert_dp : -1; };
  CHECK(pleat::with_mesh<A, B>(mesh, which) == 8);
  CHECK(pleat::with_mesh<A, RuntimeMesh>(mesh, which) == -1);
  CHECK(pleat::with_mesh<B, RuntimeMesh>(mesh, which) == 8);
  bool called = false;
  pleat::with_mesh<B>(mesh, [&](auto) { called = true; });
  CHECK(called);

  CHECK_THROWS_WITH_AS(
      (pleat::with_mesh<A, FoldedMesh<2, 4, 4, 2, 2>>(mesh, which)),
      "pleat[M10]: no mesh pp2-dp4-cp4-ep2 is compiled in; valid meshes: pp1-dp8-cp4-ep8 pp2-dp4-cp4-ep2-r2",
      pleat::mesh_error);
}

// Cases from public reports on other libraries; docs name the sources.

TEST_CASE("expert groups stay inside a stage (DeepSpeed#1942)") {
  const RuntimeMesh mesh = RuntimeMesh::fold({.world = 8, .pp = 2, .ep = 4});
  CHECK(ranks_of(mesh.group<Axis::expert_dp>(0)) == std::vector<int>{0});
  testing_support::for_each_mesh(24, [](const RuntimeMesh& any) {
    for (const Axis axis : {Axis::dp, Axis::cp, Axis::expert_dp, Axis::ep}) {
      for (const pleat::Group group : groups(any, axis)) {
        REQUIRE(group.front() / any.stage_size == group.back() / any.stage_size);
      }
    }
  });
}

TEST_CASE("ep alone folds: 8 ranks with ep 2 (nanotron)") {
  const RuntimeMesh mesh = RuntimeMesh::fold({.world = 8, .ep = 2});
  CHECK(mesh.dp == 8);
  CHECK(mesh.expert_dp == 4);
}

TEST_CASE("a layout has as many shards as its group has ranks (Megatron#6048)") {
  testing_support::for_each_mesh(32, [](const RuntimeMesh& mesh) {
    REQUIRE(mesh.shard_group<pleat::Param::dense>(0).size() * mesh.replicas == mesh.dp * mesh.cp);
    REQUIRE(mesh.shard_group<pleat::Param::expert>(0).size() * mesh.replicas == mesh.expert_dp);
  });
}

TEST_CASE("axes of size 1 make a group of one (pytorch#169381)") {
  const RuntimeMesh mesh = RuntimeMesh::fold({.world = 4, .pp = 4});
  CHECK(ranks_of(mesh.group<Axis::dp, Axis::cp>(2)) == std::vector<int>{2});
  CHECK(mesh.groups<Axis::dp, Axis::cp>().size() == 4);
}

TEST_CASE("groups along different axes are different (pytorch#163288, SkyRL#1420)") {
  const RuntimeMesh mesh = RuntimeMesh::fold({.world = 32, .pp = 2, .cp = 4, .ep = 2});
  CHECK(mesh.group<Axis::dp>(5) != mesh.group<Axis::dp, Axis::cp>(5));
  CHECK(mesh.group<Axis::pp, Axis::dp>(5) != mesh.group<Axis::pp, Axis::cp>(5));
  CHECK(mesh.group<Axis::pp, Axis::expert_dp>(5) != mesh.group<Axis::pp, Axis::dp>(5));
  CHECK(mesh.group<Axis::dp>(5).size() == mesh.dp);
}
