// The trainer in bf16 on two ranks with a GPU each, over NCCL. Exit code 77 with fewer GPUs; an argument names the
// model.
#include <train_moe/cuda/nccl_backend.cuh>

#include "skip.hpp"
#include "train_moe_cases.cuh"

extern const char train_moe_commit[];
const char train_moe_commit[] = "none";

int main(int argc, char** argv) {
  if (gpu_testing::lacks_gpus(2)) return gpu_testing::skipped;
  return train_moe_testing::check_all<train_moe::NcclBackend, pleat::bfloat16>(
      argc > 1 ? argv[1] : nullptr,
      {{"pp1-dp1-cp2-ep2"},
       {"pp1-dp2-cp1-ep2"},
       {"pp1-dp2-cp1-ep1-r2"},
       {"pp1-dp1-cp2-ep2", {"--transport", "collective"}},
       {"pp1-dp2-cp1-ep2", {"--schedule", "1f1b-pairs"}},
       {"pp2-dp1-cp1-ep1"},
       {"pp2-dp1-cp1-ep1", {"--schedule", "1f1b"}},
       {"pp2-dp1-cp1-ep1", {"--schedule", "dualpipev"}},
       {"pp1-dp1-cp2-ep2", {"--packed", "--ragged"}},
       {"pp2-dp1-cp1-ep1", {"--packed", "--ragged", "--schedule", "dualpipev", "--optimizer", "muon"}}});
}
