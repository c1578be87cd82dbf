// The plan of dispatch and combine: sizes for the worst routing or a chosen capacity, and where everything lies.
#pragma once

#include <pleat/comm/peer_access.hpp>
#include <pleat/comm/plan_digest.hpp>
#include <pleat/core/carve.hpp>
#include <pleat/core/dtype.hpp>
#include <pleat/core/footprint.hpp>
#include <pleat/mesh/model_checks.hpp>
#include <pleat/moe/dispatch_record.hpp>
#include <pleat/moe/plan_checks.hpp>
#include <pleat/moe/row_table.hpp>
#include <pleat/moe/send_by.hpp>

namespace pleat::inline v0::moe {

/// Sizes of dispatch and combine, the same on every rank.
struct DispatchShape {
  /// Most tokens of one rank in one call.
  std::int64_t max_tokens = 0;
  std::int64_t hidden = 0;
  int experts = 0;
  int k = 0;
  DType dtype = DType::f32;

  friend constexpr bool operator==(const DispatchShape&, const DispatchShape&) = default;
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

/// What a caller may choose of dispatch; all ranks choose alike.
struct DispatchOptions {
  Transport transport = Transport::collective;
  /// An expert's rows start at multiples of this; rows between are zero. The kernels of the library take any.
  std::int64_t row_alignment = 16;
  Overflow overflow = Overflow::worst_case;
  /// Most rows, one per (token, expert), that a rank's experts work on; 0 with Overflow::worst_case.
  std::int64_t max_rows = 0;
  /// Rows, pad rows included, of the arena that all layers of a step share (row_arena.hpp), with another overflow
  /// policy than worst_case; max_rows may be 0 then. 0: each micro-batch of each layer has rows of its own.
  std::int64_t arena_rows = 0;
  /// What moves rows to other ranks; `plan` writes the table's choice here. Copies need Transport::peer.
  SendBy send_by = SendBy::automatic;
  /// Bounds the multiprocessors that move rows, for what runs beside them; 0: as many as are free.
  int max_ctas = 0;
  /// For measuring what transfers cost: each rank takes itself for all others, so that what it would write to a peer
  /// and await of it is its own, and all else is done as ever. Results mean nothing. Needs Transport::peer.
  bool loopback = false;

  friend constexpr bool operator==(const DispatchOptions&, const DispatchOptions&) = default;
};

/// Made by `plan`; read its members freely.
struct DispatchPlan {
  DispatchShape shape;
  DispatchOptions options;
  int ranks = 1;

  /// Whether both keep the same things at the same places; a budget of CTAs changes nothing.
  friend constexpr bool is_same_layout(const DispatchPlan& a, DispatchPlan b) {
    b.options.max_ctas = a.options.max_ctas;
    return a.shape == b.shape && a.options == b.options && a.ranks == b.ranks;
  }

  PLEAT_HD constexpr DType accumulator() const { return pleat::accumulator(shape.dtype); }
  /// Experts of each rank.
  PLEAT_HD constexpr int experts_local() const { return shape.experts / ranks; }
  /// Whether every token's row goes to every rank, and its slot there is the token.
  PLEAT_HD constexpr bool sends_all() const { return options.send_by == SendBy::copies; }
  PLEAT_HD constexpr int max_sends() const { return !sends_all() && shape.k < ranks ? shape.k : ranks; }
  PLEAT_HD constexpr int max_entries() const { return shape.k < experts_local() ? shape.k : experts_local(); }
  PLEAT_HD constexpr std::int64_t max_received() const { return ranks * shape.max_tokens; }
  /// Rows of the worst routing.
  PLEAT_HD constexpr std::int64_t worst_rows() const { return max_received() * max_entries(); }
  PLEAT_HD constexpr bool may_drop() const { return options.overflow != Overflow::worst_case; }
  PLEAT_HD constexpr bool has_arena() const { return options.arena_rows > 0; }
  PLEAT_HD constexpr std::int64_t max_rows() const { return options.max_rows > 0 ? options.max_rows : worst_rows(); }
  /// The same where `used_rows` of an arena are in use: what is left holds so many whatever their experts.
  PLEAT_HD constexpr std::int64_t max_rows(std::int64_t used_rows) const {
    const std::int64_t left = options.arena_rows - used_rows - (options.row_alignment - 1) * experts_local();
    return !has_arena() || left > max_rows() ? max_rows() : left < 0 ? 0 : left;
  }
  /// Expert-major rows that there is room for: pad rows included.
  PLEAT_HD constexpr std::int64_t capacity_rows() const {
    if (has_arena()) return options.arena_rows;
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

  /// How rows of a kind lie when they travel.
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
    r.own_tokens = memory.take<std::int32_t>(tokens);
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
    if (!has_arena()) r.rows = take_rows(memory);
    return r;
  }
  /// [capacity_rows, hidden] dtype
  std::byte* take_rows(Carver& memory) const {
    return memory.take_bytes(static_cast<std::size_t>(capacity_rows() * shape.hidden) * size_bytes(shape.dtype));
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

  /// Of the window's signals: the credits free and full, each way, and full for headers alone.
  int channels() const { return options.transport == Transport::peer ? 5 : 0; }
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
    const std::size_t agreed = agreement_bytes(ranks);
    return {.scratch = scratch.used_bytes() < agreed ? agreed : scratch.used_bytes(),
            .saved = saved.used_bytes(),
            .symmetric = symmetric.used_bytes(),
            .persistent = persistent.used_bytes(),
            .pinned_host = pinned.used_bytes(),
            .channels = channels()};
  }

 private:
  PLEAT_HD static constexpr std::size_t rounded16(std::size_t bytes) { return (bytes + 15) / 16 * 16; }
};

inline void append_to(Message& message, const DispatchPlan& plan) {
  const DispatchShape& shape = plan.shape;
  const DispatchOptions& options = plan.options;
  message.append(message_of("ranks=", plan.ranks, " max_tokens=", shape.max_tokens, " hidden=", shape.hidden,
                            " experts=", shape.experts, " k=", shape.k, " dtype=", shape.dtype,
                            " transport=", name_of(options.transport), " send_by=", name_of(options.send_by),
                            " row_alignment=", options.row_alignment, " overflow=", name_of(options.overflow),
                            " max_rows=", options.max_rows, " arena_rows=", options.arena_rows));
}

/// Plans for groups of `ranks` ranks. Errors: mesh_error M06 when ranks does not divide experts; shape_error T01, E02
/// for k, E07 for sizes, E12 for max_rows, E14 for options.
inline DispatchPlan plan(int ranks, const DispatchShape& shape, const DispatchOptions& options = {}) {
  check_choice(shape.experts, shape.k);
  experts_per_rank(ranks, shape.experts, shape.experts);  // any divisor of the experts may be a group's size
  check_float(shape.dtype);
  check_enumerator("transport", options.transport, Transport::peer);
  check_enumerator("send_by", options.send_by, SendBy::copies);
  check_enumerator("overflow", options.overflow, Overflow::drop_lowest);
  check_number("max_ctas", options.max_ctas, true);
  const std::int64_t alignment = options.row_alignment;
  if (shape.max_tokens < 1 || shape.hidden < 1 || alignment < 1) {
    fail<shape_error>("pleat[E07]: max_tokens=", shape.max_tokens, " hidden=", shape.hidden,
                      " row_alignment=", alignment, " must each be at least 1");
  }
  DispatchPlan plan{shape, options, ranks};
  if (options.send_by == SendBy::automatic) plan.options.send_by = chosen_sender(options.transport, ranks, shape.k);
  if (plan.sends_all() && options.transport != Transport::peer) {
    fail<shape_error>("pleat[E14]: send_by=copies with transport=", name_of(options.transport),
                      "; copies write into peers' memory: plan with transport=peer, or with send_by=stores");
  }
  if (options.loopback && options.transport != Transport::peer) {
    fail<shape_error>("pleat[E14]: loopback with transport=", name_of(options.transport),
                      "; it is rows in windows that loop back: plan with transport=peer, or without loopback");
  }
  constexpr std::int64_t most_rows = 0x7fffffff;
  const std::int64_t elems = shape.hidden < most_elems ? shape.hidden + 4 * std::int64_t{shape.k} + 16 : most_elems;
  if (shape.max_tokens > most_rows || !fits_product({shape.max_tokens, ranks, plan.max_entries()}) ||
      plan.worst_rows() > most_rows || !fits_product({alignment, plan.experts_local() + 1}) ||
      !fits_product({plan.worst_rows() + alignment * (plan.experts_local() + 1), elems}) ||
      !fits_product({plan.max_received() + ranks * DispatchPlan::tokens_per_block, plan.experts_local()})) {
    fail<shape_error>(
        "pleat[E07]: ranks=", ranks, " max_tokens=", shape.max_tokens, " k=", shape.k, " experts=", shape.experts,
        " hidden=", shape.hidden, " row_alignment=", alignment,
        " are too large: ranks * max_tokens * min(k, experts / ranks) must stay below 2^31, and any array "
        "of rows below 2^53 elements");
  }
  const bool may_be_0 = !plan.may_drop() || plan.has_arena();
  if (options.max_rows < (may_be_0 ? 0 : 1) || options.max_rows > (plan.may_drop() ? plan.worst_rows() : 0)) {
    fail<shape_error>("pleat[E12]: max_rows=", options.max_rows, " with overflow=", name_of(options.overflow),
                      "; valid: 0 with worst_case, else 1 .. ", plan.worst_rows());
  }
  const bool is_arena = plan.may_drop() && options.arena_rows % alignment == 0 && options.arena_rows <= most_rows;
  if (options.arena_rows < 0 || (plan.has_arena() && (!is_arena || !fits_product({options.arena_rows, elems})))) {
    fail<shape_error>("pleat[E12]: arena_rows=", options.arena_rows, " with row_alignment=", alignment,
                      " and overflow=", name_of(options.overflow),
                      "; valid: 0, or a multiple of row_alignment below 2^31 with overflow=error or drop_lowest");
  }
  return plan;
}

}  // namespace pleat::inline v0::moe
