// How unequal parts are gathered: one choice, the same on every rank.
#include <vector>

#include <pleat/nccl/gather_v.hpp>

#include <doctest/doctest.h>

namespace {

using pleat::GatherV;

TEST_CASE("parts that are equal after all take one all-gather") {
  const std::vector<std::size_t> equal{4, 4, 4}, unequal{4, 4, 5}, none{0, 0};
  CHECK(pleat::gather_v_way(equal, 2) == GatherV::equal);
  CHECK(pleat::gather_v_way(none, 2) == GatherV::equal);
  CHECK(pleat::gather_v_way(unequal, 2) != GatherV::equal);
}
TEST_CASE("the table is ascending, begins at nothing and never says equal") {
  CHECK(pleat::detail::gather_v_table[0].from_bytes == 0);
  std::size_t before = 0;
  for (const auto& row : pleat::detail::gather_v_table) {
    CHECK(row.from_bytes >= before);
    CHECK(row.way != GatherV::equal);
    before = row.from_bytes;
  }
}

}  // namespace
