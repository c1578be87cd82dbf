// The trainer in bf16 on two ranks with a GPU each, over NCCL. Exit code 77 with fewer; an argument names the model.
#include <train_moe/cuda/leaves.cuh>
#include <train_moe/cuda/nccl_backend.cuh>

#include "skip.hpp"
#include "train_moe_cases.hpp"

int main(int argc, char** argv) {
  if (gpu_testing::lacks_gpus(2)) return gpu_testing::skipped;
  using namespace train_moe_testing;
  return check_all(run<train_moe::NcclBackend, pleat::bfloat16>, pleat::dtype_of<pleat::bfloat16>, nccl_cases,
                   argc > 1 ? argv[1] : nullptr);
}
