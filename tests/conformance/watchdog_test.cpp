// The watchdog of the tests: it names the test and what the ranks did, and keeps still when all goes well.
#include <support/watchdog.hpp>

#include <atomic>

#include <conformance/host_threads.hpp>

#include <doctest/doctest.h>

namespace {

using namespace conformance;
using testing_support::Watchdog;

TEST_CASE("a hung operation is named, with what each rank did last") {
  std::string text;
  std::atomic<bool> has_barked = false;
  pleat::run_ranks(3, [&](pleat::ThreadComm& world) {
    float value = 0;
    world.broadcast(&value, 1, 0, pleat::DType::f32);
    if (world.rank() == 0) {
      Watchdog watchdog("two ranks of three", 200ms, [&](const std::string& said) {
        text = said;
        has_barked = true;
      });
      watchdog.watch(last_operations(world));
      return world.barrier();
    }
    if (world.rank() == 1) {
      while (!has_barked) std::this_thread::sleep_for(1ms);
    }
    world.barrier();
  });
  CHECK(text.find("two ranks of three hangs after 200 ms; last seen: ") == 0);
  CHECK(text.find("rank 1: broadcast") != std::string::npos);
}

TEST_CASE("a test in time is left alone") {
  bool has_barked = false;
  {
    const Watchdog watchdog("quick", 60s, [&](const std::string&) { has_barked = true; });
  }
  CHECK_FALSE(has_barked);
}

}  // namespace
