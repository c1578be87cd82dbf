// expect: pleat[M01]: PP must divide the world size
// values: <3, 32>
#include <pleat/mesh.hpp>

#ifdef PLEAT_FIXED
using Mesh = pleat::fold_t<32, 4, 1, 1>;
#else
using Mesh = pleat::fold_t<32, 3, 1, 1>;
#endif
static_assert(Mesh::cp == 1);
