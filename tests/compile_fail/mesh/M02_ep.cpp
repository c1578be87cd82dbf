// expect: pleat[M02]: EP must divide the stage size DP*CP
// values: <4, 6>
#include <pleat/mesh.hpp>

#ifdef PLEAT_FIXED
pleat::FoldedMesh<1, 2, 3, 3> mesh;
#else
pleat::FoldedMesh<1, 2, 3, 4> mesh;
#endif
