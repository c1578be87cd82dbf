// Rank-ordered reduce-scatter on peer-mapped memory: each rank reads its terms in the peers' windows and adds them.
#pragma once

#include <array>
#include <chrono>
#include <optional>
#include <utility>
#include <vector>

#include <pleat/comm/call_checks.hpp>
#include <pleat/comm/peer_slots.hpp>
#include <pleat/comm/transfer_table.hpp>
#include <pleat/core/carve.hpp>
#include <pleat/core/dtype.hpp>
#include <pleat/core/executor.hpp>
#include <pleat/core/footprint.hpp>
#include <pleat/core/streams.hpp>

namespace pleat::inline v0 {

/// For peers without kernels that meet and add: streams meet, and a leaf adds.
struct NoSums {
  static constexpr bool exist = false;
};

/// Choices and sizes of a PeerReduceScatter; a value that every rank computes alike.
struct PeerReduceScatterPlan {
  int ranks = 1;
  std::size_t block_elems = 0;  // the largest number a rank keeps
  DType wire = DType::f32;
  KernelSteps sums = {};  // those of the table that blocks need
  int sum_channels = 0;
  std::size_t sum_persistent_bytes = 0;

  /// The inputs [ranks, block_elems] in the window.
  constexpr std::array<std::byte*, peer_slots> carve(Carver& window) const {
    std::array<std::byte*, peer_slots> inputs = {};
    for (std::byte*& input : inputs) {
      input = window.take_bytes(static_cast<std::size_t>(ranks) * block_elems * size_bytes(wire));
    }
    return inputs;
  }
  /// Channels of the streams' signals: *full* of each input, and *turn*.
  static constexpr int turn_channel = peer_slots, stream_channels = peer_slots + 1;
  constexpr int channels() const { return stream_channels + sum_channels; }
  constexpr Footprint footprint() const {
    Carver window;
    carve(window);
    return {.symmetric = window.used_bytes(), .persistent = sum_persistent_bytes, .channels = channels()};
  }
};
constexpr void append_to(Message& message, const PeerReduceScatterPlan& p) {
  message.append("peer reduce-scatter ranks=").append(p.ranks).append(" block_elems=").append(p.block_elems);
  message.append(" wire=").append(name_of(p.wire)).append(" sums=");
  append_to(message, p.sums);
}

/// The plan for ranks that keep at most `block_elems` elements. `Sums`: the peers' kernels, MappedSums where each rank
/// has a GPU of its own. Errors: T01, C05 for a dtype that is none and more bytes than memory can have.
template <class Sums = NoSums>
constexpr PeerReduceScatterPlan plan_peer_reduce_scatter(int ranks, std::size_t block_elems, DType wire = DType::f32,
                                                         const TransferTable& table = {}) {
  (void)detail::bytes_of("a peer reduce-scatter", block_elems, wire, std::int64_t{peer_slots} * ranks);
  PeerReduceScatterPlan plan{.ranks = ranks, .block_elems = block_elems, .wire = wire};
  if constexpr (Sums::exist) {
    if (ranks > 1) plan.sums = steps_up_to(table.sums, block_elems * size_bytes(wire));
    if (const int ctas = most_ctas(plan.sums); ctas > 0) {
      plan.sum_channels = Sums::channels;
      plan.sum_persistent_bytes = Sums::persistent_bytes(ranks, ctas);
    }
  }
  return plan;
}

/// Rank-ordered sums of terms that the ranks have written to their windows: each reads its terms there and adds them as
/// it reads; bits as `reduce_scatter_ordered`. Every rank makes the same calls in the same order, all on one stream or
/// ordered by the caller. Moves (ranks - 1) * elems elements in. May be captured in a graph of an even number of
/// calls; as many inputs are given out before it as after it.
///
/// In each sum the ranks meet once, before they read: the terms are there. That tells, too, that the peers have ended
/// the sum before, so the inputs are free in turn without a signal of their own. Only an input that is asked for ahead,
/// before the last one is summed, needs one more meeting.
template <executor Executor, peer_access Peers, class Sums = NoSums>
class PeerReduceScatter {
 public:
  using stream_type = typename Executor::stream_type;

  /// See `bind`. `peers` is the window of the plan's footprint.
  PeerReduceScatter(const PeerReduceScatterPlan& plan, Peers peers, [[maybe_unused]] Block persistent = {},
                    [[maybe_unused]] std::chrono::milliseconds deadline = {}, [[maybe_unused]] stream_type s = {})
      : plan_(plan), peers_(std::move(peers)), terms_(static_cast<std::size_t>(peers_.size())) {
    preload_leaves<core_leaf<typename Executor::device_type>>();
    Carver memory(Block{peers_.base(peers_.rank()), plan_.footprint().symmetric});
    inputs_ = plan_.carve(memory);
    if constexpr (Sums::exist) {
      if (const int ctas = most_ctas(plan_.sums); ctas > 0) {
        sums_.emplace(peers_, PeerReduceScatterPlan::stream_channels, ctas, persistent, deadline, s);
      }
    }
  }

  const PeerReduceScatterPlan& plan() const { return plan_; }

  /// Where the terms [ranks, elems] of the next call go, packed; what follows on `s` may write there. At most two are
  /// given out; the second one waits for the peers to ask for it too. Errors: shape_error C30.
  std::byte* input(stream_type s) {
    if (given_ == peer_slots) fail_order("input", "both inputs are given out; call reduce_scatter");
    if (given_ > 0) meet(PeerReduceScatterPlan::turn_channel, s);
    return inputs_[static_cast<std::size_t>((next_ + given_++) % peer_slots)];
  }

  /// out [elems] = (accumulate ? out : 0) + sum over ranks r, in rank order, of block `rank` of r's oldest input, which
  /// is given back. Errors: shape_error C30 without an input, or for more elements than planned.
  void reduce_scatter(void* out, DType out_dtype, std::size_t elems, bool accumulate, stream_type s) {
    if (given_ == 0) fail_order("reduce_scatter", "write the terms to input() first");
    if (elems > plan_.block_elems) fail_order("reduce_scatter", "more elements than planned");
    const int slot = std::exchange(next_, (next_ + 1) % peer_slots);
    --given_;
    const std::size_t bytes = elems * size_bytes(plan_.wire);
    const std::byte* const mine =
        inputs_[static_cast<std::size_t>(slot)] + static_cast<std::size_t>(peers_.rank()) * bytes;
    if constexpr (Sums::exist) {
      if (const int ctas = ctas_of(plan_.sums, bytes); ctas > 0) {
        return sums_->add(out, out_dtype, mine, plan_.wire, elems, accumulate, ctas, s);
      }
    }
    meet(slot, s);
    for (int r = 0; r < peers_.size(); ++r) {
      terms_[static_cast<std::size_t>(r)] = peers_.base(r) + (mine - peers_.base(peers_.rank()));
    }
    core_leaf<typename Executor::device_type>::sum_ranks(out, out_dtype, terms_, plan_.wire, elems, accumulate, s);
  }

  /// Throws what kernels of sums have met; waits for `s`. Errors: comm_error C27.
  void check_sums([[maybe_unused]] stream_type s) {
    if constexpr (Sums::exist) {
      if (sums_) sums_->check(s);
    }
  }

 private:
  [[noreturn]] static void fail_order(const char* call, const char* why) {
    fail<shape_error>("pleat[C30]: ", call, " of a peer reduce-scatter: ", why);
  }
  /// What follows on `s` comes after what stands on the peers' streams before they meet this rank. Two meetings on one
  /// channel have one on another in between, as signals of one flag must (signal_protocol.hpp).
  void meet(int channel, stream_type s) {
    detail::signal_peers(peers_, channel, s);
    detail::await_peers(peers_, channel, s);
  }

  PeerReduceScatterPlan plan_;
  Peers peers_;
  std::optional<Sums> sums_;
  std::array<std::byte*, peer_slots> inputs_ = {};
  std::vector<const void*> terms_;
  int next_ = 0, given_ = 0;
};

/// As the bind of PeerCollectives. `s`: where the memory of kernels is made ready, and waited for; calls come after it.
template <class Sums = NoSums, executor Executor, communicator Comm, symmetric_arena Arena>
PeerReduceScatter<Executor, detail::peers_of<Arena>, Sums> bind(
    const PeerReduceScatterPlan& plan, Executor, const GroupComm<Comm>& group, const Memory<Arena>& memory,
    typename Executor::stream_type s = only_stream<typename Executor::stream_type>(),
    std::chrono::milliseconds deadline = std::chrono::seconds(120)) {
  auto peers = detail::open_window("peer reduce-scatter", plan.ranks, group, memory, plan.footprint().symmetric,
                                   plan.footprint().channels);
  return {plan, std::move(peers), memory.persistent, deadline, s};
}

}  // namespace pleat::inline v0
