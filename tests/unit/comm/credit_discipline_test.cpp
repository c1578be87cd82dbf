// The checker of credits itself: what may be captured passes, what may not is found in every run.
#include <pleat/comm.hpp>
#include <pleat/comm/signal_protocol.hpp>

#include <memory>
#include <string>

#include <doctest/doctest.h>

#include "support/credit_discipline.hpp"

namespace {

using namespace pleat;
using testing_support::DisciplineArena;
using testing_support::DisciplineLog;

/// The breaches of what three ranks do with a window of four channels.
template <class F>
std::string breaches_of(F f) {
  const auto log = std::make_shared<DisciplineLog>();
  run_ranks(3, [&](ThreadComm& world) {
    const GroupComm<ThreadComm> all(world);
    DisciplineArena arena(all, 0, log, world.size());
    auto peers = arena.open(all.ranks(), 0, 4);
    f(peers, (world.rank() + 1) % 3, (world.rank() + 2) % 3);
  });
  return log->breaches();
}

TEST_CASE("free and full answer each other") {
  CHECK(breaches_of([](auto& peers, int next, int last) {
          peers.signal(last, 0, {});
          for (int round = 0; round < 5; ++round) {
            peers.await(next, 0, {});
            peers.signal(next, 1, {});
            peers.await(last, 1, {});
            peers.signal(last, 0, {});
          }
        }) == "");
}

TEST_CASE("two credits on one channel do not") {
  CHECK(breaches_of([](auto& peers, int next, int last) {
          for (int slot = 0; slot < 2; ++slot) peers.signal(last, 0, {});
          for (int slot = 0; slot < 2; ++slot) peers.await(next, 0, {});
        }) == "window 0 channel 0: 3\n");
}

TEST_CASE("a barrier takes two channels") {
  CHECK(breaches_of([](auto& peers, int, int) {
          for (int round = 0; round < 4; ++round) peer_barrier(peers, 2, {});
        }) == "");
  CHECK(breaches_of([](auto& peers, int next, int last) {
          for (int round = 0; round < 4; ++round) {
            for (const int peer : {next, last}) peers.signal(peer, 2, {});
            for (const int peer : {next, last}) peers.await(peer, 2, {});
          }
        }) != "");
}

}  // namespace
