// The MoE layer on ranks that are threads, which share one GPU or all. Exit code 77 where there is no GPU.
#define DOCTEST_CONFIG_DISABLE  // the backends of the conformance suites serve here without the suites
#include <conformance/cuda_threads.hpp>

#include "moe_cases.cuh"
#include "skip.hpp"

int main() {
  // A kernel that is loaded at its first launch may wait for the device, and so for a peer.
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  if (gpu_testing::lacks_gpus(1)) return gpu_testing::skipped;
  const int devices = pleat::cuda_device_count();
  using namespace moe_gpu_testing;
  const bool quick = testing_support::is_quick();
  int failed = quick ? check_all<conformance::CudaThreads<1>>("threads on one GPU", {3}, 2)
                     : check_all<conformance::CudaThreads<1>>("threads on one GPU", {1, 2, 4, 8}, 25);
  const auto folded = [&](const char* what, auto mesh) {
    using OneGpu = conformance::CudaThreads<1>;
    failed += fails("threads on one GPU", what, 8, [&] { return check_folded<OneGpu, pleat::bfloat16>(mesh); });
  };
  folded("dp4-cp2-ep2", pleat::FoldedMesh<1, 4, 2, 2>{});
  folded("dp2-cp4-ep4", pleat::FoldedMesh<1, 2, 4, 4>{});
  for (const bool has_arena : {false, true}) {  // one rank meets nobody on the host
    failed += fails("one GPU", has_arena ? "graph bf16, arena" : "graph bf16", 1,
                    [&] { return check_graph<conformance::CudaThreads<1>, pleat::bfloat16>(1, has_arena); });
  }
  if (devices < 2) {
    std::printf("skipped: ranks on all GPUs, 2 are needed\n");
  } else {
    failed += quick ? check_all<conformance::CudaThreads<0>>("threads on all GPUs", {2}, 2)
                    : check_all<conformance::CudaThreads<0>>("threads on all GPUs", {2, 4}, 5);
  }
  std::printf("%s\n", failed == 0 ? "all passed" : "some FAILED");
  return failed == 0 ? 0 : 1;
}
