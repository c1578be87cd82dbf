// The numbers of tokens by which losses of a step are divided, and what their values are summed in.
#pragma once

namespace pleat::inline v0::moe {

/// Tokens of the whole step, all micro-batches and ranks of dp x cp together. Losses read it from device memory: with
/// masked targets only a sum over ranks tells, and nobody waits for it.
struct StepTokens {
  double targets = 0;  ///< by which the step divides all gradients, once
  double routed = 0;   ///< with at least one routed id: those that a loss counts
};

/// Doubles of scratch in which a leaf adds up the value of a loss, in an order of its own.
inline constexpr int loss_partials = 512;

}  // namespace pleat::inline v0::moe
