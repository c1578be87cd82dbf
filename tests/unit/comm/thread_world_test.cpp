// ThreadWorld: waits that end for each of their reasons, and in which order the reasons count.
#include <pleat/comm/thread_world.hpp>

#include <functional>
#include <string>
#include <thread>

#include <doctest/doctest.h>

#include <support/watchdog.hpp>

namespace {

using namespace pleat;
using namespace std::chrono_literals;
using detail::ThreadWorld;

/// What the wait of rank 0 for rank 1 ends with; empty when it ends well.
std::string wait_of(ThreadWorld& world, const std::function<bool()>& ready) {
  const auto place = world.make_place();
  std::unique_lock lock(place->mutex);
  try {
    world.wait(
        *place, lock, 0, ready, [](auto visit) { visit(1); }, "a wait of ", 2, " ranks");
  } catch (const comm_error& e) {
    return e.what();
  }
  return "";
}
std::string wait_of(ThreadWorld& world) {
  return wait_of(world, [] { return false; });
}

TEST_CASE("what is ready needs no peer, dead or alive") {
  ThreadWorld world(2, 10ms);
  world.fail(1, "boom");
  world.leave(1);
  CHECK(wait_of(world, [] { return true; }).empty());
}

TEST_CASE("C02, C03, C04 and what they say") {
  ThreadWorld failed(2, 1s), left(2, 1s), late(2, 10ms);
  failed.enter(1, "all_gather");
  failed.fail(1, "boom");
  failed.fail(0, "second");  // the first failure is the one that is reported
  CHECK(failed.failed_rank() == 1);
  CHECK(wait_of(failed) == "pleat[C02]: rank 1 failed after all_gather (boom); rank 0 waited in a wait of 2 ranks");
  left.leave(1);
  CHECK(
      wait_of(left) ==
      "pleat[C03]: rank 1 has returned, while rank 0 waits for it in a wait of 2 ranks; all ranks of a group must make "
      "the same calls");
  CHECK(left.failed_rank() == 0);  // who gives up fails for all others
  CHECK(wait_of(late) == "pleat[C04]: rank 0 waited 10 ms in a wait of 2 ranks for rank 1, last seen in no operation");
}

TEST_CASE("a wait wakes up when a rank fails or leaves later") {
  const testing_support::Watchdog watchdog("late failure");
  for (const bool fails : {true, false}) {
    ThreadWorld world(2, 10s);
    std::jthread other([&] {
      std::this_thread::sleep_for(5ms);
      fails ? world.fail(1, "boom") : world.leave(1);
    });
    const auto start = std::chrono::steady_clock::now();
    CHECK(wait_of(world).find(fails ? "pleat[C02]" : "pleat[C03]") == 0);
    CHECK(std::chrono::steady_clock::now() - start < 5s);  // woken, not timed out
  }
}

TEST_CASE("the last operations are there to be read") {
  ThreadWorld world(3, 10ms);
  CHECK(world.ranks() == 3);
  world.enter(2, "barrier");
  CHECK(world.last_operation(0) == std::string("no operation"));
  CHECK(world.last_operation(2) == std::string("barrier"));
}

TEST_CASE("places that are gone are not woken") {
  ThreadWorld world(2, 10ms);
  for (int i = 0; i < 1000; ++i) world.make_place();
  const auto place = world.make_place();
  world.leave(0);
  CHECK(place.use_count() == 1);
}

}  // namespace
