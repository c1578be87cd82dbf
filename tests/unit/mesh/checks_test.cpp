#include <doctest/doctest.h>

#include <pleat/mesh.hpp>

#include "support/meshes.hpp"

using pleat::Axis;
using pleat::mesh_error;
using pleat::MeshDegrees;
using pleat::RuntimeMesh;

namespace {
const RuntimeMesh mesh = RuntimeMesh::fold({.world = 32, .pp = 2, .cp = 4, .ep = 2});
}

TEST_CASE("[M00] degrees are at least 1 and the world fits in int") {
  CHECK_THROWS_WITH_AS(RuntimeMesh::fold({.world = 0}), "pleat[M00]: world=0 must be at least 1", mesh_error);
  CHECK_THROWS_WITH_AS(RuntimeMesh::fold({.world = 8, .pp = 0}), "pleat[M00]: pp=0 must be at least 1", mesh_error);
  CHECK_THROWS_WITH_AS(RuntimeMesh::fold({.world = 8, .cp = -2}), "pleat[M00]: cp=-2 must be at least 1", mesh_error);
  CHECK_THROWS_WITH_AS(RuntimeMesh::fold({.world = 8, .ep = 0}), "pleat[M00]: ep=0 must be at least 1", mesh_error);
  CHECK_THROWS_WITH_AS(RuntimeMesh::fold({.world = 8, .replicas = 0}), "pleat[M00]: replicas=0 must be at least 1",
                       mesh_error);
  CHECK_THROWS_WITH_AS(RuntimeMesh(MeshDegrees{.dp = 0}), "pleat[M00]: dp=0 must be at least 1", mesh_error);
  CHECK_THROWS_WITH_AS(RuntimeMesh(MeshDegrees{.pp = 65536, .dp = 65536}),
                       "pleat[M00]: a world of pp=65536 * dp=65536 * cp=1 ranks does not fit in int; valid: at most "
                       "2147483647 ranks",
                       mesh_error);
  CHECK_THROWS_AS(RuntimeMesh(MeshDegrees{.dp = 65536, .cp = 65536}), mesh_error);
  // 2^90: more than 64 bits hold.
  CHECK_THROWS_AS(RuntimeMesh(MeshDegrees{.pp = 1 << 30, .dp = 1 << 30, .cp = 1 << 30}), mesh_error);
  CHECK(RuntimeMesh(MeshDegrees{.dp = 2147483647}).world_size == 2147483647);
  CHECK_THROWS_WITH_AS((void)mesh.fits_domain<Axis::cp>(0), "pleat[M00]: gpus_per_domain=0 must be at least 1",
                       mesh_error);
}

TEST_CASE("[M01] pp divides the world and cp the stage") {
  CHECK_THROWS_WITH_AS(RuntimeMesh::fold({.world = 32, .pp = 3}),
                       "pleat[M01]: pp=3 does not divide world=32; valid pp: 1 2 4 8 16 32", mesh_error);
  CHECK_THROWS_WITH_AS(RuntimeMesh::fold({.world = 12, .pp = 2, .cp = 4}),
                       "pleat[M01]: cp=4 does not divide stage=6; valid cp: 1 2 3 6", mesh_error);
}

TEST_CASE("[M02] ep divides the stage") {
  // DeepSpeed#7535: 4 ranks, ep 8.
  CHECK_THROWS_WITH_AS(RuntimeMesh::fold({.world = 4, .ep = 8}),
                       "pleat[M02]: ep=8 does not divide stage=4; valid ep: 1 2 4", mesh_error);
  // torchtitan#4258: 2 replicas, a stage of 4, ep 3.
  CHECK_THROWS_WITH_AS(RuntimeMesh::fold({.world = 4, .ep = 3, .replicas = 2}),
                       "pleat[M02]: ep=3 does not divide stage=4; valid ep: 1 2 4", mesh_error);
}

TEST_CASE("[M03] replicas divides expert_dp") {
  // Megatron#4342: expert_dp 1 leaves nothing to replicate.
  CHECK_THROWS_WITH_AS(RuntimeMesh::fold({.world = 8, .ep = 8, .replicas = 2}),
                       "pleat[M03]: replicas=2 does not divide expert_dp=1; valid replicas: 1", mesh_error);
}

TEST_CASE("[M04] ranks and coordinates are in range") {
  CHECK_THROWS_WITH_AS(mesh.coordinate(32), "pleat[M04]: rank=32 is out of range; valid rank: 0..31", mesh_error);
  CHECK_THROWS_WITH_AS(mesh.group<Axis::cp>(-1), "pleat[M04]: rank=-1 is out of range; valid rank: 0..31", mesh_error);
  CHECK_THROWS_AS((void)group(mesh, Axis::cp, 32), mesh_error);
  CHECK_THROWS_AS(mesh.replica_group(32), mesh_error);
  CHECK_THROWS_AS(mesh.shard_group<pleat::Param::dense>(32), mesh_error);
  CHECK_THROWS_AS((void)(pleat::FoldedMesh<2, 4, 4, 2>::coordinate(32)), mesh_error);
  CHECK_THROWS_WITH_AS(mesh.rank({.dp = 4}), "pleat[M04]: dp=4 is out of range; valid dp: 0..3", mesh_error);
  CHECK_THROWS_WITH_AS(mesh.rank({.pp = 2, .cp = 0}), "pleat[M04]: pp=2 is out of range; valid pp: 0..1", mesh_error);
  CHECK_THROWS_WITH_AS(mesh.rank({.expert_dp = -1}), "pleat[M04]: expert_dp=-1 is out of range; valid expert_dp: 0..7",
                       mesh_error);
  CHECK_THROWS_WITH_AS(mesh.rank({.ep = 2}), "pleat[M04]: ep=2 is out of range; valid ep: 0..1", mesh_error);
  CHECK_THROWS_WITH_AS(
      mesh.rank_of({.dp = 1}),
      "pleat[M04]: the coordinates name rank=4 in the attention view and rank=0 in the expert view; valid: "
      "coordinates of one rank",
      mesh_error);
}

TEST_CASE("[M05] the axes of a group belong to one view, each once") {
  CHECK_THROWS_WITH_AS(
      (void)group(mesh, {Axis::ep, Axis::dp}, 0),
      "pleat[M05]: a group along dp x ep mixes the views; valid: axes of (pp, dp, cp), or axes of (pp, "
      "expert_dp, ep)",
      mesh_error);
  CHECK_THROWS_WITH_AS((void)group(mesh, {Axis::cp, Axis::pp, Axis::cp}, 0),
                       "pleat[M05]: a group names axis cp twice; name each axis once", mesh_error);
}

TEST_CASE("[M06] ep divides the number of experts") {
  CHECK(experts_per_rank(mesh, 64) == 32);
  CHECK(pleat::experts_per_rank<64>(mesh) == 32);
  CHECK(testing_support::at_compile_time(pleat::experts_per_rank<64>(pleat::FoldedMesh<1, 8, 4, 8>{}) == 8));
  const RuntimeMesh wide = RuntimeMesh::fold({.world = 8, .ep = 8});
  CHECK_THROWS_WITH_AS(experts_per_rank(wide, 12),
                       "pleat[M06]: experts=12 is not divisible by ep=8; valid ep: 1 2 4, or experts: a multiple of 8",
                       mesh_error);
  CHECK_THROWS_WITH_AS(experts_per_rank(wide, 0), "pleat[M06]: experts=0 must be at least 1", mesh_error);
}

TEST_CASE("[M07] 2 * cp divides the sequence of the dense zigzag") {
  CHECK(zigzag_chunk_tokens(mesh, 128) == 16);
  CHECK(zigzag_chunk_tokens(mesh, 1LL << 40) == 1LL << 37);
  CHECK_THROWS_WITH_AS(zigzag_chunk_tokens(mesh, 100),
                       "pleat[M07]: sequence=100 is not a multiple of 2*cp=8; valid sequence: 96 104 .. (other "
                       "lengths: the packed path)",
                       mesh_error);
  CHECK_THROWS_WITH_AS(zigzag_chunk_tokens(mesh, 0), "pleat[M07]: sequence=0 must be at least 1", mesh_error);
  CHECK_THROWS_WITH_AS(zigzag_chunk_tokens(mesh, 4), doctest::Contains("valid sequence: 8 16 .."), mesh_error);
  const RuntimeMesh one;  // nothing is cut
  CHECK(zigzag_chunk_tokens(one, 1) == 1);
  CHECK(zigzag_chunk_tokens(one, 7) == 7);
  CHECK_THROWS_WITH_AS(zigzag_chunk_tokens(one, 0), "pleat[M07]: sequence=0 must be at least 1", mesh_error);
}

TEST_CASE("[M08] a communicator has the world of the mesh") {
  check_world(mesh, 32);
  CHECK_THROWS_WITH_AS(check_world(mesh, 16),
                       "pleat[M08]: a communicator of 16 ranks cannot carry the mesh pp2-dp4-cp4-ep2; valid ranks: 32",
                       mesh_error);
}
