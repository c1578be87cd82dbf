// Rank-ordered reduce-scatter on peer-mapped memory: each rank reads its terms in the peers' windows and adds them.
#pragma once

#include <array>
#include <vector>

#include <pleat/comm/peer_slots.hpp>
#include <pleat/core/carve.hpp>
#include <pleat/core/dtype.hpp>
#include <pleat/core/executor.hpp>
#include <pleat/core/footprint.hpp>
#include <pleat/core/streams.hpp>

namespace pleat::inline v0 {

/// Sizes of a PeerReduceScatter.
struct PeerReduceScatterPlan {
  int ranks = 1;
  std::size_t block_elems = 0;  // the largest number a rank keeps
  DType wire = DType::f32;

  /// The inputs [ranks, block_elems] in the window.
  constexpr std::array<std::byte*, peer_slots> carve(Carver& window) const {
    std::array<std::byte*, peer_slots> inputs = {};
    for (std::byte*& input : inputs) {
      input = window.take_bytes(static_cast<std::size_t>(ranks) * block_elems * size_bytes(wire));
    }
    return inputs;
  }
  constexpr int channels() const { return detail::slot_channels; }
  constexpr Footprint footprint() const {
    Carver window;
    carve(window);
    return {.symmetric = window.used_bytes()};
  }
};
constexpr void append_to(Message& message, const PeerReduceScatterPlan& p) {
  message.append("peer reduce-scatter ranks=").append(p.ranks).append(" block_elems=").append(p.block_elems);
  message.append(" wire=").append(name_of(p.wire));
}

/// Rank-ordered sums of terms that the ranks have written to their windows: each reads its terms there and adds them as
/// it reads; bits as `reduce_scatter_ordered`. Every rank makes the same calls in the same order, all on one stream or
/// ordered by the caller. May be captured in a graph with an even number of calls. Moves (ranks - 1) * elems elements
/// in.
template <executor Executor, peer_access Peers>
class PeerReduceScatter {
 public:
  using stream_type = typename Executor::stream_type;

  /// See `bind`.
  PeerReduceScatter(const PeerReduceScatterPlan& plan, Peers peers, stream_type s)
      : plan_(plan), peers_(std::move(peers)), terms_(static_cast<std::size_t>(peers_.size())) {
    preload_leaves<core_leaf<typename Executor::device_type>>();
    Carver memory(Block{peers_.base(peers_.rank()), plan_.footprint().symmetric});
    inputs_ = plan_.carve(memory);
    for (int slot = 0; slot < peer_slots; ++slot) signal_all(detail::free_channel(slot), s);
  }

  /// Where the terms [ranks, elems] of the next call go, packed; what follows on `s` may write there. At most two are
  /// given out. Errors: shape_error C30.
  std::byte* input(stream_type s) {
    if (given_ == peer_slots) fail_order("input", "both inputs are given out; call reduce_scatter");
    const int slot = (next_ + given_++) % peer_slots;
    detail::for_each_peer(peers_, [&](int peer) { peers_.await(peer, detail::free_channel(slot), s); });
    return inputs_[static_cast<std::size_t>(slot)];
  }

  /// out [elems] = (accumulate ? out : 0) + sum over ranks r, in rank order, of block `rank` of r's oldest input, which
  /// is given back. Errors: shape_error C30 without an input, or for more elements than planned.
  void reduce_scatter(void* out, DType out_dtype, std::size_t elems, bool accumulate, stream_type s) {
    if (given_ == 0) fail_order("reduce_scatter", "write the terms to input() first");
    if (elems > plan_.block_elems) fail_order("reduce_scatter", "more elements than planned");
    const int slot = std::exchange(next_, (next_ + 1) % peer_slots);
    --given_;
    signal_all(detail::full_channel(slot), s);
    detail::for_each_peer(peers_, [&](int peer) { peers_.await(peer, detail::full_channel(slot), s); });
    const std::ptrdiff_t at = inputs_[static_cast<std::size_t>(slot)] - peers_.base(peers_.rank());
    const std::size_t mine = static_cast<std::size_t>(peers_.rank()) * elems * size_bytes(plan_.wire);
    for (int r = 0; r < peers_.size(); ++r) terms_[static_cast<std::size_t>(r)] = peers_.base(r) + at + mine;
    core_leaf<typename Executor::device_type>::sum_ranks(out, out_dtype, terms_, plan_.wire, elems, accumulate, s);
    signal_all(detail::free_channel(slot), s);
  }

 private:
  [[noreturn]] static void fail_order(const char* call, const char* why) {
    fail<shape_error>("pleat[C30]: ", call, " of a peer reduce-scatter: ", why);
  }
  void signal_all(int channel, stream_type s) {
    detail::for_each_peer(peers_, [&](int peer) { peers_.signal(peer, channel, s); });
  }

  PeerReduceScatterPlan plan_;
  Peers peers_;
  std::array<std::byte*, peer_slots> inputs_ = {};
  std::vector<const void*> terms_;
  int next_ = 0, given_ = 0;
};

/// As the bind of PeerCollectives; needs no persistent memory.
template <executor Executor, communicator Comm, symmetric_arena Arena>
PeerReduceScatter<Executor, detail::peers_of<Arena>> bind(
    const PeerReduceScatterPlan& plan, Executor, const GroupComm<Comm>& group, const Memory<Arena>& memory,
    typename Executor::stream_type s = only_stream<typename Executor::stream_type>()) {
  auto peers = detail::open_window("peer reduce-scatter", plan.ranks, group, memory, plan.footprint().symmetric,
                                   plan.channels());
  return {plan, std::move(peers), s};
}

}  // namespace pleat::inline v0
