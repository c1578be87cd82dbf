// The plan of dispatch and combine: sizes for the worst routing or a chosen capacity, and where everything lies.
#pragma once

#include <vector>

#include <pleat/comm/peer_access.hpp>
#include <pleat/core/carve.hpp>
#include <pleat/core/dtype.hpp>
#include <pleat/core/footprint.hpp>
#include <pleat/mesh/model_checks.hpp>
#include <pleat/moe/dispatch_record.hpp>
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

/// What happens when more rows come for a rank's experts than it has room for.
enum class Overflow : unsigned char {
  worst_case,   ///< it cannot: there is room for every routing
  error,        ///< as drop_lowest until `check` throws E10, on every rank of the group
  drop_lowest,  ///< entries of the smallest weight are dropped: they add 0, have no gradient, and are counted
};
constexpr const char* name_of(Overflow overflow) {
  return overflow == Overflow::worst_case ? "worst_case" : overflow == Overflow::error ? "error" : "drop_lowest";
}

struct DispatchOptions {
  Transport transport = Transport::collective;
  /// An expert's rows start at multiples of this; rows between are zero. 1 where no kernel wants more.
  std::int64_t row_alignment = 128;
  Overflow overflow = Overflow::worst_case;
  /// Most rows, one per (token, expert), that a rank's experts work on; 0 with Overflow::worst_case.
  std::int64_t max_rows = 0;
  /// Bounds the multiprocessors that move rows, for what runs beside them; 0: as many as are free.
  int max_ctas = 0;
};

struct DispatchPlan {
  DispatchShape shape;
  DispatchOptions options;
  int ranks = 1;

  PLEAT_HD constexpr DType accumulator() const { return pleat::accumulator(shape.dtype); }
  PLEAT_HD constexpr int experts_local() const { return shape.experts / ranks; }
  PLEAT_HD constexpr int max_sends() const { return shape.k < ranks ? shape.k : ranks; }
  PLEAT_HD constexpr int max_entries() const { return shape.k < experts_local() ? shape.k : experts_local(); }
  PLEAT_HD constexpr std::int64_t max_received() const { return ranks * shape.max_tokens; }
  /// Rows of the worst routing.
  PLEAT_HD constexpr std::int64_t worst_rows() const { return max_received() * max_entries(); }
  PLEAT_HD constexpr bool may_drop() const { return options.overflow != Overflow::worst_case; }
  PLEAT_HD constexpr std::int64_t max_rows() const { return may_drop() ? options.max_rows : worst_rows(); }
  /// Expert-major rows that there is room for: pad rows included.
  PLEAT_HD constexpr std::int64_t capacity_rows() const {
    const std::int64_t a = options.row_alignment;
    const std::int64_t rows = max_rows() + (a - 1) * experts_local();
    return (rows + a - 1) / a * a;
  }
  /// Of a call with so many tokens: those that are sent; none where they are too many.
  PLEAT_HD constexpr std::int64_t planned(std::int64_t tokens) const { return tokens > shape.max_tokens ? 0 : tokens; }
  /// Plans count rows in blocks of so many tokens, or rows of one source.
  static constexpr int tokens_per_block = 256;
  PLEAT_HD constexpr std::int64_t token_blocks() const {
    return (shape.max_tokens + tokens_per_block - 1) / tokens_per_block;
  }

  PLEAT_HD constexpr RowFormat format(RowKind kind) const {
    const std::size_t acc_bytes = size_bytes(accumulator()) * static_cast<std::size_t>(shape.k);
    const std::size_t header = kind == RowKind::token            ? ids_offset_bytes() + 4 * std::size_t(shape.k) + 4
                               : kind == RowKind::token_gradient ? acc_bytes
                                                                 : 0;
    const std::size_t payload = static_cast<std::size_t>(shape.hidden) * size_bytes(shape.dtype);
    return {rounded16(header), rounded16(header) + rounded16(payload)};
  }
  /// In the header of a token's row: weights at 0, ids here, the token's number after them.
  PLEAT_HD constexpr std::size_t ids_offset_bytes() const {
    return size_bytes(accumulator()) * static_cast<std::size_t>(shape.k);
  }
  /// Bytes of the longest row that goes this way.
  PLEAT_HD constexpr std::size_t row_bytes(Way way) const {
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
    r.dropped = memory.take<std::int64_t>(1);
    r.all_dropped = memory.take<std::int64_t>(n);
    r.rows = memory.take_bytes(static_cast<std::size_t>(capacity_rows() * shape.hidden) * size_bytes(shape.dtype));
    return r;
  }
  PlanScratch carve_plan_scratch(Carver& memory) const {
    return {memory.take<std::int32_t>(static_cast<std::size_t>(ranks * token_blocks() * experts_local()))};
  }
  /// How many words Dispatch::status_words gives.
  int status_words() const { return options.overflow == Overflow::error ? 2 : 1; }
  DispatchStatus* carve_status(Carver& memory) const { return memory.take<DispatchStatus>(1); }
  DispatchWindow carve_window(Carver& memory) const {
    DispatchWindow window{};
    for (const Way way : {Way::to_experts, Way::to_sources}) {
      window.counts[static_cast<int>(way)] = memory.take<std::int64_t>(static_cast<std::size_t>(ranks));
      window.rows[static_cast<int>(way)] = memory.take_bytes(static_cast<std::size_t>(max_received()) * row_bytes(way));
    }
    return window;
  }
  PeerRowTables carve_peer_tables(Carver& memory) const {
    const auto n = static_cast<std::size_t>(ranks);
    PeerRowTables tables{};
    for (auto& way : tables.outgoing) way = memory.take<std::byte*>(n);
    for (auto& way : tables.incoming) way = memory.take<std::byte*>(n);
    for (auto& way : tables.outgoing_counts) way = memory.take<std::int64_t*>(n);
    for (auto& way : tables.incoming_counts) way = memory.take<std::int64_t*>(n);
    tables.outgoing_first = memory.take<std::int64_t>(n);
    tables.incoming_first = memory.take<std::int64_t>(n);
    return tables;
  }
  DispatchBuffers carve_buffers(Carver& memory) const {
    const auto sent = static_cast<std::size_t>(shape.max_tokens * max_sends());
    const auto received = static_cast<std::size_t>(max_received());
    const std::size_t there = row_bytes(Way::to_experts), back = row_bytes(Way::to_sources);
    const auto longer = [](std::size_t a, std::size_t b) { return a > b ? a : b; };
    std::byte* outgoing = memory.take_bytes(longer(sent * there, received * back));
    return {outgoing, memory.take_bytes(longer(received * there, sent * back))};
  }
  CollectiveRowTables carve_collective_tables(Carver& memory) const {
    std::byte** outgoing = memory.take<std::byte*>(static_cast<std::size_t>(ranks));
    return {outgoing, memory.take<std::byte*>(static_cast<std::size_t>(ranks))};
  }
  /// Counts on their way to the host.
  std::int64_t* carve_pinned(Carver& memory) const {
    return memory.take<std::int64_t>(2 * static_cast<std::size_t>(ranks));
  }

  /// Of the window's signals: the credits free and full, each way.
  int channels() const { return options.transport == Transport::peer ? 4 : 0; }
  Footprint footprint() const {
    Carver scratch, saved, symmetric, persistent, pinned;
    carve_saved(saved);
    carve_plan_scratch(scratch);
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
            .pinned_host = pinned.used_bytes(),
            .channels = channels()};
  }

 private:
  PLEAT_HD static constexpr std::size_t rounded16(std::size_t bytes) { return (bytes + 15) / 16 * 16; }
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

  /// Whether the call had too many tokens.
  bool is_refused() const { return planned_tokens != tokens; }

  DispatchRecord record;
  std::int64_t tokens = 0;                // of the call
  std::int64_t planned_tokens = 0;        // 0 when they were too many
  std::vector<std::int64_t> host_counts;  // rows sent to, then received from each rank (collective transport)
};

/// Plans for groups of `ranks` ranks. Errors: mesh_error M06 when ranks does not divide experts, shape_error E02 for k,
/// E07 for sizes, E12 for max_rows.
inline DispatchPlan plan(int ranks, const DispatchShape& shape, const DispatchOptions& options = {}) {
  check_choice(shape.experts, shape.k);
  experts_per_rank(ranks, shape.experts, shape.experts);  // any divisor of the experts may be a group's size
  if (shape.max_tokens < 1 || shape.max_tokens > 0x7fffffff || shape.hidden < 1 || options.row_alignment < 1) {
    fail<shape_error>("pleat[E07]: max_tokens=", shape.max_tokens, " hidden=", shape.hidden,
                      " row_alignment=", options.row_alignment, " must each be at least 1, max_tokens below 2^31");
  }
  const DispatchPlan plan{shape, options, ranks};
  const bool fits =
      plan.may_drop() ? options.max_rows >= 1 && options.max_rows <= plan.worst_rows() : options.max_rows == 0;
  if (!fits) {
    fail<shape_error>("pleat[E12]: max_rows=", options.max_rows, " with overflow=", name_of(options.overflow),
                      "; valid: 0 with worst_case, else 1 .. ", plan.worst_rows());
  }
  return plan;
}

}  // namespace pleat::inline v0::moe
