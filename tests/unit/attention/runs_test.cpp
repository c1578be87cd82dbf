// Runs against a set of rows kept one by one.
#include <pleat/attention/runs.hpp>

#include <random>

#include <doctest/doctest.h>

namespace {

using namespace pleat;

TEST_CASE("runs are the set of what was inserted: ascending, with gaps between them") {
  std::mt19937 generator(std::random_device{}());
  const auto draw = [&] {
    const auto begin = static_cast<std::int64_t>(generator() % 30);
    return TokenSpan{begin, begin + static_cast<std::int64_t>(generator() % 6)};
  };
  for (int trial = 0; trial < 300; ++trial) {
    Runs runs;
    std::vector<bool> rows(40);
    for (unsigned i = generator() % 7; i > 0; --i) {
      const TokenSpan span = draw();
      runs.insert(span);
      for (std::int64_t row = span.begin; row < span.end; ++row) rows[static_cast<std::size_t>(row)] = true;
    }
    std::vector<bool> held(40);
    std::int64_t last = -1;
    for (const TokenSpan& run : runs) {
      REQUIRE(run.begin > last);
      REQUIRE(!run.empty());
      last = run.end;
      for (std::int64_t row = run.begin; row < run.end; ++row) held[static_cast<std::size_t>(row)] = true;
    }
    REQUIRE(held == rows);
    REQUIRE(runs.rows() == std::count(rows.begin(), rows.end(), true));
    REQUIRE(runs.empty() == (runs.rows() == 0));

    const TokenSpan span = draw();
    std::vector<bool> gaps(40);
    runs.for_each_gap(span, [&](TokenSpan gap) {
      REQUIRE(!gap.empty());
      for (std::int64_t row = gap.begin; row < gap.end; ++row) gaps[static_cast<std::size_t>(row)] = true;
    });
    bool meets = false;
    for (std::int64_t row = 0; row < 40; ++row) {
      const bool inside = span.begin <= row && row < span.end, is_held = rows[static_cast<std::size_t>(row)];
      meets |= inside && is_held;
      REQUIRE(gaps[static_cast<std::size_t>(row)] == (inside && !is_held));
    }
    REQUIRE(runs.meets(span) == meets);
  }
}

}  // namespace
