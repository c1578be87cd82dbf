// HostArena beyond the concept: an arena of one rank, memory that lives as long as its windows.
#include <pleat/comm/thread_arena.hpp>

#include <pleat/comm/peer_window.hpp>

#include <cstring>
#include <memory>
#include <stdexcept>
#include <thread>

#include <doctest/doctest.h>

#include <support/watchdog.hpp>

namespace {

using namespace pleat;
using namespace std::chrono_literals;

static_assert(!std::copyable<HostPeers> && !std::is_copy_constructible_v<HostArena>);

void require(bool holds, const char* text) {
  if (!holds) throw std::logic_error(text);
}

TEST_CASE("an arena of one rank needs no communicator") {
  const GroupComm<ThreadComm> alone(3);
  HostArena arena(alone, 256);
  CHECK(arena.reachable(Group{3, {}}));
  CHECK_FALSE(arena.reachable(Group{0, {}}));
  HostPeers peers = arena.open(Group{3, {}}, 256, 1);
  CHECK(peers.rank() == 0);
  CHECK(peers.size() == 1);
  std::memset(peers.base(0), 7, 256);
  peers.signal(0, 0);
  peers.await(0, 0);
  CHECK_THROWS_WITH_AS(peers.await(0, 0),
                       "pleat[C03]: rank 3 waits for itself in await of signal 2 on channel 0 from rank 3; what a rank "
                       "awaits of itself comes before the wait",
                       comm_error);
}

TEST_CASE("C07 names the group and the ranks of the arena") {
  HostArena arena(GroupComm<ThreadComm>(3), 256);
  CHECK_THROWS_WITH_AS((void)arena.open(Group{2, GroupShape{}.append(1, 2)}, 8, 1),
                       "pleat[C07]: group {2, 3} of rank 3 is not inside the arena of ranks {3}", comm_error);
}

TEST_CASE("C08 says what there is and what is needed") {
  HostArena arena(GroupComm<ThreadComm>(0), 256);
  const HostPeers first = arena.open(Group{0, {}}, 100, 1);
  CHECK_THROWS_WITH_AS(
      (void)arena.open(Group{0, {}}, 129, 1),
      "pleat[C08]: the arena has 256 bytes, the operations bound to it so far need 257; size it by the "
      "sum of footprint().symmetric",
      comm_error);
  CHECK(arena.open(Group{0, {}}, 128, 1).base(0) == first.base(0) + 128);
}

TEST_CASE("C08: a host arena counts channels as those of GPUs do") {
  CHECK_THROWS_WITH_AS(HostArena(GroupComm<ThreadComm>(0), 8, -1), "pleat[C08]: -1 channels; valid: 0 or more",
                       comm_error);
  HostArena arena(GroupComm<ThreadComm>(0), 256, 3);
  const HostPeers first = arena.open(Group{0, {}}, 1, 2);
  CHECK_THROWS_WITH_AS((void)arena.open(Group{0, {}}, 1, 2),
                       "pleat[C08]: the arena has 3 channels, the operations bound to it so far need 4; size it by the "
                       "sum of footprint().channels",
                       comm_error);
  CHECK(arena.open(Group{0, {}}, 1, 1).base(0) == first.base(0) + 128);
}

TEST_CASE("a deadline names the operation that awaits, and whose signal it is") {
  const auto run = [] {
    run_ranks(2,
              [](ThreadComm& world) {
                const GroupComm<ThreadComm> all(world);
                HostArena arena(all, 128);
                auto peers = detail::open_window("moe dispatch", 2, all, Memory<HostArena>{.arena = &arena}, 64, 3);
                if (world.rank() == 0) peers.await(1, 2);
                std::this_thread::sleep_for(60ms);
              },
              {.deadline = 30ms});
  };
  CHECK_THROWS_WITH_AS(
      run(),
      "pleat[C04]: rank 0 waited 30 ms in moe dispatch: await of signal 1 on channel 2 from rank 1 for "
      "rank 1, last seen in arena",
      comm_error);
}

TEST_CASE("a group moves bytes by peer access where the arena reaches it") {
  const HostArena arena(GroupComm<ThreadComm>(3), 256);
  CHECK(choose_transport(arena, Group{3, {}}) == Transport::peer);
  CHECK(choose_transport(arena, Group{2, GroupShape{}.append(1, 2)}) == Transport::collective);
}

TEST_CASE("windows keep the memory alive when arena and peers are gone") {
  const testing_support::Watchdog watchdog("window outlives arena");
  run_ranks(3, [](ThreadComm& world) {
    auto arena = std::make_unique<HostArena>(world, 64);
    HostPeers peers = arena->open(Group{0, GroupShape{}.append(1, 3)}, 64, 1);
    arena.reset();
    if (world.rank() == 2) return;  // its window is gone, its memory is not
    std::this_thread::sleep_for(1ms);
    peers.base(2)[world.rank()] = std::byte{1};
    const HostPeers moved = std::move(peers);
    require(moved.base(2)[world.rank()] == std::byte{1}, "the memory of a rank that has returned");
  });
}

// A rank outside the stage fails while the stage shares its new arena: rank 0 must not take the state away too early.
TEST_CASE("a failure elsewhere while an arena is made") {
  const testing_support::Watchdog watchdog("failure while an arena is made");
  for (int round = 0; round < 40; ++round) {
    const auto run = [&] {
      run_ranks(4, [&](ThreadComm& world) {
        ThreadComm stage = world.split(world.rank() == 3, world.rank());
        if (world.rank() == 3) {
          std::this_thread::sleep_for(std::chrono::microseconds(round * 5));
          throw std::runtime_error("boom");
        }
        for (;;) {
          HostArena arena(stage, 128);
          HostPeers peers = arena.open(Group{0, GroupShape{}.append(1, 3)}, 128, 1);
          peers.base((world.rank() + 1) % 3)[world.rank()] = std::byte{1};
        }
      });
    };
    CHECK_THROWS_AS(run(), rank_error);
  }
}

}  // namespace
