// What the trainer's programs run on ranks that are threads, in each dtype.
#pragma once

#include <train_moe/cuda/backend.cuh>

#include "skip.hpp"
#include "train_moe_cases.cuh"

extern const char train_moe_commit[];
const char train_moe_commit[] = "none";

namespace train_moe_testing {

/// main() of a dtype: on one GPU, or all that there are. Exit code 77 without one; an argument names the model.
template <class T>
int main_on_threads(int argc, char** argv) {
  if (gpu_testing::lacks_gpus(1)) return gpu_testing::skipped;
  return check_all<train_moe::CudaBackend, T>(
      argc > 1 ? argv[1] : nullptr,
      {{"pp1-dp2-cp2-ep4"},
       {"pp1-dp2-cp1-ep2"},
       {"pp1-dp1-cp2-ep2"},
       {"pp1-dp2-cp2-ep2-r2"},
       {"pp1-dp4-cp2-ep8"},
       {"pp1-dp2-cp2-ep4", {"--transport", "collective"}},
       {"pp1-dp2-cp2-ep4", {"--schedule", "1f1b-pairs"}},
       {"pp2-dp2-cp2-ep4"},
       {"pp2-dp2-cp2-ep4", {"--schedule", "1f1b"}},
       {"pp2-dp1-cp2-ep2", {"--schedule", "dualpipev"}},
       {"pp1-dp2-cp2-ep4", {"--packed", "--ragged"}},
       {"pp2-dp1-cp2-ep2", {"--packed", "--ragged"}},
       {"pp2-dp2-cp2-ep4", {"--packed", "--ragged", "--schedule", "dualpipev", "--optimizer", "muon"}}});
}

}  // namespace train_moe_testing
