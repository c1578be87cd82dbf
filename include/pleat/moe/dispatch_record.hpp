// What dispatch keeps in memory: the record of a micro-batch, its status, windows and tables; values that kernels take.
#pragma once

#include <cstddef>
#include <cstdint>

#include <pleat/core/config.hpp>

namespace pleat::inline v0::moe {

/// A row that was sent: to which rank of the group, and which of the rows this rank sends there.
struct SentRow {
  std::int32_t rank;
  std::int32_t slot;
};

/// What the forward pass of one micro-batch leaves behind: device arrays of a saved block. Rows that came from another
/// rank are numbered source * max_tokens + slot; `max_sends` and `max_entries` are the plan's. An entry is a row's use
/// by one expert of this rank.
struct DispatchRecord {
  SentRow* sent;               // [max_tokens, max_sends], ascending rank; rank -1 ends a token's list
  std::int32_t* own_tokens;    // [max_tokens] by slot: the tokens of the rows from this rank to itself
  std::int64_t* send_counts;   // [ranks] rows to each rank; minus the tokens where they are too many
  std::int64_t* send_first;    // [ranks] their sums before each rank (collective transport)
  std::int64_t* recv_counts;   // [ranks] rows from each rank
  std::int64_t* recv_first;    // [ranks]
  std::int64_t* entry_rows;    // [ranks * max_tokens, max_entries] expert-major rows, ascending expert; -1 ends a list
  std::int32_t* entry_choice;  // the same shape: which of the token's k choices
  void* entry_weights;         // the same shape, acc
  void* entry_dweights;        // the same shape, acc: written by combine_backward
  std::int64_t* offsets;       // [experts_local + 1] where each expert's rows start, the first at 0 or in the arena
  std::int64_t* ends;          // [experts_local] where they end and pad rows begin
  std::int64_t* dropped;       // [1] entries that found no place on this rank
  std::int64_t* all_dropped;   // [ranks] those of each rank (collective transport)
  std::byte* rows;             // [capacity_rows, hidden] dtype
  std::int64_t* used_rows;     // [1] of an arena: how many rows are in use; null: the rows are the micro-batch's own
};

namespace detail {
/// Rows of the arena that are in use, 0 where there is none; where the record lies.
PLEAT_HD inline std::int64_t used_rows(const DispatchRecord& r) {
  return r.used_rows == nullptr ? 0 : *r.used_rows;
}
}  // namespace detail

/// What a bound operation reports, sticky until it is bound again: device memory.
struct DispatchStatus {
  std::int64_t poisoned_rank = 0;     ///< 1 + the first rank of the group that had too many tokens, 0 for none
  std::int64_t poisoned_tokens = 0;   ///< how many it had
  std::int64_t overflow_rank = 0;     ///< 1 + the first rank of the group that had too many rows, 0 for none
  std::int64_t overflow_rows = 0;     ///< how many it dropped then
  std::int64_t dropped_rows = 0;      ///< all that ranks of the group dropped, of all calls of `combine`
  std::int64_t unrouted_choices = 0;  ///< ids of this rank's tokens that were no expert, or twice in a token
};

/// What `plan_sends` and `plan_rows` count in; a call's alone.
struct PlanScratch {
  std::int32_t* block_counts;  // [experts_local, ranks * token_blocks], of which plan_sends uses [ranks, token_blocks]
};

/// Peer transport: a rank's symmetric range.
struct DispatchWindow {
  std::int64_t* counts[2];  // by Way: [ranks] the count beside the rows of each rank
  std::byte* rows[2];       // by Way: [ranks, max_tokens] rows
};
/// Peer transport: device tables behind its RowTables, by Way.
struct PeerRowTables {
  std::byte** outgoing[2];            // [ranks] windows of the peers
  std::byte** incoming[2];            // [ranks] my window
  std::int64_t** outgoing_counts[2];  // [ranks] my words in the windows of the peers
  std::int64_t** incoming_counts[2];  // [ranks] the words of my window
  std::int64_t* outgoing_first;       // [ranks] where my rows start in a peer's window
  std::int64_t* incoming_first;       // [ranks] where a peer's rows start in mine
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

}  // namespace pleat::inline v0::moe
