// Where a mesh meets a model, a sequence or a communicator: M06, M07, M08.
#pragma once

#include <pleat/mesh/concept.hpp>

namespace pleat::inline v0 {

namespace detail {
template <int EP, int Experts>
struct EP_must_divide_experts {
  static constexpr bool ok = Experts >= 1 && divides(EP, Experts);
  static_assert(
      ok,
      "pleat[M06]: EP must divide the number of experts: choose EP among its divisors, or a multiple of EP experts");
};

PLEAT_HD constexpr long long greatest_common_divisor(long long a, long long b) {
  while (b != 0) {
    const long long rest = a % b;
    a = b;
    b = rest;
  }
  return a;
}
}  // namespace detail

/// How many of a layer's `experts` routed experts each rank of a group of `ep` hosts. `stage` is a multiple of every
/// possible ep. Errors: M06.
PLEAT_HD constexpr int experts_per_rank(int ep, int experts, long long stage) {
  if (experts < 1) fail<mesh_error>("pleat[M06]: experts=", experts, " must be at least 1");
  if (ep < 1) fail<mesh_error>("pleat[M06]: ep=", ep, " must be at least 1");
  if (!detail::divides(ep, experts)) {
    fail<mesh_error>("pleat[M06]: experts=", experts, " is not divisible by ep=", ep,
                     "; valid ep: ", Divisors{detail::greatest_common_divisor(experts, stage)},
                     ", or experts: a multiple of ", ep);
  }
  return experts / ep;
}
/// The same for the ep groups of a mesh.
template <folded_mesh Mesh>
PLEAT_HD constexpr int experts_per_rank(const Mesh& mesh, int experts) {
  return experts_per_rank(mesh.ep, experts, mesh.stage_size);
}
/// The same for a number that is a constant; with a static mesh M06 is a compile error.
template <int Experts, folded_mesh Mesh>
PLEAT_HD constexpr int experts_per_rank(const Mesh& mesh) {
  if constexpr (!static_mesh<Mesh>) {
    return experts_per_rank(mesh, Experts);
  } else if constexpr (detail::EP_must_divide_experts<Mesh::ep, Experts>::ok) {
    return Experts / Mesh::ep;
  } else {
    return 0;
  }
}

/// Tokens in each chunk of the dense zigzag over a sequence of `sequence` tokens: `2 * cp` equal chunks, and one, the
/// whole, for `cp == 1`. Errors: M07; a sequence of any other length takes the packed path.
template <folded_mesh Mesh>
PLEAT_HD constexpr long long zigzag_chunk_tokens(const Mesh& mesh, long long sequence) {
  if (sequence < 1) fail<mesh_error>("pleat[M07]: sequence=", sequence, " must be at least 1");
  if (mesh.cp == 1) return sequence;
  const long long chunks = 2LL * mesh.cp;
  if (sequence % chunks != 0) {
    const long long below = sequence < chunks ? chunks : sequence / chunks * chunks;
    fail<mesh_error>("pleat[M07]: sequence=", sequence, " is not a multiple of 2*cp=", chunks,
                     "; valid sequence: ", below, ' ', below + chunks, " .. (other lengths: the packed path)");
  }
  return sequence / chunks;
}

/// Errors: M08 when a communicator of `ranks` ranks cannot carry the mesh.
template <folded_mesh Mesh>
PLEAT_HD constexpr void check_world(const Mesh& mesh, int ranks) {
  if (ranks != mesh.world_size) {
    fail<mesh_error>("pleat[M08]: a communicator of ", ranks, " ranks cannot carry the mesh ", mesh,
                     "; valid ranks: ", int{mesh.world_size});
  }
}

}  // namespace pleat::inline v0
