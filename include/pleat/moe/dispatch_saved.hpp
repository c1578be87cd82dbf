// What a micro-batch keeps between its calls, and the check that it is given to the right ones.
#pragma once

#include <vector>

#include <pleat/moe/row_arena.hpp>

namespace pleat::inline v0::moe {

/// The saved state of one live micro-batch: give it to `dispatch`, and to every later call of the same micro-batch. It
/// may be used again for another one afterwards. `memory` has at least `plan.footprint().saved` bytes, and is borrowed.
class DispatchSaved {
 public:
  /// `arena`, of the same plan, where the plan has one; it must outlive this. Errors: shape_error T02, E17.
  DispatchSaved(const DispatchPlan& made_for, Block memory, RowArena* row_arena = nullptr)
      : plan(made_for), arena(row_arena), host_counts(2 * static_cast<std::size_t>(made_for.ranks)) {
    if (plan.has_arena() != (arena != nullptr)) {
      fail<shape_error>("pleat[E17]: a saved state of a plan with arena_rows=", plan.options.arena_rows,
                        arena == nullptr ? " was given no arena" : " was given an arena");
    }
    Carver carver(memory);
    record = plan.carve_saved(carver);
    if (arena == nullptr) return;
    record.rows = arena->rows;
    record.used_rows = arena->used_rows;
  }

  /// Whether the call had too many tokens.
  bool is_refused() const { return planned_tokens != tokens; }
  /// Errors: shape_error E15 when it was made for a plan that lays out its memory otherwise.
  void expect_made_for(const DispatchPlan& operation) const {
    if (!is_same_layout(plan, operation)) {
      fail<shape_error>("pleat[E15]: a saved state for the plan ", plan, " was given to an operation of the plan ",
                        operation, "; make it from the operation's plan");
    }
  }
  /// Errors: E15; shape_error E16 when no forward call has filled it.
  void expect_filled(const char* call, const DispatchPlan& operation) const {
    expect_made_for(operation);
    if (tokens < 0) {
      fail<shape_error>("pleat[E16]: ", call,
                        " was given a saved state that no dispatch has filled; run the forward "
                        "pass of the micro-batch with it first");
    }
  }

  DispatchPlan plan;
  RowArena* arena;
  int place = -1;  // in the arena; -1: holds no rows of it
  DispatchRecord record;
  std::int64_t tokens = -1;               // of the call; -1 before the first
  std::int64_t planned_tokens = -1;       // 0 when they were too many
  std::vector<std::int64_t> host_counts;  // rows sent to, then received from each rank (collective transport)
};

}  // namespace pleat::inline v0::moe
