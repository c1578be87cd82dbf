// More rows than there is room for: what is dropped, that it is the same whatever the timing, and who hears of it.
#include <pleat/moe/dispatch.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include <doctest/doctest.h>

#include <pleat/comm/thread_arena.hpp>
#include <pleat/core/host/buffer.hpp>
#include <pleat/core/host/leaf.hpp>
#include <pleat/moe.hpp>

namespace {

using namespace pleat;
using moe::DispatchShape;
using moe::Overflow;

constexpr int ranks = 3, experts = 6, k = 3;
constexpr std::int64_t max_tokens = 12;
constexpr float nan = std::numeric_limits<float>::quiet_NaN();

/// The choices of one rank's tokens; few distinct weights, so that many are equal.
struct Choices {
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
  std::int64_t tokens() const { return static_cast<std::int64_t>(weights.size()) / k; }
};
Choices choices_of(int rank, unsigned seed) {
  std::mt19937 random(seed * 100 + static_cast<unsigned>(rank));
  Choices c;
  const std::int64_t tokens = rank == 1 ? 0 : max_tokens - rank;
  for (std::int64_t t = 0; t < tokens; ++t) {
    std::vector<std::int32_t> all(experts);
    std::iota(all.begin(), all.end(), 0);
    std::shuffle(all.begin(), all.end(), random);
    for (int j = 0; j < k; ++j) {
      c.ids.push_back(random() % 8 == 0 ? -1 : all[static_cast<std::size_t>(j)]);
      c.weights.push_back(random() % 16 == 0 ? nan : static_cast<float>(static_cast<int>(random() % 5)) - 1);
    }
  }
  return c;
}

/// Which choices [rank][token * k + j] are kept, by definition: the max_rows largest of each expert's rank.
std::vector<std::vector<bool>> kept_choices(unsigned seed, std::int64_t max_rows) {
  std::vector<std::vector<bool>> kept;
  for (int rank = 0; rank < ranks; ++rank) kept.emplace_back(choices_of(rank, seed).ids.size(), false);
  for (int host = 0; host < ranks; ++host) {
    struct Entry {
      float weight;
      int rank;
      std::int64_t token;
      std::int32_t expert;
      std::size_t at;
    };
    std::vector<Entry> entries;
    for (int rank = 0; rank < ranks; ++rank) {
      const Choices c = choices_of(rank, seed);
      for (std::size_t i = 0; i < c.ids.size(); ++i) {
        if (c.ids[i] < 0 || c.ids[i] / (experts / ranks) != host) continue;
        const float weight = std::isnan(c.weights[i]) ? -std::numeric_limits<float>::infinity() : c.weights[i];
        entries.push_back({weight, rank, static_cast<std::int64_t>(i) / k, c.ids[i], i});
      }
    }
    std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
      return std::tuple(-a.weight, a.rank, a.token, a.expert) < std::tuple(-b.weight, b.rank, b.token, b.expert);
    });
    if (static_cast<std::int64_t>(entries.size()) > max_rows) entries.resize(static_cast<std::size_t>(max_rows));
    for (const Entry& e : entries) kept[static_cast<std::size_t>(e.rank)][e.at] = true;
  }
  return kept;
}

template <class Arena = HostArena>
struct Bench {
  Bench(ThreadComm& world, const moe::DispatchPlan& p)
      : plan(p),
        scratch(plan.footprint().scratch, 0xff),
        persistent(plan.footprint().persistent, 0xff),
        pinned(plan.footprint().pinned_host, 0xff),
        saved_memory(plan.footprint().saved, 0xff),
        arena{HostArena(world, plan.footprint().symmetric)},
        op(moe::bind(plan, HostExecutor{}, GroupComm<ThreadComm>(world),
                     Memory<Arena>{scratch.block(), persistent.block(), pinned.block(), &arena})),
        saved(plan, saved_memory.block()) {}

  /// Experts that return their rows times the expert's number + 1; y of rows of ones.
  std::vector<float> forward(const Choices& c) {
    tokens = c.tokens();
    std::vector<float> x(static_cast<std::size_t>(tokens), 1.f);
    const moe::ExpertRows view = op.dispatch({}, column(x, 1), column(c.ids, k), column(c.weights, k), saved);
    out.assign(static_cast<std::size_t>(plan.capacity_rows()), nan);
    const auto* offsets = view.offsets.as<std::int64_t>();
    for (int e = 0; e < plan.experts_local(); ++e) {
      for (std::int64_t row = offsets[e]; row < offsets[e + 1]; ++row) {
        out[static_cast<std::size_t>(row)] =
            view.rows.as<float>()[row] * static_cast<float>(saved_rank * plan.experts_local() + e + 1);
      }
    }
    std::vector<float> y(x.size(), nan);
    op.combine({}, column(out, 1), saved, column(y, 1));
    return y;
  }
  /// dweights of dy = 1.
  std::vector<float> backward() {
    std::vector<float> dy(static_cast<std::size_t>(tokens), 1.f), drows(out.size(), nan), dx(dy.size(), nan),
        dweights(dy.size() * k, nan);
    op.combine_backward({}, column(dy, 1), column(out, 1), saved, column(drows, 1));
    op.dispatch_backward({}, column(drows, 1), saved, column(dx, 1), column(dweights, k));
    return dweights;
  }
  template <class T>
  static TensorRef column(const std::vector<T>& values, std::int64_t cols) {
    return {const_cast<T*>(values.data()), {static_cast<std::int64_t>(values.size()) / cols, cols}};
  }

  moe::DispatchPlan plan;
  HostBuffer scratch, persistent, pinned, saved_memory;
  Arena arena;
  moe::Dispatch<HostExecutor, ThreadComm, Arena> op;
  moe::DispatchSaved saved;
  std::vector<float> out;
  std::int64_t tokens = 0;
  int saved_rank = 0;
};

void each_case(Overflow overflow, const std::function<void(ThreadComm&, Bench<>&, unsigned, std::int64_t)>& f) {
  for (const Transport transport : {Transport::peer, Transport::collective}) {
    for (const std::int64_t max_rows : {1, 7, 20, 1000}) {
      CAPTURE(name_of(transport));
      CAPTURE(max_rows);
      const DispatchShape shape{max_tokens, 1, experts, k, DType::f32};
      const std::int64_t most = std::min<std::int64_t>(max_rows, moe::plan(ranks, shape).worst_rows());
      const moe::DispatchPlan plan =
          moe::plan(ranks, shape, {.transport = transport, .row_alignment = 4, .overflow = overflow, .max_rows = most});
      run_ranks(ranks, [&](ThreadComm& world) {
        Bench<> bench(world, plan);
        bench.saved_rank = world.rank();
        for (unsigned seed = 0; seed < 5; ++seed) f(world, bench, seed, most);
      });
    }
  }
}

TEST_CASE("drop_lowest keeps the largest weights of each rank; equal ones go from the end") {
  each_case(Overflow::drop_lowest, [](ThreadComm& world, Bench<>& bench, unsigned seed, std::int64_t max_rows) {
    const Choices c = choices_of(world.rank(), seed);
    const std::vector<bool> kept = kept_choices(seed, max_rows)[static_cast<std::size_t>(world.rank())];
    const std::vector<float> y = bench.forward(c), dweights = bench.backward();
    CHECK(bench.saved.record.offsets[bench.plan.experts_local()] <= bench.plan.capacity_rows());
    for (std::size_t t = 0; t < y.size(); ++t) {
      float sum = 0;
      for (std::size_t i = t * k; i < (t + 1) * k; ++i) {
        if (kept[i]) sum += c.weights[i] * static_cast<float>(c.ids[i] + 1);
        CHECK(dweights[i] == (kept[i] ? static_cast<float>(c.ids[i] + 1) : 0.f));
      }
      CHECK((y[t] == sum || (std::isnan(y[t]) && std::isnan(sum))));
    }
  });
}

TEST_CASE("every rank counts what the group dropped, over all calls; drop_lowest is no error") {
  std::int64_t sums[2][4] = {};
  for (const Transport transport : {Transport::peer, Transport::collective}) {
    const moe::DispatchPlan plan =
        moe::plan(ranks, DispatchShape{max_tokens, 1, experts, k, DType::f32},
                  {.transport = transport, .overflow = Overflow::drop_lowest, .max_rows = 7});
    run_ranks(ranks, [&](ThreadComm& world) {
      Bench<> bench(world, plan);
      for (unsigned seed = 0; seed < 3; ++seed) bench.forward(choices_of(world.rank(), seed));
      sums[transport == Transport::peer][world.rank()] = bench.op.check({}).dropped_rows;
    });
  }
  std::int64_t expected = 0;
  for (unsigned seed = 0; seed < 3; ++seed) {
    const auto kept = kept_choices(seed, 7);
    for (int rank = 0; rank < ranks; ++rank) {
      const Choices c = choices_of(rank, seed);
      for (std::size_t i = 0; i < c.ids.size(); ++i)
        expected += c.ids[i] >= 0 && !kept[static_cast<std::size_t>(rank)][i];
    }
  }
  CHECK(expected > 0);
  for (const auto& of_transport : sums) {
    for (int rank = 0; rank < ranks; ++rank) CHECK(of_transport[rank] == expected);
  }
}

TEST_CASE("overflow=error: too many rows on one rank are the same error on every rank, and stay one") {
  for (const Transport transport : {Transport::peer, Transport::collective}) {
    const moe::DispatchPlan plan = moe::plan(ranks, DispatchShape{4, 1, experts, 1, DType::f32},
                                             {.transport = transport, .overflow = Overflow::error, .max_rows = 5});
    std::vector<std::string> texts(ranks);
    run_ranks(ranks, [&](ThreadComm& world) {
      Bench<> bench(world, plan);
      Choices c{{2, 2, 0, 5}, {1, 1, 1, 1}};  // k is 1 here: rank 1 gets six rows
      const std::vector<float> x(4, 1.f);
      std::vector<float> y(4, nan), out(static_cast<std::size_t>(plan.capacity_rows()), 1.f);
      for (int step = 0; step < 2; ++step) {
        bench.op.dispatch({}, Bench<>::column(x, 1), Bench<>::column(c.ids, 1), Bench<>::column(c.weights, 1),
                          bench.saved);
        bench.op.combine({}, Bench<>::column(out, 1), bench.saved, Bench<>::column(y, 1));
        c.ids = {-1, -1, 0, 5};  // the next call has room: the error stays
      }
      CHECK(y == std::vector<float>{0, 0, 1, 1});
      CHECK(*bench.op.status_words().back() == 2);
      try {
        bench.op.check({});
      } catch (const shape_error& e) {
        texts[static_cast<std::size_t>(world.rank())] = e.what();
      }
    });
    for (const std::string& text : texts) {
      CHECK(text ==
            "pleat[E10]: rank 1 of the ep group {0, 1, 2} got 1 rows more than max_rows=5; plan with a larger "
            "max_rows, or with overflow=drop_lowest");
    }
  }
}

/// Rank 2 is slow to tell rank 1, which waits for it while rank 0 goes on.
struct UnevenArena {
  struct Peers : HostPeers {
    Peers(HostPeers&& peers) : HostPeers(std::move(peers)) {}
    void signal(int peer, int channel, HostStream s) {
      if (rank() == 2 && peer == 1) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      HostPeers::signal(peer, channel, s);
    }
  };
  HostArena arena;
  bool reachable(const Group& group) const { return arena.reachable(group); }
  Peers open(const Group& group, std::size_t bytes, int channels) { return arena.open(group, bytes, channels); }
};

TEST_CASE("a rank that is late hears of too many rows from the same error, not from the failure of another rank") {
  const moe::DispatchPlan plan = moe::plan(ranks, DispatchShape{max_tokens, 1, experts, k, DType::f32},
                                           {.transport = Transport::peer, .overflow = Overflow::error, .max_rows = 5});
  std::vector<std::string> texts(ranks);
  const auto run = [&] {
    run_ranks(ranks, [&](ThreadComm& world) {
      Bench<UnevenArena> bench(world, plan);
      bench.forward(choices_of(world.rank(), 1));
      bench.backward();
      try {
        bench.op.check({});
      } catch (const error& e) {
        texts[static_cast<std::size_t>(world.rank())] = e.what();
        throw;
      }
    });
  };
  CHECK_THROWS_AS(run(), shape_error);
  for (const std::string& text : texts) {
    CHECK(text == texts[0]);
    CHECK(text.find("pleat[E10]") == 0);
  }
}

TEST_CASE("6 and 8 tokens on two ranks with a capacity: nobody waits for ever, and what has room is right") {
  for (const Transport transport : {Transport::peer, Transport::collective}) {
    const moe::DispatchPlan plan =
        moe::plan(2, DispatchShape{8, 1, 4, 1, DType::f32},
                  {.transport = transport, .overflow = Overflow::drop_lowest, .max_rows = 5});
    run_ranks(2, [&](ThreadComm& world) {
      Bench<> bench(world, plan);
      for (int step = 0; step < 3; ++step) {
        const std::int64_t tokens = world.rank() == 0 ? 6 : 8;
        // All to expert 0 of rank 0, whose five places go to the largest weights: the last tokens of rank 1.
        std::vector<std::int32_t> ids(static_cast<std::size_t>(tokens), 0);
        std::vector<float> weights, x(ids.size(), 1.f), y(ids.size(), nan),
            out(static_cast<std::size_t>(plan.capacity_rows()), 1.f);
        for (std::int64_t t = 0; t < tokens; ++t) weights.push_back(static_cast<float>(t + 1));
        bench.op.dispatch({}, Bench<>::column(x, 1), Bench<>::column(ids, 1), Bench<>::column(weights, 1), bench.saved);
        bench.op.combine({}, Bench<>::column(out, 1), bench.saved, Bench<>::column(y, 1));
        CHECK(y ==
              (world.rank() == 0 ? std::vector<float>{0, 0, 0, 0, 5, 6} : std::vector<float>{0, 0, 0, 0, 0, 6, 7, 8}));
        CHECK(bench.op.check({}).dropped_rows == 9 * (step + 1));
      }
    });
  }
}

TEST_CASE("a plan with a capacity is as large as it says; max_rows that do not fit the policy are refused") {
  const DispatchShape shape{32, 16, 8, 2, DType::bf16};
  const moe::DispatchPlan small = moe::plan(4, shape, {.overflow = Overflow::error, .max_rows = 64});
  CHECK(small.capacity_rows() == 96);  // 64 rows, and 15 pad rows of each of two experts, in multiples of 16
  CHECK(moe::plan(4, shape).capacity_rows() == 288);
  CHECK(moe::plan(4, shape, {.overflow = Overflow::error, .max_rows = 256}).capacity_rows() == 288);
  CHECK(small.footprint().saved < moe::plan(4, shape).footprint().saved);
  const auto text = [&](const moe::DispatchOptions& options) {
    try {
      moe::plan(4, shape, options);
    } catch (const shape_error& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  CHECK(text({.max_rows = 1}) ==
        "pleat[E12]: max_rows=1 with overflow=worst_case; valid: 0 with worst_case, else 1 .. 256");
  CHECK(text({.overflow = Overflow::error}).find("pleat[E12]: max_rows=0 with overflow=error") == 0);
  CHECK(text({.overflow = Overflow::drop_lowest, .max_rows = 257}).find("pleat[E12]: max_rows=257") == 0);
}

}  // namespace
