// The balanced split of packed documents: many short chunks, dealt out so that every rank has the same work.
#pragma once

#include <numeric>
#include <span>
#include <vector>

#include <pleat/attention/zigzag.hpp>

namespace pleat::inline v0 {

/// How many (query, key) pairs the queries on `queries` see: the work of attention, up to a factor. `cu_seqlens` are
/// the boundaries of the documents, ascending from 0. Exact below 2^53.
inline double visible_pairs(TokenSpan queries, std::span<const std::int64_t> cu_seqlens, bool causal) {
  double pairs = 0;
  auto end = std::upper_bound(cu_seqlens.begin(), cu_seqlens.end(), queries.begin);
  for (; end != cu_seqlens.end() && *(end - 1) < queries.end; ++end) {
    const TokenSpan document{*(end - 1), *end};
    const TokenSpan inside = intersection(queries, document);
    const auto size = static_cast<double>(inside.size());
    const auto before = static_cast<double>(inside.begin - document.begin);
    pairs += causal ? size * (before + (size + 1) / 2) : size * static_cast<double>(document.size());
  }
  return pairs;
}

/// The pairs of each rank of a split.
inline std::vector<double> pairs_of_ranks(std::span<const TokenSpans> ranks, std::span<const std::int64_t> cu_seqlens,
                                          bool causal) {
  std::vector<double> pairs(ranks.size());
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    for (const TokenSpan& span : ranks[rank]) pairs[rank] += visible_pairs(span, cu_seqlens, causal);
  }
  return pairs;
}
/// The most work of a rank over the mean: what a split costs, 1 at best. 1 where there is none.
inline double imbalance(std::span<const double> pairs_of_ranks) {
  const double sum = std::accumulate(pairs_of_ranks.begin(), pairs_of_ranks.end(), 0.0);
  if (sum == 0) return 1;
  return *std::max_element(pairs_of_ranks.begin(), pairs_of_ranks.end()) * static_cast<double>(pairs_of_ranks.size()) /
         sum;
}

namespace detail {
/// Hands out chunks, the same number to every rank: the one with most work first, each to the rank that has least.
/// Then ranks swap: the one with most gives a chunk for a lighter one, as long as that lowers the larger of the two.
class ChunkDealer {
 public:
  ChunkDealer(std::vector<double> work, int ranks)
      : work_(std::move(work)), loads_(static_cast<std::size_t>(ranks)), chunks_(loads_.size()) {
    std::vector<std::size_t> order(work_.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return work_[a] > work_[b]; });
    const std::size_t share = work_.size() / chunks_.size();
    for (const std::size_t chunk : order) {
      std::size_t to = chunks_.size();
      for (std::size_t rank = 0; rank < chunks_.size(); ++rank) {
        if (chunks_[rank].size() < share && (to == chunks_.size() || loads_[rank] < loads_[to])) to = rank;
      }
      chunks_[to].push_back(chunk);
      loads_[to] += work_[chunk];
    }
    for (std::size_t swaps = 0; swaps < work_.size() && swap(); ++swaps) {
    }
    for (auto& of_rank : chunks_) std::sort(of_rank.begin(), of_rank.end());
  }
  /// Of a rank, ascending.
  const std::vector<std::size_t>& chunks(int rank) const { return chunks_[static_cast<std::size_t>(rank)]; }

 private:
  bool swap() {
    const auto most = static_cast<std::size_t>(std::max_element(loads_.begin(), loads_.end()) - loads_.begin());
    double least = loads_[most];
    std::size_t with = most, give = 0, take = 0;
    for (std::size_t rank = 0; rank < chunks_.size(); ++rank) {
      if (rank == most) continue;
      for (std::size_t i = 0; i < chunks_[most].size(); ++i) {
        for (std::size_t j = 0; j < chunks_[rank].size(); ++j) {
          const double moved = work_[chunks_[most][i]] - work_[chunks_[rank][j]];
          const double larger = std::max(loads_[most] - moved, loads_[rank] + moved);
          if (larger < least) least = larger, with = rank, give = i, take = j;
        }
      }
    }
    if (with == most) return false;
    const double moved = work_[chunks_[most][give]] - work_[chunks_[with][take]];
    loads_[most] -= moved;
    loads_[with] += moved;
    std::swap(chunks_[most][give], chunks_[with][take]);
    return true;
  }

  std::vector<double> work_;                      // of each chunk
  std::vector<double> loads_;                     // of each rank
  std::vector<std::vector<std::size_t>> chunks_;  // of each rank
};
}  // namespace detail

/// The split of packed documents over `cp` ranks that balances attention: `TokenSpans::capacity * cp` chunks of nearly
/// equal size, the same number of them on every rank, given out by their work. Ranks hold equally many tokens where the
/// number of chunks divides `tokens`. It depends on the documents, so each packing has a split of its own.
inline std::vector<TokenSpans> balanced_spans(std::int64_t tokens, int cp, std::span<const std::int64_t> cu_seqlens,
                                              bool causal) {
  const int chunks = TokenSpans::capacity * cp;
  std::vector<double> work;
  for (int i = 0; i < chunks; ++i) work.push_back(visible_pairs(piece_of(tokens, chunks, i), cu_seqlens, causal));
  const detail::ChunkDealer dealer(std::move(work), cp);
  std::vector<TokenSpans> ranks(static_cast<std::size_t>(cp));
  for (int rank = 0; rank < cp; ++rank) {
    for (const std::size_t chunk : dealer.chunks(rank)) {
      ranks[static_cast<std::size_t>(rank)].append(piece_of(tokens, chunks, static_cast<int>(chunk)));
    }
  }
  return ranks;
}

}  // namespace pleat::inline v0
