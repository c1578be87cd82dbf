// expect: pleat[M00]: the world size PP*DP*CP must fit in int
// values: <65536, 65536, 1>
#include <pleat/mesh.hpp>

#ifdef PLEAT_FIXED
pleat::FoldedMesh<65536, 32767, 1, 1> mesh;
#else
pleat::FoldedMesh<65536, 65536, 1, 1> mesh;
#endif
