// Rows between ranks by peer access: written straight into the reader's window, one slot per possible row.
#pragma once

#include <utility>
#include <vector>

#include <pleat/core/executor.hpp>
#include <pleat/moe/dispatch_plan.hpp>

namespace pleat::inline v0::moe {

/// The transport of Transport::peer. A source can send at most max_tokens rows, so the window [source][slot] cannot
/// overflow and a row never waits for counts; these travel beside the rows. Each way has a window and two credits:
/// *free* (you may write my window) and *full* (I have written yours).
template <executor Executor, peer_access Peers>
class PeerRows {
 public:
  using Stream = typename Executor::stream_type;
  static constexpr int channels = 4;

  /// Fills the device tables and gives every peer its first credits.
  PeerRows(const DispatchPlan& plan, const Executor& executor, Peers peers, Carver& persistent, Stream s)
      : plan_(plan), executor_(executor), peers_(std::move(peers)), tables_(plan.carve_peer_tables(persistent)) {
    Carver symmetric;
    plan.carve_window(symmetric);
    const std::size_t bytes = symmetric.used_bytes();
    const auto n = static_cast<std::size_t>(plan.ranks);
    std::vector<std::byte*> outgoing[2], incoming[2];
    std::vector<std::int64_t> outgoing_first, incoming_first;
    for (int p = 0; p < plan.ranks; ++p) {
      Carver theirs(Block{peers_.base(p), bytes}), mine(Block{peers_.base(peers_.rank()), bytes});
      const DispatchWindow remote = plan.carve_window(theirs), local = plan.carve_window(mine);
      for (int way = 0; way < 2; ++way) {
        outgoing[way].push_back(remote.rows[way]);
        incoming[way].push_back(local.rows[way]);
      }
      counts_.push_back(remote.counts);
      outgoing_first.push_back(peers_.rank() * plan.shape.max_tokens);
      incoming_first.push_back(p * plan.shape.max_tokens);
    }
    for (int way = 0; way < 2; ++way) {
      executor.copy(tables_.outgoing[way], outgoing[way].data(), n * sizeof(std::byte*), s);
      executor.copy(tables_.incoming[way], incoming[way].data(), n * sizeof(std::byte*), s);
    }
    executor.copy(tables_.outgoing_first, outgoing_first.data(), n * sizeof(std::int64_t), s);
    executor.copy(tables_.incoming_first, incoming_first.data(), n * sizeof(std::int64_t), s);
    for (const Way way : {Way::to_experts, Way::to_sources}) grant(way, s);
  }

  /// Where to write rows; what follows runs when all peers have read the rows before.
  RowTable open(RowKind kind, const DispatchSaved&, Stream s) {
    const Way way = way_of(kind);
    each_peer([&](int p) { peers_.await(p, free_channel(way), s); });
    return {tables_.outgoing[static_cast<int>(way)], tables_.outgoing_first, plan_.format(kind)};
  }

  /// Tells the peers that their rows are there, and waits for theirs. Rows of kind `token` bring their counts.
  RowTable deliver(RowKind kind, DispatchSaved& saved, Stream s) {
    const Way way = way_of(kind);
    if (kind == RowKind::token) {
      for (int p = 0; p < plan_.ranks; ++p) {
        executor_.copy(counts_[static_cast<std::size_t>(p)] + peers_.rank(), saved.record.send_counts + p,
                       sizeof(std::int64_t), s);
      }
    }
    each_peer([&](int p) { peers_.signal(p, full_channel(way), s); });
    each_peer([&](int p) { peers_.await(p, full_channel(way), s); });
    if (kind == RowKind::token) {
      executor_.copy(saved.record.recv_counts, counts_[static_cast<std::size_t>(peers_.rank())],
                     static_cast<std::size_t>(plan_.ranks) * sizeof(std::int64_t), s);
    }
    return {tables_.incoming[static_cast<int>(way)], tables_.incoming_first, plan_.format(kind)};
  }

  /// The rows that came have been read.
  void release(RowKind kind, Stream s) { grant(way_of(kind), s); }

 private:
  void grant(Way way, Stream s) {
    each_peer([&](int p) { peers_.signal(p, free_channel(way), s); });
  }
  static constexpr int free_channel(Way way) { return 2 * static_cast<int>(way); }
  static constexpr int full_channel(Way way) { return 2 * static_cast<int>(way) + 1; }
  /// Own rows lie in the own window and need no signal.
  template <class F>
  void each_peer(const F& f) const {
    for (int p = 0; p < plan_.ranks; ++p) {
      if (p != peers_.rank()) f(p);
    }
  }

  DispatchPlan plan_;
  Executor executor_;
  Peers peers_;
  PeerRowTables tables_;
  std::vector<std::int64_t*> counts_;  // of every peer's window
};

}  // namespace pleat::inline v0::moe
