// A group's window on the symmetric arena: how operations open it, and what they do with all their peers in turn.
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

/// In ring order from the next rank on, so that not all turn to the same peer first.
template <class Peers, class F>
void for_each_peer(const Peers& peers, F f) {
  for (int i = 1; i < peers.size(); ++i) f(cyclic(peers.rank(), i, peers.size()));
}
template <class Peers, class Stream>
void signal_peers(Peers& peers, int channel, Stream s) {
  for_each_peer(peers, [&](int peer) { peers.signal(peer, channel, s); });
}
template <class Peers, class Stream>
void await_peers(Peers& peers, int channel, Stream s) {
  for_each_peer(peers, [&](int peer) { peers.await(peer, channel, s); });
}

/// The window of an operation planned for `ranks` ranks. Errors: comm_error C29 for a group of another size and without
/// an arena that reaches it; C08.
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
  return memory.arena->open(group.ranks(), bytes, channels);
}

}  // namespace detail

}  // namespace pleat::inline v0
