// HostArena and its windows, through the peer-access suite.
#include <pleat/comm/thread_arena.hpp>

#include <conformance/host_threads.hpp>
#include <conformance/peer_access.hpp>

#include <doctest/doctest.h>

namespace {

using namespace conformance;

struct HostThreadsWithArena : HostThreads {
  using arena_type = pleat::HostArena;
};

TEST_CASE("HostArena: windows, signals and credits") {
  check_peer_access<HostThreadsWithArena>();
}
TEST_CASE("HostArena: failures") {
  check_peer_failures<HostThreadsWithArena>();
}

}  // namespace
