// budget: 0.01 s over mesh/ranks_32.cpp
#include <pleat/mesh.hpp>

using namespace pleat;
using Mesh = FoldedMesh<16, 1024, 64, 256>;

static_assert(Mesh::groups<Axis::cp>()[Mesh::groups<Axis::cp>().size() - 1].back() == Mesh::world_size - 1);

int use(int rank) {
  int sum = Mesh::coordinate(rank).ep + Mesh::rank({.dp = 0});
  for (const int member : Mesh::group<Axis::cp>(rank)) sum += member;
  return sum + Mesh::group<Axis::dp, Axis::cp>(rank)[0];
}
