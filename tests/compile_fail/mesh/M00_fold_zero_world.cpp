// expect: pleat[M00]: every degree of a mesh must be at least 1
// values: <0, 1, 1>
#include <pleat/mesh.hpp>

#ifdef PLEAT_FIXED
using Mesh = pleat::fold_t<8, 1, 1, 1>;
#else
using Mesh = pleat::fold_t<0, 1, 1, 1>;
#endif
static_assert(Mesh::pp == 1);
