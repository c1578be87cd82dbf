// expect: pleat[M06]: EP must divide the number of experts
// values: <8, 12>
#include <pleat/mesh.hpp>

#ifdef PLEAT_FIXED
int experts() {
  return pleat::experts_per_rank<16>(pleat::FoldedMesh<1, 8, 4, 8>{});
}
#else
int experts() {
  return pleat::experts_per_rank<12>(pleat::FoldedMesh<1, 8, 4, 8>{});
}
#endif
