// The rows of all layers of a step, one behind the other in one block: it is sized for what comes, not for what could.
#pragma once

#include <pleat/core/executor.hpp>
#include <pleat/moe/dispatch_plan.hpp>

namespace pleat::inline v0::moe {

/// Memory for the rows of all live micro-batches of operations with one plan. A forward call takes as many rows as
/// come, behind those in use, which the device alone knows: nobody waits, and a captured graph takes other numbers when
/// it is replayed. They are released in the reverse order of the forward calls; with several micro-batches in flight,
/// as in a pipeline, each has an arena. What finds no room is dropped as DispatchOptions::overflow says.
class RowArena {
 public:
  /// Bytes of the arena's memory.
  static std::size_t bytes(const DispatchPlan& plan) {
    Carver memory;
    RowArena(plan, memory);
    return memory.used_bytes();
  }
  /// Takes `bytes` of memory, which is borrowed. Call `clear` before the first forward call. Errors: shape_error T02.
  RowArena(const DispatchPlan& plan, Carver& memory)
      : used_rows(memory.take<std::int64_t>(1)), rows(plan.take_rows(memory)) {}
  // A copy would release what the other holds.
  RowArena(RowArena&&) = default;
  RowArena& operator=(RowArena&&) = default;

  /// Releases all: before the first use, and where a step was given up.
  template <executor Executor>
  void clear(const Executor& executor, typename Executor::stream_type s) {
    executor.zero(used_rows, sizeof(std::int64_t), s);
    holders_ = 0;
  }

  /// How many forward calls hold rows.
  int holders() const { return holders_; }
  /// The next place.
  int enter() { return holders_++; }
  /// Errors: shape_error E17 when the place is not the last.
  void leave(int place) {
    if (place + 1 != holders_) {
      fail<shape_error>("pleat[E17]: rows of forward call ", place, " of an arena are released while ", holders_,
                        " calls hold rows; the last one comes first, and each once");
    }
    holders_ = place;
  }

  std::int64_t* used_rows;  // device
  std::byte* rows;

 private:
  int holders_ = 0;
};

}  // namespace pleat::inline v0::moe
