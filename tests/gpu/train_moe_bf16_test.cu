// The trainer in bf16 on ranks that are threads, on one GPU or all that there are. Exit code 77 without one; an
// argument names the model.
#include <train_moe/cuda/backend.cuh>
#include <train_moe/cuda/leaves.cuh>

#include "skip.hpp"
#include "train_moe_cases.hpp"

int main(int argc, char** argv) {
  if (gpu_testing::lacks_gpus(1)) return gpu_testing::skipped;
  using namespace train_moe_testing;
  return check_all(run<train_moe::CudaBackend, pleat::bfloat16>, pleat::dtype_of<pleat::bfloat16>, thread_cases,
                   argc > 1 ? argv[1] : nullptr);
}
