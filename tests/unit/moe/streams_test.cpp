// Dispatch on asynchronous streams: whatever order signals leave open, every leaf sees the right values.
#include <pleat/moe/dispatch.hpp>

#include <algorithm>
#include <deque>
#include <optional>
#include <random>
#include <vector>

#include <doctest/doctest.h>

#include <pleat/comm/thread_comm.hpp>
#include <pleat/moe.hpp>
#include <pleat/moe/host/leaf.hpp>

#include "support/deferred_device.hpp"

/// The host's leaves, later; what is passed is copied, as a kernel's arguments are.
template <>
struct pleat::moe_leaf<testing_support::deferred_device> {
  using Host = pleat::moe_leaf<pleat::host_device>;
  using Stream = testing_support::DeferredStream;
  using Plan = pleat::moe::DispatchPlan;
  using Record = pleat::moe::DispatchRecord;
  using Scratch = pleat::moe::PlanScratch;
  using Table = pleat::moe::RowTable;
  using Sources = pleat::moe::SourceRows;
  using Status = pleat::moe::DispatchStatus;

  static void plan_sends(const Plan& plan, int rank, std::int64_t tokens, std::int64_t planned, const std::int32_t* ids,
                         const Record& r, const Scratch& scratch, Status* status, Stream s) {
    s.run([=] { Host::plan_sends(plan, rank, tokens, planned, ids, r, scratch, status, {}); });
  }
  static void sum_before(int ranks, const std::int64_t* counts, std::int64_t* before, Stream s) {
    s.run([=] { Host::sum_before(ranks, counts, before, {}); });
  }
  static void pack_headers(const Plan& plan, std::int64_t tokens, const std::int32_t* ids, const void* weights,
                           const Record& r, const Table& out, Stream s) {
    s.run([=] { Host::pack_headers(plan, tokens, ids, weights, r, out, {}); });
  }
  static void pack(const Plan& plan, int rank, std::int64_t tokens, const void* x, const Record& r, const Table& out,
                   Stream s) {
    s.run([=] { Host::pack(plan, rank, tokens, x, r, out, {}); });
  }
  static void plan_rows(const Plan& plan, int rank, const Table& in, const Record& r, const Scratch& scratch,
                        Status* status, Stream s) {
    s.run([=] { Host::plan_rows(plan, rank, in, r, scratch, status, {}); });
  }
  static void expand(const Plan& plan, const Sources& in, const Record& r, Stream s) {
    s.run([=] { Host::expand(plan, in, r, {}); });
  }
  static void expand_gradient(const Plan& plan, const Sources& in, const void* out, const Record& r, void* dout,
                              Stream s) {
    s.run([=] { Host::expand_gradient(plan, in, out, r, dout, {}); });
  }
  static void sum_experts(const Plan& plan, const void* rows, bool weighted, const Record& r, const Table& out,
                          Stream s) {
    s.run([=] { Host::sum_experts(plan, rows, weighted, r, out, {}); });
  }
  static void sum_sources(const Plan& plan, std::int64_t tokens, const Table& in, const Record& r, const void* residual,
                          void* y, void* dweights, Status* status, Stream s) {
    s.run([=] { Host::sum_sources(plan, tokens, in, r, residual, y, dweights, status, {}); });
  }
  static void count_choices(int count, int chosen, std::int64_t groups, std::int64_t tokens, const std::int32_t* ids,
                            bool accumulate, double* counts, Stream s) {
    s.run([=] { Host::count_choices(count, chosen, groups, tokens, ids, accumulate, counts, {}); });
  }
  static void load_balance(const pleat::moe::LoadBalancePlan& plan, std::int64_t groups, std::int64_t tokens,
                           const std::int32_t* ids, const void* probs, const double* counts,
                           const pleat::moe::StepTokens* step, void* dprobs, double* value, double* partials,
                           Stream s) {
    s.run([=] { Host::load_balance(plan, groups, tokens, ids, probs, counts, step, dprobs, value, partials, {}); });
  }
};

namespace {

using namespace pleat;
using namespace testing_support;
using Op = moe::Dispatch<DeferredExecutor, DeferredComm, DeferredArena>;

constexpr int experts = 8, k = 3, steps = 4;
constexpr std::int64_t max_tokens = 6, hidden = 2;

/// One rank's memory and operation, and its inputs and results of every step.
struct Rank {
  Rank(DeferredWorld& world, int index, int ranks, const moe::DispatchPlan& plan, unsigned seed)
      : comm(index, ranks),
        arena(world, index),
        scratch(plan.footprint().scratch, 0xff),
        persistent(plan.footprint().persistent, 0xff),
        pinned(plan.footprint().pinned_host, 0xff),
        stream(world.make_stream()),
        side(world.make_stream()) {
    const GroupComm<DeferredComm> ep = ranks == 1 ? GroupComm<DeferredComm>(index) : GroupComm<DeferredComm>(comm);
    // What bind writes is enqueued as well: its memory must live until then.
    op.emplace(moe::bind(plan, DeferredExecutor{}, ep,
                         Memory<DeferredArena>{scratch.block(), persistent.block(), pinned.block(), &arena}, stream));
    std::mt19937 random(seed + static_cast<unsigned>(index));
    for (Step& step : all) {
      const auto tokens = static_cast<std::int64_t>(random() % (max_tokens + 1));
      for (std::int64_t t = 0; t < tokens; ++t) {
        const auto first = static_cast<std::int32_t>(random() % experts);
        for (int j = 0; j < k; ++j) {
          step.ids.push_back(random() % 5 == 0 ? -1 : (first + 3 * j) % experts);
          step.weights.push_back(static_cast<float>(random() % 8));
        }
        for (int h = 0; h < hidden; ++h) step.x.push_back(static_cast<float>(random() % 64));
      }
      step.y.assign(step.x.size(), -1.f);
      step.dx.assign(step.x.size(), -1.f);
      step.dweights.assign(step.weights.size(), -1.f);
      step.memory.emplace(plan.footprint().saved, static_cast<unsigned char>(0xff));
      step.saved.emplace(plan, step.memory->block());
    }
  }

  /// Experts that return their rows; dy = x. Two live micro-batches at a time, each call for both before the next one.
  void enqueue() {
    const Streams<DeferredStream> streams{stream, side};
    for (int first = 0; first < steps; first += 2) {
      const auto each = [&](const auto& call) {
        for (int i = first; i < first + 2; ++i) call(all[i], *all[i].saved);
      };
      each([&](Step& step, moe::DispatchSaved& saved) {
        op->dispatch(streams, staged(step.x), matrix(step.ids, k), matrix(step.weights, k), saved);
      });
      each([&](Step& step, moe::DispatchSaved& saved) {
        op->combine(streams, op->rows(saved).rows, saved, matrix(step.y, hidden));
      });
      each([&](Step& step, moe::DispatchSaved& saved) {
        op->combine_backward(streams, staged(step.x), op->rows(saved).rows, saved, op->rows(saved).rows);
      });
      each([&](Step& step, moe::DispatchSaved& saved) {
        op->dispatch_backward(streams, op->rows(saved).rows, saved, matrix(step.dx, hidden), matrix(step.dweights, k));
      });
    }
  }

  int wrong() const {
    int count = 0;
    for (const Step& step : all) {
      for (std::size_t t = 0; t * hidden < step.x.size(); ++t) {
        float sum = 0, dot = 0;
        for (std::size_t h = t * hidden; h < (t + 1) * hidden; ++h) dot += step.x[h] * step.x[h];
        for (std::size_t j = t * k; j < (t + 1) * k; ++j) {
          sum += step.ids[j] < 0 ? 0 : step.weights[j];
          count += step.dweights[j] != (step.ids[j] < 0 ? 0 : dot);
        }
        for (std::size_t h = t * hidden; h < (t + 1) * hidden; ++h) {
          count += step.y[h] != sum * step.x[h];
          count += step.dx[h] != sum * step.x[h];
        }
      }
    }
    return count;
  }

  /// The values in an array that all calls use: a call that still reads it when it is done reads the next one's.
  TensorRef staged(std::vector<float>& values) {
    stream.run([this, &values] { std::copy(values.begin(), values.end(), staging.begin()); });
    return {staging.data(), {static_cast<std::int64_t>(values.size()) / hidden, hidden}};
  }
  template <class T>
  static TensorRef matrix(std::vector<T>& values, std::int64_t cols) {
    return {values.data(), {static_cast<std::int64_t>(values.size()) / cols, cols}};
  }

  struct Step {
    std::vector<float> x, weights, y, dx, dweights;
    std::vector<std::int32_t> ids;
    std::optional<HostBuffer> memory;
    std::optional<moe::DispatchSaved> saved;
  };
  DeferredComm comm;
  DeferredArena arena;
  HostBuffer scratch, persistent, pinned;
  DeferredStream stream, side;
  std::vector<float> staging = std::vector<float>(max_tokens * hidden);
  std::optional<Op> op;
  Step all[steps];
};

TEST_CASE("with peer access nothing is read or overwritten too early, and nothing is waited for on the host") {
  for (const int ranks : {1, 2, 4}) {
    for (unsigned seed = 0; seed < 40; ++seed) {
      const moe::DispatchPlan plan = moe::plan(ranks, moe::DispatchShape{max_tokens, hidden, experts, k, DType::f32},
                                               {.transport = Transport::peer,
                                                .row_alignment = 4,
                                                .send_by = seed % 2 == 0 ? moe::SendBy::stores : moe::SendBy::copies});
      DeferredWorld world(ranks, plan.footprint().symmetric);
      std::deque<Rank> all;
      for (int r = 0; r < ranks; ++r) all.emplace_back(world, r, ranks, plan, seed * 10).enqueue();
      std::mt19937 random(seed);
      REQUIRE_NOTHROW(world.run(random));
      for (const Rank& rank : all) CHECK(rank.wrong() == 0);
    }
  }
}

TEST_CASE("a group of one waits for its counts too, and its status") {
  for (unsigned seed = 0; seed < 5; ++seed) {
    const moe::DispatchPlan plan = moe::plan(1, moe::DispatchShape{max_tokens, hidden, experts, k, DType::f32},
                                             {.transport = Transport::collective, .row_alignment = 4});
    DeferredWorld world(1, 0);
    Rank rank(world, 0, 1, plan, seed);
    rank.enqueue();
    std::int64_t unrouted = 0;
    for (const Rank::Step& step : rank.all) unrouted += std::count(step.ids.begin(), step.ids.end(), -1);
    CHECK(rank.op->check({rank.stream, rank.stream}).unrouted_choices == unrouted);
    CHECK(rank.wrong() == 0);
  }
}

/// The gradients of four micro-batches and the value of their loss.
template <class Executor, class Comm, class Stream, class Enqueue>
std::vector<float> balance(unsigned seed, Stream compute, Stream comm, const HostBuffer& persistent,
                           std::vector<std::int32_t>& ids, std::vector<float>& probs, std::vector<float>& dprobs,
                           std::vector<float>& results, double& value, const moe::StepTokens& step,
                           const Enqueue& enqueue) {
  const auto plan = moe::plan(1, moe::LoadBalanceShape{experts, k}, {1.0, moe::BalanceScope::global_batch});
  auto op = moe::bind(plan, Executor{}, GroupComm<Comm>(0), Memory<>{.persistent = persistent.block()}, compute);
  const Streams<Stream> streams{compute, comm};
  for (int i = 0; i < steps; ++i) {
    enqueue([&ids, &probs, seed, i] {  // of this micro-batch: written over what the one before read
      std::mt19937 random(seed * 10 + static_cast<unsigned>(i));
      for (std::int32_t& id : ids) id = static_cast<std::int32_t>(random() % experts);
      for (float& p : probs) p = static_cast<float>(random() % 16);
    });
    op.begin(streams, TensorRef(ids.data(), {max_tokens, k}), TensorRef(probs.data(), {max_tokens, experts}), 1, &step,
             TensorRef(dprobs.data(), {1, experts}), TensorRef(&value, {1}));
    op.end(streams);
    enqueue([&dprobs, &results, i] { std::copy(dprobs.begin(), dprobs.end(), results.begin() + i * experts); });
  }
  return results;
}

TEST_CASE("the load-balance loss sums over ranks beside what is computed, and is waited for before it is read") {
  const auto plan = moe::plan(1, moe::LoadBalanceShape{experts, k}, {1.0, moe::BalanceScope::global_batch});
  const moe::StepTokens step{.targets = 16, .routed = 24};
  for (unsigned seed = 0; seed < 20; ++seed) {
    std::vector<float> expected;
    double expected_value = 0;
    for (const bool is_deferred : {false, true}) {
      const HostBuffer persistent(plan.footprint().persistent, 0xff);
      std::vector<std::int32_t> ids(max_tokens * k, -1);
      std::vector<float> probs(max_tokens * experts), dprobs(experts, -1.f), results(steps * experts, -1.f);
      double value = 0;
      if (!is_deferred) {
        expected = balance<HostExecutor, ThreadComm>(seed, HostStream{}, HostStream{}, persistent, ids, probs, dprobs,
                                                     results, expected_value, step, [](const auto& f) { f(); });
        continue;
      }
      DeferredWorld world(1, 0);
      const DeferredStream compute = world.make_stream(), comm = world.make_stream();
      balance<DeferredExecutor, DeferredComm>(seed, compute, comm, persistent, ids, probs, dprobs, results, value, step,
                                              [&](const auto& f) { compute.run(f); });
      std::mt19937 random(seed);
      world.run(random);
      CHECK(results == expected);
      CHECK(value == expected_value);
    }
  }
}

}  // namespace
