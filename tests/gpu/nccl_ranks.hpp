// How many ranks, each with a GPU of its own, the suites on NCCL run with beside one.
#pragma once

#include <cstdlib>

namespace nccl_testing {

/// Two, or what PLEAT_TEST_RANKS says, up to 8.
inline const int world_ranks = [] {
  const char* const text = std::getenv("PLEAT_TEST_RANKS");
  return text == nullptr ? 2 : std::atoi(text);
}();

}  // namespace nccl_testing
