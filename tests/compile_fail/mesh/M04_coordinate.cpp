// expect: constexpr
// values: M04_coordinate_is_out_of_range
#include <pleat/mesh.hpp>

using Mesh = pleat::FoldedMesh<2, 4, 4, 2>;
#ifdef PLEAT_FIXED
constexpr int rank = Mesh::rank({.dp = 3});
#else
constexpr int rank = Mesh::rank({.dp = 4});
#endif
