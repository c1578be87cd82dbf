// run_ranks: what a program sees of the errors of its ranks.
#include <pleat/comm/run_ranks.hpp>
#include <pleat/comm/thread_ranks.hpp>

#include <atomic>
#include <stdexcept>
#include <string>
#include <thread>

#include <doctest/doctest.h>

#include <support/watchdog.hpp>

namespace {

using namespace pleat;
using namespace std::chrono_literals;

TEST_CASE("C01: a run needs a rank") {
  for (const int ranks : {0, -3}) CHECK_THROWS_AS(run_ranks(ranks, [](ThreadComm&) {}), comm_error);
  CHECK_THROWS_WITH(run_ranks(0, [](ThreadComm&) {}), "pleat[C01]: a run of 0 ranks; at least 1 is needed");
}

TEST_CASE("C35: a deadline is 0 or more; for ever is a century") {
  CHECK_THROWS_WITH_AS(run_ranks(2, [](ThreadComm&) {}, {.deadline = -1000ms}),
                       "pleat[C35]: a deadline of -1000 ms; valid deadlines: 0 ms or more", comm_error);
  const auto late = [](ThreadComm& world) {
    if (world.rank() == 1) std::this_thread::sleep_for(5ms);
    world.barrier();
  };
  CHECK_NOTHROW(run_ranks(2, late, {.deadline = std::chrono::milliseconds::max()}));
}

TEST_CASE("every rank runs once, on a world of its own") {
  std::atomic<int> sum = 0;
  run_ranks(8, [&](ThreadComm& world) { sum += 1 << (4 * world.rank() % 31) >> (world.size() == 8 ? 0 : 31); });
  int expected = 0;
  for (int r = 0; r < 8; ++r) expected += 1 << (4 * r % 31);
  CHECK(sum == expected);
}

TEST_CASE("the error of one rank names it, and holds what it threw") {
  const testing_support::Watchdog watchdog("rank_error");
  try {
    run_ranks(4, [](ThreadComm& world) {
      world.barrier();
      if (world.rank() == 2) throw std::out_of_range("no such expert");
      float value = 0;
      world.broadcast(&value, 1, 0, DType::f32);
    });
    FAIL("nothing was thrown");
  } catch (const rank_error& e) {
    CHECK(e.rank() == 2);
    CHECK(std::string(e.what()) == "pleat[C02]: rank 2 failed after barrier (no such expert)");
    CHECK_THROWS_AS(e.rethrow_nested(), std::out_of_range);
  }
}

TEST_CASE("what all ranks throw alike is thrown as it is") {
  const auto run = [](int ranks) { run_ranks(ranks, [](ThreadComm&) { throw std::length_error("alike"); }); };
  CHECK_THROWS_WITH_AS(run(1), "alike", std::length_error);
  CHECK_THROWS_WITH_AS(run(4), "alike", std::length_error);
  CHECK_THROWS_AS(run_ranks(3, [](ThreadComm& world) { throw std::length_error(std::to_string(world.rank())); }),
                  rank_error);
}

TEST_CASE("an error of a communicator is thrown as it is") {
  CHECK_THROWS_WITH_AS(run_ranks(2,
                                 [](ThreadComm& world) {
                                   if (world.rank() == 1) fail<comm_error>("pleat[C99]: mine");
                                   world.barrier();
                                 }),
                       "pleat[C99]: mine", comm_error);
}

TEST_CASE("a rank that catches its own failure still ends the run with an error") {
  const testing_support::Watchdog watchdog("swallowed failure");
  CHECK_THROWS_AS(run_ranks(2,
                            [](ThreadComm& world) {
                              try {
                                if (world.rank() == 0) world.barrier();
                              } catch (const comm_error&) {
                              }
                            },
                            {.deadline = 20ms}),
                  comm_error);
}

TEST_CASE("exceptions that are no std::exception") {
  const testing_support::Watchdog watchdog("throw 42");
  try {
    run_ranks(3, [](ThreadComm& world) {
      if (world.rank() == 0) throw 42;
      world.barrier();
    });
    FAIL("nothing was thrown");
  } catch (const rank_error& e) {
    CHECK(e.rank() == 0);
    CHECK_THROWS_AS(e.rethrow_nested(), int);
  }
  CHECK_THROWS_AS(run_ranks(2, [](ThreadComm&) { throw 42; }), int);
}

TEST_CASE("runs within ranks") {
  std::atomic<int> inner_ranks = 0;
  run_ranks(2, [&](ThreadComm& outer) {
    run_ranks(3, [&](ThreadComm& inner) {
      inner.barrier();
      ++inner_ranks;
    });
    outer.barrier();
  });
  CHECK(inner_ranks == 6);
  CHECK_THROWS_WITH_AS(run_ranks(2,
                                 [](ThreadComm& outer) {
                                   if (outer.rank() == 0) {
                                     run_ranks(2, [](ThreadComm& inner) {
                                       if (inner.rank() == 1) throw std::runtime_error("deep");
                                       inner.barrier();
                                     });
                                   }
                                   outer.barrier();
                                 }),
                       "pleat[C02]: rank 1 failed after no operation (deep)", rank_error);
}

TEST_CASE("ranks may return at different times") {
  run_ranks(4, [](ThreadComm& world) {
    world.barrier();
    std::this_thread::sleep_for(std::chrono::milliseconds(world.rank()));
  });
}

TEST_CASE("threads that exist are ranks; one that fails ends the waits of the others") {
  const testing_support::Watchdog watchdog("thread_ranks");
  CHECK_THROWS_WITH(ThreadRanks(0), "pleat[C01]: a world of 0 ranks; at least 1 is needed");
  const ThreadRanks ranks(3);
  for (const int none : {-1, 3}) CHECK_THROWS_AS(ranks.comm(none), mesh_error);
  std::string seen[3];
  {
    std::vector<std::jthread> threads;
    for (int r = 0; r < 3; ++r) {
      threads.emplace_back([&ranks, &seen, r] {
        ThreadComm comm = ranks.comm(r);
        std::int64_t mine = r + 1, all[3];
        comm.all_gather(&mine, all, 1, DType::i64);
        seen[r] = std::to_string(all[0] + all[1] + all[2]);
        if (r == 1) return ranks.fail(r, "the framework gave up");
        try {
          comm.barrier();
        } catch (const comm_error& e) {
          seen[r] += e.what();
        }
      });
    }
  }
  CHECK(seen[1] == "6");
  for (const int r : {0, 2}) CHECK(seen[r].starts_with("6pleat[C02]: rank 1 failed"));
  for (const int r : {0, 2}) CHECK(seen[r].find("the framework gave up") != std::string::npos);
}

}  // namespace
