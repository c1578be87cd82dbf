// Sharded training on two GPUs: the bits of the host in every run, whatever is late, whatever else occupies the GPU and
// however many multiprocessors sums have; the same from a captured graph, and a clear error where none can be captured.
// Then the same without graphs, with one hardware queue per GPU. Exit code 77 where there are fewer than two GPUs.
#define DOCTEST_CONFIG_DISABLE  // the backends of the conformance suites serve here without the suites
#include "nccl_backend.cuh"
#include "skip.hpp"
#include "templates_cases.cuh"
#include "two_gpus.cuh"

#include <sys/wait.h>

namespace {

using namespace templates_testing;

constexpr int two = 2;

struct GraphRanks : nccl_testing::NcclRanks {
  using Graph = two_gpus::Graph;
};

/// Also lets kernels of another stream take some multiprocessors, or all, for a while.
class NoisyExecutor : public DelayingExecutor {
 public:
  NoisyExecutor(unsigned seed, cudaStream_t late)
      : DelayingExecutor(seed, late),
        random_(std::make_shared<std::mt19937>(seed)),
        noise_(std::make_shared<CudaStream>()) {}

  void record(const CudaEvent& event, cudaStream_t s) const {
    const auto draw = (*random_)();
    if (draw % 8 == 0) {
      spin<<<1 + draw / 8 % 264, 1024, 0, *noise_>>>(draw / 4096 % 100'000);
      check_launch("spin");
    }
    DelayingExecutor::record(event, s);
  }

 private:
  std::shared_ptr<std::mt19937> random_;
  std::shared_ptr<CudaStream> noise_;
};

std::vector<Bytes> host_bits(const Training& t) {
  std::vector<Bytes> expected(two);
  HostRanks::run(two, 60s, [&](ThreadComm& world) {
    const auto host = [](int, const auto&) { return HostExecutor(); };
    expected[static_cast<std::size_t>(world.rank())] = TrainingRank<HostRanks, decltype(host)>(t, world, host).run();
  });
  return expected;
}

/// `runs` runs of each training, each with another stream late.
template <class Backend>
void check_runs(const char* name, const std::vector<Training>& trainings, int runs) {
  std::vector<std::vector<Bytes>> expected;
  for (const Training& t : trainings) expected.push_back(host_bits(t));
  testing_support::Watchdog watchdog(name, 90s);
  const unsigned seed = std::random_device{}();
  double bytes = 0;
  Backend::run(two, 60s, [&](typename Backend::comm_type& world) {
    if (world.rank() == 0) watchdog.watch(Backend::status(world));
    for (int run = 0; run < runs; ++run) {
      for (std::size_t i = 0; i < trainings.size(); ++i) {
        Training t = trainings[i];
        t.reduce_ctas = std::array{8, 0, 1, 2, 132}[static_cast<std::size_t>(run) % 5];
        const auto noisy = [&](int rank, const fsdp::ShardStreams<cudaStream_t>& s) {
          const std::array streams{s.compute, s.gather, s.reduce, s.own};
          const auto which = static_cast<std::size_t>(run) % (streams.size() + 1);
          const unsigned number = static_cast<unsigned>(run) * 64 + static_cast<unsigned>(i) * 2;
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

std::vector<Training> trainings_of(bool replays) {
  std::vector<Training> made;
  const auto add = [&](const fsdp_testing::RunConfig& config, DType compute, DType gradient, bool uneven) {
    made.push_back({.config = config,
                    .compute = compute,
                    .gradient = gradient,
                    .uneven = uneven,
                    .seed = static_cast<std::int64_t>(std::random_device{}()),
                    .replays = replays});
  };
  const int steps = replays ? 5 : 2;
  for (const Transport transport : {Transport::peer, Transport::collective}) {
    add({.ranks = two, .transport = transport, .micro_batches = 2, .steps = steps, .width = 60}, DType::bf16,
        DType::f32, false);
    add({.ranks = two, .transport = transport, .prefetch = 2, .steps = steps, .alignment_elems = 1}, DType::bf16,
        DType::bf16, true);
  }
  add({.ranks = two, .replicas = two, .transport = Transport::peer, .prefetch = 0, .micro_batches = 3, .steps = steps},
      DType::f32, DType::f32, false);
  return made;
}

/// Ranks that meet on the host cannot be captured.
void check_refusal() {
  using Ranks = conformance::CudaThreads<1>;
  Ranks::run(two, 20s, [](CudaThreadComm& world) {
    const MeshComms comms(RuntimeMesh::fold({.world = two}), world);
    const auto groups = fsdp::groups_of(comms);
    const CudaStream s;
    for (const Transport transport : {Transport::peer, Transport::collective}) {
      const fsdp::Plan plan = fsdp::plan(fsdp_testing::odd_model({}), groups.sizes(), {.transport = transport});
      const CudaBuffer persistent(plan.footprint().persistent);
      CudaThreadArena arena(comms.world(), plan.footprint().symmetric);
      auto op = fsdp::bind(plan, CudaExecutor{}, groups,
                           Memory<CudaThreadArena>{.persistent = persistent.block(), .arena = &arena}, s);
      std::string text;
      try {
        op.fork({s, s, s});
      } catch (const shape_error& e) {
        text = e.what();
      }
      require(text.find("pleat[F17]: fork over") == 0, "threads of one GPU: fork over ", name_of(transport),
              " says: ", text.c_str());
      world.wait(s);
      world.barrier(s);
      world.wait(s);
    }
  });
  std::printf("ok      a graph of ranks that meet on the host is refused\n");
}

int run_all(int runs, bool with_graphs) {
  try {
    check_refusal();
    check_runs<nccl_testing::NcclRanks>("late streams, noise, budgets", trainings_of(false), runs);
    if (with_graphs) check_runs<GraphRanks>("the same from graphs", trainings_of(true), std::max(1, runs / 5));
  } catch (const std::exception& e) {
    std::printf("FAILED  %s\n", e.what());
    return 1;
  }
  return 0;
}

/// This program again in an environment of its own.
int run_with_one_queue(int runs) {
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1", 1);
    execl("/proc/self/exe", "nccl_fsdp_test", "one queue", std::to_string(runs).c_str(), nullptr);
    _exit(1);
  }
  int status = 0;
  (void)waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}

}  // namespace

int main(int argc, char** argv) {
  // A kernel that is loaded at its first launch may wait for the device, and so for a peer.
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  setenv("NCCL_NVLS_ENABLE", "0", 1);
  if (argc == 3 && std::string(argv[1]) == "one queue") {
    std::printf("with one hardware queue:\n");
    // The branches of a graph would enter the one queue in an order that nobody chooses.
    const int failed = run_all(std::atoi(argv[2]), false);
    nccl_testing::end_world();
    return failed;
  }
  if (gpu_testing::lacks_gpus(two)) return gpu_testing::skipped;
  const int runs = argc == 2 ? std::atoi(argv[1]) : 20;  // of five trainings
  int failed = run_all(runs, true);
  nccl_testing::end_world();
  if (failed == 0) failed = run_with_one_queue(std::max(1, runs / 2));
  std::printf("%s\n", failed == 0 ? "all passed" : "some FAILED");
  return failed;
}
