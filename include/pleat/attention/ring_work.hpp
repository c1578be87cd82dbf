// What the ranks of a ring compute, step by step, as a value; and one rank's share of it where its kernels read it.
#pragma once

#include <cstring>

#include <pleat/attention/local_kernel.hpp>
#include <pleat/core/carve.hpp>
#include <pleat/core/executor.hpp>

namespace pleat::inline v0::ring {

/// What every rank computes at every step: at step s rank c meets the block of rank c - s (cyclic). A value; the same
/// on every rank.
class Work {
 public:
  Work() = default;
  Work(std::span<const TokenSpans> spans, std::span<const std::int64_t> cu_seqlens, bool causal)
      : cp_(static_cast<int>(spans.size())) {
    blocks_.reserve(spans.size() * (spans.size() + 2));
    for (int rank = 0; rank < cp_; ++rank) {
      for (int step = 0; step < cp_; ++step) {
        const TokenSpans& keys = spans[static_cast<std::size_t>(owner(rank, step))];
        blocks_.push_back(plan_block_work(spans[static_cast<std::size_t>(rank)], keys, step == 0, cu_seqlens, causal));
      }
      const BlockWork own = at(rank, 0);
      const std::int64_t middle = own.keys.size() / 2;
      blocks_.push_back(with_keys(own, {0, middle}));
      blocks_.push_back(with_keys(own, {middle, own.keys.size()}));
    }
  }

  int ranks() const { return cp_; }
  /// Whose block rank `rank` meets at `step`.
  int owner(int rank, int step) const { return (rank - step + cp_) % cp_; }
  /// Who meets the block of `rank` at `step`.
  int reader(int rank, int step) const { return (rank + step) % cp_; }

  const BlockWork& at(int rank, int step) const { return list(rank, step); }
  /// The own block of `rank` again, in two parts: the first half of its keys, and the rest.
  const BlockWork& own_half(int rank, int half) const { return list(rank, cp_ + half); }

  /// The last step at which `rank` has something to compute; 0 when there is none.
  int last_step(int rank) const {
    int step = cp_ - 1;
    while (step > 0 && at(rank, step).rectangles.empty()) --step;
    return step;
  }
  /// The rows of the block of `rank` that have a gradient once its readers of steps 1 .. `step` have added theirs.
  TokenSpan summed_keys(int rank, int step) const {
    TokenSpan rows;
    for (int s = 1; s <= std::min(step, cp_ - 1); ++s) rows = hull(rows, at(reader(rank, s), s).keys);
    return rows;
  }

  /// Bytes of memory for the rectangles of a rank, the same for every rank.
  std::size_t placed_bytes() const {
    Carver memory;
    memory.take<Rectangle>(most_rectangles());
    return memory.used_bytes();
  }

 private:
  friend class PlacedWork;

  int lists() const { return cp_ + 2; }  // of one rank: its steps, and the halves of its own block
  const BlockWork& list(int rank, int index) const {
    return blocks_[static_cast<std::size_t>(rank) * static_cast<std::size_t>(lists()) +
                   static_cast<std::size_t>(index)];
  }
  std::size_t rectangles_before(int rank, int index) const {
    std::size_t count = 0;
    for (int i = 0; i < index; ++i) count += list(rank, i).rectangles.size();
    return count;
  }

  std::size_t most_rectangles() const {
    std::size_t most = 0;
    for (int rank = 0; rank < cp_; ++rank) most = std::max(most, rectangles_before(rank, lists()));
    return most;
  }

  int cp_ = 0;
  std::vector<BlockWork> blocks_;  // [rank][list]
};

/// One rank's share of a `Work`, its rectangles also in memory of the rank's device. Borrows both.
class PlacedWork {
 public:
  PlacedWork() = default;
  /// Copies on `s`; `staging` is pinned host memory that stays unchanged until that is done. Both blocks have
  /// `work.placed_bytes()`. Errors: shape_error T02.
  template <executor Executor>
  PlacedWork(const Work& work, int rank, Block staging, Block memory, const Executor& executor,
             typename Executor::stream_type s)
      : work_(&work), rank_(rank), memory_(take(memory, work)) {
    Rectangle* const staged = take(staging, work);
    const std::size_t count = work.rectangles_before(rank, work.lists());
    for (int i = 0; i < work.lists(); ++i) {
      const std::vector<Rectangle>& list = work.list(rank, i).rectangles;
      std::copy(list.begin(), list.end(), staged + work.rectangles_before(rank, i));
    }
    executor.copy(memory_, staged, count * sizeof(Rectangle), s);
  }

  const Work& work() const { return *work_; }
  WorkView at(int step) const { return view(step); }
  WorkView own_half(int half) const { return view(work_->ranks() + half); }

 private:
  static Rectangle* take(Block block, const Work& work) {
    return Carver(block).take<Rectangle>(work.most_rectangles());
  }
  WorkView view(int index) const {
    return {work_->list(rank_, index).rectangles, memory_ + work_->rectangles_before(rank_, index)};
  }

  const Work* work_ = nullptr;
  int rank_ = 0;
  Rectangle* memory_ = nullptr;
};

}  // namespace pleat::inline v0::ring
