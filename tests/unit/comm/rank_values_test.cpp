// Values on a rank's device go there and come back, through an operation in between.
#include <pleat/comm.hpp>

#include <doctest/doctest.h>

namespace {

using namespace pleat;

TEST_CASE("values of all ranks, read after a gather") {
  run_ranks(3, [](ThreadComm& world) {
    const RankValues mine(world, std::vector{world.rank() + 0.5, -1.0});
    const RankValues all(world, std::vector<double>(6));
    static_assert(std::is_same_v<decltype(all.data()), double*>);
    world.all_gather(mine.data(), all.data(), mine.size(), DType::f64);
    if (all.read(world) != std::vector{0.5, -1.0, 1.5, -1.0, 2.5, -1.0}) throw std::runtime_error("other values");
    if (RankValues(world, std::vector<int>()).read(world).size() != 0) throw std::runtime_error("not empty");
  });
}

}  // namespace
