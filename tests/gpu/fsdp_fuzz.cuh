// Sharded training again and again, whatever is late, whatever else occupies the GPU and however many multiprocessors
// sums have: the bits of the host in every run.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>

#include <pleat/cuda/leaf.cuh>

#include <support/watchdog.hpp>

#include "delays.cuh"
#include "fsdp_training.hpp"

namespace templates_testing {

using namespace std::chrono_literals;

/// Also lets kernels of another stream take some multiprocessors, or all, for a while, and begins with 10 ms in front
/// of all that the late stream does.
class NoisyExecutor : public DelayingExecutor {
 public:
  NoisyExecutor(unsigned seed, cudaStream_t late)
      : DelayingExecutor(seed, late),
        random_(std::make_shared<std::mt19937>(seed)),
        late_(std::make_shared<cudaStream_t>(late)),
        noise_(std::make_shared<CudaStream>()) {}

  void record(const CudaEvent& event, cudaStream_t s) const {
    if (s == *late_) {
      spin<<<1, 1, 0, s>>>(10'000'000);
      check_launch("spin");
      *late_ = nullptr;
    }
    const auto draw = (*random_)();
    if (draw % 8 == 0) {
      spin<<<1 + draw / 8 % 264, 1024, 0, *noise_>>>(draw / 4096 % 100'000);
      check_launch("spin");
    }
    DelayingExecutor::record(event, s);
  }

 private:
  std::shared_ptr<std::mt19937> random_;
  std::shared_ptr<cudaStream_t> late_;  // null once it was late
  std::shared_ptr<CudaStream> noise_;
};

inline std::vector<Bytes> host_bits(const Training& t) {
  const int ranks = t.config.ranks;
  std::vector<Bytes> expected(static_cast<std::size_t>(ranks));
  HostRanks::run(ranks, 60s, [&](ThreadComm& world) {
    const auto host = [](int, const auto&) { return HostExecutor(); };
    expected[static_cast<std::size_t>(world.rank())] = TrainingRank<HostRanks, decltype(host)>(t, world, host).run();
  });
  return expected;
}

/// `runs` runs of each training, all on the same number of ranks, each run with another stream late.
template <class Backend>
void check_runs(const char* name, const std::vector<Training>& trainings, int runs) {
  std::vector<std::vector<Bytes>> expected;
  for (const Training& t : trainings) expected.push_back(host_bits(t));
  testing_support::Watchdog watchdog(name, 90s);
  const unsigned seed = std::random_device{}();
  double bytes = 0;
  Backend::run(trainings.front().config.ranks, 60s, [&](typename Backend::comm_type& world) {
    if (world.rank() == 0) watchdog.watch(Backend::status(world));
    for (int run = 0; run < runs; ++run) {
      for (std::size_t i = 0; i < trainings.size(); ++i) {
        Training t = trainings[i];
        t.reduce_ctas = std::array{8, 0, 1, 2, 132}[static_cast<std::size_t>(run) % 5];
        const auto noisy = [&](int rank, const fsdp::ShardStreams<cudaStream_t>& s) {
          const std::array streams{s.compute, s.gather, s.reduce, s.own};
          const auto which = static_cast<std::size_t>(run) % (streams.size() + 1);
          const auto number = static_cast<unsigned>(run) * 512 + static_cast<unsigned>(i) * 64;
          return NoisyExecutor(seed + number + static_cast<unsigned>(rank),
                               which < streams.size() ? streams[which] : nullptr);
        };
        const Bytes seen = TrainingRank<Backend, decltype(noisy)>(t, world, noisy).run();
        conformance::require_equal(seen, expected[i][static_cast<std::size_t>(world.rank())], name, ": run ", run,
                                   " of training ", i, " (", name_of(t.config.transport), ", reduce_ctas ",
                                   t.reduce_ctas, ", seed ", t.seed, " and ", seed, ") of rank ", world.rank());
        if (world.rank() == 0) bytes += static_cast<double>(seen.size());
      }
    }
  });
  std::printf("ok      %-32s  %3d runs of %zu trainings, %.1f MB equal\n", name, runs, trainings.size(), bytes / 1e6);
  std::fflush(stdout);
}

/// What random numbers of this run are drawn from: PLEAT_TEST_SEED, for ranks in processes of their own, or something
/// new.
inline unsigned run_seed() {
  const char* const given = std::getenv("PLEAT_TEST_SEED");
  return given != nullptr ? static_cast<unsigned>(std::strtoul(given, nullptr, 10)) : std::random_device{}();
}

inline std::vector<Training> fuzzed_trainings(int ranks, bool replays) {
  std::vector<Training> made;
  std::mt19937 seeds(run_seed());
  const auto add = [&](const fsdp_testing::RunConfig& config, DType compute, DType gradient, bool uneven) {
    made.push_back({.config = config,
                    .compute = compute,
                    .gradient = gradient,
                    .uneven = uneven,
                    .seed = static_cast<std::int64_t>(seeds()),
                    .replays = replays});
  };
  const int steps = replays ? 5 : 2;
  for (const Transport transport : {Transport::peer, Transport::collective}) {
    add({.ranks = ranks, .transport = transport, .micro_batches = 2, .steps = steps, .width = 60}, DType::bf16,
        DType::f32, false);
    add({.ranks = ranks, .transport = transport, .prefetch = 2, .steps = steps, .alignment_elems = 1}, DType::bf16,
        DType::bf16, true);
  }
  add({.ranks = ranks, .replicas = 2, .transport = Transport::peer, .prefetch = 0, .micro_batches = 3, .steps = steps},
      DType::f32, DType::f32, false);
  // Experts on ranks alone, then everything: gradients are written in shards.
  add({.ranks = ranks, .ep = ranks, .transport = Transport::peer, .micro_batches = 3, .steps = steps}, DType::bf16,
      DType::f32, false);
  add({.ranks = ranks, .replicas = ranks, .transport = Transport::peer, .micro_batches = 2, .steps = steps}, DType::f32,
      DType::f32, false);
  if (ranks % 4 == 0) {
    add({.ranks = ranks, .ep = 2, .replicas = 2, .transport = Transport::peer, .micro_batches = 2, .steps = steps},
        DType::bf16, DType::f32, false);
  }
  return made;
}

/// This program again in an environment of its own.
inline int run_with_one_queue(int runs) {
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1", 1);
    execl("/proc/self/exe", "again", "one queue", std::to_string(runs).c_str(), nullptr);
    _exit(1);
  }
  int status = 0;
  (void)waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}

}  // namespace templates_testing
