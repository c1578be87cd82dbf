// Rows between ranks by collectives: the host reads the counts, then one all_to_all_v moves the packed rows.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include <pleat/comm/group_comm.hpp>
#include <pleat/core/executor.hpp>
#include <pleat/moe/dispatch_saved.hpp>
#include <pleat/moe/leaf.hpp>

namespace pleat::inline v0::moe {

/// The row_transport of Transport::collective. Both ways share one pair of buffers.
template <executor Executor, communicator Comm>
class CollectiveRows {
 public:
  using stream_type = typename Executor::stream_type;
  using leaf = moe_leaf<typename Executor::device_type>;
  static constexpr bool sends_ahead = false;  // headers travel in front of their rows

  CollectiveRows(const DispatchPlan& plan, const Executor& executor, GroupComm<Comm> comm, Carver& scratch,
                 Carver& persistent, Carver& pinned, stream_type s)
      : plan_(plan),
        executor_(executor),
        comm_(comm),
        buffers_(plan.carve_buffers(scratch)),
        tables_(plan.carve_collective_tables(persistent)),
        pinned_(plan.carve_pinned(pinned)),
        send_bytes_(static_cast<std::size_t>(plan.ranks)),
        recv_bytes_(static_cast<std::size_t>(plan.ranks)),
        outgoing_(static_cast<std::size_t>(plan.ranks), buffers_.outgoing),
        incoming_(static_cast<std::size_t>(plan.ranks), buffers_.incoming) {
    executor.copy(tables_.outgoing, outgoing_.data(), outgoing_.size() * sizeof(std::byte*), s);
    executor.copy(tables_.incoming, incoming_.data(), incoming_.size() * sizeof(std::byte*), s);
  }

  RowTable open(RowKind kind, DispatchSaved& saved, stream_type s) {
    DispatchRecord& r = saved.record;
    if (kind == RowKind::token) leaf::sum_before(plan_.ranks, r.send_counts, r.send_first, s);
    const std::int64_t* first = way_of(kind) == Way::to_experts ? r.send_first : r.recv_first;
    return {.base = tables_.outgoing, .first = first, .format = plan_.format(kind)};
  }

  /// As PeerRows; collectives move all rows when they are received, and hold nothing that is to be released.
  void copy_all(RowKind, const void*, std::int64_t, stream_type) {}  // plans with collectives do not
  void send_headers(stream_type) {}
  void send(RowKind, stream_type) {}
  /// As PeerRows: headers and rows come together.
  RowTable receive_headers(DispatchSaved& saved, stream_type s) {
    exchange_counts(saved, s);
    return exchange_rows(RowKind::token, saved, s);
  }
  /// As PeerRows.
  RowTable receive(RowKind kind, DispatchSaved& saved, stream_type s) {
    return kind == RowKind::token ? incoming(kind, saved) : exchange_rows(kind, saved, s);
  }
  /// As PeerRows: nothing is held.
  void release(RowKind, stream_type) {}

 private:
  RowTable incoming(RowKind kind, const DispatchSaved& saved) const {
    const DispatchRecord& r = saved.record;
    const std::int64_t* first = way_of(kind) == Way::to_experts ? r.recv_first : r.send_first;
    return {.base = tables_.incoming, .first = first, .format = plan_.format(kind)};
  }
  RowTable exchange_rows(RowKind kind, DispatchSaved& saved, stream_type s) {
    const DispatchRecord& r = saved.record;
    const std::int64_t* sent = saved.host_counts.data();
    const std::int64_t* received = sent + plan_.ranks;
    if (way_of(kind) == Way::to_sources) std::swap(sent, received);
    const RowFormat format = plan_.format(kind);
    for (int p = 0; p < plan_.ranks; ++p) {
      send_bytes_[static_cast<std::size_t>(p)] = static_cast<std::size_t>(sent[p]) * format.row_bytes;
      recv_bytes_[static_cast<std::size_t>(p)] = static_cast<std::size_t>(received[p]) * format.row_bytes;
    }
    comm_.all_to_all_v(buffers_.outgoing, send_bytes_, buffers_.incoming, recv_bytes_, DType::u8, s);
    if (kind == RowKind::result && plan_.may_drop()) comm_.all_gather(r.dropped, r.all_dropped, 1, DType::i64, s);
    return incoming(kind, saved);
  }
  void exchange_counts(DispatchSaved& saved, stream_type s) {
    const DispatchRecord& r = saved.record;
    const std::size_t bytes = static_cast<std::size_t>(plan_.ranks) * sizeof(std::int64_t);
    comm_.all_to_all(r.send_counts, r.recv_counts, 1, DType::i64, s);
    leaf::sum_before(plan_.ranks, r.recv_counts, r.recv_first, s);
    executor_.copy(pinned_, r.send_counts, bytes, s);
    executor_.copy(pinned_ + plan_.ranks, r.recv_counts, bytes, s);
    comm_.wait(s);
    for (std::size_t i = 0; i < saved.host_counts.size(); ++i) {
      saved.host_counts[i] = std::max<std::int64_t>(pinned_[i], 0);  // a rank with too many tokens sends none
    }
  }

  DispatchPlan plan_;
  Executor executor_;
  GroupComm<Comm> comm_;
  DispatchBuffers buffers_;
  CollectiveRowTables tables_;
  std::int64_t* pinned_;
  std::vector<std::size_t> send_bytes_;
  std::vector<std::size_t> recv_bytes_;
  std::vector<std::byte*> outgoing_, incoming_;  // copied from here in the order of a stream
};

}  // namespace pleat::inline v0::moe
