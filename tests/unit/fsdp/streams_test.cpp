// The schedule on asynchronous streams: whatever order events and signals leave open, every kernel sees the right
// values.
#include <pleat/fsdp/sharder.hpp>

#include <numeric>
#include <optional>
#include <random>
#include <tuple>
#include <utility>

#include <doctest/doctest.h>

#include "support/deferred_device.hpp"

namespace {

using namespace pleat;
using namespace testing_support;
using Sharder = fsdp::Sharder<DeferredExecutor, DeferredComm, DeferredArena>;
using Groups = fsdp::Groups<DeferredComm>;
using Streams = fsdp::ShardStreams<DeferredStream>;

constexpr int units = 6;
constexpr std::int64_t elems = 11;
bool is_expert(int unit) {
  return unit % 3 == 2;
}

/// Whole numbers, so that every sum is exact.
float gradient(int rank, int unit, int step, int micro, std::int64_t i) {
  return static_cast<float>((rank + 1) * (unit + 2) + step + 3 * micro + static_cast<int>(i));
}

struct Rank {
  Rank(DeferredWorld& world, int index, int ranks, const fsdp::Plan& plan)
      : comm(index, ranks),
        arena(world, index),
        persistent(plan.footprint().persistent, 0xff),
        streams{world.make_stream(), world.make_stream(), world.make_stream(), world.make_stream()},
        second{world.make_stream(), streams.gather, streams.reduce, streams.own} {
    const Groups groups{.dense = Groups::Lanes(GroupComm<DeferredComm>(comm)),
                        .expert = Groups::Lanes(GroupComm<DeferredComm>(index))};
    // Not by bind, in which ranks meet.
    op.emplace(plan, DeferredExecutor{}, groups,
               Memory<DeferredArena>{.persistent = persistent.block(), .arena = &arena}, streams.compute);
  }
  DeferredComm comm;
  DeferredArena arena;
  HostBuffer persistent;
  Streams streams;
  Streams second;  // of another lane that computes
  std::optional<Sharder> op;
};

struct Errors {
  int gathered = 0;
  int reduced = 0;
};

struct Passes {
  int steps = 2;
  int micro_batches = 1;
  int lanes = 1;  // micro-batches take turns
  bool forks = false;
};

/// Of a unit's gradient, as the rank has it now.
float shard_sum(const fsdp::ShardMemory& shard) {
  float sum = 0;
  for (std::int64_t k = 0; k < shard.piece_count; ++k) {
    const float* const first = static_cast<const float*>(shard.gradient) + shard.pieces[k].begin;
    sum = std::accumulate(first, first + shard.pieces[k].elems, sum);
  }
  return sum;
}

/// The work of one rank, enqueued: nothing has run when this returns.
void enqueue_training(Rank& rank, int index, int ranks, const Passes& passes, Errors& errors,
                      std::deque<std::vector<float>>& kept) {
  Sharder& op = *rank.op;
  const auto& [steps, micro_batches, lanes, forks] = passes;
  // Dense units are summed over all ranks, expert units over groups of one.
  const auto expected = [=](int u, std::int64_t i, int step) {
    const int first = is_expert(u) ? index : 0;
    const int count = is_expert(u) ? 1 : ranks;
    auto value = static_cast<float>(100 * u + static_cast<int>(i));
    for (int s = 0; s < step; ++s) {
      for (int micro = 0; micro < passes.micro_batches; ++micro) {
        for (int r = first; r < first + count; ++r) value -= gradient(r, u, s, micro, i);
      }
    }
    return value;
  };
  for (int u = 0; u < units; ++u) {
    auto& values = kept.emplace_back();
    for (std::int64_t i = 0; i < elems; ++i) values.push_back(expected(u, i, 0));
    op.load(u, 0, values, rank.streams);
  }
  std::vector<int> order{0, 1, 2, 3, 4, 5, 5, 4, 3, 2, 1, 0};
  for (int step = 0; step < steps; ++step) {
    if (forks) op.fork(rank.streams);
    for (int micro = 0; micro < micro_batches; ++micro) {
      const Streams& streams = micro % lanes == 0 ? rank.streams : rank.second;
      // The order goes on with a unit that nobody acquires: its gather is still under way when the step ends.
      std::vector<int> with_rest = order;
      with_rest.push_back(4);
      op.begin(with_rest);
      for (std::size_t use = 0; use < order.size(); ++use) {
        const int u = order[use];
        const fsdp::UnitView view = op.acquire(u, streams);
        const auto check = [=, &errors, at = view[0].as<float>()] {
          for (std::int64_t i = 0; i < elems; ++i) errors.gathered += at[i] != expected(u, i, step);
        };
        streams.compute.run(check);
        if (use >= order.size() / 2) {
          const auto [tensor, accumulate] = op.gradient(u, streams).write(0);
          streams.compute.run([=, adds = accumulate, to = tensor.template as<float>()] {
            for (std::int64_t i = 0; i < elems; ++i) to[i] = (adds ? to[i] : 0) + gradient(index, u, step, micro, i);
          });
          op.reduce(u, streams);
        }
        streams.compute.run(check);
        op.release(u, streams);
      }
    }
    op.finish_gradients(rank.streams);
    std::vector<float>& norms = kept.emplace_back(units);
    for (int u = 0; u < units; ++u) {
      rank.streams.compute.run([&sum = norms[static_cast<std::size_t>(u)],
                                shard = op.shards()[static_cast<std::size_t>(u)]] { sum = shard_sum(shard); });
    }
    for (int u = 0; u < units; ++u) {
      const fsdp::ShardMemory shard = op.shards()[static_cast<std::size_t>(u)];
      rank.streams.compute.run([shard, &errors, &sum = norms[static_cast<std::size_t>(u)]] {
        errors.reduced += sum != shard_sum(shard);
        auto* master = static_cast<float*>(shard.master);
        for (std::int64_t k = 0; k < shard.piece_count; ++k) {
          for (std::int64_t i = 0; i < shard.pieces[k].elems; ++i) {
            const std::int64_t at = shard.pieces[k].begin + i;
            master[at] -= static_cast<const float*>(shard.gradient)[at];
          }
        }
      });
    }
    op.weights_changed(rank.streams);
    if (forks) op.join(rank.streams);
  }
  op.begin({});
  for (int u = 0; u < units; ++u) {
    const fsdp::UnitView view = op.acquire(u, rank.streams);
    rank.streams.compute.run([=, &errors, last = passes.steps, at = view[0].as<float>()] {
      for (std::int64_t i = 0; i < elems; ++i) errors.reduced += at[i] != expected(u, i, last);
    });
    op.release(u, rank.streams);
  }
}

void train(int ranks, int prefetch, const Passes& passes, unsigned seed) {
  std::vector<fsdp::UnitSpec> model;
  for (int u = 0; u < units; ++u) {
    model.push_back({.name = "unit " + std::to_string(u),
                     .kind = is_expert(u) ? Param::expert : Param::dense,
                     .params = {{.name = "w", .shape = {elems}}}});
  }
  const fsdp::Plan plan =
      fsdp::plan(model, {.dense = ranks}, {.transport = Transport::peer, .prefetch = prefetch, .alignment_elems = 2});
  DeferredWorld world(ranks, plan.footprint().symmetric);
  std::deque<Rank> all;
  std::deque<std::vector<float>> kept;
  std::vector<Errors> errors(static_cast<std::size_t>(ranks));
  for (int r = 0; r < ranks; ++r) {
    all.emplace_back(world, r, ranks, plan);
    enqueue_training(all.back(), r, ranks, passes, errors[static_cast<std::size_t>(r)], kept);
  }
  std::mt19937 random(seed);
  REQUIRE_NOTHROW(world.run(random));
  for (const Errors& of_rank : errors) {
    CHECK(of_rank.gathered == 0);
    CHECK(of_rank.reduced == 0);
  }
}

TEST_CASE("every order of asynchronous work gives the right values") {
  const unsigned first = std::random_device{}();
  CAPTURE(first);
  for (unsigned i = 0; i < 20; ++i) {
    for (const int ranks : {1, 2, 3}) {
      for (const int prefetch : {0, 1, 2}) {
        CAPTURE(i);
        CAPTURE(ranks);
        CAPTURE(prefetch);
        const int lanes = 1 + static_cast<int>(i / 4 % 2);
        CAPTURE(lanes);
        train(ranks, prefetch, {.micro_batches = lanes + static_cast<int>(i % 2), .lanes = lanes, .forks = i % 4 < 2},
              first + i);
      }
    }
  }
}

TEST_CASE("a step without sums leaves the shards alone until the step before is read") {
  const fsdp::Plan plan =
      fsdp::plan(std::vector{fsdp::UnitSpec{.name = "unit", .params = {{.name = "w", .shape = {elems}}}}}, {},
                 {.transport = Transport::peer});
  for (unsigned seed = 0; seed < 20; ++seed) {
    DeferredWorld world(1, plan.footprint().symmetric);
    Rank rank(world, 0, 1, plan);
    int wrong = 0;
    const auto expect = [&](float value) {
      rank.streams.compute.run([&wrong, value, at = static_cast<const float*>(rank.op->shards()[0].gradient)] {
        for (std::int64_t i = 0; i < elems; ++i) wrong += at[i] != value;
      });
    };
    // On a lane of its own: the step ends after it, too.
    const auto [tensor, accumulate] = rank.op->gradient(0, rank.second).write(0);
    rank.second.compute.run([to = tensor.template as<float>()] { std::fill_n(to, elems, 3.0f); });
    rank.op->reduce(0, rank.second);
    rank.op->finish_gradients(rank.streams);
    if (seed % 2 == 0) {
      rank.op->weights_changed(rank.streams);
      for (int i = 0; i < 200; ++i) rank.streams.compute.run([] {});  // the sums are read later
    }
    expect(3);
    rank.op->finish_gradients(rank.streams);
    expect(0);
    std::mt19937 random(seed);
    REQUIRE_NOTHROW(world.run(random));
    CHECK(wrong == 0);
  }
}

/// One rank whose gradients lie in its shard, or in gradient units where they are of bf16.
struct Alone {
  explicit Alone(bool of_bf16)
      : is_bf16(of_bf16),
        plan(fsdp::plan(
            std::vector{fsdp::UnitSpec{.name = "unit", .params = {{.name = "w", .shape = {elems}}}}}, {},
            is_bf16 ? fsdp::Options{.compute = DType::bf16, .gradient = DType::bf16, .transport = Transport::peer}
                    : fsdp::Options{.transport = Transport::peer})),
        world(1, plan.footprint().symmetric),
        rank(world, 0, 1, plan) {}

  /// On the device, in the order of the lane.
  void write(const Streams& lane, float value) {
    const auto [tensor, accumulate] = rank.op->gradient(0, lane).write(0);
    lane.compute.run([this, value, adds = accumulate, to = tensor] {
      for (std::int64_t i = 0; i < elems; ++i) {
        if (is_bf16) {
          auto* const at = to.template as<bfloat16>() + i;
          *at = bfloat16(value + (adds ? static_cast<float>(*at) : 0));
        } else {
          auto* const at = to.template as<float>() + i;
          *at = value + (adds ? *at : 0);
        }
      }
    });
  }
  void expect_sum(const Streams& lane, float value) {
    lane.compute.run([this, value, at = static_cast<const float*>(rank.op->shards()[0].gradient)] {
      for (std::int64_t i = 0; i < elems; ++i) wrong += at[i] != value;
    });
  }
  void expect_weights(const Streams& lane, const fsdp::UnitView& view, float value) {
    lane.compute.run([this, value, w = view[0]] {
      for (std::int64_t i = 0; i < elems; ++i) {
        wrong += (is_bf16 ? static_cast<float>(w.as<bfloat16>()[i]) : w.as<float>()[i]) != value;
      }
    });
  }
  int run(unsigned seed) {
    std::mt19937 random(seed);
    REQUIRE_NOTHROW(world.run(random));
    return std::exchange(wrong, 0);
  }

  bool is_bf16;
  fsdp::Plan plan;
  DeferredWorld world;
  Rank rank;
  int wrong = 0;
};
constexpr unsigned seeds = 50;

TEST_CASE("what one lane still writes of a discarded batch is over before another lane writes") {
  for (const bool is_bf16 : {false, true}) {
    CAPTURE(is_bf16);
    for (unsigned seed = 0; seed < seeds; ++seed) {
      Alone alone(is_bf16);
      Sharder& op = *alone.rank.op;
      const auto& [a, b] = std::tie(alone.rank.streams, alone.rank.second);
      alone.write(b, 100);
      op.discard_gradients();
      alone.write(a, 1);
      op.reduce(0, a);
      op.finish_gradients(a);
      alone.expect_sum(a, 1);
      alone.write(b, 100);
      op.discard_gradients();
      op.join(a);
      op.fork(a);  // after what was discarded
      alone.write(a, 2);
      op.reduce(0, a);
      op.finish_gradients(a);
      alone.expect_sum(a, 2);
      CHECK(alone.run(seed) == 0);
    }
  }
}

TEST_CASE("a step on another lane leaves the sums alone until the compute stream of the step before has read them") {
  for (const bool is_bf16 : {false, true}) {
    for (const bool changes : {false, true}) {
      CAPTURE(is_bf16);
      CAPTURE(changes);
      for (unsigned seed = 0; seed < seeds; ++seed) {
        Alone alone(is_bf16);
        Sharder& op = *alone.rank.op;
        const auto& [a, b] = std::tie(alone.rank.streams, alone.rank.second);
        alone.write(a, 1);
        op.reduce(0, a);
        op.finish_gradients(a);
        alone.expect_sum(a, 1);
        if (changes) op.weights_changed(a);
        alone.write(b, 50);
        op.reduce(0, b);
        op.finish_gradients(b);
        alone.expect_sum(b, 50);
        op.finish_gradients(a);  // without sums
        alone.expect_sum(a, 0);
        CHECK(alone.run(seed) == 0);
      }
    }
  }
}

TEST_CASE("weights that are used where they lie are written after their uses on every lane") {
  for (const bool is_bf16 : {false, true}) {
    for (const bool loads : {false, true}) {
      CAPTURE(is_bf16);
      CAPTURE(loads);
      for (unsigned seed = 0; seed < seeds; ++seed) {
        Alone alone(is_bf16);
        Sharder& op = *alone.rank.op;
        const auto& [a, b] = std::tie(alone.rank.streams, alone.rank.second);
        const std::vector<float> sevens(elems, 7), sixes(elems, 6);
        op.load(0, 0, sevens, a);
        for (int use = 0; use < 2; ++use) {
          const fsdp::UnitView weights = op.acquire(0, b);
          if (use == 1) alone.write(b, 1);
          if (use == 1) op.reduce(0, b);
          for (int i = 0; i < 200; ++i) b.compute.run([] {});  // dx takes a while beside the sum
          alone.expect_weights(b, weights, 7);
          op.release(0, b);
        }
        if (loads) {
          op.load(0, 0, sixes, a);
        } else {
          op.finish_gradients(a);
          a.compute.run([shard = op.shards()[0]] {
            std::fill_n(static_cast<float*>(shard.master), elems, 6.0F);
            if (shard.compute != nullptr) std::fill_n(static_cast<bfloat16*>(shard.compute), elems, bfloat16(6.0F));
          });
          op.weights_changed(a);
        }
        alone.expect_weights(b, op.acquire(0, b), 6);
        op.release(0, b);
        CHECK(alone.run(seed) == 0);
      }
    }
  }
}

TEST_CASE("lanes do not wait for each other's uses of weights") {
  Alone alone(false);
  Sharder& op = *alone.rank.op;
  const auto& [a, b] = std::tie(alone.rank.streams, alone.rank.second);
  bool is_done = false;
  a.compute.enqueue([&] { return is_done; });  // for ever, unless lane b goes on
  for (const Streams& lane : {a, b}) {
    op.acquire(0, lane);
    op.release(0, lane);
  }
  b.compute.run([&] { is_done = true; });
  CHECK(alone.run(1) == 0);
}

TEST_CASE("a fork has nothing in flight; a join brings it back, and nothing but compute goes on after it") {
  std::vector<fsdp::UnitSpec> model;
  for (const char* name : {"a", "b"}) model.push_back({.name = name, .params = {{.name = "w", .shape = {elems}}}});
  const fsdp::Plan plan = fsdp::plan(model, {.dense = 2}, {.transport = Transport::peer});
  DeferredWorld world(2, plan.footprint().symmetric);
  std::deque<Rank> all;
  std::array<int, 2> joined{};
  const std::vector<float> ones(elems, 1.0f);  // read when the stream gets there
  for (int r = 0; r < 2; ++r) {
    Rank& rank = all.emplace_back(world, r, 2, plan);
    Sharder& op = *rank.op;
    const Streams& streams = rank.streams;
    op.load(0, 0, ones, streams);
    op.fork(streams);
    op.begin(std::array{0, 1});
    op.acquire(0, streams);
    CHECK_THROWS_WITH_AS(op.fork(streams), doctest::Contains("pleat[F17]: fork while a gather or a sum is under way"),
                         shape_error);
    op.join(streams);
    CHECK_THROWS_WITH_AS(op.fork(streams), doctest::Contains("pleat[F10]"), shape_error);
    op.release(0, streams);
    op.gradient(0, streams);
    CHECK_THROWS_WITH_AS(op.fork(streams), doctest::Contains("pleat[F17]"), shape_error);
    op.reduce(0, streams);
    CHECK_THROWS_WITH_AS(op.fork(streams), doctest::Contains("pleat[F17]"), shape_error);
    op.finish_gradients(streams);
    op.join(streams);
    CHECK_NOTHROW(op.fork(streams));
    op.join(streams);
    streams.compute.run([&, r] {
      joined[static_cast<std::size_t>(r)] =
          streams.gather.queue->empty() && streams.reduce.queue->empty() && streams.own.queue->empty();
    });
  }
  std::mt19937 random(std::random_device{}());
  REQUIRE_NOTHROW(world.run(random));
  CHECK(joined == std::array{1, 1});
}

}  // namespace
