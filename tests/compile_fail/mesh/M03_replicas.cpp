// expect: pleat[M03]: Replicas must divide expert_dp
// values: <3, 4>
#include <pleat/mesh.hpp>

#ifdef PLEAT_FIXED
pleat::FoldedMesh<1, 8, 4, 8, 4> mesh;
#else
pleat::FoldedMesh<1, 8, 4, 8, 3> mesh;
#endif
