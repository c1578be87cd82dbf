// expect: pleat needs NaN, infinity and sums in order: compile without -ffast-math
// values: -ffinite-math-only
#ifndef PLEAT_FIXED
#define __FAST_MATH__ 1  // what -ffast-math defines
#endif
#include <pleat/core/config.hpp>
