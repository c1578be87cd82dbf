// expect: pleat: a dispatch needs at least one type
// values: dispatch_dtype
#include <pleat/core/dtype.hpp>

#ifdef PLEAT_FIXED
using Types = pleat::TypeList<float>;
#else
using Types = pleat::TypeList<>;
#endif

void f(pleat::DType dtype) {
  pleat::dispatch_dtype(Types{}, dtype, [](auto) {});
}
