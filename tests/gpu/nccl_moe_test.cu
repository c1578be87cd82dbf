// The MoE layer on NCCL's ranks, threads with a GPU each, on mapped memory and by NCCL's operations, and captured in a
// graph. Exit code 77 where there are fewer than two GPUs.
#define DOCTEST_CONFIG_DISABLE  // the backends of the conformance suites serve here without the suites
#include "moe_cases.cuh"
#include "nccl_backend.cuh"
#include "skip.hpp"

int main() {
  // A kernel that is loaded at its first launch may wait for the device, and so for a peer.
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  setenv("NCCL_NVLS_ENABLE", "0", 1);
  if (gpu_testing::lacks_gpus(2)) return gpu_testing::skipped;
  using namespace moe_gpu_testing;
  using nccl_testing::NcclRanks;
  int failed = check_all<NcclRanks>("NCCL threads", {2}, testing_support::is_quick() ? 2 : 25);
  for (const bool has_arena : {false, true}) {
    const char* const what = has_arena ? "graph bf16, arena" : "graph bf16";
    failed += fails("NCCL threads", what, 2, [&] { return check_graph<NcclRanks, pleat::bfloat16>(2, has_arena); });
  }
  failed += fails("NCCL threads", "graph f64", 2, [] { return check_graph<NcclRanks, double>(2, false); });
  nccl_testing::end_world();
  std::printf("%s\n", failed == 0 ? "all passed" : "some FAILED");
  return failed == 0 ? 0 : 1;
}
