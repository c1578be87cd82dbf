// The MoE layer on NCCL's ranks, threads and processes with a GPU each, on mapped memory and by NCCL's operations, and
// captured in a graph. PLEAT_TEST_RANKS: how many, two by default. Exit code 77 where there are fewer GPUs.
#define DOCTEST_CONFIG_DISABLE  // the backends of the conformance suites serve here without the suites
#include "moe_cases.cuh"
#include "nccl_backend.cuh"
#include "nccl_runner.hpp"
#include "skip.hpp"

namespace {

void check_ranks() {
  using namespace moe_gpu_testing;
  using nccl_testing::NcclRanks;
  using nccl_testing::world_ranks;
  const char* const ranks = nccl_testing::ranks_are_processes() ? "NCCL processes" : "NCCL threads";
  int failed = check_all<NcclRanks>(ranks, {world_ranks}, testing_support::is_quick() ? 2 : 25);
  for (const bool has_arena : {false, true}) {
    const char* const what = has_arena ? "graph bf16, arena" : "graph bf16";
    failed += fails(ranks, what, world_ranks,
                    [&] { return check_graph<NcclRanks, pleat::bfloat16>(world_ranks, has_arena); });
  }
  failed += fails(ranks, "graph f64", world_ranks, [] { return check_graph<NcclRanks, double>(world_ranks, false); });
  nccl_testing::end_world();
  if (failed != 0) throw std::runtime_error(std::to_string(failed) + " checks failed");
}

}  // namespace

/// `nccl_moe_test [threads|processes]`.
int main(int argc, char** argv) {
  // A kernel that is loaded at its first launch may wait for the device, and so for a peer.
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  setenv("NCCL_NVLS_ENABLE", "0", 1);
  setenv("PLEAT_TEST_SEED", std::to_string(std::random_device{}()).c_str(), 0);  // one for all processes
  const std::vector<nccl_testing::Case> cases{{"threads", false, check_ranks, 120},
                                              {"processes", true, check_ranks, 120}};
  if (argc == 3 && std::strcmp(argv[1], "--case") == 0) return nccl_testing::run_case(cases, argv[2]);
  if (gpu_testing::lacks_gpus(nccl_testing::world_ranks)) return gpu_testing::skipped;
  return nccl_testing::run_all(cases, "/proc/self/exe", argc > 1 ? argv[1] : "");
}
