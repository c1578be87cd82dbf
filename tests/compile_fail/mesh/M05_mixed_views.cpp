// expect: pleat[M05]: the axes of a group must belong to one view
// values: axes_of_a_group_must_share_a_view
#include <pleat/mesh.hpp>

using Mesh = pleat::FoldedMesh<2, 4, 4, 2>;
#ifdef PLEAT_FIXED
auto group(int rank) {
  return Mesh::group<pleat::Axis::pp, pleat::Axis::ep>(rank);
}
#else
auto group(int rank) {
  return Mesh::group<pleat::Axis::dp, pleat::Axis::ep>(rank);
}
#endif
