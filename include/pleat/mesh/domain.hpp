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

namespace detail {
/// How many domains one group reaches into, of a stride below a domain: its blocks leave none out. Visits its blocks.
constexpr int domains_of(const Group& group, int gpus_per_domain) {
  const GroupShape& shape = group.shape;
  int spanned = 0;
  int last = -1;
  for (int block = 0; block < shape.outer_count; ++block) {
    const int first_rank = group.first + block * shape.outer_stride;
    const int first = first_rank / gpus_per_domain;
    if (first == last) --spanned;
    last = (first_rank + (shape.count - 1) * shape.stride) / gpus_per_domain;
    spanned += last - first + 1;
  }
  return spanned;
}
}  // namespace detail

/// The largest number of domains that a group of the shape reaches into. Groups of one block: in at most
/// min(world_size / span, world_size / gpus_per_domain, gpus_per_domain) steps. Errors: M00.
constexpr int domains_spanned(const GroupShape& shape, int world_size, int gpus_per_domain) {
  if (fits_domain(shape, world_size, gpus_per_domain)) return 1;
  if (shape.stride >= gpus_per_domain) return shape.size();  // each rank in another one
  const long long span = shape.span();
  int most = 0;
  const auto take = [&](int first) {
    const int spanned = detail::domains_of({first, shape}, gpus_per_domain);
    if (spanned > most) most = spanned;
  };
  const auto repeats = [&](long long first) {  // from here on groups lie in domains as they do from rank 0 on
    return first > 0 && first % span == 0 && first % gpus_per_domain == 0;
  };
  if (shape.outer_count > 1) {
    for (const Group group : GroupList{world_size, shape}) {
      if (repeats(group.first)) break;
      take(group.first);
    }
    return most;
  }
  // One span after the other holds `stride` groups that interleave; the one that starts latest in a domain reaches
  // furthest. Spans between two borders of domains are passed over.
  for (long long first = 0; first < world_size && !repeats(first);) {
    const long long before_border = gpus_per_domain - 1 - first % gpus_per_domain;
    take(static_cast<int>(first + (before_border < shape.stride - 1 ? before_border : shape.stride - 1)));
    const long long next = first + span;
    const long long with_border = ((next - 1) / gpus_per_domain + 1) * gpus_per_domain / span * span;
    first = with_border > next ? with_border : next;
  }
  return most;
}
template <Axis... Axes, folded_mesh Mesh>
constexpr int domains_spanned(const Mesh& mesh, int gpus_per_domain) {
  return domains_spanned(group_shape<Axes...>(mesh), mesh.world_size, gpus_per_domain);
}

}  // namespace pleat::inline v0
