// The plan of dispatch and combine: sizes for the worst routing, and what a micro-batch saves for its backward pass.
#pragma once

#include <algorithm>
#include <vector>

#include <pleat/comm/peer_access.hpp>
#include <pleat/core/carve.hpp>
#include <pleat/core/dtype.hpp>
#include <pleat/core/footprint.hpp>
#include <pleat/mesh/model_checks.hpp>
#include <pleat/moe/operand.hpp>
#include <pleat/moe/row_table.hpp>

namespace pleat::inline v0::moe {

struct DispatchShape {
  /// Most tokens of one rank in one call.
  std::int64_t max_tokens = 0;
  std::int64_t hidden = 0;
  int experts = 0;
  int k = 0;
  DType dtype = DType::f32;
};

struct DispatchOptions {
  Transport transport = Transport::peer;
  /// An expert's rows start at multiples of this; rows between are zero. 1 where no kernel wants more.
  std::int64_t row_alignment = 128;
};

/// A row that was sent: to which rank of the group, and which of the rows this rank sends there.
struct SentRow {
  std::int32_t rank;
  std::int32_t slot;
};

/// What the forward pass of one micro-batch leaves behind: device arrays of a saved block. Rows that came from another
/// rank are numbered source * max_tokens + slot; `max_sends` and `max_entries` are the plan's.
struct DispatchRecord {
  SentRow* sent;               // [max_tokens, max_sends], ascending rank; rank -1 ends a token's list
  std::int64_t* send_counts;   // [ranks] rows to each rank; minus the tokens where they are too many
  std::int64_t* send_first;    // [ranks] their sums before each rank (collective transport)
  std::int64_t* recv_counts;   // [ranks] rows from each rank
  std::int64_t* recv_first;    // [ranks]
  std::int64_t* entry_rows;    // [ranks * max_tokens, max_entries] expert-major rows, ascending expert; -1 ends a list
  std::int32_t* entry_choice;  // the same shape: which of the token's k choices
  void* entry_weights;         // the same shape, acc
  void* entry_dweights;        // the same shape, acc: written by combine_backward
  std::int64_t* offsets;       // [experts_local + 1] where each expert's rows start
  std::int64_t* ends;          // [experts_local] where they end and pad rows begin
  std::byte* rows;             // [capacity_rows, hidden] dtype
};

/// What a bound operation reports, sticky until it is bound again: device memory.
struct DispatchStatus {
  std::int64_t poisoned_rank = 0;     ///< 1 + the first rank of the group that had too many tokens, 0 for none
  std::int64_t poisoned_tokens = 0;   ///< how many it had
  std::int64_t unrouted_choices = 0;  ///< ids of this rank's tokens that were no expert, or twice in a token
};

/// Peer transport: a rank's symmetric range.
struct DispatchWindow {
  std::int64_t* counts;  // [ranks] rows of each source
  std::byte* rows[2];    // by Way: [ranks, max_tokens] rows
};
/// Peer transport: device tables behind its RowTables.
struct PeerRowTables {
  std::byte** outgoing[2];       // by Way: [ranks] windows of the peers
  std::byte** incoming[2];       // by Way: [ranks] my window
  std::int64_t* outgoing_first;  // [ranks] where my rows start in a peer's window
  std::int64_t* incoming_first;  // [ranks] where a peer's rows start in mine
};
/// Collective transport: packed rows in rank order, one pair of buffers for both ways.
struct DispatchBuffers {
  std::byte* outgoing;
  std::byte* incoming;
};
/// Collective transport: device tables behind its RowTables.
struct CollectiveRowTables {
  std::byte** outgoing;  // [ranks] the one buffer
  std::byte** incoming;  // [ranks]
};

struct DispatchPlan {
  DispatchShape shape;
  DispatchOptions options;
  int ranks = 1;

  constexpr DType accumulator() const { return pleat::accumulator(shape.dtype); }
  constexpr int experts_local() const { return shape.experts / ranks; }
  constexpr int max_sends() const { return std::min(shape.k, ranks); }
  constexpr int max_entries() const { return std::min(shape.k, experts_local()); }
  constexpr std::int64_t max_received() const { return ranks * shape.max_tokens; }
  /// Expert-major rows in the worst routing: pad rows included.
  constexpr std::int64_t capacity_rows() const {
    const std::int64_t a = options.row_alignment;
    const std::int64_t rows = max_received() * max_entries() + (a - 1) * experts_local();
    return (rows + a - 1) / a * a;
  }

  constexpr RowFormat format(RowKind kind) const {
    const auto rounded = [](std::size_t bytes) { return (bytes + 15) / 16 * 16; };
    const std::size_t acc_bytes = size_bytes(accumulator()) * static_cast<std::size_t>(shape.k);
    const std::size_t header = kind == RowKind::token            ? ids_offset_bytes() + 4 * std::size_t(shape.k) + 4
                               : kind == RowKind::token_gradient ? acc_bytes
                                                                 : 0;
    const std::size_t payload = static_cast<std::size_t>(shape.hidden) * size_bytes(shape.dtype);
    return {rounded(header), rounded(header) + rounded(payload)};
  }
  /// In the header of a token's row: weights at 0, ids here, the token's number after them.
  constexpr std::size_t ids_offset_bytes() const {
    return size_bytes(accumulator()) * static_cast<std::size_t>(shape.k);
  }
  /// Bytes of the longest row that goes this way.
  constexpr std::size_t row_bytes(Way way) const {
    return way == Way::to_experts ? format(RowKind::token).row_bytes : format(RowKind::token_gradient).row_bytes;
  }

  DispatchRecord carve_saved(Carver& memory) const {
    const auto tokens = static_cast<std::size_t>(shape.max_tokens), n = static_cast<std::size_t>(ranks);
    const std::size_t entries = static_cast<std::size_t>(max_received()) * static_cast<std::size_t>(max_entries());
    const std::size_t local = static_cast<std::size_t>(experts_local());
    const std::size_t acc_bytes = size_bytes(accumulator());
    DispatchRecord r{};
    r.sent = memory.take<SentRow>(tokens * static_cast<std::size_t>(max_sends()));
    r.send_counts = memory.take<std::int64_t>(n);
    r.send_first = memory.take<std::int64_t>(n);
    r.recv_counts = memory.take<std::int64_t>(n);
    r.recv_first = memory.take<std::int64_t>(n);
    r.entry_rows = memory.take<std::int64_t>(entries);
    r.entry_choice = memory.take<std::int32_t>(entries);
    r.entry_weights = memory.take_bytes(entries * acc_bytes);
    r.entry_dweights = memory.take_bytes(entries * acc_bytes);
    r.offsets = memory.take<std::int64_t>(local + 1);
    r.ends = memory.take<std::int64_t>(local);
    r.rows = memory.take_bytes(static_cast<std::size_t>(capacity_rows() * shape.hidden) * size_bytes(shape.dtype));
    return r;
  }
  DispatchStatus* carve_status(Carver& memory) const { return memory.take<DispatchStatus>(1); }
  DispatchWindow carve_window(Carver& memory) const {
    DispatchWindow window{memory.take<std::int64_t>(static_cast<std::size_t>(ranks)), {}};
    for (const Way way : {Way::to_experts, Way::to_sources}) {
      window.rows[static_cast<int>(way)] = memory.take_bytes(static_cast<std::size_t>(max_received()) * row_bytes(way));
    }
    return window;
  }
  PeerRowTables carve_peer_tables(Carver& memory) const {
    const auto n = static_cast<std::size_t>(ranks);
    PeerRowTables tables{};
    for (auto& way : tables.outgoing) way = memory.take<std::byte*>(n);
    for (auto& way : tables.incoming) way = memory.take<std::byte*>(n);
    tables.outgoing_first = memory.take<std::int64_t>(n);
    tables.incoming_first = memory.take<std::int64_t>(n);
    return tables;
  }
  DispatchBuffers carve_buffers(Carver& memory) const {
    const auto sent = static_cast<std::size_t>(shape.max_tokens * max_sends());
    const auto received = static_cast<std::size_t>(max_received());
    const std::size_t there = row_bytes(Way::to_experts), back = row_bytes(Way::to_sources);
    std::byte* outgoing = memory.take_bytes(std::max(sent * there, received * back));
    return {outgoing, memory.take_bytes(std::max(received * there, sent * back))};
  }
  CollectiveRowTables carve_collective_tables(Carver& memory) const {
    std::byte** outgoing = memory.take<std::byte*>(static_cast<std::size_t>(ranks));
    return {outgoing, memory.take<std::byte*>(static_cast<std::size_t>(ranks))};
  }
  /// Counts on their way to the host.
  std::int64_t* carve_pinned(Carver& memory) const {
    return memory.take<std::int64_t>(2 * static_cast<std::size_t>(ranks));
  }

  Footprint footprint() const {
    Carver scratch, saved, symmetric, persistent, pinned;
    carve_saved(saved);
    carve_status(persistent);
    if (options.transport == Transport::peer) {
      carve_window(symmetric);
      carve_peer_tables(persistent);
    } else {
      carve_buffers(scratch);
      carve_collective_tables(persistent);
      carve_pinned(pinned);
    }
    return {.scratch = scratch.used_bytes(),
            .saved = saved.used_bytes(),
            .symmetric = symmetric.used_bytes(),
            .persistent = persistent.used_bytes(),
            .pinned_host = pinned.used_bytes()};
  }
};

/// The saved state of one live micro-batch: give it to `dispatch`, and to every later call of the same micro-batch. It
/// may be used again for another one afterwards. `memory` has at least `plan.footprint().saved` bytes, and is borrowed.
class DispatchSaved {
 public:
  /// Errors: shape_error T02.
  DispatchSaved(const DispatchPlan& plan, Block memory) : host_counts(2 * static_cast<std::size_t>(plan.ranks)) {
    Carver carver(memory);
    record = plan.carve_saved(carver);
  }

  DispatchRecord record;
  std::int64_t tokens = 0;                // of the call
  std::int64_t planned_tokens = 0;        // 0 when they were too many
  std::vector<std::int64_t> host_counts;  // rows sent to, then received from each rank (collective transport)
};

/// Plans for groups of `ranks` ranks. Errors: mesh_error M06 when ranks does not divide experts, shape_error E02 for k,
/// E07 for sizes.
inline DispatchPlan plan(int ranks, const DispatchShape& shape, const DispatchOptions& options = {}) {
  check_choice(shape.experts, shape.k);
  experts_per_rank(ranks, shape.experts, shape.experts);  // any divisor of the experts may be a group's size
  if (shape.max_tokens < 1 || shape.max_tokens > 0x7fffffff || shape.hidden < 1 || options.row_alignment < 1) {
    fail<shape_error>("pleat[E07]: max_tokens=", shape.max_tokens, " hidden=", shape.hidden,
                      " row_alignment=", options.row_alignment, " must each be at least 1, max_tokens below 2^31");
  }
  return {shape, options, ranks};
}

}  // namespace pleat::inline v0::moe
