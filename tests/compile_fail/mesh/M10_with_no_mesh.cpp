// expect: pleat[M10]: with_mesh needs the meshes to compile in
#include <pleat/mesh.hpp>

void call(const pleat::RuntimeMesh& mesh) {
#ifdef PLEAT_FIXED
  pleat::with_mesh<pleat::FoldedMesh<1, 1, 1, 1>, pleat::RuntimeMesh>(mesh, [](auto) {});
#else
  pleat::with_mesh<>(mesh, [](auto) {});
#endif
}
