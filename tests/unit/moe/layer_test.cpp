// The whole layer over every small group against one rank in float64, with both transports.
#include <pleat/moe/layer.hpp>

#include "layer_problem.hpp"

#include <doctest/doctest.h>

namespace {

using namespace moe_testing;

/// Unequal numbers of tokens, 0 among them where there is more than one rank.
std::vector<std::int64_t> uneven_tokens(int ranks) {
  const std::int64_t tokens[] = {7, 0, 13, 1, 5, 0, 2, 9};
  return {tokens, tokens + ranks};
}

template <class T>
void check_grid() {
  for (const int ranks : {1, 2, 3, 4, 5, 8}) {
    for (const int k : {1, 2, 4, 8}) {
      CAPTURE(ranks);
      CAPTURE(k);
      const Sizes sizes{.hidden = 12, .inner = 10, .experts = ranks * (ranks < 4 ? 4 : 2), .k = k};
      if (k > sizes.experts) continue;
      const Problem<T> problem(sizes, uneven_tokens(ranks), static_cast<unsigned>(ranks * 100 + k));
      const Answer<T> peer = run(problem, {.transport = Transport::peer});
      CHECK(worst(peer, solve(problem)) < tolerance<T>());
      CHECK(run(problem, {.transport = Transport::collective}) == peer);
      CHECK(run(problem, {.transport = Transport::peer, .row_alignment = 1}) == peer);
    }
  }
}

TEST_CASE("forward and backward equal one rank: f64") {
  check_grid<double>();
}
TEST_CASE("forward and backward equal one rank: f32") {
  check_grid<float>();
}
TEST_CASE("forward and backward equal one rank: bf16") {
  check_grid<bfloat16>();
}

}  // namespace
