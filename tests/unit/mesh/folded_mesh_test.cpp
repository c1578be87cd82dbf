#include <doctest/doctest.h>

#include <pleat/mesh/folded_mesh.hpp>
#include <pleat/mesh/runtime_mesh.hpp>
#include <type_traits>

#include "support/meshes.hpp"

using pleat::Axis;
using pleat::FoldedMesh;
using pleat::Param;
using testing_support::at_compile_time;

namespace {
template <class... Ranks>
constexpr bool is(const pleat::Group& group, Ranks... ranks) {
  int i = 0;
  return group.size() == static_cast<int>(sizeof...(ranks)) && ((group[i++] == ranks) && ...);
}
}  // namespace

using Mesh = FoldedMesh<2, 4, 4, 2>;
static_assert(std::is_empty_v<Mesh>);

TEST_CASE("a mesh is a constant") {
  CHECK(
      at_compile_time(Mesh::world_size == 32 && Mesh::stage_size == 16 && Mesh::expert_dp == 8 && Mesh::replicas == 1));
  CHECK(at_compile_time(Mesh::coordinate(13) == pleat::Coordinate{.pp = 0, .dp = 3, .cp = 1, .expert_dp = 6, .ep = 1}));
  CHECK(at_compile_time(is(Mesh::group<Axis::pp>(13), 13, 29)));
  CHECK(at_compile_time(is(Mesh::group<Axis::cp>(13), 12, 13, 14, 15)));
  CHECK(at_compile_time(is(Mesh::group<Axis::dp>(13), 1, 5, 9, 13)));
  CHECK(at_compile_time(is(Mesh::group<Axis::ep>(13), 12, 13)));
  CHECK(at_compile_time(is(Mesh::group<Axis::expert_dp>(13), 1, 3, 5, 7, 9, 11, 13, 15)));
  CHECK(at_compile_time(is(Mesh::group<Axis::dp, Axis::cp>(13), 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)));
  CHECK(at_compile_time(is(Mesh::group<Axis::pp, Axis::cp>(13), 12, 13, 14, 15, 28, 29, 30, 31)));
  CHECK(at_compile_time(Mesh::groups<Axis::cp>().size() == 8));
  CHECK(at_compile_time(is(Mesh::groups<Axis::cp>()[7], 28, 29, 30, 31)));
}

TEST_CASE("axes in any order, and none") {
  CHECK(at_compile_time(Mesh::group<Axis::cp, Axis::pp>(13) == Mesh::group<Axis::pp, Axis::cp>(13)));
  CHECK(at_compile_time(is(Mesh::group<>(13), 13)));
  CHECK(at_compile_time(Mesh::group<Axis::pp, Axis::expert_dp, Axis::ep>(13).size() == 32));
}

TEST_CASE("a rank from coordinates; fields that are left out are 0") {
  CHECK(at_compile_time(Mesh::rank({.pp = 0, .dp = 3, .cp = 1}) == 13));
  CHECK(at_compile_time(Mesh::rank({.pp = 1, .expert_dp = 6, .ep = 1}) == 29));
  CHECK(at_compile_time(Mesh::rank({.ep = 1}) == 1));
  CHECK(at_compile_time(Mesh::rank({.dp = 1}) == 4));
  CHECK(at_compile_time(Mesh::rank_of(Mesh::coordinate(29)) == 29));
}

// The mesh the seed is about: unfolded it would leave dp = 1.
using Seed = pleat::fold_t<32, 1, 4, 8>;
static_assert(std::is_same_v<Seed, FoldedMesh<1, 8, 4, 8>>);

TEST_CASE("folding keeps data parallelism") {
  CHECK(at_compile_time(Seed::dp == 8));
  CHECK(at_compile_time(Seed::expert_dp == 4));
}

using Straddling = FoldedMesh<1, 2, 3, 2>;

TEST_CASE("ep and cp need not divide each other") {
  CHECK(at_compile_time(is(Straddling::group<Axis::ep>(2), 2, 3)));
  CHECK(at_compile_time(Straddling::coordinate(2).dp == 0));
  CHECK(at_compile_time(Straddling::coordinate(3).dp == 1));
}

using Hsdp = FoldedMesh<1, 4, 2, 2, 2>;

TEST_CASE("the replica is outside, the shard inside") {
  CHECK(at_compile_time(is(Hsdp::shard_group<Param::dense>(6), 4, 5, 6, 7)));
  CHECK(at_compile_time(is(Hsdp::shard_group<Param::expert>(6), 4, 6)));
  CHECK(at_compile_time(is(Hsdp::replica_group(6), 2, 6)));
  CHECK(at_compile_time(Mesh::shard_group<Param::dense>(13) == Mesh::group<Axis::dp, Axis::cp>(13)));
  CHECK(at_compile_time(Mesh::shard_group<Param::expert>(13) == Mesh::group<Axis::expert_dp>(13)));
  CHECK(at_compile_time(is(Mesh::replica_group(13), 13)));
}

TEST_CASE("a million ranks, and the most there can be") {
  using Million = FoldedMesh<16, 1024, 64, 256>;
  CHECK(at_compile_time(Million::world_size == 1'048'576));
  CHECK(at_compile_time(Million::expert_dp == 256));
  CHECK(at_compile_time(Million::group<Axis::pp, Axis::cp>(1'048'575).back() == 1'048'575));
  CHECK(at_compile_time(Million::groups<Axis::dp>()[1023].front() == 15 * 65536 + 63));
  CHECK(at_compile_time(Million::rank_of(Million::coordinate(777'777)) == 777'777));
  CHECK(at_compile_time(FoldedMesh<1, 1, 2147483647, 2147483647>::rank({.cp = 2147483646}) == 2147483646));
}

static_assert(pleat::folded_mesh<Mesh> && pleat::static_mesh<Mesh>);
static_assert(!pleat::folded_mesh<int>);

namespace {
/// Everything a static mesh says is what the run-time mesh of its sizes says.
template <class Static>
void agrees_with_its_runtime_twin() {
  const pleat::RuntimeMesh twin = Static{};
  CAPTURE(twin.world_size);
  CHECK(twin.world_size == Static::world_size);
  CHECK(twin.stage_size == Static::stage_size);
  CHECK(twin.expert_dp == Static::expert_dp);
  CHECK(same_mesh(twin, Static{}));
  for (int rank = 0; rank < Static::world_size; ++rank) {
    CHECK(twin.coordinate(rank) == Static::coordinate(rank));
    CHECK(twin.rank_of(twin.coordinate(rank)) == rank);
    CHECK(twin.group<Axis::pp>(rank) == Static::template group<Axis::pp>(rank));
    CHECK(twin.group<Axis::cp>(rank) == Static::template group<Axis::cp>(rank));
    CHECK(twin.group<Axis::dp>(rank) == Static::template group<Axis::dp>(rank));
    CHECK(twin.group<Axis::ep>(rank) == Static::template group<Axis::ep>(rank));
    CHECK(twin.group<Axis::expert_dp>(rank) == Static::template group<Axis::expert_dp>(rank));
    CHECK(twin.group<Axis::pp, Axis::ep>(rank) == Static::template group<Axis::pp, Axis::ep>(rank));
    CHECK(twin.shard_group<Param::dense>(rank) == Static::template shard_group<Param::dense>(rank));
    CHECK(twin.shard_group<Param::expert>(rank) == Static::template shard_group<Param::expert>(rank));
    CHECK(twin.replica_group(rank) == Static::replica_group(rank));
    CHECK(pleat::group<Axis::cp>(twin, rank) == pleat::group<Axis::cp>(Static{}, rank));
    CHECK(pleat::group(Static{}, {Axis::pp, Axis::cp}, rank) == pleat::group<Axis::pp, Axis::cp>(twin, rank));
  }
  CHECK(twin.groups<Axis::dp>().shape == Static::template groups<Axis::dp>().shape);
  for (const int gpus : {1, 3, 8, 16}) {
    CHECK(twin.fits_domain<Axis::ep>(gpus) == Static::template fits_domain<Axis::ep>(gpus));
  }
}
}  // namespace

TEST_CASE_TEMPLATE("a static mesh and its run-time twin", T, FoldedMesh<1, 1, 1, 1>, Mesh, Seed, Straddling, Hsdp,
                   FoldedMesh<3, 2, 6, 4>, FoldedMesh<2, 8, 2, 8>, FoldedMesh<4, 8, 1, 1, 4>,
                   FoldedMesh<2, 3, 5, 5, 3>) {
  agrees_with_its_runtime_twin<T>();
}
