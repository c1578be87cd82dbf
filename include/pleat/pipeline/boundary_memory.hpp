// Where the tensors between stages lie on one rank, and what must be done before their memory is used again.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

#include <pleat/core/carve.hpp>
#include <pleat/core/dtype.hpp>
#include <pleat/pipeline/schedule.hpp>

namespace pleat::inline v0::pipeline {

/// The tensors between stages: [rows of the micro-batch, hidden] of dtype.
struct Shape {
  std::int64_t hidden = 0;
  DType dtype = DType::f32;
  std::vector<std::int64_t> rows;  ///< [micro_batches], the same on every rank; 0 is allowed

  std::size_t elems(int micro_batch) const {
    return static_cast<std::size_t>(rows[static_cast<std::size_t>(micro_batch)] * hidden);
  }
};

namespace detail {

/// Memory handed out and taken back in a known order: the first gap that fits.
class GapList {
 public:
  std::size_t take(std::size_t bytes) {
    std::size_t at = 0;
    auto next = used_.begin();
    for (; next != used_.end() && next->first - at < bytes; ++next) at = next->first + next->second;
    used_.insert(next, {at, bytes});
    peak_ = std::max(peak_, at + bytes);
    return at;
  }
  void give_back(std::size_t at) {
    used_.erase(std::find_if(used_.begin(), used_.end(), [&](const auto& block) { return block.first == at; }));
  }
  std::size_t peak() const { return peak_; }

 private:
  std::vector<std::pair<std::size_t, std::size_t>> used_;  // offset and size, ascending, apart
  std::size_t peak_ = 0;
};

/// Of one rank. A tensor that an op reads lives until the op that makes the last gradient from it: a stage may refer to
/// its input and to the gradient of its output until then. A tensor that is only sent lives until compute has waited
/// for a batch no earlier than the one that sends it.
struct BoundaryLayout {
  std::vector<std::size_t> offsets;  ///< [schedule.boundaries()]; of those that this rank makes or uses
  std::vector<int> waits_for;        ///< [ops]: the batch whose end the op needs, or -1
  std::size_t bytes = 0;
};

/// Walks through the program of one rank.
class BoundaryWalk {
 public:
  BoundaryWalk(const Schedule& schedule, const Shape& shape, int rank)
      : schedule_(schedule),
        shape_(shape),
        rank_(rank),
        received_in_(static_cast<std::size_t>(schedule.boundaries()), -1) {
    layout_.offsets.resize(received_in_.size());
  }

  BoundaryLayout run() {
    const Program& program = schedule_.programs[static_cast<std::size_t>(rank_)];
    std::size_t batch = 0;
    for (std::size_t i = 0; i < program.ops.size(); ++i) {
      for (; batch < program.batches.size() && program.batches[batch].before <= static_cast<int>(i); ++batch) {
        enter(program.batches[batch], static_cast<int>(batch));
      }
      run_op(program.ops[i]);
    }
    layout_.bytes = memory_.peak();
    return std::move(layout_);
  }

 private:
  struct Sent {
    int batch;
    std::size_t index;
  };

  std::size_t index(const Boundary& what) const { return static_cast<std::size_t>(schedule_.index(what)); }
  void take(const Boundary& what) {
    constexpr std::size_t alignment = Carver::alignment_bytes;
    const std::size_t bytes = shape_.elems(what.micro_batch) * size_bytes(shape_.dtype);
    // An empty tensor takes a line as well, so that each block has a place of its own.
    layout_.offsets[index(what)] = memory_.take(std::max(alignment, (bytes + alignment - 1) / alignment * alignment));
  }
  void give_back(const Boundary& what) {
    if (schedule_.placement.exists(what)) memory_.give_back(layout_.offsets[index(what)]);
  }
  void enter(const Batch& batch, int number) {
    for (const Transfer& t : batch.transfers) {
      if (t.is_send) {
        sent_.push_back({number, index(t.what)});
      } else {
        take(t.what);
        received_in_[index(t.what)] = number;
      }
    }
  }
  void run_op(const Op& op) {
    const Placement& placement = schedule_.placement;
    int waits_for = -1;
    for_each_input(placement, rank_, op,
                   [&](const Boundary& what) { waits_for = std::max(waits_for, received_in_[index(what)]); });
    layout_.waits_for.push_back(waits_for);
    const auto is_over = [&](const Sent& sent) { return sent.batch <= waits_for; };
    for (const Sent& sent : sent_) {
      if (is_over(sent)) memory_.give_back(layout_.offsets[sent.index]);
    }
    sent_.erase(std::remove_if(sent_.begin(), sent_.end(), is_over), sent_.end());
    for_each_output(placement, rank_, op, [&](const Boundary& what) { take(what); });
    if (!op.has_weight_gradient()) return;
    const int stage = placement.stage(rank_, op.backward.chunk);
    give_back({Payload::activation, stage - 1, op.backward.micro_batch});
    give_back({Payload::gradient, stage + 1, op.backward.micro_batch});
  }

  const Schedule& schedule_;
  const Shape& shape_;
  int rank_;
  std::vector<int> received_in_;  // [boundaries]: the batch, or -1
  std::vector<Sent> sent_;        // whose memory is still in use
  GapList memory_;
  BoundaryLayout layout_;
};

inline BoundaryLayout boundary_layout(const Schedule& schedule, const Shape& shape, int rank) {
  return BoundaryWalk(schedule, shape, rank).run();
}

}  // namespace detail

}  // namespace pleat::inline v0::pipeline
