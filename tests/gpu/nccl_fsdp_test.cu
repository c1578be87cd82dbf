// Sharded training on two GPUs: the bits of the host in every run, whatever is late, whatever else occupies the GPU and
// however many multiprocessors sums have; the same from a captured graph, and a clear error where none can be captured.
// Then the same without graphs, with one hardware queue per GPU. Exit code 77 where there are fewer than two GPUs.
#define DOCTEST_CONFIG_DISABLE  // the backends of the conformance suites serve here without the suites
#include "fsdp_fuzz.cuh"
#include "nccl_backend.cuh"
#include "skip.hpp"
#include "two_gpus.cuh"

namespace {

using namespace templates_testing;

constexpr int two = 2;

struct GraphRanks : nccl_testing::NcclRanks {
  using Graph = two_gpus::Graph;
};

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
    check_runs<nccl_testing::NcclRanks>("late streams, noise, budgets", fuzzed_trainings(two, false), runs);
    if (with_graphs) check_runs<GraphRanks>("the same from graphs", fuzzed_trainings(two, true), std::max(1, runs / 5));
  } catch (const std::exception& e) {
    std::printf("FAILED  %s\n", e.what());
    return 1;
  }
  return 0;
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
