// Footprints: operations that live together add up, operations that take turns share scratch and nothing else.
#include <pleat/core/footprint.hpp>

#include <doctest/doctest.h>

namespace {

using pleat::Footprint;

constexpr Footprint a{
    .scratch = 1, .saved = 20, .symmetric = 300, .persistent = 4000, .pinned_host = 50000, .channels = 6};
constexpr Footprint b{
    .scratch = 2, .saved = 10, .symmetric = 100, .persistent = 1000, .pinned_host = 10000, .channels = 1};

static_assert(a + b == Footprint{3, 30, 400, 5000, 60000, 7});
static_assert(max_scratch(a, b) == Footprint{2, 30, 400, 5000, 60000, 7});
static_assert(max_scratch(b, a) == max_scratch(a, b));
static_assert(a + Footprint{} == a && max_scratch(a, Footprint{}) == a);

TEST_CASE("footprints add and share at run time as well") {
  Footprint sum;
  for (int i = 0; i < 3; ++i) sum = sum + a;
  CHECK(sum == Footprint{3, 60, 900, 12000, 150000, 18});
  CHECK(max_scratch(sum, a).scratch == 3);
  CHECK_FALSE(sum == a);
}

}  // namespace
