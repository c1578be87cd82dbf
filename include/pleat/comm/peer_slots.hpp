// What operations on peer-mapped memory share: slots that are used in turn, and the credits that pass them on.
#pragma once

#include <pleat/comm/peer_window.hpp>
#include <pleat/core/footprint.hpp>

namespace pleat::inline v0 {

/// Results, or inputs of sums, that are in use at the same time: while one is read, the next is written.
inline constexpr int peer_slots = 2;

namespace detail {
/// The credits of a slot: *free*, the peer may be written (or has read); *full*, it has been written.
constexpr int free_channel(int slot) {
  return 2 * slot;
}
constexpr int full_channel(int slot) {
  return 2 * slot + 1;
}
inline constexpr int slot_channels = 2 * peer_slots;
}  // namespace detail

}  // namespace pleat::inline v0
