// The peer-access concept: the ranks of a group write each other's memory, and signals say when.
#pragma once

#include <concepts>
#include <cstddef>

#include <pleat/core/error.hpp>
#include <pleat/mesh/group.hpp>

namespace pleat::inline v0 {

/// How a schedule moves bytes: copies and signals on mapped memory, or collective operations. Both give the same bits.
enum class Transport : unsigned char { collective, peer };
constexpr const char* name_of(Transport transport) {
  return transport == Transport::peer ? "peer" : "collective";
}

/// A group's window on the symmetric arena: the same range, of the same size, on every rank of the group.
///
/// - `base(peer)`: the peer's range, for copies and kernels; `base(rank())` is one's own.
/// - `signal(peer, channel, s)`: one more signal to the peer on the channel, after all that `s` has done so far; the
///   peer sees what was written before it.
/// - `await(peer, channel, s)`: what follows on `s` runs after the next signal of `peer` to me on the channel: the k-th
///   await matches the k-th signal. On the host the call blocks, with the communicator's deadline and failure rules.
///
/// A peer that is no rank of the window and a channel that it does not have are refused (C33), and so is all with a
/// window that was moved from, which has no ranks.
///
/// Signals count, so a *free* and a *full* channel make a credit: the writer awaits free, writes, signals full; the
/// reader awaits full, reads, signals free. At bind the reader signals free once per slot that starts empty.
template <class P>
concept peer_access = std::movable<P> && requires(P& p, const P& k, typename P::stream_type s, int peer, int channel) {
  typename P::device_type;
  { k.rank() }
  noexcept->std::same_as<int>;
  { k.size() }
  noexcept->std::same_as<int>;
  { k.base(peer) } -> std::same_as<std::byte*>;
  { p.signal(peer, channel, s) } -> std::same_as<void>;
  { p.await(peer, channel, s) } -> std::same_as<void>;
};

/// The symmetric arena: one block per rank of a stage, of the same size and layout everywhere.
///
/// - `reachable(group)`: whether all ranks of the group (world ranks) can be mapped.
/// - `open(group, bytes, channels)`: hands the group the next `bytes` of the arena and `channels` signal channels. No
///   communication; every rank of the arena opens in the same order with the same sizes (its own groups), which the
///   arenas' `seal(stage)` checks once all operations are bound.
template <class A>
concept symmetric_arena = requires(A& a, const A& k, const Group& group, std::size_t bytes, int channels) {
  { k.reachable(group) } -> std::same_as<bool>;
  { a.open(group, bytes, channels) } -> peer_access;
};

namespace detail {

/// What windows refuse. `channels`: of the window; a base has none. Errors: comm_error C33.
inline void check_peer(const char* call, int peer, int ranks) {
  if (peer >= 0 && peer < ranks) return;
  fail<comm_error>("pleat[C33]: ", call, " with peer ", peer, " of a window of ", ranks, " ranks; valid peers: 0 to ",
                   ranks - 1);
}
inline void check_signal(const char* call, int peer, int ranks, int channel, int channels) {
  check_peer(call, peer, ranks);
  if (channel >= 0 && channel < channels) return;
  fail<comm_error>("pleat[C33]: ", call, " on channel ", channel, " of a window of ", channels,
                   " channels; valid channels: 0 to ", channels - 1);
}

/// In ring order from the next rank on, so that not all turn to the same peer first.
template <class Peers, class F>
void for_each_peer(const Peers& peers, F f) {
  for (int i = 1; i < peers.size(); ++i) f(cyclic(peers.rank(), i, peers.size()));
}
/// One more signal to every peer on the channel; at once where the window can.
template <class Peers>
void signal_peers(Peers& peers, int channel, typename Peers::stream_type s) {
  if constexpr (requires { peers.signal_peers(channel, s); }) {
    peers.signal_peers(channel, s);
  } else {
    for_each_peer(peers, [&](int peer) { peers.signal(peer, channel, s); });
  }
}
/// The next signal of every peer on the channel.
template <class Peers>
void await_peers(Peers& peers, int channel, typename Peers::stream_type s) {
  if constexpr (requires { peers.await_peers(channel, s); }) {
    peers.await_peers(channel, s);
  } else {
    for_each_peer(peers, [&](int peer) { peers.await(peer, channel, s); });
  }
}

}  // namespace detail

}  // namespace pleat::inline v0
