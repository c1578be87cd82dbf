// GroupComm: a group of one does without a communicator, and refuses what a communicator would refuse.
#include <pleat/comm/group_comm.hpp>
#include <pleat/comm/run_ranks.hpp>

#include <vector>

#include <doctest/doctest.h>

namespace {

using namespace pleat;
using Handle = GroupComm<ThreadComm>;

static_assert(std::is_trivially_copyable_v<Handle>);

TEST_CASE("a group of one has its rank of the world, and place 0") {
  const Handle alone(5);
  CHECK(alone.rank() == 0);
  CHECK(alone.size() == 1);
  CHECK(alone.ranks()[0] == 5);
  CHECK(alone.comm() == nullptr);
}

TEST_CASE("a communicator of one rank is not kept") {
  run_ranks(2, [](ThreadComm& world) {
    ThreadComm self = world.split(world.rank(), 0);
    const Handle alone(self, Group{world.rank(), {}});
    if (alone.comm() != nullptr || alone.rank() != 0 || alone.ranks()[0] != world.rank()) fail<comm_error>("kept");
    const Handle both(world);
    if (both.comm() != &world || both.size() != 2 || both.rank() != world.rank()) fail<comm_error>("not kept");
  });
}

TEST_CASE("operations of a group of one are copies, also in place") {
  const Handle alone;
  const std::vector<float> in = {1, 2, 3};
  const std::size_t counts[] = {3};
  const auto check = [&](auto operation) {
    std::vector<float> out(3);
    operation(in.data(), out.data());
    CHECK(out == in);
    operation(out.data(), out.data());
    CHECK(out == in);
  };
  check([&](const void* from, void* to) { alone.all_gather(from, to, 3, DType::f32, {}); });
  check([&](const void* from, void* to) { alone.all_gather_v(from, to, counts, DType::f32, {}); });
  check([&](const void* from, void* to) { alone.all_to_all(from, to, 3, DType::f32, {}); });
  check([&](const void* from, void* to) { alone.all_to_all_v(from, counts, to, counts, DType::f32, {}); });
  std::vector<float> out(4);
  const Send tx[] = {{in.data(), 1, 0}, {in.data() + 1, 2, 0}};
  const Recv rx[] = {{out.data() + 3, 1, 0}, {out.data(), 2, 0}};
  alone.exchange(tx, rx, DType::f32, {});
  CHECK(out == std::vector<float>{2, 3, 0, 1});
  alone.broadcast(out.data(), 4, 0, DType::f32, {});
  alone.barrier({});
}

TEST_CASE("C05: counts and roots that cannot be") {
  const Handle alone;
  float a[4] = {}, b[4] = {};
  const std::size_t one[] = {1}, two[] = {2}, pair[] = {1, 1};
  CHECK_THROWS_WITH_AS(alone.all_to_all_v(a, one, b, two, DType::f32, {}),
                       "pleat[C05]: all_to_all_v in a group of one: valid: root 0, one count per list, and as many "
                       "elements sent as received",
                       comm_error);
  CHECK_THROWS_AS(alone.all_to_all_v(a, pair, b, one, DType::f32, {}), comm_error);
  CHECK_THROWS_AS(alone.all_gather_v(a, b, pair, DType::f32, {}), comm_error);
  CHECK_THROWS_AS(alone.all_gather_v(a, b, {}, DType::f32, {}), comm_error);
  CHECK_THROWS_AS(alone.broadcast(a, 1, 1, DType::f32, {}), comm_error);
}

TEST_CASE("C06: messages that do not match") {
  const Handle alone;
  float a[4] = {}, b[4] = {};
  const Send tx[] = {{a, 1, 0}}, to_nobody[] = {{a, 1, 1}};
  const Recv rx[] = {{b, 1, 0}}, longer[] = {{b, 2, 0}}, from_nobody[] = {{b, 1, 1}};
  CHECK_THROWS_WITH_AS(
      alone.exchange(tx, {}, DType::f32, {}),
      "pleat[C06]: in a group of one every message goes to peer 0 and matches a receive of its size; 1 "
      "sends and 0 receives do not",
      comm_error);
  CHECK_THROWS_AS(alone.exchange({}, rx, DType::f32, {}), comm_error);
  CHECK_THROWS_AS(alone.exchange(tx, longer, DType::f32, {}), comm_error);
  CHECK_THROWS_AS(alone.exchange(to_nobody, rx, DType::f32, {}), comm_error);
  CHECK_THROWS_AS(alone.exchange(tx, from_nobody, DType::f32, {}), comm_error);
}

}  // namespace
