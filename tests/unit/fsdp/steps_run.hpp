// Runs of a Sharder on small units, for tests of single steps.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include <pleat/comm.hpp>
#include <pleat/fsdp.hpp>

namespace sharder_steps {

using namespace pleat;
using Sharder = fsdp::Sharder<HostExecutor, ThreadComm, HostArena>;
using Groups = fsdp::Groups<ThreadComm>;

/// Binds `units` on every rank of `groups(world)` and runs f(op, world).
inline void with_sharder(int ranks, std::vector<fsdp::UnitSpec> units, const fsdp::Options& options,
                         const std::function<Groups(ThreadComm&)>& groups_of_rank,
                         const std::function<void(Sharder&, ThreadComm&)>& f) {
  run_ranks(ranks, [&](ThreadComm& world) {
    const Groups groups = groups_of_rank(world);
    const fsdp::Plan plan = fsdp::plan(units, groups.sizes(), options);
    const HostBuffer persistent(plan.footprint().persistent, 0xff);
    HostArena arena(GroupComm<ThreadComm>(world), plan.footprint().symmetric);
    Sharder op =
        fsdp::bind(plan, HostExecutor{}, groups, Memory<HostArena>{.persistent = persistent.block(), .arena = &arena});
    f(op, world);
  });
}
inline Groups dense_world(ThreadComm& world) {
  return {.dense = Groups::Lanes(GroupComm<ThreadComm>(world))};
}
/// One vector parameter of `elems` elements per unit.
inline std::vector<fsdp::UnitSpec> vectors(int count, std::int64_t elems) {
  std::vector<fsdp::UnitSpec> units;
  for (int u = 0; u < count; ++u) {
    units.push_back({.name = "unit " + std::to_string(u), .params = {{.name = "w", .shape = {elems}}}});
  }
  return units;
}
template <class T>
void write(Sharder& op, int unit, std::vector<T> values) {
  const auto [tensor, accumulate] = op.gradient(unit, {}).write(0);
  for (std::size_t i = 0; i < values.size(); ++i) {
    T& to = tensor.template as<T>()[i];
    to = accumulate ? static_cast<T>(to + values[i]) : values[i];
  }
}
template <class T>
std::vector<T> gradient_of(Sharder& op, int unit, std::size_t elems) {
  std::vector<T> values(elems);
  op.export_gradient(unit, 0, values, {});
  return values;
}

inline constexpr Transport transports[] = {Transport::collective, Transport::peer};

}  // namespace sharder_steps
