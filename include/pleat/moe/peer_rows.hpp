// Rows between ranks by peer access: written straight into the reader's window, one slot per possible row.
#pragma once

#include <utility>
#include <vector>

#include <pleat/comm/peer_window.hpp>
#include <pleat/core/executor.hpp>
#include <pleat/moe/dispatch_saved.hpp>

namespace pleat::inline v0::moe {

/// The row_transport of Transport::peer. A source can send at most max_tokens rows, so the window [source][slot] cannot
/// overflow and a row never waits for counts; whoever writes the rows writes these beside them. Each way has a window
/// and two credits: *free* (you may write my window) and *full* (I have written yours); headers of tokens have a *full*
/// of their own.
template <executor Executor, peer_access Peers>
class PeerRows {
 public:
  using stream_type = typename Executor::stream_type;
  static constexpr bool sends_ahead = true;

  /// Own rows lie in the own window and need no signal. Fills the device tables and gives every peer its first credits.
  PeerRows(const DispatchPlan& plan, const Executor& executor, Peers peers, Carver& persistent, stream_type s)
      : plan_(plan), executor_(executor), peers_(std::move(peers)), tables_(plan.carve_peer_tables(persistent)) {
    Carver symmetric;
    plan.carve_window(symmetric);
    const std::size_t bytes = symmetric.used_bytes();
    for (int p = 0; p < plan.ranks; ++p) {
      const int to = plan.options.loopback ? peers_.rank() : p, as = plan.options.loopback ? p : peers_.rank();
      Carver theirs(Block{peers_.base(to), bytes}), mine(Block{peers_.base(peers_.rank()), bytes});
      const DispatchWindow remote = plan.carve_window(theirs), local = plan.carve_window(mine);
      for (int way = 0; way < 2; ++way) {
        copied_.bases[way].push_back(remote.rows[way]);
        copied_.bases[2 + way].push_back(local.rows[way]);
        copied_.counts[way].push_back(remote.counts[way] + as);
        copied_.counts[2 + way].push_back(local.counts[way] + p);
      }
      copied_.first[0].push_back(as * plan.shape.max_tokens);
      copied_.first[1].push_back(p * plan.shape.max_tokens);
    }
    const auto copy = [&](auto* to, const auto& from) {
      executor.copy(to, from.data(), from.size() * sizeof(from[0]), s);
    };
    for (int way = 0; way < 2; ++way) {
      copy(tables_.outgoing[way], copied_.bases[way]);
      copy(tables_.incoming[way], copied_.bases[2 + way]);
      copy(tables_.outgoing_counts[way], copied_.counts[way]);
      copy(tables_.incoming_counts[way], copied_.counts[2 + way]);
    }
    copy(tables_.outgoing_first, copied_.first[0]);
    copy(tables_.incoming_first, copied_.first[1]);
    for (const Way way : {Way::to_experts, Way::to_sources}) grant(way, s);
  }

  /// Where to write rows and counts; what follows runs when all peers have read those before.
  RowTable open(RowKind kind, const DispatchSaved&, stream_type s) {
    const int way = static_cast<int>(way_of(kind));
    await(free_channel(way_of(kind)), s);
    return {tables_.outgoing[way], tables_.outgoing_first, tables_.outgoing_counts[way], plan_.format(kind)};
  }

  /// x [tokens, hidden] to all other ranks, at slots that are the tokens.
  void copy_all(RowKind kind, const void* x, std::int64_t tokens, stream_type s) {
    const RowFormat format = plan_.format(kind);
    const std::size_t payload = static_cast<std::size_t>(plan_.shape.hidden) * size_bytes(plan_.shape.dtype);
    for (int distance = 1; distance < plan_.ranks; ++distance) {  // each rank begins with another peer
      const auto peer = static_cast<std::size_t>((peers_.rank() + distance) % plan_.ranks);
      const std::size_t first = static_cast<std::size_t>(copied_.first[0][peer]) * format.row_bytes;
      executor_.copy_2d(copied_.bases[static_cast<int>(way_of(kind))][peer] + first + format.header_bytes,
                        format.row_bytes, x, payload, payload, static_cast<std::size_t>(tokens), s);
    }
  }
  void send_headers(stream_type s) { signal(headers_channel, s); }
  void send(RowKind kind, stream_type s) { signal(full_channel(way_of(kind)), s); }
  RowTable receive_headers(const DispatchSaved&, stream_type s) {
    await(headers_channel, s);
    return incoming(RowKind::token);
  }
  RowTable receive(RowKind kind, const DispatchSaved&, stream_type s) {
    await(full_channel(way_of(kind)), s);
    return incoming(kind);
  }

  /// The rows that came have been read.
  void release(RowKind kind, stream_type s) { grant(way_of(kind), s); }

 private:
  RowTable incoming(RowKind kind) const {
    const int way = static_cast<int>(way_of(kind));
    return {tables_.incoming[way], tables_.incoming_first, tables_.incoming_counts[way], plan_.format(kind)};
  }
  /// One more signal to every peer, or the next of every peer; where rows loop back, to and of this rank.
  void signal(int channel, stream_type s) {
    plan_.options.loopback ? peers_.signal(peers_.rank(), channel, s) : pleat::detail::signal_peers(peers_, channel, s);
  }
  void await(int channel, stream_type s) {
    plan_.options.loopback ? peers_.await(peers_.rank(), channel, s) : pleat::detail::await_peers(peers_, channel, s);
  }
  void grant(Way way, stream_type s) { signal(free_channel(way), s); }
  static constexpr int free_channel(Way way) { return 2 * static_cast<int>(way); }
  static constexpr int full_channel(Way way) { return 2 * static_cast<int>(way) + 1; }
  static constexpr int headers_channel = 4;

  DispatchPlan plan_;
  Executor executor_;
  Peers peers_;
  PeerRowTables tables_;
  /// Copied from here in the order of a stream: what goes out by Way, then what comes in by Way.
  struct {
    std::vector<std::byte*> bases[4];
    std::vector<std::int64_t*> counts[4];
    std::vector<std::int64_t> first[2];
  } copied_;
};

}  // namespace pleat::inline v0::moe
