// expect: pleat[M05]: a group names an axis twice
// values: axes_of_a_group_must_differ
#include <pleat/mesh.hpp>

using pleat::Axis;
#ifdef PLEAT_FIXED
auto groups(const pleat::RuntimeMesh& mesh) {
  return pleat::groups<Axis::cp, Axis::dp>(mesh);
}
#else
auto groups(const pleat::RuntimeMesh& mesh) {
  return pleat::groups<Axis::cp, Axis::cp>(mesh);
}
#endif
