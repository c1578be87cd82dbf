// The schedules of FSDP and ring attention on ranks with GPUs, from the same source as on the host and against it.
#pragma once

#include <cstdio>
#include <cstring>
#include <mutex>

#include <pleat/cuda/leaf.cuh>

#include <conformance/host_threads.hpp>
#include <unit/attention/ring_run.hpp>

#include "delays.cuh"
#include "fsdp_training.hpp"
#include "naive_attention.cuh"
#include "ring_calls.hpp"

namespace templates_testing {

using namespace std::chrono_literals;
using conformance::milliseconds;
using conformance::require;

/// The number of a case chooses which of `streams` is late; after the last comes the one in which each of them is.
template <std::size_t n>
DelayingExecutor delayed(std::size_t number, int rank, const std::array<cudaStream_t, n>& streams) {
  const std::size_t which = number % (n + 1);
  return {std::random_device{}() + static_cast<unsigned>(rank), which < n ? streams[which] : nullptr};
}

inline std::vector<Training> trainings(int ranks) {
  using Config = fsdp_testing::RunConfig;
  std::vector<Training> cases;
  const auto add = [&](const Config& config, DType compute = DType::f32, DType gradient = DType::f32,
                       bool uneven = false) {
    for (const Transport transport : {Transport::collective, Transport::peer}) {
      cases.push_back({config, compute, gradient, uneven, static_cast<std::int64_t>(std::random_device{}())});
      cases.back().config.transport = transport;
    }
  };
  add({.ranks = ranks});
  add({.ranks = ranks, .prefetch = 0, .micro_batches = 3});
  add({.ranks = ranks, .prefetch = 2, .micro_batches = 2, .alignment_elems = 1}, DType::f32, DType::f32, true);
  add({.ranks = ranks, .micro_batches = 2}, DType::bf16);
  add({.ranks = ranks, .prefetch = 2, .micro_batches = 2}, DType::bf16, DType::bf16, true);
  add({.ranks = ranks, .micro_batches = 2, .alignment_elems = 128, .width = 60}, DType::bf16);
  if (ranks % 2 == 0) {
    add({.ranks = ranks, .replicas = 2, .prefetch = 2, .micro_batches = 3});
    add({.ranks = ranks, .ep = 2, .micro_batches = 2, .steps = 3}, DType::bf16);
  }
  if (ranks % 4 == 0) add({.ranks = ranks, .ep = 2, .replicas = 2, .prefetch = 0, .micro_batches = 2});
  if (ranks % 8 == 0) add({.ranks = ranks, .ep = 2, .replicas = 4, .micro_batches = 2}, DType::bf16);
  return cases;
}

/// What a row of the table says.
struct Outcome {
  int cases = 0;
  double bytes = 0;  // that were compared bit by bit
  double worst = 0;  // relative L2 of what may differ
};

template <class Backend>
Outcome check_trainings(int ranks, testing_support::Watchdog& watchdog) {
  const std::vector<Training> cases = trainings(ranks);
  std::vector<std::vector<Bytes>> expected(cases.size(), std::vector<Bytes>(static_cast<std::size_t>(ranks)));
  HostRanks::run(ranks, 60s, [&](ThreadComm& world) {
    const auto host = [](int, const auto&) { return HostExecutor(); };
    for (std::size_t i = 0; i < cases.size(); ++i) {
      expected[i][static_cast<std::size_t>(world.rank())] =
          TrainingRank<HostRanks, decltype(host)>(cases[i], world, host).run();
    }
  });
  Outcome outcome{.cases = static_cast<int>(cases.size())};
  std::mutex mutex;
  Backend::run(ranks, 60s, [&](typename Backend::comm_type& world) {
    if (world.rank() == 0) watchdog.watch(Backend::status(world));
    for (std::size_t i = 0; i < cases.size(); ++i) {
      const auto device = [&](int rank, const fsdp::ShardStreams<cudaStream_t>& s) {
        return delayed(i / 2, rank, std::array{s.compute, s.gather, s.reduce});
      };
      const Bytes seen = TrainingRank<Backend, decltype(device)>(cases[i], world, device).run();
      conformance::require_equal(seen, expected[i][static_cast<std::size_t>(world.rank())], "training ", i, " (",
                                 name_of(cases[i].config.transport), ", seed ", cases[i].seed, ") of rank ",
                                 world.rank());
      const std::lock_guard lock(mutex);
      outcome.bytes += static_cast<double>(seen.size());
    }
  });
  return outcome;
}

inline std::vector<oracle::Problem> ring_problems(int ranks) {
  return {{.batch = 2, .tokens = 6 * ranks, .q_heads = 4, .kv_heads = 2, .qk_dim = 12, .v_dim = 5},
          {.batch = 2, .tokens = 5 * ranks + 1, .q_heads = 3, .kv_heads = 3, .causal = false},
          {.tokens = 87, .q_heads = 4, .kv_heads = 1, .v_dim = 6, .cu_seqlens = {0, 9, 16, 16, 24, 64, 65, 80}},
          {.batch = 2, .tokens = 40, .q_heads = 4, .kv_heads = 2, .causal = false, .cu_seqlens = {0, 3, 30, 40}},
          {.tokens = 480, .q_heads = 4, .kv_heads = 2, .qk_dim = 32, .v_dim = 32}};
}

inline bool same_bits(const std::vector<double>& a, const std::vector<double>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0;
}
inline std::string scientific(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2e", value);
  return text;
}
/// Rows that see no key have an LSE of -inf on both sides.
inline double difference_of_lse(const std::vector<double>& a, const std::vector<double>& b) {
  std::vector<double> finite_a, finite_b;
  for (std::size_t i = 0; i < b.size(); ++i) {
    require(std::isinf(a[i]) == std::isinf(b[i]), "row ", i, " sees keys on one side alone");
    if (std::isinf(b[i])) continue;
    finite_a.push_back(a[i]);
    finite_b.push_back(b[i]);
  }
  return oracle::relative_l2(finite_a, finite_b);
}

template <class Backend, class T>
Outcome check_ring(int ranks, double tolerance, testing_support::Watchdog& watchdog) {
  const std::vector<oracle::Problem> problems = ring_problems(ranks);
  constexpr Transport transports[] = {Transport::collective, Transport::peer};
  std::vector<oracle::Inputs> inputs;
  std::vector<oracle::Outputs> got[2];
  for (const oracle::Problem& p : problems) {
    inputs.push_back(oracle::draw(p, std::random_device{}(), ring_run::as_stored<T>));
    for (auto& outputs : got) outputs.push_back(poisoned_outputs(p, inputs.back()));
  }
  Backend::run(ranks, 60s, [&](typename Backend::comm_type& world) {
    if (world.rank() == 0) watchdog.watch(Backend::status(world));
    for (std::size_t i = 0; i < problems.size(); ++i) {
      for (std::size_t way = 0; way < 2; ++way) {
        const auto device = [&](int rank, const Streams<cudaStream_t>& s) {
          return delayed(i, rank, std::array{s.compute, s.comm});
        };
        run_ring<Backend, T>(world, problems[i], inputs[i], transports[way], 2, device, got[way][i]);
      }
    }
  });
  Outcome outcome{.cases = static_cast<int>(2 * problems.size())};
  for (std::size_t i = 0; i < problems.size(); ++i) {
    const oracle::Outputs& hops = got[0][i];
    const oracle::Outputs& pushes = got[1][i];
    const oracle::Outputs host = ring_run::run<T>(problems[i], inputs[i], ranks, {});
    const auto check = [&](const char* what, std::vector<double> oracle::Outputs::*member, double difference) {
      require(same_bits(hops.*member, pushes.*member), "problem ", i, ": the bits of ", what,
              " depend on the transport");
      require(difference <= tolerance, "problem ", i, ": ", what, " is off the host's by ",
              scientific(difference).c_str());
      outcome.bytes += static_cast<double>((hops.*member).size() * sizeof(accumulator_t<T>));
      outcome.worst = std::max(outcome.worst, difference);
    };
    check("lse", &oracle::Outputs::lse, difference_of_lse(hops.lse, host.lse));
    check("out", &oracle::Outputs::out, oracle::relative_l2(hops.out, host.out));
    check("dq", &oracle::Outputs::dq, oracle::relative_l2(hops.dq, host.dq));
    check("dk", &oracle::Outputs::dk, oracle::relative_l2(hops.dk, host.dk));
    check("dv", &oracle::Outputs::dv, oracle::relative_l2(hops.dv, host.dv));
  }
  return outcome;
}

/// The rows of one backend, of templates whose names have `part`. Returns how many failed.
template <class Backend>
int check_templates(const char* backend, std::initializer_list<int> sizes, const std::string& part = "") {
  int failed = 0;
  const auto row = [&](const char* what, int ranks, auto check) {
    if (std::string(what).find(part) == std::string::npos) return;
    const auto start = std::chrono::steady_clock::now();
    testing_support::Watchdog watchdog(std::string(what) + " on " + backend + ", " + std::to_string(ranks) + " ranks",
                                       90s);
    Outcome outcome;
    std::string failure;
    try {
      outcome = check(watchdog);
    } catch (const std::exception& e) {
      failure = e.what();
      ++failed;
    }
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    std::printf("%-6s  %-22s  %-9s  %5d  %5d  %10.2f  %10.1e  %5.1f\n", failure.empty() ? "ok" : "FAILED", backend,
                what, ranks, outcome.cases, outcome.bytes / 1e6, outcome.worst, took.count());
    if (!failure.empty()) std::printf("        %s\n", failure.c_str());
    std::fflush(stdout);
  };
  for (const int ranks : sizes) {
    row("fsdp", ranks, [&](auto& watchdog) { return check_trainings<Backend>(ranks, watchdog); });
    row("ring f32", ranks, [&](auto& watchdog) { return check_ring<Backend, float>(ranks, 1e-5, watchdog); });
    row("ring bf16", ranks, [&](auto& watchdog) { return check_ring<Backend, bfloat16>(ranks, 1e-3, watchdog); });
  }
  return failed;
}
inline void print_header() {
  std::printf("%-6s  %-22s  %-9s  %5s  %5s  %10s  %10s  %5s\n", "", "backend", "template", "ranks", "cases", "equal MB",
              "worst L2", "s");
}

}  // namespace templates_testing
