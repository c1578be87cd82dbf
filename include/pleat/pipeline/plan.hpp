// What a pipeline does in a step and the memory it takes, before anything is allocated.
#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>

#include <pleat/core/footprint.hpp>
#include <pleat/pipeline/boundary_memory.hpp>
#include <pleat/pipeline/simulate.hpp>

namespace pleat::inline v0::pipeline {

/// A checked schedule with the shapes of its tensors; the same on every rank.
struct Plan {
  Schedule schedule;
  Shape shape;
  std::size_t boundary_bytes = 0;  ///< of the rank that needs most

  /// Scratch holds the tensors between stages for as long as a step takes; all ranks ask for the same.
  Footprint footprint() const { return {.scratch = boundary_bytes}; }
};

namespace detail {
inline void check_rows(const Schedule& schedule, const std::vector<std::int64_t>& rows) {
  const bool is_sane = std::all_of(rows.begin(), rows.end(), [](std::int64_t n) { return n >= 0; });
  if (!is_sane || rows.size() != static_cast<std::size_t>(schedule.micro_batches)) {
    fail<shape_error>("pleat[P04]: rows of ", rows.size(), " micro-batches, ", is_sane ? "none" : "some",
                      " of them negative, for a schedule of ", schedule.micro_batches,
                      "; give each micro-batch its number of rows, 0 or more");
  }
}
inline std::size_t boundary_bytes(const Schedule& schedule, const Shape& shape) {
  std::size_t most = 0;
  for (int r = 0; r < schedule.placement.ranks; ++r) most = std::max(most, boundary_layout(schedule, shape, r).bytes);
  return most;
}
/// Where ranks connect before their first step: a byte from each rank, and one to send.
inline std::size_t connection_bytes(const Schedule& schedule) {
  return schedule.placement.ranks == 1 ? 0 : static_cast<std::size_t>(schedule.placement.ranks) + 1;
}
}  // namespace detail

/// Plans a step of `schedule`, one of `make_schedule` or the caller's own. Errors: shape_error P04 (rows, hidden), and
/// those of `simulate` for a schedule that would hang or compute something twice.
inline Plan plan(Schedule schedule, Shape shape) {
  simulate(schedule);
  detail::check_rows(schedule, shape.rows);
  if (shape.hidden < 1) fail<shape_error>("pleat[P04]: hidden=", shape.hidden, "; a row has at least 1 element");
  const std::size_t bytes = std::max(detail::boundary_bytes(schedule, shape), detail::connection_bytes(schedule));
  return {std::move(schedule), std::move(shape), bytes};
}

}  // namespace pleat::inline v0::pipeline
