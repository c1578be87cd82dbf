// expect: pleat[M01]: CP must divide the stage size World/PP
// values: <4, 6>
#include <pleat/mesh.hpp>

#ifdef PLEAT_FIXED
using Mesh = pleat::fold_t<12, 2, 3, 1>;
#else
using Mesh = pleat::fold_t<12, 2, 4, 1>;
#endif
static_assert(Mesh::pp == 2);
