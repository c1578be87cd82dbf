// Sharded training on eight ranks that share one GPU: the bits of the host in every run, whatever is late, whatever
// else occupies the GPU and however many multiprocessors sums have; then with one hardware queue. Exit code 77 where
// there is no GPU.
#define DOCTEST_CONFIG_DISABLE  // the backends of the conformance suites serve here without the suites
#include <conformance/cuda_threads.hpp>

#include "fsdp_fuzz.cuh"
#include "skip.hpp"

namespace {

int run_all(const char* name, int runs) {
  using namespace templates_testing;
  try {
    check_runs<conformance::CudaThreads<1>>(name, fuzzed_trainings(8, false), runs);
  } catch (const std::exception& e) {
    std::printf("FAILED  %s\n", e.what());
    return 1;
  }
  return 0;
}

}  // namespace

/// `fsdp_test [runs]`, of eight trainings, or `fsdp_test "one queue" runs`.
int main(int argc, char** argv) {
  // A kernel that is loaded at its first launch may wait for the device, and so for a peer.
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  if (argc == 3 && std::string(argv[1]) == "one queue") return run_all("with one hardware queue", std::atoi(argv[2]));
  if (gpu_testing::lacks_gpus(1)) return gpu_testing::skipped;
  const int runs = argc == 2 ? std::atoi(argv[1]) : testing_support::is_quick() ? 1 : 20;
  int failed = run_all("late streams, noise, budgets", runs);
  if (failed == 0) failed = templates_testing::run_with_one_queue(std::max(1, runs / 2));
  std::printf("%s\n", failed == 0 ? "all passed" : "some FAILED");
  return failed;
}
