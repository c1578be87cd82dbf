// Which groups stay inside one domain: a node, or whatever one NVLink fabric joins.
#pragma once

#include <pleat/mesh/concept.hpp>

namespace pleat::inline v0 {

/// Whether every group of a shape stays inside one domain of `gpus_per_domain` consecutive ranks; the last domain may
/// be smaller. Errors: M00.
PLEAT_HD constexpr bool fits_domain(const GroupShape& shape, int world_size, int gpus_per_domain) {
  detail::require_at_least_1("gpus_per_domain", gpus_per_domain);
  // Groups that interleave cover every boundary inside their span, so only domains of whole spans cut none of them.
  return shape.size() == 1 || gpus_per_domain >= world_size || gpus_per_domain % shape.span() == 0;
}
template <Axis... Axes, folded_mesh Mesh>
PLEAT_HD constexpr bool fits_domain(const Mesh& mesh, int gpus_per_domain) {
  return fits_domain(group_shape<Axes...>(mesh), mesh.world_size, gpus_per_domain);
}

/// The largest number of domains that a group of the shape reaches into. Visits every rank. Errors: M00.
constexpr int domains_spanned(const GroupShape& shape, int world_size, int gpus_per_domain) {
  detail::require_at_least_1("gpus_per_domain", gpus_per_domain);
  int most = 0;
  for (const Group group : GroupList{world_size, shape}) {
    int spanned = 0;
    int last = -1;
    for (const int rank : group) {
      if (rank / gpus_per_domain != last) ++spanned;
      last = rank / gpus_per_domain;
    }
    if (spanned > most) most = spanned;
  }
  return most;
}
template <Axis... Axes, folded_mesh Mesh>
constexpr int domains_spanned(const Mesh& mesh, int gpus_per_domain) {
  return domains_spanned(group_shape<Axes...>(mesh), mesh.world_size, gpus_per_domain);
}

}  // namespace pleat::inline v0
