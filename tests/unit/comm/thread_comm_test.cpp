// ThreadComm beyond the concept: failures that leave memory behind, errors that can be caught, groups in many threads.
#include <pleat/comm/run_ranks.hpp>
#include <pleat/comm/thread_comm.hpp>

#include <atomic>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <doctest/doctest.h>

#include <support/watchdog.hpp>

namespace {

using namespace pleat;
using namespace std::chrono_literals;
using testing_support::Watchdog;

void require(bool holds, const char* text) {
  if (!holds) throw std::logic_error(text);
}
void spin_until(const std::atomic<int>& counter, int value) {
  while (counter < value) std::this_thread::yield();
}

/// Gathers in a group through memory that goes when the call throws.
void gather_on_heap(ThreadComm& group) {
  const std::vector<float> in(100, static_cast<float>(group.rank()));
  std::vector<float> out(100 * static_cast<std::size_t>(group.size()));
  group.all_gather(in.data(), out.data(), 100, DType::f32);
}

// The last of three ranks comes when the other two have given up: it must not take them for present.
TEST_CASE("nobody meets ranks that have given up") {
  for (const bool by_deadline : {false, true}) {
    const Watchdog watchdog(by_deadline ? "give up by deadline" : "give up by failure");
    std::atomic<int> ended = 0;
    std::string seen;
    const auto run = [&] {
      run_ranks(4,
                [&](ThreadComm& world) {
                  ThreadComm trio = world.split(world.rank() == 3, world.rank());
                  if (world.rank() == 3) {
                    if (!by_deadline) throw std::runtime_error("boom");
                    spin_until(ended, 3);
                    return;
                  }
                  if (world.rank() == 2) spin_until(ended, 2);
                  try {
                    gather_on_heap(trio);
                  } catch (const comm_error& e) {
                    if (world.rank() == 2) seen = e.what();
                    ++ended;
                    throw;
                  }
                },
                {.deadline = by_deadline ? 20ms : 60000ms});
    };
    CHECK_THROWS_AS(run(), comm_error);
    CHECK(seen.find("pleat[C02]") == 0);
    CHECK(seen.find(by_deadline ? "pleat[C04]" : "boom") != std::string::npos);
  }
}

TEST_CASE("a sender that fails waits for the copy under way") {
  const Watchdog watchdog("failing sender");
  for (int round = 0; round < 20; ++round) {
    const auto run = [&] {
      run_ranks(3, [&](ThreadComm& world) {
        std::vector<char> memory(1 << 18, static_cast<char>(world.rank()));
        const Send send{memory.data(), memory.size(), 1};
        const Recv recv{memory.data(), memory.size(), 0}, never{memory.data(), 1, 2};
        if (world.rank() == 0) world.exchange({&send, 1}, {&never, 1}, DType::u8);
        if (world.rank() == 1) world.exchange({}, {&recv, 1}, DType::u8);
        std::this_thread::sleep_for(std::chrono::microseconds(round * 20));
        throw std::runtime_error("boom");
      });
    };
    CHECK_THROWS_AS(run(), std::exception);
  }
}

TEST_CASE("calls that disagree can be caught, and the group goes on") {
  const Watchdog watchdog("caught C05");
  run_ranks(4, [](ThreadComm& world) {
    for (int round = 0; round < 10; ++round) {
      bool caught = false;
      try {
        float value = 1;
        world.broadcast(&value, 1, world.rank() == 2 ? 1 : 0, DType::f32);
      } catch (const comm_error& e) {
        caught = std::string(e.what()).find("pleat[C05]: rank 2 calls broadcast") == 0;
      }
      require(caught, "no C05");
      gather_on_heap(world);
    }
  });
}

TEST_CASE("C05 names the rank that is wrong, and another only where two differ") {
  const auto text_of = [](auto call) {
    try {
      run_ranks(3, call);
    } catch (const comm_error& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  float a[8] = {}, b[8] = {};
  CHECK(text_of([&](ThreadComm& world) { world.broadcast(a, 1, 9, DType::f32); }) ==
        "pleat[C05]: rank 0 calls broadcast; root 9 is not in 0 to 2");
  CHECK(text_of([&](ThreadComm& world) {
          world.all_gather_v(a, b, std::vector<std::size_t>(world.rank() == 0 ? 2 : 3, 1), DType::f32);
        }) == "pleat[C05]: rank 0 calls all_gather_v; it gives 2 counts for 3 ranks");
  CHECK(text_of([&](ThreadComm& world) {
          std::vector<std::size_t> counts(3, 1);
          if (world.rank() == 2) counts[1] = 4;
          world.all_gather_v(a, b, counts, DType::f32);
        }) == "pleat[C05]: rank 2 calls all_gather_v; it expects 4 elements of rank 1, rank 0 expects 1");
  CHECK(text_of([&](ThreadComm& world) {
          std::vector<std::size_t> send(3, 1), recv(3, 1);
          if (world.rank() == 1) send[0] = 2;
          world.all_to_all_v(a, send, b, recv, DType::f32);
        }) == "pleat[C05]: rank 0 calls all_to_all_v; it expects 1 elements of rank 1, which sends 2");
}

TEST_CASE("a mismatch can be caught on both sides, and the next batch is clean") {
  const Watchdog watchdog("caught C06");
  run_ranks(2, [](ThreadComm& world) {
    std::vector<int> memory(8, world.rank());
    const int peer = 1 - world.rank();
    for (int round = 0; round < 10; ++round) {
      bool caught = false;
      const Send send{memory.data(), world.rank() == 0 ? 2U : 3U, peer};
      const Recv recv{memory.data() + 4, world.rank() == 0 ? 3U : 1U, peer};
      try {
        // Rank 1 refuses the message of 2, and takes its own of 3 back or has it taken.
        world.exchange({&send, 1}, {&recv, 1}, DType::i32);
      } catch (const comm_error& e) {
        caught = std::string(e.what()).find("pleat[C06]: a message of 2 i32 from rank 0 meets a receive of 1 i32") == 0;
      }
      require(caught, "no C06");
      world.barrier();
      const Send good{memory.data(), 4, peer};
      const Recv whole{memory.data() + 4, 4, peer};
      world.exchange({&good, 1}, {&whole, 1}, DType::i32);
      require(memory[4] == peer && memory[7] == peer, "wrong message");
    }
  });
}

TEST_CASE("a receive from oneself that nobody sends ends at once") {
  const Watchdog watchdog("receive from oneself");
  float value = 0;
  const Recv recv{&value, 1, 0};
  const auto run = [&] {
    run_ranks(2, [&](ThreadComm& world) {
      if (world.rank() == 0) world.exchange({}, {&recv, 1}, DType::f32);
      if (world.rank() == 1) world.barrier();
    });
  };
  CHECK_THROWS_WITH_AS(run(),
                       "pleat[C03]: rank 0 waits for itself in exchange, receiving from rank 0; what a rank awaits of "
                       "itself comes before the wait",
                       comm_error);
}

TEST_CASE("threads of a rank, each with a group of its own") {
  const Watchdog watchdog("threads of a rank");
  constexpr int lanes = 4;
  run_ranks(4, [](ThreadComm& world) {
    std::vector<ThreadComm> groups;
    for (int lane = 0; lane < lanes; ++lane) {
      groups.push_back(world.split(lane % 2 == 0 ? 0 : world.rank() / 2, lane % 3 == 0 ? -world.rank() : world.rank()));
    }
    std::atomic<int> wrong = 0;
    {
      std::vector<std::jthread> threads;
      for (int lane = 0; lane < lanes; ++lane) {
        threads.emplace_back([&, lane] {
          ThreadComm& group = groups[static_cast<std::size_t>(lane)];
          std::minstd_rand random(static_cast<unsigned>(lane * 10 + group.rank() + 1));
          const int n = group.size();
          for (int round = 0; round < 60; ++round) {
            if (random() % 4 == 0) std::this_thread::yield();
            const int mine = lane * 1000 + round * 10 + group.rank();
            std::vector<int> all(static_cast<std::size_t>(n));
            group.all_gather(&mine, all.data(), 1, DType::i32);
            for (int r = 0; r < n; ++r) wrong += all[static_cast<std::size_t>(r)] != mine - group.rank() + r;
            int got = -1;
            const Send send{&mine, 1, (group.rank() + 1) % n};
            const Recv recv{&got, 1, (group.rank() + n - 1) % n};
            group.exchange({&send, 1}, {&recv, 1}, DType::i32);
            wrong += got != mine - group.rank() + recv.peer;
          }
        });
      }
    }
    require(wrong == 0, "the lanes of a rank mixed");
  });
}

TEST_CASE("a communicator can move, and leave before or after its peers") {
  const Watchdog watchdog("moved communicators");
  run_ranks(4, [](ThreadComm& world) {
    for (int round = 0; round < 50; ++round) {
      auto first = std::make_unique<ThreadComm>(world.split(0, round % 2 == 0 ? 0 : -world.rank()));
      ThreadComm second = std::move(*first);
      first->barrier();  // what is moved from is a handle on the same group
      if (world.rank() % 2 == 0) first.reset();
      second.barrier();
      ThreadComm third = second.split(second.rank() / 2, 0);
      second = std::move(third);
      gather_on_heap(second);
    }
  });
}

TEST_CASE("share hands over the object of the rank that each names") {
  const Watchdog watchdog("share");
  std::atomic<int> alive = 0;
  struct Counted {
    std::atomic<int>& alive;
    int rank;
    Counted(std::atomic<int>& counter, int r) : alive(counter), rank(r) { ++alive; }
    ~Counted() { --alive; }
  };
  run_ranks(4, [&](ThreadComm& world) {
    auto mine = std::make_shared<Counted>(alive, world.rank());
    const auto theirs = world.share("share", mine, (world.rank() + 1) % 4);
    mine.reset();
    require(theirs->rank == (world.rank() + 1) % 4, "another's object");
    world.barrier();
    require(alive == 4, "objects live while anybody holds them");
    world.barrier();
  });
  CHECK(alive == 0);
}

TEST_CASE("world_ranks of a group of a group are ranks of the run") {
  run_ranks(6, [](ThreadComm& world) {
    ThreadComm odd_or_even = world.split(world.rank() % 2, -world.rank());
    ThreadComm front = odd_or_even.split(odd_or_even.rank() < 2, 0);
    const int parity = world.rank() % 2;
    const std::vector<int> expected =
        world.rank() >= 2 ? std::vector<int>{4 + parity, 2 + parity} : std::vector<int>{parity};
    require(front.world_ranks() == expected, "wrong world ranks");
  });
}

}  // namespace
