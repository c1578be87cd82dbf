// A mesh in device code says what it says on the host: coordinates and groups, static and run-time.
#include <doctest/doctest.h>

#include <pleat/mesh.hpp>
#include <vector>

#include <cuda_runtime.h>

using pleat::Axis;
using pleat::Group;
using pleat::Param;

namespace {

/// What a rank knows of its mesh.
struct Facts {
  pleat::Coordinate at;
  Group cp, dp, ep, expert_dp, stage, pp_cp, dense_shard, expert_shard, replica;
  int rank, members, neighbour_index, experts, number_of_groups;
  bool ep_fits;

  friend constexpr bool operator==(const Facts&, const Facts&) = default;
};

template <class Mesh>
PLEAT_HD Facts facts_of(const Mesh& mesh, int rank) {
  Facts f{};
  f.at = coordinate(mesh, rank);
  f.cp = pleat::group<Axis::cp>(mesh, rank);
  f.dp = pleat::group<Axis::dp>(mesh, rank);
  f.ep = pleat::group<Axis::ep>(mesh, rank);
  f.expert_dp = pleat::group<Axis::expert_dp>(mesh, rank);
  f.stage = pleat::group<Axis::dp, Axis::cp>(mesh, rank);
  f.pp_cp = pleat::group(mesh, {Axis::pp, Axis::cp}, rank);
  f.dense_shard = pleat::shard_group<Param::dense>(mesh, rank);
  f.expert_shard = pleat::shard_group<Param::expert>(mesh, rank);
  f.replica = replica_group(mesh, rank);
  f.rank = rank_of(mesh, f.at);
  for (const int member : f.pp_cp) f.members += member;
  f.neighbour_index = f.cp.index_of(rank + 1);
  f.experts = experts_per_rank(mesh, 64);
  f.number_of_groups = pleat::groups<Axis::dp>(mesh).size();
  f.ep_fits = pleat::fits_domain<Axis::ep>(mesh, 8);
  return f;
}

template <class Mesh>
__global__ void fill(Mesh mesh, Facts* facts) {
  const int rank = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (rank < mesh.world_size) facts[rank] = facts_of(mesh, rank);
}

void check(cudaError_t status) {
  REQUIRE_MESSAGE(status == cudaSuccess, cudaGetErrorString(status));
}

template <class Mesh>
void device_agrees(const Mesh& mesh) {
  const std::size_t world = static_cast<std::size_t>(mesh.world_size);
  Facts* on_device = nullptr;
  check(cudaMalloc(&on_device, world * sizeof(Facts)));
  check(cudaMemset(on_device, 0xFF, world * sizeof(Facts)));
  fill<<<(mesh.world_size + 63) / 64, 64>>>(mesh, on_device);
  check(cudaGetLastError());
  std::vector<Facts> facts(world);
  check(cudaMemcpy(facts.data(), on_device, world * sizeof(Facts), cudaMemcpyDeviceToHost));
  check(cudaFree(on_device));
  for (int rank = 0; rank < mesh.world_size; ++rank) {
    CAPTURE(rank);
    CHECK(facts[static_cast<std::size_t>(rank)] == facts_of(mesh, rank));
  }
}

}  // namespace

TEST_CASE("a static mesh on the device") {
  device_agrees(pleat::FoldedMesh<2, 4, 4, 2>{});
  device_agrees(pleat::FoldedMesh<1, 8, 4, 8, 2>{});
  device_agrees(pleat::FoldedMesh<2, 4, 3, 4>{});
}

TEST_CASE("a run-time mesh on the device") {
  device_agrees(pleat::RuntimeMesh::fold({.world = 32, .pp = 2, .cp = 4, .ep = 2}));
  device_agrees(pleat::RuntimeMesh::fold({.world = 96, .pp = 3, .cp = 4, .ep = 8, .replicas = 4}));
}
