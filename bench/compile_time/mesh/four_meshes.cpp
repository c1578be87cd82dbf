// budget: 0.10 s over empty.cpp
#include <pleat/mesh.hpp>

using namespace pleat;

template <class Mesh>
int use(int rank) {
  int sum = Mesh::coordinate(rank).ep + Mesh::rank({.dp = 0});
  for (const int member : Mesh::template group<Axis::cp>(rank)) sum += member;
  return sum + Mesh::template group<Axis::dp, Axis::cp>(rank)[0];
}

int use_all(int rank) {
  return use<FoldedMesh<2, 4, 4, 2>>(rank) + use<FoldedMesh<1, 8, 4, 8>>(rank) + use<FoldedMesh<2, 8, 2, 8>>(rank) +
         use<FoldedMesh<4, 8, 1, 1, 2>>(rank);
}
