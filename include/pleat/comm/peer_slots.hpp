// What operations on peer-mapped memory share: slots that are used in turn, and the credits that pass them on.
#pragma once

#include <cstddef>
#include <utility>

#include <pleat/comm/group_comm.hpp>
#include <pleat/comm/memory.hpp>
#include <pleat/comm/peer_access.hpp>
#include <pleat/core/footprint.hpp>

namespace pleat::inline v0 {

/// Results, or inputs of sums, that are in use at the same time: while one is read, the next is written.
inline constexpr int peer_slots = 2;

namespace detail {
/// In ring order from the next rank on, so that not all turn to the same peer first.
template <class Peers, class F>
void for_each_peer(const Peers& peers, F f) {
  for (int i = 1; i < peers.size(); ++i) f((peers.rank() + i) % peers.size());
}
/// The credits of a slot: *free*, the peer may be written (or has read); *full*, it has been written.
constexpr int free_channel(int slot) {
  return 2 * slot;
}
constexpr int full_channel(int slot) {
  return 2 * slot + 1;
}
inline constexpr int slot_channels = 2 * peer_slots;

template <class Arena>
using peers_of = decltype(std::declval<Arena&>().open(std::declval<const Group&>(), std::size_t{}, 0));

/// The window of an operation. Errors: comm_error C29 without an arena or for a group of another size; C08.
template <class Comm, class Arena>
auto open_window(const char* operation, int ranks, const GroupComm<Comm>& group, const Memory<Arena>& memory,
                 const Footprint& need) {
  if (group.size() != ranks || memory.arena == nullptr) {
    fail<comm_error>("pleat[C29]: ", operation, " planned for ", ranks, " ranks needs a group of ", ranks,
                     " and an arena; the group has ", group.size(), " ranks, the arena is ",
                     memory.arena == nullptr ? "null" : "there");
  }
  return memory.arena->open(group.ranks(), need.symmetric, need.channels);
}
}  // namespace detail

}  // namespace pleat::inline v0
