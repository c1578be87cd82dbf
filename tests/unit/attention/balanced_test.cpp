// The balanced split: the work of every rank is the same, and so is its number of tokens.
#include <pleat/attention/layout.hpp>

#include <cmath>
#include <random>

#include <doctest/doctest.h>

#include "unit/attention/expect_error.hpp"
#include "unit/attention/oracle.hpp"

namespace {

using namespace pleat;
using Boundaries = std::vector<std::int64_t>;

/// Documents of log-normal lengths that fill the stream; the last one is cut.
Boundaries log_normal(std::int64_t tokens, double mean, double sigma, unsigned seed) {
  std::mt19937 generator(seed);
  std::lognormal_distribution<double> length(std::log(mean) - sigma * sigma / 2, sigma);
  Boundaries cu_seqlens{0};
  while (cu_seqlens.back() < tokens) {
    cu_seqlens.push_back(std::min(tokens, cu_seqlens.back() + 1 + static_cast<std::int64_t>(length(generator))));
  }
  return cu_seqlens;
}
double imbalance_of(ring::Layout layout, std::int64_t tokens, int cp, const Boundaries& cu_seqlens, bool causal) {
  return imbalance(pairs_of_ranks(ring::layout_spans(layout, tokens, cp, cu_seqlens, causal), cu_seqlens, causal));
}

TEST_CASE("visible pairs are those of the definition") {
  const Boundaries cu_seqlens{0, 5, 5, 6, 19, 27};
  for (const bool causal : {true, false}) {
    const oracle::Problem problem{.tokens = 30, .causal = causal, .cu_seqlens = cu_seqlens};
    for (std::int64_t begin = 0; begin <= 30; ++begin) {
      for (std::int64_t end = begin; end <= 30; ++end) {
        int pairs = 0;
        for (std::int64_t query = begin; query < end; ++query) {
          for (std::int64_t key = 0; key < 30; ++key) pairs += problem.sees(query, key) ? 1 : 0;
        }
        REQUIRE(visible_pairs({begin, end}, cu_seqlens, causal) == pairs);
      }
    }
  }
}

TEST_CASE("64k tokens of log-normal documents, mean 2k: max/mean work is at most 1.05, and mostly far below") {
  const std::int64_t tokens = 65536;
  std::random_device fresh;
  for (const int cp : {2, 4, 8}) {
    double zigzag = 0, balanced = 0;
    const int draws = 30;
    for (int draw = 0; draw < draws; ++draw) {
      const unsigned seed = draw < 20 ? static_cast<unsigned>(draw) : fresh();
      CAPTURE(cp);
      CAPTURE(seed);
      const Boundaries cu_seqlens = log_normal(tokens, 2048, 1, seed);
      const double worst = imbalance_of(ring::Layout::balanced, tokens, cp, cu_seqlens, true);
      CHECK(worst <= 1.02);
      balanced += worst / draws;
      zigzag += imbalance_of(ring::Layout::zigzag, tokens, cp, cu_seqlens, true) / draws;
    }
    CAPTURE(cp);
    CHECK(balanced <= 1.005);
    CHECK(zigzag >= 1.1);  // what the balance is for
    MESSAGE("cp ", cp, ": max/mean work ", balanced, " balanced, ", zigzag, " zigzag");
  }
}

TEST_CASE("every rank holds as many chunks, in order, each token once") {
  for (const int cp : {1, 2, 3, 8}) {
    for (const std::int64_t tokens : {std::int64_t{0}, std::int64_t{5}, std::int64_t{8} * cp, std::int64_t{1000}}) {
      const Boundaries cu_seqlens = log_normal(tokens, 40, 1, 3);
      std::vector<int> holders(static_cast<std::size_t>(tokens));
      for (const TokenSpans& mine : balanced_spans(tokens, cp, cu_seqlens, true)) {
        std::int64_t last = -1;
        for (std::int64_t i = 0; i < mine.tokens(); ++i) {
          CHECK(mine.position(i) > last);
          last = mine.position(i);
          ++holders.at(static_cast<std::size_t>(last));
        }
        CHECK(std::abs(mine.tokens() * cp - tokens) <= (tokens % (8 * cp) == 0 ? 0 : 8 * cp));
      }
      for (const int count : holders) CHECK(count == 1);
    }
  }
}

TEST_CASE("the planner balances where that pays, and only there") {
  const Boundaries skewed{0, 4096, 4224, 4352, 4480, 8192};
  CHECK(ring::choose_layout(8192, 8, skewed, true) == ring::Layout::balanced);
  CHECK(ring::choose_layout(8192, 8, skewed, false) == ring::Layout::contiguous);
  CHECK(ring::choose_layout(8192, 8, Boundaries{0, 8192}, true) == ring::Layout::zigzag);
  CHECK(ring::choose_layout(8192, 1, skewed, true) == ring::Layout::zigzag);
  CHECK(ring::choose_layout(64, 4, Boundaries{0}, true) == ring::Layout::zigzag);
  Boundaries equal;
  for (std::int64_t end = 0; end <= 8192; end += 128) equal.push_back(end);
  CHECK(ring::choose_layout(8192, 4, equal, true) == ring::Layout::zigzag);
}

TEST_CASE("imbalance is the largest over the mean") {
  CHECK(imbalance(std::vector<double>{1, 2, 3}) == 1.5);
  CHECK(imbalance(std::vector<double>{0, 0}) == 1);
}

TEST_CASE("one span that continues another is one with it") {
  TokenSpans spans;
  CHECK(spans.tokens() == 0);
  for (const TokenSpan& span : {TokenSpan{2, 4}, TokenSpan{4, 4}, TokenSpan{4, 7}, TokenSpan{9, 12}})
    spans.append(span);
  CHECK(spans == TokenSpans({2, 7}, {9, 12}));
  CHECK(spans.position(5) == 9);
}

TEST_CASE("A18: more spans than a rank may hold") {
  TokenSpans spans;
  for (std::int64_t i = 0; i < TokenSpans::capacity; ++i) spans.append({2 * i, 2 * i + 1});
  spans.append({15, 16});  // goes on with the last one
  expect_error<shape_error>("pleat[A18]", [&] { spans.append({20, 21}); });
}

}  // namespace
