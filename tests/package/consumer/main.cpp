#ifdef PLEAT_IN_ONE_FILE
#include <pleat.hpp>
#else
#include <pleat/mesh.hpp>
#endif

using Mesh = pleat::FoldedMesh<2, 4, 4, 2>;

int main() {
  return Mesh::world_size == 32 && Mesh::expert_dp == 8 ? 0 : 1;
}
