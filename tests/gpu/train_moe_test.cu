// The trainer on ranks that share a GPU, or all that there are, with the library's GPU templates. Exit code 77 without
// a GPU; an argument names the only cases to run: "mla bf16".
#include <train_moe/cuda/backend.cuh>

#include "skip.hpp"
#include "train_moe_cases.cuh"

extern const char train_moe_commit[];
const char train_moe_commit[] = "none";

int main(int argc, char** argv) {
  if (gpu_testing::lacks_gpus(1)) return gpu_testing::skipped;
  return train_moe_testing::check_all<train_moe::CudaBackend>(
      argc > 1 ? argv[1] : nullptr, {"pp1-dp2-cp2-ep4", "pp1-dp2-cp1-ep2", "pp1-dp1-cp2-ep2", "pp1-dp2-cp2-ep2-r2",
                                     "pp1-dp4-cp2-ep8", "pp2-dp2-cp2-ep4", "pp2-dp1-cp2-ep2"});
}
