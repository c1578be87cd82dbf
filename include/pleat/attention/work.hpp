// The work of attention as data: rectangles of (query, key) pairs, planned on the host for dense, zigzag and packed
// sequences alike.
#pragma once

#include <cstddef>
#include <limits>
#include <span>
#include <vector>

#include <pleat/attention/runs.hpp>
#include <pleat/core/error.hpp>

namespace pleat::inline v0 {

/// Queries [q0, q1) against keys [k0, k1), in rows of the tensors that a local kernel gets. Query q sees key k when
/// `k - k0 <= q - q0 + causal_offset`, or always when the rectangle is `full`. Offset 0 is the diagonal through the
/// first query and the first key; `(k1 - k0) - (q1 - q0)` is the one through the last of both.
struct Rectangle {
  static constexpr std::int64_t full = std::numeric_limits<std::int64_t>::max();

  std::int64_t q0 = 0;
  std::int64_t q1 = 0;
  std::int64_t k0 = 0;
  std::int64_t k1 = 0;
  std::int64_t causal_offset = full;

  /// Whether every query sees every key.
  PLEAT_HD constexpr bool is_full() const { return causal_offset == full; }
  /// Query `q` sees the keys [k0, keys_end(q)).
  PLEAT_HD constexpr std::int64_t keys_end(std::int64_t q) const {
    const std::int64_t end = is_full() ? k1 : k0 + (q - q0) + causal_offset + 1;
    return end < k0 ? k0 : end < k1 ? end : k1;
  }
  /// Key `k` is seen by the queries [queries_begin(k), q1).
  PLEAT_HD constexpr std::int64_t queries_begin(std::int64_t k) const {
    const std::int64_t begin = is_full() ? q0 : q0 + (k - k0) - causal_offset;
    return begin < q0 ? q0 : begin < q1 ? begin : q1;
  }
  friend constexpr bool operator==(const Rectangle&, const Rectangle&) = default;
};

/// What one rank computes with the block of one rank: `keys`, the rows of the block from the first to the last that it
/// reads (all of them for its own block), and rectangles whose queries are local rows and whose keys are rows of
/// `keys`.
struct BlockWork {
  TokenSpan keys;
  std::vector<Rectangle> rectangles;
};

namespace detail {
/// How many of the tokens that `spans` hold stand before `position`: the local row of the first one that does not.
constexpr std::int64_t rows_before(std::span<const TokenSpan> spans, std::int64_t position) {
  std::int64_t rows = 0;
  for (const TokenSpan& span : spans) rows += std::clamp(position, span.begin, span.end) - span.begin;
  return rows;
}
constexpr TokenSpan rows_of(std::span<const TokenSpan> spans, TokenSpan tokens) {
  return {rows_before(spans, tokens.begin), rows_before(spans, tokens.end)};
}

/// Adds queries x keys; melts it into the last rectangle where that one sees the same keys and ends at these queries.
inline void append_full(std::vector<Rectangle>& to, TokenSpan queries, TokenSpan keys) {
  if (queries.empty() || keys.empty()) return;
  if (!to.empty() && to.back().q1 == queries.begin && to.back().k0 == keys.begin && to.back().k1 == keys.end) {
    to.back().q1 = queries.end;
  } else {
    to.push_back({queries.begin, queries.end, keys.begin, keys.end});
  }
}

/// What the queries on `query_spans` see of one document's keys on `key_spans`.
/// Rows of a document are contiguous on a rank, because spans ascend and a document has no gaps.
inline void append_document(std::vector<Rectangle>& to, std::span<const TokenSpan> query_spans,
                            std::span<const TokenSpan> key_spans, TokenSpan document, bool same_rank, bool causal) {
  const TokenSpan queries = rows_of(query_spans, document);
  const TokenSpan keys = rows_of(key_spans, document);
  if (queries.empty() || keys.empty()) return;
  if (!causal) {
    append_full(to, queries, keys);
  } else if (same_rank) {
    to.push_back({queries.begin, queries.end, keys.begin, keys.end, 0});
  } else {
    for (const TokenSpan& span : query_spans) {  // a span sees all that stands before it, and nothing inside it
      append_full(to, intersection(queries, rows_of(query_spans, span)),
                  intersection(keys, {0, rows_before(key_spans, span.begin)}));
    }
  }
}
}  // namespace detail

/// Plans what the rank that holds `query_spans` computes with the block of the rank that holds `key_spans` (the same
/// one when `same_rank`; otherwise the two share no token). `cu_seqlens` are the boundaries of the documents in the
/// sequence, ascending from 0; no query sees a key of another document, and tokens past the last boundary see and show
/// nothing. A dense sequence is one document.
inline BlockWork plan_block_work(std::span<const TokenSpan> query_spans, std::span<const TokenSpan> key_spans,
                                 bool same_rank, std::span<const std::int64_t> cu_seqlens, bool causal) {
  BlockWork work;
  std::size_t next = 1;  // documents end at cu_seqlens[1..]; both spans of a rank may lie in one document
  for (const TokenSpan& span : query_spans) {
    const auto first = std::upper_bound(cu_seqlens.begin(), cu_seqlens.end(), span.begin);
    next = std::max(next, static_cast<std::size_t>(first - cu_seqlens.begin()));
    for (; next < cu_seqlens.size() && cu_seqlens[next - 1] < span.end; ++next) {
      detail::append_document(work.rectangles, query_spans, key_spans, {cu_seqlens[next - 1], cu_seqlens[next]},
                              same_rank, causal);
    }
  }
  if (same_rank) {
    work.keys = detail::rows_of(key_spans, {0, std::numeric_limits<std::int64_t>::max()});
    return work;
  }
  for (const Rectangle& r : work.rectangles) work.keys = hull(work.keys, {r.k0, r.k1});
  for (Rectangle& r : work.rectangles) {
    r.k0 -= work.keys.begin;
    r.k1 -= work.keys.begin;
  }
  return work;
}

/// The part of `work` that has the keys `keys`, rows of the same block.
inline BlockWork with_keys(const BlockWork& work, TokenSpan keys) {
  BlockWork part{{work.keys.begin + keys.begin, work.keys.begin + keys.end}, {}};
  for (const Rectangle& r : work.rectangles) {
    const TokenSpan kept = intersection({r.k0, r.k1}, keys);
    const std::int64_t q0 = kept.empty() ? r.q1 : r.queries_begin(kept.begin);
    if (q0 == r.q1) continue;
    const std::int64_t offset = r.is_full() ? r.full : r.causal_offset + (q0 - r.q0) - (kept.begin - r.k0);
    part.rectangles.push_back({q0, r.q1, kept.begin - keys.begin, kept.end - keys.begin, offset});
  }
  return part;
}

/// `work` cut where it leaves keys out: parts that read all of their `keys`, ascending. Only these rows need to travel.
inline std::vector<BlockWork> parts_without_gaps(const BlockWork& work) {
  Runs read;
  for (const Rectangle& r : work.rectangles) read.insert({r.k0, r.k1});
  std::vector<BlockWork> parts;
  for (const TokenSpan& run : read) parts.push_back(with_keys(work, run));
  return parts;
}

/// Errors: shape_error A03 when `cu_seqlens` is no list of document boundaries within `tokens` tokens.
inline void check_documents(std::span<const std::int64_t> cu_seqlens, std::int64_t tokens) {
  const bool fits = !cu_seqlens.empty() && cu_seqlens.front() == 0 && cu_seqlens.back() <= tokens &&
                    std::is_sorted(cu_seqlens.begin(), cu_seqlens.end());
  if (!fits) {
    fail<shape_error>("pleat[A03]: cu_seqlens (", List<std::int64_t>{cu_seqlens.data(), cu_seqlens.size()},
                      ") must ascend from 0 to at most the ", tokens, " tokens of the stream");
  }
}

}  // namespace pleat::inline v0
