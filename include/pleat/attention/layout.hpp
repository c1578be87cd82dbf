// The splits of a sequence over the cp group, by name: the table from which a plan takes its spans.
#pragma once

#include <pleat/attention/balanced.hpp>

namespace pleat::inline v0::ring {

/// How a sequence is split over the ranks of the cp group: `zigzag_spans`, `contiguous_spans` or `balanced_spans`.
enum class Layout : unsigned char { zigzag, contiguous, balanced };
constexpr const char* name_of(Layout layout) {
  switch (layout) {
    case Layout::zigzag:
      return "zigzag";
    case Layout::contiguous:
      return "contiguous";
    case Layout::balanced:
      break;
  }
  return "balanced";
}

/// The tokens of each rank. Only `Layout::balanced` asks for the documents and the mask.
inline std::vector<TokenSpans> layout_spans(Layout layout, std::int64_t tokens, int cp,
                                            std::span<const std::int64_t> cu_seqlens, bool causal) {
  if (layout == Layout::balanced) return balanced_spans(tokens, cp, cu_seqlens, causal);
  std::vector<TokenSpans> ranks;
  for (int rank = 0; rank < cp; ++rank) {
    ranks.push_back(layout == Layout::zigzag ? zigzag_spans(tokens, cp, rank) : contiguous_spans(tokens, cp, rank));
  }
  return ranks;
}
/// The same for the layouts that do not look at documents.
inline std::vector<TokenSpans> layout_spans(Layout layout, std::int64_t tokens, int cp) {
  const std::int64_t one_document[] = {0, tokens};
  return layout_spans(layout, tokens, cp, one_document, true);
}

/// What a balanced split must gain over the zigzag to be chosen: it has more and smaller rectangles.
inline constexpr double least_gain_of_balance = 1.02;

/// The layout of a plan that names none: contiguous without a mask; with one zigzag, or balanced for packed documents
/// whose longest rank it makes shorter by `least_gain_of_balance`.
inline Layout choose_layout(std::int64_t tokens, int cp, std::span<const std::int64_t> cu_seqlens, bool causal) {
  if (!causal) return Layout::contiguous;
  const auto cost = [&](Layout layout) {
    return imbalance(pairs_of_ranks(layout_spans(layout, tokens, cp, cu_seqlens, causal), cu_seqlens, causal));
  };
  return cost(Layout::zigzag) > least_gain_of_balance * cost(Layout::balanced) ? Layout::balanced : Layout::zigzag;
}

}  // namespace pleat::inline v0::ring
