// FSDP and ring attention on ranks that are threads, which share one GPU or all: gathered units, gradients and masters
// have the host's bits, attention has one result on both transports. Exit code 77 where there is no GPU.
//
//   templates_test [<part of a template's name>]
#define DOCTEST_CONFIG_DISABLE  // the backends of the conformance suites serve here without the suites
#include <conformance/cuda_threads.hpp>

#include "skip.hpp"
#include "templates_cases.cuh"

int main(int argc, char** argv) {
  // A kernel that is loaded at its first launch may wait for the device, and so for a peer.
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  if (gpu_testing::lacks_gpus(1)) return gpu_testing::skipped;
  const int devices = pleat::cuda_device_count();
  using namespace templates_testing;
  print_header();
  const char* const part = argc > 1 ? argv[1] : "";
  const bool quick = testing_support::is_quick();  // an even and an odd number of ranks reach every kernel
  int failed = quick ? check_templates<conformance::CudaThreads<1>>("threads on one GPU", {2, 5}, part)
                     : check_templates<conformance::CudaThreads<1>>("threads on one GPU", {1, 2, 3, 4, 5, 8}, part);
  if (devices < 2) {
    std::printf("skipped: ranks on all GPUs, 2 are needed\n");
  } else {
    failed += quick ? check_templates<conformance::CudaThreads<0>>("threads on all GPUs", {4}, part)
                    : check_templates<conformance::CudaThreads<0>>("threads on all GPUs", {2, 3, 4, 5, 8}, part);
  }
  std::printf("%s\n", failed == 0 ? "all passed" : "some FAILED");
  return failed == 0 ? 0 : 1;
}
