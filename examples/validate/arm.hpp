// An arm: one run of the trainer, as validation compares several of.
#pragma once

#include <string>

#include "log.hpp"
#include "options.hpp"

namespace validate {

struct Arm {
  std::string name;
  train_moe::Options options;
  bool unfolded = false;  // on the baseline's mesh of the same degrees
};

/// What a run leaves.
struct Outcome {
  Log log;
  /// With options.check: the largest relative differences from one rank in float64, over all steps.
  double loss = 0, gradients = 0, norm = 0;
};

/// Runs an arm on host ranks; its log is `folder/<name>.json`, of the steps from `first_step` to the last. Errors:
/// those of the trainer and of read_log.
Outcome run_arm(const Arm& arm, const std::string& folder, int first_step = 1);

}  // namespace validate
