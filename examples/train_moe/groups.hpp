// The groups of one rank, whatever type its mesh has: behind them the trainer knows no mesh type.
#pragma once

#include <pleat/comm.hpp>
#include <pleat/fsdp.hpp>
#include <pleat/moe/losses.hpp>

namespace train_moe {

template <class Comm>
struct Groups {
  pleat::RuntimeMesh mesh;
  pleat::Coordinate me;
  pleat::GroupComm<Comm> world, stage, pp, cp, ep;
  pleat::fsdp::Groups<Comm> shards;

  /// The ranks whose tokens a load-balance loss counts together.
  pleat::GroupComm<Comm> counted_over(pleat::moe::BalanceScope scope) const {
    return scope == pleat::moe::BalanceScope::sequence ? cp : stage;
  }
};

template <pleat::folded_mesh Mesh, class Comm>
Groups<Comm> groups_of(const pleat::MeshComms<Mesh, Comm>& comms) {
  using pleat::Axis;
  return {comms.mesh(),
          pleat::coordinate(comms.mesh(), comms.world().rank()),
          comms.world(),
          comms.template get<Axis::dp, Axis::cp>(),
          comms.template get<Axis::pp>(),
          comms.template get<Axis::cp>(),
          comms.template get<Axis::ep>(),
          pleat::fsdp::groups_of(comms)};
}

}  // namespace train_moe
