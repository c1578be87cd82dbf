// The splits of a sequence: every token on exactly one rank, in order, the zigzag in mirrored chunks.
#include <pleat/attention/zigzag.hpp>

#include <vector>

#include <doctest/doctest.h>

namespace {

using namespace pleat;

static_assert(zigzag_spans(7, 1, 0) == TokenSpans({0, 7}));
static_assert(contiguous_spans(9, 2, 1) == TokenSpans({4, 9}));
static_assert(intersection({2, 5}, {7, 9}).empty() && intersection({2, 8}, {4, 9}) == TokenSpan{4, 8});
static_assert(hull({5, 5}, {7, 9}) == TokenSpan{7, 9} && hull({1, 2}, {7, 9}) == TokenSpan{1, 9});

template <class Split>
void check_partition(Split split) {
  for (const int cp : {1, 2, 3, 4, 5, 8}) {
    for (std::int64_t tokens = 0; tokens < 70; ++tokens) {
      CAPTURE(cp);
      CAPTURE(tokens);
      std::vector<int> holders(static_cast<std::size_t>(tokens));
      for (int rank = 0; rank < cp; ++rank) {
        const TokenSpans mine = split(tokens, cp, rank);
        std::int64_t local = 0, last = -1;
        for (const TokenSpan& span : mine) {
          for (std::int64_t at = span.begin; at < span.end; ++at, ++local) {
            REQUIRE(mine.position(local) == at);
            REQUIRE(at > last);
            last = at;
            ++holders.at(static_cast<std::size_t>(at));
          }
        }
        REQUIRE(mine.tokens() == local);
        REQUIRE(std::abs(local * cp - tokens) <= 2 * cp);  // two chunks, each off by less than one token
      }
      for (const int count : holders) REQUIRE(count == 1);
    }
  }
}

TEST_CASE("both splits give every token to one rank, in order, in nearly equal parts") {
  check_partition(zigzag_spans);
  check_partition(contiguous_spans);
}

TEST_CASE("the zigzag of a divisible sequence is chunks c and 2 cp - 1 - c") {
  CHECK(zigzag_spans(16, 4, 1) == TokenSpans({2, 4}, {12, 14}));
  CHECK(zigzag_spans(16, 4, 3) == TokenSpans({6, 8}, {8, 10}));
  for (const int cp : {2, 3, 8}) {
    const std::int64_t chunk = 5;
    for (int c = 0; c < cp; ++c) {
      const std::int64_t mirror = 2 * cp - 1 - c;
      CHECK(zigzag_spans(2 * cp * chunk, cp, c) ==
            TokenSpans({c * chunk, (c + 1) * chunk}, {mirror * chunk, (mirror + 1) * chunk}));
    }
  }
}

TEST_CASE("a sequence of 2^40 tokens is cut without overflow") {
  const std::int64_t tokens = std::int64_t{1} << 40;
  const TokenSpans last = zigzag_spans(tokens, 1024, 0);
  CHECK(last.position(last.tokens() - 1) == tokens - 1);
}

}  // namespace
