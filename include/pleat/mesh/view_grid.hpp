// A view of one stage as a page shows it: rows and columns of ranks, cut where a page ends.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include <pleat/mesh/domain.hpp>

namespace pleat::inline v0 {

/// What to show beside the two views.
struct DrawOptions {
  int gpus_per_domain = 8;  ///< ranks of a node
};

namespace detail {

inline std::string to_text(Message message) {
  return {message.c_str(), static_cast<std::size_t>(message.size())};
}
template <class... Parts>
std::string text(const Parts&... parts) {
  return to_text(message_of(parts...));
}

/// Row by row: a row is a group along the inner axis (cp, ep), a column one along the outer axis (dp, expert_dp).
template <folded_mesh Mesh>
struct ViewGrid {
  static constexpr int most_rows = 32;

  Mesh mesh;
  View view;
  int most_columns;

  Axis outer() const { return view == View::attention ? Axis::dp : Axis::expert_dp; }
  Axis inner() const { return view == View::attention ? Axis::cp : Axis::ep; }
  int rows() const { return view == View::attention ? mesh.dp : mesh.expert_dp; }
  int columns() const { return view == View::attention ? mesh.cp : mesh.ep; }
  int shown_rows() const { return std::min(rows(), most_rows); }
  int shown_columns() const { return std::min(columns(), most_columns); }
  int rank(int stage, int row, int column) const {
    return view == View::attention ? pleat::rank(mesh, AttentionCoordinate{stage, row, column})
                                   : pleat::rank(mesh, ExpertCoordinate{stage, row, column});
  }
};

/// All stages of a small world, the first of a large one: further ones look the same, only their ranks are higher.
template <folded_mesh Mesh>
int shown_stages(const Mesh& mesh) {
  return mesh.world_size <= 64 ? mesh.pp : 1;
}
template <folded_mesh Mesh>
std::string hidden_stages_note(const Mesh& mesh) {
  const int shown = shown_stages(mesh);
  if (shown == mesh.pp) return {};
  return text("stages 1..", mesh.pp - 1, ": the same, each ", int{mesh.stage_size}, " ranks further on");
}
template <folded_mesh Mesh>
std::string summary(const Mesh& mesh) {
  const std::string replicas = mesh.replicas == 1 ? "" : text(", ", int{mesh.replicas}, " replicas");
  return text(int{mesh.world_size}, mesh.world_size == 1 ? " rank = " : " ranks = ", int{mesh.pp},
              mesh.pp == 1 ? " stage" : " stages", " of ", int{mesh.stage_size}, replicas);
}

/// How a kind of group, of more than one rank, lies in the domains.
struct DomainNote {
  std::string groups;
  int size;
  int spanned;
};
template <folded_mesh Mesh>
std::vector<DomainNote> domain_notes(const Mesh& mesh, int gpus_per_domain) {
  std::vector<DomainNote> notes;
  for (const AxisSet axes : {AxisSet(Axis::cp), AxisSet(Axis::dp), AxisSet(Axis::dp, Axis::cp), AxisSet(Axis::ep),
                             AxisSet(Axis::expert_dp), AxisSet(Axis::pp)}) {
    const GroupShape shape = group_shape(mesh, axes);
    if (shape.size() == 1) continue;
    notes.push_back({text(axes), shape.size(), domains_spanned(shape, mesh.world_size, gpus_per_domain)});
  }
  return notes;
}

}  // namespace detail
}  // namespace pleat::inline v0
