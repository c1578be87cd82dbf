// FSDP and ring attention on NCCL's ranks, threads with a GPU each, on mapped memory and by NCCL's operations; see
// templates_test.cu. PLEAT_TEST_RANKS: how many, two by default. Exit code 77 where there are fewer GPUs.
#define DOCTEST_CONFIG_DISABLE  // the backends of the conformance suites serve here without the suites
#include "nccl_backend.cuh"
#include "skip.hpp"
#include "templates_cases.cuh"

int main() {
  // A kernel that is loaded at its first launch may wait for the device, and so for a peer.
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  setenv("NCCL_NVLS_ENABLE", "0", 1);
  if (gpu_testing::lacks_gpus(nccl_testing::world_ranks)) return gpu_testing::skipped;
  using namespace templates_testing;
  print_header();
  const int failed = check_templates<nccl_testing::NcclRanks>("NCCL threads", {1, nccl_testing::world_ranks});
  nccl_testing::end_world();
  std::printf("%s\n", failed == 0 ? "all passed" : "some FAILED");
  return failed == 0 ? 0 : 1;
}
