// A pass of a rank played on its streams: units are gathered ahead of what computes with them, and their gradients
// summed behind.
#pragma once

#include <pleat/estimate/traffic.hpp>

namespace pleat::inline v0::estimate {

/// One unit of a pass, in the order in which they are used.
struct UnitStep {
  Param kind = Param::dense;
  double compute = 0;  ///< seconds on the stream that computes
  double gather = 0;   ///< seconds of its gather; 0 where nothing is gathered
  double sum = 0;      ///< seconds of the sum of its gradients; 0 where there is none
};

/// Whether steps are a whole step of training, or a pass in the middle of one: its first unit came during the pass
/// before, and its last sums end during the one behind.
enum class PlayedPart : unsigned char { pass, whole };

/// How long the streams are busy with the steps, or wait. `room`: slots and gradient units of both kinds.
inline double play(std::span<const UnitStep> steps, const std::array<fsdp::KindPlan, 2>& room,
                   PlayedPart part = PlayedPart::pass) {
  std::array<std::vector<double>, 2> used, summed;  // when each step of a kind let its slot, and its gradient, go
  double compute = 0, gathers = 0, sums = 0;
  bool is_first = part == PlayedPart::pass;
  for (const UnitStep& step : steps) {
    const auto kind = static_cast<std::size_t>(step.kind);
    if (step.gather > 0) {
      const std::size_t slots = static_cast<std::size_t>(std::max(room[kind].slots, 1)), before = used[kind].size();
      if (before >= slots) gathers = std::max(gathers, used[kind][before - slots]);
      if (!is_first) gathers += step.gather;
      compute = std::max(compute, gathers);
      is_first = false;
    }
    if (step.sum > 0) {
      const std::size_t units = static_cast<std::size_t>(std::max(room[kind].gradient_units, 1)),
                        before = summed[kind].size();
      if (before >= units) compute = std::max(compute, summed[kind][before - units]);
    }
    compute += step.compute;
    if (step.gather > 0) used[kind].push_back(compute);
    if (step.sum > 0) summed[kind].push_back(sums = std::max(sums, compute) + step.sum);
  }
  if (part == PlayedPart::whole) return std::max(compute, sums);
  // Links that carry more than the pass hides hold up the next one.
  return std::max({compute, gathers, sums - (steps.empty() ? 0 : steps.back().sum)});
}

}  // namespace pleat::inline v0::estimate
