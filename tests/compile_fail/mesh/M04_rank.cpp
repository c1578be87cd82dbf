// expect: constexpr
// values: M04_rank_is_out_of_range
#include <pleat/mesh.hpp>

using Mesh = pleat::FoldedMesh<2, 4, 4, 2>;
#ifdef PLEAT_FIXED
constexpr auto at = Mesh::coordinate(31);
#else
constexpr auto at = Mesh::coordinate(32);
#endif
