// The selection bias: counts are exact over ranks and micro-batches, so its sign is right.
#include <pleat/moe/selection_bias.hpp>

#include <numeric>
#include <vector>

#include <doctest/doctest.h>

#include <pleat/comm/thread_arena.hpp>
#include <pleat/core/host/buffer.hpp>
#include <pleat/core/host/leaf.hpp>
#include <pleat/moe.hpp>

namespace {

using namespace pleat;

TEST_CASE("64 ranks with counts 608..676: the sum is exact and the sign +1") {
  constexpr int ranks = 64;
  std::vector<int> counts;
  for (int r = 0; r < ranks; ++r) counts.push_back(r % 2 == 0 ? 608 + r / 2 : 676 - r / 2);
  int rest = 40840 - std::accumulate(counts.begin(), counts.end(), 0);
  for (int r = 0; rest != 0; r = (r + 1) % ranks) {  // towards the sum, within 608..676
    const int move = rest > 0 ? 1 : -1;
    if (counts[static_cast<std::size_t>(r)] + move < 608 || counts[static_cast<std::size_t>(r)] + move > 676) continue;
    counts[static_cast<std::size_t>(r)] += move;
    rest -= move;
  }
  REQUIRE(std::accumulate(counts.begin(), counts.end(), 0) == 40840);

  std::vector<std::vector<float>> biases(ranks);
  run_ranks(ranks, [&](ThreadComm& world) {
    const auto plan = moe::plan(ranks, moe::SelectionBiasShape{2, 1, DType::bf16});
    const HostBuffer scratch(plan.footprint().scratch, 0xff), persistent(plan.footprint().persistent, 0xff);
    auto bias = moe::bind(plan, HostExecutor{}, GroupComm<ThreadComm>(world),
                          Memory<HostArena>{scratch.block(), persistent.block()});
    const auto rank = static_cast<std::size_t>(world.rank());
    std::vector<std::int32_t> ids(static_cast<std::size_t>(counts[rank]), 0);
    const int others = 41080 / ranks + (world.rank() < 41080 % ranks ? 1 : 0);  // the mean is 40,960
    ids.resize(ids.size() + static_cast<std::size_t>(others), 1);
    biases[rank] = {0.25f, -0.5f};
    for (int step = 0; step < 2; ++step) {
      // two micro-batches, the second with an unrouted token
      const auto half = static_cast<std::int64_t>(ids.size() / 2), all = static_cast<std::int64_t>(ids.size());
      bias.count({}, TensorRef(ids.data(), {half, 1}));
      bias.count({}, TensorRef(ids.data() + half, {all - half, 1}));
      std::vector<std::int32_t> unrouted = {-1, 2, 2147483647};
      bias.count({}, TensorRef(unrouted.data(), {3, 1}));
      bias.update({}, 0.125, biases[rank]);
    }
  });
  for (const auto& bias : biases) CHECK(bias == std::vector<float>{0.5f, -0.75f});
}

TEST_CASE("an expert at the mean keeps its bias") {
  const auto plan = moe::plan(1, moe::SelectionBiasShape{3, 1, DType::f64});
  const HostBuffer scratch(plan.footprint().scratch), persistent(plan.footprint().persistent);
  auto op =
      moe::bind(plan, HostExecutor{}, GroupComm<ThreadComm>(), Memory<HostArena>{scratch.block(), persistent.block()});
  std::vector<std::int32_t> ids = {0, 1, 1, 2, 2, 2};
  std::vector<double> bias = {1, 1, 1};
  op.count({}, TensorRef(ids.data(), {6, 1}));
  op.update({}, 0.5, bias);
  CHECK(bias == std::vector<double>{1.5, 1, 0.5});
}

}  // namespace
