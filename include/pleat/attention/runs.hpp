// Sets of rows, as runs with gaps between them: which rows of a block travel, or hold a sum.
#pragma once

#include <vector>

#include <pleat/attention/zigzag.hpp>

namespace pleat::inline v0 {

/// A set of rows: a range of TokenSpan, ascending, none empty, none touching the next.
class Runs {
 public:
  Runs() = default;
  explicit Runs(TokenSpan rows) { insert(rows); }

  /// Adds rows that may be in the set.
  void insert(TokenSpan rows) {
    if (rows.empty()) return;
    auto first = runs_.begin();
    while (first != runs_.end() && first->end < rows.begin) ++first;
    auto last = first;
    for (; last != runs_.end() && last->begin <= rows.end; ++last) rows = hull(rows, *last);
    runs_.insert(runs_.erase(first, last), rows);
  }

  auto begin() const { return runs_.begin(); }
  auto end() const { return runs_.end(); }
  bool empty() const { return runs_.empty(); }
  /// Runs, and rows of all of them.
  std::size_t count() const { return runs_.size(); }
  std::int64_t rows() const {
    std::int64_t sum = 0;
    for (const TokenSpan& run : runs_) sum += run.size();
    return sum;
  }
  /// Whether one of `rows` is in the set.
  bool meets(TokenSpan rows) const {
    return std::any_of(begin(), end(), [&](const TokenSpan& run) { return !intersection(run, rows).empty(); });
  }
  /// f(gap) for each run of `rows` that is not in the set.
  template <class F>
  void for_each_gap(TokenSpan rows, F f) const {
    for (const TokenSpan& run : runs_) {
      const TokenSpan gap = intersection(rows, {rows.begin, run.begin});
      if (!gap.empty()) f(gap);
      rows.begin = std::clamp(run.end, rows.begin, std::max(rows.begin, rows.end));
    }
    if (!rows.empty()) f(rows);
  }

  friend bool operator==(const Runs&, const Runs&) = default;

 private:
  std::vector<TokenSpan> runs_;
};

}  // namespace pleat::inline v0
