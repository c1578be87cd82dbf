// Planned work: over all ranks and steps, each pair a query may see is in exactly one rectangle, and no other pair is.
#include <pleat/attention/balanced.hpp>
#include <pleat/attention/work.hpp>

#include <functional>
#include <random>
#include <string>

#include <doctest/doctest.h>

#include "unit/attention/oracle.hpp"

namespace {

using namespace pleat;
using Boundaries = std::vector<std::int64_t>;
using RankSpans = std::vector<std::vector<TokenSpan>>;  // [rank], ascending

std::int64_t position(const std::vector<TokenSpan>& spans, std::int64_t row) {
  for (const TokenSpan& span : spans) {
    if (row < span.size()) return span.begin + row;
    row -= span.size();
  }
  FAIL("row ", row, " past the end");
  return -1;
}

void check_exact(const RankSpans& ranks, const Boundaries& cu_seqlens, std::int64_t tokens, bool causal) {
  const oracle::Problem wanted{.tokens = tokens, .causal = causal, .cu_seqlens = cu_seqlens};
  std::vector<int> seen(static_cast<std::size_t>(tokens * tokens));
  for (std::size_t c = 0; c < ranks.size(); ++c) {
    for (std::size_t p = 0; p < ranks.size(); ++p) {
      const BlockWork work = plan_block_work(ranks[c], ranks[p], c == p, cu_seqlens, causal);
      TokenSpan touched;
      for (const Rectangle& r : work.rectangles) {
        REQUIRE(r.q0 < r.q1);
        REQUIRE(r.k0 < r.k1);
        touched = hull(touched, {work.keys.begin + r.k0, work.keys.begin + r.k1});
        for (std::int64_t q = r.q0; q < r.q1; ++q) {
          for (std::int64_t k = r.k0; k < r.keys_end(q); ++k) {
            const std::int64_t query = position(ranks[c], q), key = position(ranks[p], work.keys.begin + k);
            ++seen[static_cast<std::size_t>(query * tokens + key)];
          }
        }
      }
      if (c != p) REQUIRE(work.keys == touched);  // no more keys travel than are needed
    }
  }
  for (std::int64_t query = 0; query < tokens; ++query) {
    for (std::int64_t key = 0; key < tokens; ++key) {
      CAPTURE(query);
      CAPTURE(key);
      REQUIRE(seen[static_cast<std::size_t>(query * tokens + key)] == (wanted.sees(query, key) ? 1 : 0));
    }
  }
}

RankSpans split(std::int64_t tokens, int cp, const std::function<TokenSpans(std::int64_t, int, int)>& spans_of) {
  RankSpans ranks;
  for (int rank = 0; rank < cp; ++rank) {
    const TokenSpans spans = spans_of(tokens, cp, rank);
    ranks.emplace_back(spans.begin(), spans.end());
  }
  return ranks;
}

TEST_CASE("the two views of a rectangle agree with its definition") {
  for (const std::int64_t offset :
       {Rectangle::full, std::int64_t{-9}, std::int64_t{-2}, std::int64_t{0}, std::int64_t{3}, std::int64_t{20}}) {
    const Rectangle r{3, 8, 2, 6, offset};
    for (std::int64_t q = r.q0; q < r.q1; ++q) {
      for (std::int64_t k = r.k0; k < r.k1; ++k) {
        const bool visible = r.is_full() || k - r.k0 <= q - r.q0 + offset;
        CHECK((k < r.keys_end(q)) == visible);
        CHECK((q >= r.queries_begin(k)) == visible);
      }
    }
  }
}

TEST_CASE("dense zigzag: one rectangle per step, of the same cost on every rank") {
  const std::int64_t half = 3;
  for (const int cp : {2, 3, 4, 8}) {
    const std::int64_t tokens = 2 * cp * half;
    const RankSpans ranks = split(tokens, cp, zigzag_spans);
    const auto planned = [&](int c, int p) {
      return plan_block_work(ranks[static_cast<std::size_t>(c)], ranks[static_cast<std::size_t>(p)], c == p,
                             Boundaries{0, tokens}, true);
    };
    for (int c = 0; c < cp; ++c) {
      for (int p = 0; p < cp; ++p) {
        const BlockWork work = planned(c, p);
        REQUIRE(work.rectangles.size() == 1);
        const Rectangle local{0, 2 * half, 0, 2 * half, 0}, past{0, 2 * half, 0, half},
            future{half, 2 * half, 0, 2 * half};
        CHECK(work.rectangles[0] == (p == c ? local : p < c ? past : future));
        CHECK(work.keys == TokenSpan{0, p < c ? half : 2 * half});
      }
    }
  }
}

TEST_CASE("dense sequences of any length, both layouts, both masks") {
  for (const int cp : {1, 2, 3, 5, 8}) {
    for (const std::int64_t tokens : {0, 1, 4, 5, 7, 16, 31}) {
      for (const bool causal : {true, false}) {
        CAPTURE(cp);
        CAPTURE(tokens);
        CAPTURE(causal);
        check_exact(split(tokens, cp, zigzag_spans), {0, tokens}, tokens, causal);
        check_exact(split(tokens, cp, contiguous_spans), {0, tokens}, tokens, causal);
      }
    }
  }
}

TEST_CASE("packed documents of any length, empty ones and padding at the end included") {
  std::mt19937 generator(std::random_device{}());
  for (int trial = 0; trial < 150; ++trial) {
    const std::int64_t tokens = std::uniform_int_distribution<std::int64_t>(0, 40)(generator);
    Boundaries cu_seqlens{0};
    while (generator() % 12 != 0) {
      const std::int64_t length = generator() % 4 == 0 ? 0 : static_cast<std::int64_t>(generator() % 17);
      if (cu_seqlens.back() + length > tokens) break;
      cu_seqlens.push_back(cu_seqlens.back() + length);
    }
    const int cp = 1 + static_cast<int>(generator() % 8);
    CAPTURE(tokens);
    CAPTURE(cp);
    for (const bool causal : {true, false}) {
      check_exact(split(tokens, cp, zigzag_spans), cu_seqlens, tokens, causal);
      check_exact(split(tokens, cp, contiguous_spans), cu_seqlens, tokens, causal);
    }
  }
}

TEST_CASE("chunks dealt out in any way, more than two per rank") {
  std::mt19937 generator(std::random_device{}());
  for (int trial = 0; trial < 40; ++trial) {
    const std::int64_t tokens = 40;
    const int cp = 1 + static_cast<int>(generator() % 4);
    RankSpans ranks(static_cast<std::size_t>(cp));
    for (int chunk = 0; chunk < 8 * cp; ++chunk) {
      ranks[generator() % ranks.size()].push_back(piece_of(tokens, 8 * cp, chunk));
    }
    for (const bool causal : {true, false}) check_exact(ranks, {0, 11, 11, 13, 29, 38}, tokens, causal);
  }
}

TEST_CASE("the balanced split of packed documents, and of one that is all of the stream") {
  std::mt19937 generator(std::random_device{}());
  for (const int cp : {1, 2, 3, 8}) {
    for (int trial = 0; trial < 12; ++trial) {
      const std::int64_t tokens = static_cast<std::int64_t>(generator() % 90);
      Boundaries cu_seqlens{0};
      while (cu_seqlens.size() < 8 && trial != 0)
        cu_seqlens.push_back(std::min(tokens, cu_seqlens.back() + static_cast<std::int64_t>(generator() % 25)));
      if (trial == 0) cu_seqlens.push_back(tokens);
      CAPTURE(tokens);
      CAPTURE(cp);
      for (const bool causal : {true, false}) {
        const std::vector<TokenSpans> balanced = balanced_spans(tokens, cp, cu_seqlens, causal);
        check_exact(
            split(tokens, cp, [&](std::int64_t, int, int rank) { return balanced[static_cast<std::size_t>(rank)]; }),
            cu_seqlens, tokens, causal);
      }
    }
  }
}

TEST_CASE("parts without gaps: the same pairs, and only keys that some query sees") {
  const Boundaries cu_seqlens{0, 11, 11, 13, 29, 38};
  std::size_t most_parts = 0;
  for (const bool causal : {true, false}) {
    const std::vector<TokenSpans> ranks = balanced_spans(40, 2, cu_seqlens, causal);
    for (const int reader : {0, 1}) {
      const TokenSpans &queries = ranks[static_cast<std::size_t>(reader)],
                       &keys = ranks[static_cast<std::size_t>(1 - reader)];
      const oracle::Problem wanted{.tokens = 40, .causal = causal, .cu_seqlens = cu_seqlens};
      const std::vector<BlockWork> parts =
          parts_without_gaps(plan_block_work(queries, keys, false, cu_seqlens, causal));
      most_parts = std::max(most_parts, parts.size());
      std::int64_t next = 0;
      for (const BlockWork& part : parts) {
        CHECK(part.keys.begin >= next);
        next = part.keys.end + 1;  // a gap before the next one
      }
      for (std::int64_t k = 0; k < keys.tokens(); ++k) {
        bool travels = false;
        std::vector<int> seen(static_cast<std::size_t>(queries.tokens()));
        for (const BlockWork& part : parts) {
          travels |= part.keys.begin <= k && k < part.keys.end;
          for (const Rectangle& r : part.rectangles) {
            const std::int64_t key = k - part.keys.begin;
            if (key < r.k0 || key >= r.k1) continue;
            for (std::int64_t q = r.queries_begin(key); q < r.q1; ++q) ++seen[static_cast<std::size_t>(q)];
          }
        }
        bool needed = false;
        for (std::int64_t q = 0; q < queries.tokens(); ++q) {
          const bool sees = wanted.sees(queries.position(q), keys.position(k));
          needed |= sees;
          REQUIRE(seen[static_cast<std::size_t>(q)] == (sees ? 1 : 0));
        }
        REQUIRE(travels == needed);
      }
    }
  }
  CHECK(most_parts > 1);
}

TEST_CASE("two different chunks share at most one document") {
  const std::int64_t tokens = 64;
  const Boundaries cu_seqlens{0, 3, 20, 21, 22, 50, 64};
  const RankSpans chunks = split(tokens, 8, contiguous_spans);
  for (std::size_t c = 0; c < 8; ++c) {
    for (std::size_t p = 0; p < 8; ++p) {
      if (c != p) CHECK(plan_block_work(chunks[c], chunks[p], false, cu_seqlens, true).rectangles.size() <= 1);
    }
  }
}

TEST_CASE("A03: boundaries that are none") {
  for (const Boundaries& wrong : {Boundaries{}, Boundaries{1, 4}, Boundaries{0, 5, 4}, Boundaries{0, 9}}) {
    std::string text;
    try {
      check_documents(wrong, 8);
    } catch (const shape_error& e) {
      text = e.what();
    }
    CHECK(text.find("pleat[A03]") == 0);
    CHECK(text.find("8 tokens") != std::string::npos);
  }
  CHECK_NOTHROW(check_documents(Boundaries{0}, 8));
  CHECK_NOTHROW(check_documents(Boundaries{0, 0, 8, 8}, 8));
}

TEST_CASE("the parts of a block's work by keys see what the whole sees, each pair once") {
  std::mt19937 random(std::random_device{}());
  const auto below = [&](std::int64_t n) { return static_cast<std::int64_t>(random() % static_cast<unsigned>(n)); };
  for (int trial = 0; trial < 50; ++trial) {
    const std::int64_t keys = 20, queries = 20, begin = below(5);
    BlockWork whole{{begin, begin + keys}, {}};
    for (std::int64_t q = 0; q < queries;) {
      const std::int64_t q1 = std::min(queries, q + 1 + below(9)), k0 = below(keys), k1 = k0 + 1 + below(keys - k0);
      whole.rectangles.push_back({q, q1, k0, k1, below(2) == 0 ? Rectangle::full : below(30) - 10});
      q = q1;
    }
    const std::int64_t cut = below(keys + 1);
    std::vector<int> seen(static_cast<std::size_t>(queries * keys));
    const auto add = [&](const BlockWork& work, int sign) {
      for (const Rectangle& r : work.rectangles) {
        for (std::int64_t q = r.q0; q < r.q1; ++q) {
          for (std::int64_t k = r.k0; k < r.keys_end(q); ++k) {
            seen[static_cast<std::size_t>(q * keys + work.keys.begin - begin + k)] += sign;
          }
        }
      }
    };
    add(whole, 1);
    const BlockWork low = with_keys(whole, {0, cut}), high = with_keys(whole, {cut, keys});
    CHECK(low.keys == TokenSpan{begin, begin + cut});
    CHECK(high.keys == TokenSpan{begin + cut, begin + keys});
    add(low, -1);
    add(high, -1);
    CHECK(std::all_of(seen.begin(), seen.end(), [](int count) { return count == 0; }));
  }
}

}  // namespace
