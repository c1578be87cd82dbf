// Which tokens of a sequence a rank holds: the one definition that data loading, positions and attention share.
#pragma once

#include <algorithm>
#include <cstdint>

#include <pleat/core/config.hpp>

namespace pleat::inline v0 {

/// The tokens [begin, end).
struct TokenSpan {
  std::int64_t begin = 0;
  std::int64_t end = 0;

  PLEAT_HD constexpr std::int64_t size() const { return end - begin; }
  PLEAT_HD constexpr bool empty() const { return end <= begin; }
  friend constexpr bool operator==(const TokenSpan&, const TokenSpan&) = default;
};

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

/// The tokens of one rank, as spans of the sequence in ascending order: a range of one or two TokenSpan. The rank keeps
/// them one after the other, so local order is sequence order.
class TokenSpans {
 public:
  constexpr explicit TokenSpans(TokenSpan only) : spans_{only, {}}, count_(1) {}
  constexpr TokenSpans(TokenSpan low, TokenSpan high) : spans_{low, high}, count_(2) {}

  constexpr const TokenSpan* begin() const { return spans_; }
  constexpr const TokenSpan* end() const { return spans_ + count_; }

  /// Tokens the rank holds.
  constexpr std::int64_t tokens() const { return spans_[0].size() + spans_[1].size(); }
  /// Where in the sequence local token `i` of [0, tokens()) stands.
  constexpr std::int64_t position(std::int64_t i) const {
    return i < spans_[0].size() ? spans_[0].begin + i : spans_[1].begin + (i - spans_[0].size());
  }

  friend constexpr bool operator==(const TokenSpans&, const TokenSpans&) = default;

 private:
  TokenSpan spans_[2];
  int count_;
};

/// Piece `index` of `tokens` tokens cut into `pieces` contiguous pieces of nearly equal size.
constexpr TokenSpan piece_of(std::int64_t tokens, int pieces, int index) {
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
  return {piece_of(tokens, 2 * cp, rank), piece_of(tokens, 2 * cp, 2 * cp - 1 - rank)};
}

/// The tokens of rank `rank` in the plain split, for attention without a causal mask: piece `rank` of `cp`.
constexpr TokenSpans contiguous_spans(std::int64_t tokens, int cp, int rank) {
  return TokenSpans(piece_of(tokens, cp, rank));
}

}  // namespace pleat::inline v0
