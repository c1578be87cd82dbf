// What the ranks of a ring compute, step by step, as a value; and one rank's share of it where its kernels read it.
#pragma once

#include <cstring>

#include <pleat/attention/launches.hpp>
#include <pleat/comm/plan_digest.hpp>
#include <pleat/core/carve.hpp>
#include <pleat/core/executor.hpp>

namespace pleat::inline v0::ring {

/// What every rank computes at every step: at step s rank c meets the block of rank c - s (cyclic). Of that it reads
/// some runs of keys, each of which is a part of its own. A value; the same on every rank.
class Work {
 public:
  Work() = default;
  /// `launches`: of the forward pass; for one, the blocks of a rank are also listed as one.
  Work(std::span<const TokenSpans> spans, std::span<const std::int64_t> cu_seqlens, bool causal,
       Launches launches = Launches::per_step)
      : cp_(static_cast<int>(spans.size())), launches_(launches), hash_(hash_of(spans, cu_seqlens)) {
    for (const TokenSpans& rank : spans) block_rows_ = std::max(block_rows_, rank.tokens());
    std::vector<std::vector<BlockWork>> of_steps(spans.size() * spans.size());  // [rank][step]
    for (int rank = 0; rank < cp_; ++rank) {
      const TokenSpans& queries = spans[static_cast<std::size_t>(rank)];
      for (int step = 0; step < cp_; ++step) {
        const TokenSpans& keys = spans[static_cast<std::size_t>(owner(rank, step))];
        BlockWork work = plan_block_work(queries, keys, step == 0, cu_seqlens, causal);
        of_steps[index(rank, step)] = step == 0 ? std::vector{std::move(work)} : parts_without_gaps(work);
      }
    }
    add_sums(of_steps);
    lists_.reserve(spans.size() * static_cast<std::size_t>(lists()));
    for (int rank = 0; rank < cp_; ++rank) add_lists(rank, {&of_steps[index(rank, 0)], spans.size()});
  }

  /// Of the ring: cp.
  int ranks() const { return cp_; }
  /// Of the split and the documents: ranks that work together have the same.
  const PlanHash& hash() const { return hash_; }
  /// Whose block rank `rank` meets at `step`.
  int owner(int rank, int step) const { return cyclic(rank, -step, cp_); }
  /// Who meets the block of `rank` at `step`.
  int reader(int rank, int step) const { return cyclic(rank, step, cp_); }

  /// What `rank` computes at `step`: one part per run of keys that it reads. Its own block, step 0, is one part.
  std::span<const BlockWork> parts(int rank, int step) const { return list(rank, step).parts; }
  /// The same parts, cut where a slice of the block ends.
  std::span<const BlockWork> sliced_parts(int rank, int step) const {
    return slices() == 1 ? parts(rank, step) : list(rank, slice_list(step)).parts;
  }
  /// The own block of `rank` again, in two parts: the first half of its keys, and the rest.
  const BlockWork& own_half(int rank, int half) const { return list(rank, cp_).parts[static_cast<std::size_t>(half)]; }
  /// All that `rank` computes, its keys in one row of blocks: the own one, then that of step s from row
  /// `own keys + first_row(s)` on, as it stands on its owner.
  const BlockWork& all(int rank) const { return list(rank, lists() - 1).parts.front(); }
  /// Of the forward pass that it was made for.
  Launches launches() const { return launches_; }
  /// Of the blocks of others that one launch computes.
  std::int64_t block_rows() const { return block_rows_; }
  std::int64_t first_row(int step) const { return (step - 1) * block_rows_; }
  /// How many rows of the block of `step` travel to `rank`.
  std::int64_t travelling_rows(int rank, int step) const { return rows_before(rank, step, parts(rank, step).size()); }
  /// Where part `part` of `step` begins when the rows that travel lie one after the other.
  std::int64_t rows_before(int rank, int step, std::size_t part) const {
    std::int64_t rows = 0;
    for (const BlockWork& earlier : parts(rank, step).first(part)) rows += earlier.keys.size();
    return rows;
  }

  /// The last step at which `rank` has something to compute; 0 when there is none.
  int last_step(int rank) const {
    int step = cp_ - 1;
    while (step > 0 && parts(rank, step).empty()) --step;
    return step;
  }
  /// The rows of the block of `rank` that have a gradient once its readers of steps 1 .. `step` have added theirs.
  const Runs& summed_keys(int rank, int step) const { return summed_[index(rank, std::min(step, cp_ - 1))]; }

  /// In how many slices a block's gradients are computed and handed on: two where ranks wait for those of others, so
  /// that one travels while the other is computed.
  int slices() const { return cp_ > 2 ? 2 : 1; }
  /// The rows of the block of `rank` that are in a slice.
  TokenSpan slice(int rank, int slice) const {
    const std::int64_t cut = slices() == 1 ? block_rows_ : cuts_[static_cast<std::size_t>(rank)];
    return slice == 0 ? TokenSpan{0, cut} : TokenSpan{cut, block_rows_};
  }

  /// Bytes of memory for the rectangles of a rank, the same for every rank.
  std::size_t placed_bytes() const { return bytes_of(most_rectangles_); }
  /// What suffices for any packing of at most so many documents, whatever the split: for memory that is there before
  /// the packings are. Of the own block a document has one rectangle, and one in each half; of another one for each of
  /// the rank's spans that it meets, and as many in each slice.
  static std::size_t most_placed_bytes(int cp, std::int64_t documents, Launches launches) {
    const std::int64_t of_step = documents + TokenSpans::capacity, lists_of_step = (cp > 2 ? 3 : 1);
    const std::int64_t of_steps = (cp - 1) * of_step;
    const std::int64_t most =
        3 * documents + lists_of_step * of_steps + (launches == Launches::one ? documents + of_steps : 0);
    return bytes_of(static_cast<std::size_t>(most));
  }

 private:
  friend class PlacedWork;

  struct List {
    std::vector<BlockWork> parts;
    std::size_t rectangles_before;  // of the same rank, in the lists before
  };

  static PlanHash hash_of(std::span<const TokenSpans> spans, std::span<const std::int64_t> cu_seqlens) {
    PlanHash hash;
    for (const TokenSpans& rank : spans) {
      for (const TokenSpan& span : rank) hash.add(span.begin).add(span.end);
      hash.add(rank.tokens());
    }
    return hash.add_all(cu_seqlens);
  }
  static std::size_t bytes_of(std::size_t rectangles) {
    Carver memory;
    memory.take<Rectangle>(rectangles);
    return memory.used_bytes();
  }
  /// Of one rank: its steps, the halves of its own block, all steps but the first in slices, and all as one.
  int lists() const { return slice_list(slices() == 1 ? 1 : cp_) + (launches_ == Launches::one ? 1 : 0); }
  int slice_list(int step) const { return cp_ + step; }
  void add_lists(int rank, std::span<const std::vector<BlockWork>> of_steps) {
    std::size_t placed = 0;
    const auto add = [&](std::vector<BlockWork> parts) {
      List list{std::move(parts), placed};
      for (const BlockWork& part : list.parts) placed += part.rectangles.size();
      lists_.push_back(std::move(list));
    };
    for (const std::vector<BlockWork>& parts : of_steps) add(parts);
    const BlockWork& own = of_steps.front().front();
    const std::int64_t middle = own.keys.size() / 2;
    add({with_keys(own, {0, middle}), with_keys(own, {middle, own.keys.size()})});
    for (int step = 1; step < cp_ && slices() > 1; ++step) {
      std::vector<BlockWork> sliced;
      for (const BlockWork& part : of_steps[static_cast<std::size_t>(step)]) {
        for (int i = 0; i < slices(); ++i) {
          const TokenSpan rows = intersection(part.keys, slice(owner(rank, step), i));
          if (rows.empty()) continue;
          sliced.push_back(with_keys(part, {rows.begin - part.keys.begin, rows.end - part.keys.begin}));
        }
      }
      add(std::move(sliced));
    }
    if (launches_ == Launches::one) add({all_blocks(of_steps)});
    most_rectangles_ = std::max(most_rectangles_, placed);
  }
  BlockWork all_blocks(std::span<const std::vector<BlockWork>> of_steps) const {
    BlockWork all = of_steps.front().front();
    const std::int64_t own_rows = all.keys.size();
    for (int step = 1; step < cp_; ++step) {
      for (const BlockWork& part : of_steps[static_cast<std::size_t>(step)]) {
        const std::int64_t first = own_rows + first_row(step) + part.keys.begin;
        for (Rectangle r : part.rectangles) {
          r.k0 += first;
          r.k1 += first;
          all.rectangles.push_back(r);
        }
      }
    }
    std::sort(all.rectangles.begin(), all.rectangles.end(),
              [](const Rectangle& a, const Rectangle& b) { return a.q0 != b.q0 ? a.q0 < b.q0 : a.k0 < b.k0; });
    return all;
  }
  /// Which rows of every block have gradients when, and where a block's second slice begins: in the middle of what all
  /// readers read; of what any reads, where there is nothing of that kind.
  void add_sums(std::span<const std::vector<BlockWork>> of_steps) {
    summed_.resize(of_steps.size());
    for (int rank = 0; rank < cp_; ++rank) {
      TokenSpan all{0, block_rows_};
      for (int step = 1; step < cp_; ++step) {
        Runs& summed = summed_[index(rank, step)] = summed_[index(rank, step - 1)];
        TokenSpan read;
        for (const BlockWork& part : of_steps[index(reader(rank, step), step)]) {
          summed.insert(part.keys);
          read = hull(read, part.keys);
        }
        all = intersection(all, read);
      }
      for (const TokenSpan& run : summed_[index(rank, cp_ - 1)]) {
        if (all.empty()) all = run;
      }
      cuts_.push_back(all.begin + all.size() / 2);
    }
  }
  const List& list(int rank, int list) const {
    return lists_[static_cast<std::size_t>(rank) * static_cast<std::size_t>(lists()) + static_cast<std::size_t>(list)];
  }
  std::size_t index(int rank, int step) const {
    return static_cast<std::size_t>(rank) * static_cast<std::size_t>(cp_) + static_cast<std::size_t>(step);
  }

  int cp_ = 0;
  Launches launches_ = Launches::per_step;
  std::int64_t block_rows_ = 0;
  PlanHash hash_;
  std::size_t most_rectangles_ = 0;  // of a rank
  std::vector<List> lists_;          // [rank][list]
  std::vector<Runs> summed_;         // [rank][step]
  std::vector<std::int64_t> cuts_;   // of the block of each rank, where its second slice begins
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
    Rectangle* end = staged;
    for (int i = 0; i < work.lists(); ++i) {
      for (const BlockWork& part : work.list(rank, i).parts) {
        end = std::copy(part.rectangles.begin(), part.rectangles.end(), end);
      }
    }
    executor.copy(memory_, staged, static_cast<std::size_t>(end - staged) * sizeof(Rectangle), s);
  }

  /// What was placed; its members tell what each of these lists is.
  const Work& work() const { return *work_; }
  WorkView part(int step, std::size_t part) const { return view(step, part); }
  WorkView sliced_part(int step, std::size_t part) const {
    return view(work_->slices() == 1 ? step : work_->slice_list(step), part);
  }
  WorkView own_half(int half) const { return view(work_->ranks(), static_cast<std::size_t>(half)); }
  WorkView all() const { return view(work_->lists() - 1, 0); }

 private:
  static Rectangle* take(Block block, const Work& work) { return Carver(block).take<Rectangle>(work.most_rectangles_); }
  WorkView view(int index, std::size_t part) const {
    const Work::List& list = work_->list(rank_, index);
    std::size_t before = list.rectangles_before;
    for (std::size_t i = 0; i < part; ++i) before += list.parts[i].rectangles.size();
    return {list.parts[part].rectangles, memory_ + before};
  }

  const Work* work_ = nullptr;
  int rank_ = 0;
  Rectangle* memory_ = nullptr;
};

}  // namespace pleat::inline v0::ring
