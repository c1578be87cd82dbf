// A group's window on the symmetric arena: how operations open it.
#pragma once

#include <cstddef>
#include <utility>

#include <pleat/comm/group_comm.hpp>
#include <pleat/comm/memory.hpp>
#include <pleat/comm/peer_access.hpp>

namespace pleat::inline v0 {

/// How an operation of `group` (world ranks) moves bytes best: by peer access where the arena maps all ranks of the
/// group, else by collectives. A plan is the same on every rank of the arena, so where some groups are mapped and
/// others are not, the ranks agree first.
template <symmetric_arena Arena>
Transport choose_transport(const Arena& arena, const Group& group) {
  return arena.reachable(group) ? Transport::peer : Transport::collective;
}

namespace detail {

template <class Arena>
using peers_of = decltype(std::declval<Arena&>().open(std::declval<const Group&>(), std::size_t{}, 0));

/// The window of an operation planned for `ranks` ranks; `operation`, a string literal, names it in errors. Errors:
/// comm_error C29 for a group of another size and without an arena that reaches it; C08.
template <class Comm, class Arena>
peers_of<Arena> open_window(const char* operation, int ranks, const GroupComm<Comm>& group, const Memory<Arena>& memory,
                            std::size_t bytes, int channels) {
  const bool reaches = memory.arena != nullptr && memory.arena->reachable(group.ranks());
  if (group.size() != ranks || !reaches) {
    fail<comm_error>("pleat[C29]: ", operation, " planned for ", ranks, " ranks needs a group of ", ranks,
                     " and an arena that reaches it; the group is ", group.ranks(), ", the arena ",
                     memory.arena == nullptr ? "is null"
                     : reaches               ? "reaches it"
                                             : "does not reach it",
                     "; plan with the group's size, and with Transport::collective where there is no such arena");
  }
  peers_of<Arena> peers = memory.arena->open(group.ranks(), bytes, channels);
  if constexpr (requires { peers.name(operation); }) peers.name(operation);
  return peers;
}

}  // namespace detail

}  // namespace pleat::inline v0
