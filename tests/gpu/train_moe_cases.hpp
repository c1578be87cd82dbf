// What the trainer's programs run on GPUs, in a unit that is compiled for the host alone.
#pragma once

#include <vector>

#include <pleat/core/dtype.hpp>

#include "train_moe_steps.hpp"

namespace train_moe_testing {

/// A mesh, and what the run has besides.
struct Case {
  const char* mesh;
  std::vector<const char*> flags{};
};
/// Of ranks that are threads, on one GPU or all that there are.
extern const std::vector<Case> thread_cases;
/// Of two ranks with a GPU each.
extern const std::vector<Case> nccl_cases;

/// The exit code of a program: 0 when all cases passed, of both models or of the one called `only`; `run` is of
/// `dtype`.
int check_all(RunSteps run, pleat::DType dtype, const std::vector<Case>& cases, const char* only);

}  // namespace train_moe_testing
