// Whether the ranks of a model have planned the same: what of a plan must be equal, and who compares it.
#pragma once

#include <array>
#include <span>

#include <pleat/comm/plan_digest.hpp>
#include <pleat/fsdp/plan.hpp>

namespace pleat::inline v0::fsdp::detail {

inline void add_to(PlanHash& hash, const ParamSpec& spec) {
  hash.add_all(spec.shape).add(static_cast<int>(spec.granule.kind)).add(spec.granule.block_rows);
  hash.add(spec.granule.or_rows).add(spec.frozen).add(spec.tied_to).add(spec.weight_decay);
  hash.add(static_cast<int>(spec.optimizer)).add(spec.copies);
}

/// Of the units as they are described, before groups are known.
inline PlanHash hash_of(std::span<const UnitSpec> units) {
  PlanHash hash;
  for (const UnitSpec& unit : units) {
    hash.add(static_cast<int>(unit.kind)).add(unit.experts_local).add_all(unit.boundaries);
    for (const ParamSpec& spec : unit.params) add_to(hash, spec);
    hash.add(static_cast<std::int64_t>(unit.params.size()));
  }
  return hash;
}

/// What the ranks of all groups of a plan share: shards, what is sent, and when. Multiprocessors are each rank's own.
inline auto agreement_of(const Plan& plan) {
  PlanHash hash;
  std::int64_t elems = 0;
  for (std::size_t u = 0; u < plan.layouts.size(); ++u) {
    const UnitLayout& unit = plan.layouts[u];
    hash.add(static_cast<int>(plan.kinds[u])).add(unit.experts_local).add_all(unit.boundaries);
    for (const ParamPlace& place : unit.params) add_to(hash.add(place.offset), place.spec);
    elems += unit.total_elems();
  }
  return std::array{PlanField{"units", plan.layouts.size()},
                    PlanField{"elements", elems},
                    PlanField{"hash of units", hash},
                    PlanField{"dense ranks", plan.sizes.dense},
                    PlanField{"expert ranks", plan.sizes.expert},
                    PlanField{"replicas", plan.sizes.replicas},
                    PlanField{"dtype of parameters", plan.compute},
                    PlanField{"dtype of gradients", plan.gradient},
                    PlanField{"transport", plan.transport},
                    PlanField{"prefetch", plan.prefetch},
                    PlanField{"check_order", plan.check_order}};
}

}  // namespace pleat::inline v0::fsdp::detail
