// expect: pleat[M00]: every degree of a mesh must be at least 1
// values: <1, 0, 4, 2, 1>
#include <pleat/mesh.hpp>

#ifdef PLEAT_FIXED
pleat::FoldedMesh<1, 4, 4, 2> mesh;
#else
pleat::FoldedMesh<1, 0, 4, 2> mesh;
#endif
