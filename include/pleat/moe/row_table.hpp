// Where rows that travel between ranks lie in memory, the same for both transports.
#pragma once

#include <cstddef>
#include <cstdint>

#include <pleat/core/config.hpp>

namespace pleat::inline v0::moe {

/// To the ranks that host the experts, or back to the ranks that own the tokens.
enum class Way : unsigned char { to_experts, to_sources };

/// What a travelling row holds in front of its `hidden` elements.
enum class RowKind : unsigned char {
  token,           ///< to experts: k weights, k ids, the token's number
  gradient,        ///< to experts: nothing; the receiver knows the rows from the forward pass
  result,          ///< to sources: nothing
  token_gradient,  ///< to sources: gradients of the k weights, 0 where another rank has the expert
};

/// Which way rows of a kind go.
PLEAT_HD constexpr Way way_of(RowKind kind) {
  return kind == RowKind::token || kind == RowKind::gradient ? Way::to_experts : Way::to_sources;
}
/// Whether a count travels beside the rows: of the rows themselves, or of those that found no place at their expert.
PLEAT_HD constexpr bool has_counts(RowKind kind) {
  return kind == RowKind::token || kind == RowKind::result;
}

/// A row is `row_bytes` long, its payload starts after `header_bytes`; both are multiples of 16.
struct RowFormat {
  std::size_t header_bytes = 0;
  std::size_t row_bytes = 0;
};

/// Rows exchanged with every rank of the group: row `slot` of `peer` lies at base[peer] + (first[peer] + slot) *
/// row_bytes, and the count beside them at counts[peer]. All arrays [ranks] are device memory. Where `counts` is null
/// the transport moves the counts itself, from and to the arrays of the DispatchRecord.
struct RowTable {
  std::byte* const* base = nullptr;
  const std::int64_t* first = nullptr;
  std::int64_t* const* counts = nullptr;
  RowFormat format;

  /// Where a row begins, and where its payload does.
  PLEAT_HD std::byte* header(int peer, std::int64_t slot) const {
    return base[peer] + static_cast<std::size_t>(first[peer] + slot) * format.row_bytes;
  }
  PLEAT_HD std::byte* payload(int peer, std::int64_t slot) const { return header(peer, slot) + format.header_bytes; }
};

/// The rows that rank `rank` reads next: those it sends itself, at their tokens, or those of other ranks, in a table.
struct SourceRows {
  int rank;
  bool are_own;
  const void* tokens = nullptr;  // [tokens, hidden]
  RowTable table{};

  /// Rows that this rank sends to itself; rows that came from another.
  static SourceRows own(int rank, const void* tokens) { return {rank, true, tokens, {}}; }
  static SourceRows of_others(int rank, const RowTable& table) { return {rank, false, nullptr, table}; }
};

}  // namespace pleat::inline v0::moe
