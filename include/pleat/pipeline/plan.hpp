// What a pipeline does in a step and the memory it takes, before anything is allocated.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>

#include <pleat/comm/plan_digest.hpp>
#include <pleat/core/footprint.hpp>
#include <pleat/pipeline/boundary_memory.hpp>
#include <pleat/pipeline/simulate.hpp>

namespace pleat::inline v0::pipeline {

/// A checked schedule with the shapes of its tensors; the same on every rank.
struct Plan {
  Schedule schedule;
  Shape shape;
  std::size_t boundary_bytes = 0;  ///< of the rank that needs most

  /// Scratch holds the tensors between stages for as long as a step takes, and what ranks compare at bind; all ranks
  /// ask for the same.
  Footprint footprint() const {
    return {.scratch = std::max(boundary_bytes, agreement_bytes(schedule.placement.ranks))};
  }
};

namespace detail {
/// Errors: shape_error T01, P04.
inline void check_shape(const Schedule& schedule, const Shape& shape) {
  if (size_bytes(shape.dtype) == 0) {
    fail<shape_error>("pleat[T01]: a pipeline of elements of dtype number ", static_cast<int>(shape.dtype),
                      "; valid dtypes: f64 f32 bf16 f16 i64 i32 u8");
  }
  const std::vector<std::int64_t>& rows = shape.rows;
  const bool is_sane = std::all_of(rows.begin(), rows.end(), [](std::int64_t n) { return n >= 0; });
  if (!is_sane || rows.size() != static_cast<std::size_t>(schedule.micro_batches)) {
    fail<shape_error>("pleat[P04]: rows of ", rows.size(), " micro-batches, ", is_sane ? "none" : "some",
                      " of them negative, for a schedule of ", schedule.micro_batches,
                      "; give each micro-batch its number of rows, 0 or more");
  }
  if (shape.hidden < 1) fail<shape_error>("pleat[P04]: hidden=", shape.hidden, "; a row has at least 1 element");
  // As if all were as large as the largest and lived at once: bytes and offsets fit whatever the dtype and the places.
  const std::int64_t most_elems = (std::int64_t{1} << 58) / std::max(schedule.boundaries(), 1);
  for (const std::int64_t n : rows) {
    if (n > most_elems / shape.hidden) {
      fail<shape_error>("pleat[P04]: rows=", n, " of hidden=", shape.hidden, " are too large; each of the ",
                        schedule.boundaries(), " tensors of this schedule has at most ", most_elems, " elements");
    }
  }
}
inline std::size_t boundary_bytes(const Schedule& schedule, const Shape& shape) {
  std::size_t most = 0;
  for (int r = 0; r < schedule.placement.ranks; ++r) most = std::max(most, boundary_layout(schedule, shape, r).bytes);
  return most;
}
/// What the ranks share: which op and which transfer comes when, and how large tensors are.
inline auto agreement_of(const Plan& plan) {
  const Schedule& schedule = plan.schedule;
  PlanHash ops, transfers;
  for (const Program& program : schedule.programs) {
    for (const Op& op : program.ops) {
      ops.add(static_cast<int>(op.kind)).add(op.forward.chunk).add(op.forward.micro_batch);
      ops.add(op.backward.chunk).add(op.backward.micro_batch);
    }
    ops.add(static_cast<std::int64_t>(program.ops.size()));
    for (const Batch& batch : program.batches) {
      for (const Transfer& t : batch.transfers) {
        transfers.add(static_cast<int>(t.what.payload)).add(t.what.stage).add(t.what.micro_batch);
        transfers.add(t.peer).add(t.is_send);
      }
      transfers.add(batch.before).add(static_cast<std::int64_t>(batch.transfers.size()));
    }
    transfers.add(static_cast<std::int64_t>(program.batches.size()));
  }
  return std::array{PlanField{"chunks per rank", schedule.placement.chunks_per_rank},
                    PlanField{"micro-batches", schedule.micro_batches},
                    PlanField{"hash of ops", ops},
                    PlanField{"hash of transfers", transfers},
                    PlanField{"hidden", plan.shape.hidden},
                    PlanField{"dtype", plan.shape.dtype},
                    PlanField{"hash of rows", PlanHash().add_all(plan.shape.rows)}};
}
/// Where ranks connect before their first step: a byte from each rank, and one to send.
inline std::size_t connection_bytes(const Schedule& schedule) {
  return schedule.placement.ranks == 1 ? 0 : static_cast<std::size_t>(schedule.placement.ranks) + 1;
}
}  // namespace detail

/// Plans a step of `schedule`, one of `make_schedule` or the caller's own. Errors: shape_error T01, P04 (rows,
/// hidden), and those of `simulate` for a schedule that would hang or compute something twice.
inline Plan plan(Schedule schedule, Shape shape) {
  simulate(schedule);
  detail::check_shape(schedule, shape);
  const std::size_t bytes = std::max(detail::boundary_bytes(schedule, shape), detail::connection_bytes(schedule));
  return {std::move(schedule), std::move(shape), bytes};
}

}  // namespace pleat::inline v0::pipeline
