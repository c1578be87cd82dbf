// The concepts of peer access: what satisfies them and what does not.
#include <pleat/comm/memory.hpp>
#include <pleat/comm/peer_access.hpp>

#include <string>

#include <doctest/doctest.h>

#include <support/archetype.hpp>

namespace {

using namespace pleat;
using testing_support::ArchetypeArena;
using testing_support::ArchetypePeers;
using testing_support::ArchetypeStream;

struct SignalsWithStatus : ArchetypePeers {
  bool signal(int, int, ArchetypeStream);
};
struct TypedBase : ArchetypePeers {
  float* base(int) const;
};
struct OpensNothing : ArchetypeArena {
  int open(const Group&, std::size_t, int);
};
static_assert(peer_access<ArchetypePeers> && !peer_access<SignalsWithStatus> && !peer_access<TypedBase> &&
              !peer_access<int>);
static_assert(symmetric_arena<ArchetypeArena> && !symmetric_arena<OpensNothing>);

TEST_CASE("transports have names") {
  CHECK(name_of(Transport::peer) == std::string("peer"));
  CHECK(name_of(Transport::collective) == std::string("collective"));
}

TEST_CASE("memory is empty until the caller gives some") {
  constexpr Memory<ArchetypeArena> memory;
  static_assert(memory.arena == nullptr && memory.scratch.size_bytes == 0 && memory.persistent.data == nullptr &&
                memory.pinned_host.data == nullptr);
  CHECK(memory.arena == nullptr);
}

}  // namespace
