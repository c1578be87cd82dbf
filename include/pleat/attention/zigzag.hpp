// Which tokens of a sequence a rank holds: the one definition that data loading, positions and attention share.
#pragma once

#include <algorithm>
#include <cstdint>

#include <pleat/core/config.hpp>
#include <pleat/core/error.hpp>

namespace pleat::inline v0 {

/// The tokens [begin, end).
struct TokenSpan {
  std::int64_t begin = 0;
  std::int64_t end = 0;

  PLEAT_HD constexpr std::int64_t size() const { return end - begin; }
  PLEAT_HD constexpr bool empty() const { return end <= begin; }
  friend constexpr bool operator==(const TokenSpan&, const TokenSpan&) = default;
};

/// The tokens of both; empty, at the later begin, when there are none.
constexpr TokenSpan intersection(TokenSpan a, TokenSpan b) {
  const std::int64_t begin = std::max(a.begin, b.begin);
  return {begin, std::max(begin, std::min(a.end, b.end))};
}
/// The smallest span that holds both; an empty one adds nothing.
constexpr TokenSpan hull(TokenSpan a, TokenSpan b) {
  if (a.empty()) return b;
  if (b.empty()) return a;
  return {std::min(a.begin, b.begin), std::max(a.end, b.end)};
}

/// The tokens of one rank, as spans of the sequence in ascending order: a range of up to `capacity` TokenSpan, some
/// maybe empty. The rank keeps them one after the other, so local order is sequence order.
class TokenSpans {
 public:
  static constexpr int capacity = 8;

  constexpr TokenSpans() = default;
  constexpr explicit TokenSpans(TokenSpan only) : spans_{only}, count_(1) {}
  constexpr TokenSpans(TokenSpan low, TokenSpan high) : spans_{low, high}, count_(2) {}

  /// Adds a span that begins no earlier than the last one ends, where it is the last one's next token as part of that
  /// one. Errors: shape_error A18 past `capacity` spans.
  constexpr void append(TokenSpan span) {
    if (count_ > 0 && spans_[count_ - 1].end == span.begin) {
      spans_[count_ - 1].end = span.end;
    } else {
      if (count_ == capacity) {
        fail<shape_error>("pleat[A18]: a rank got a span of tokens more than the ", capacity,
                          " that it may hold: cut the sequence into fewer pieces per rank");
      }
      spans_[count_++] = span;
    }
  }

  constexpr const TokenSpan* begin() const { return spans_; }
  constexpr const TokenSpan* end() const { return spans_ + count_; }

  /// Tokens the rank holds.
  constexpr std::int64_t tokens() const {
    std::int64_t sum = 0;
    for (const TokenSpan& span : *this) sum += span.size();
    return sum;
  }
  /// Where in the sequence local token `i` of [0, tokens()) stands.
  constexpr std::int64_t position(std::int64_t i) const {
    const TokenSpan* span = spans_;
    for (; i >= span->size(); ++span) i -= span->size();
    return span->begin + i;
  }

  friend constexpr bool operator==(const TokenSpans&, const TokenSpans&) = default;

 private:
  TokenSpan spans_[capacity]{};
  int count_ = 0;
};

/// Piece `index` of `tokens` tokens cut into `pieces` contiguous pieces of nearly equal size, up to 2^31 of them.
constexpr TokenSpan piece_of(std::int64_t tokens, std::int64_t pieces, std::int64_t index) {
  // tokens * i / pieces, without the product
  const auto cut = [&](std::int64_t i) { return tokens / pieces * i + tokens % pieces * i / pieces; };
  return {cut(index), cut(index + 1)};
}

/// The tokens of context-parallel rank `rank` of `cp` in the zigzag split, which balances causal attention: of `2 * cp`
/// chunks, chunks `rank` and `2 * cp - 1 - rank`; the whole for `cp == 1`. Chunks are equal where `2 * cp` divides
/// `tokens` (the dense path asks for that, M07); otherwise they differ by at most one token and may be empty.
/// source: github.com/zhuzilin/ring-flash-attention (the split)
constexpr TokenSpans zigzag_spans(std::int64_t tokens, int cp, int rank) {
  if (cp == 1) return TokenSpans({0, tokens});
  const std::int64_t chunks = 2 * std::int64_t{cp};
  return {piece_of(tokens, chunks, rank), piece_of(tokens, chunks, chunks - 1 - rank)};
}

/// The tokens of rank `rank` in the plain split, for attention without a causal mask: piece `rank` of `cp`.
constexpr TokenSpans contiguous_spans(std::int64_t tokens, int cp, int rank) {
  return TokenSpans(piece_of(tokens, cp, rank));
}

}  // namespace pleat::inline v0
