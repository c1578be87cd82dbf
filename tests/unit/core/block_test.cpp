// Block: by default there is no memory.
#include <pleat/core/block.hpp>

#include <doctest/doctest.h>

namespace {

TEST_CASE("a default block is empty") {
  constexpr pleat::Block block;
  static_assert(block.data == nullptr && block.size_bytes == 0);
  CHECK(block.data == nullptr);
}

}  // namespace
