// How often a test repeats what chance varies: fewer times where every repeat is slow, as under compute-sanitizer.
#pragma once

#include <algorithm>
#include <cstdlib>

namespace testing_support {

inline bool is_quick() {
  return std::getenv("PLEAT_TEST_QUICK") != nullptr;
}
/// `full`, or a tenth of it and at least 1.
inline int repeats(int full) {
  return is_quick() ? std::max(1, full / 10) : full;
}

}  // namespace testing_support
