// Where micro-batches keep what they need: a schedule says how many are in use at one time, so that places are reused.
#pragma once

#include <optional>
#include <vector>

#include <pleat/pipeline.hpp>

namespace train_moe {

/// Of each chunk of a rank: how many places, and which one each micro-batch takes.
struct Places {
  std::vector<int> count;            // [chunk]
  std::vector<std::vector<int>> of;  // [chunk][micro_batch]
};

/// A place is taken by the op of which `begins(op)` is a Part, until the op of which `ends(op)` is the same is over.
template <class Begins, class Ends>
Places assign_places(const pleat::pipeline::Schedule& schedule, int rank, Begins begins, Ends ends) {
  using pleat::pipeline::Part;
  const auto chunks = static_cast<std::size_t>(schedule.placement.chunks_per_rank);
  Places places{std::vector<int>(chunks), std::vector<std::vector<int>>(chunks)};
  for (auto& of_chunk : places.of) of_chunk.resize(static_cast<std::size_t>(schedule.micro_batches), -1);
  std::vector<std::vector<int>> free(chunks);
  for (const pleat::pipeline::Op& op : schedule.programs[static_cast<std::size_t>(rank)].ops) {
    if (const std::optional<Part> part = begins(op)) {
      const auto chunk = static_cast<std::size_t>(part->chunk);
      if (free[chunk].empty()) free[chunk].push_back(places.count[chunk]++);
      places.of[chunk][static_cast<std::size_t>(part->micro_batch)] = free[chunk].back();
      free[chunk].pop_back();
    }
    if (const std::optional<Part> part = ends(op)) {
      const auto chunk = static_cast<std::size_t>(part->chunk);
      free[chunk].push_back(places.of[chunk][static_cast<std::size_t>(part->micro_batch)]);
    }
  }
  return places;
}

/// Of activations: from the forward pass to the gradients of the weights.
inline Places activation_places(const pleat::pipeline::Schedule& schedule, int rank) {
  using pleat::pipeline::Op;
  return assign_places(
      schedule, rank, [](const Op& op) { return op.has_forward() ? std::optional(op.forward) : std::nullopt; },
      [](const Op& op) { return op.has_weight_gradient() ? std::optional(op.backward) : std::nullopt; });
}
/// Of what weights' gradients that are put off need besides.
inline Places deferred_places(const pleat::pipeline::Schedule& schedule, int rank) {
  using pleat::pipeline::Op;
  using pleat::pipeline::OpKind;
  const auto of_kind = [](OpKind kind) {
    return [kind](const Op& op) { return op.kind == kind ? std::optional(op.backward) : std::nullopt; };
  };
  return assign_places(schedule, rank, of_kind(OpKind::input_backward), of_kind(OpKind::weight_backward));
}

}  // namespace train_moe
