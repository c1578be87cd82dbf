// MeshComms: the communicators of a folded mesh, made once, in one order, on every rank.
#pragma once

#include <deque>

#include <pleat/comm/group_comm.hpp>
#include <pleat/mesh.hpp>
#include <pleat/mesh/communicator_plan.hpp>

namespace pleat::inline v0 {

/// Owns one communicator per planned group of this rank (see communicator_plan.hpp) and hands out handles on them.
/// `world` and this object must outlive the handles; a handle on a group of one holds no communicator.
template <folded_mesh Mesh, communicator Comm>
class MeshComms {
 public:
  /// Collective over `world`: one `split` per planned communicator. Errors: mesh_error M08 when `world` has another
  /// size than the mesh.
  MeshComms(const Mesh& mesh, Comm& world, LaneSet lanes = {Lane::main, Lane::gather, Lane::reduce})
      : mesh_(mesh), world_(&world), plan_(checked_plan(mesh, world, lanes)) {
    for (const PlannedCommunicator& planned : plan_) comms_.push_back(world.split(planned.color, planned.key));
  }

  /// The mesh that the communicators were made for.
  const Mesh& mesh() const { return mesh_; }
  /// All ranks of the job.
  GroupComm<Comm> world() const { return GroupComm<Comm>(*world_); }

  /// The group along `Axes`. Errors: mesh_error M11 for a group that no template communicates over.
  template <Axis... Axes>
  GroupComm<Comm> get(Lane lane = Lane::main) const {
    return handle(plan_.template find<Axes...>(lane));
  }
  /// The ranks among which my parameters of class `param` are sharded. Errors: mesh_error M11.
  GroupComm<Comm> shard(Param param, Lane lane = Lane::main) const { return handle(plan_.find_shard(param, lane)); }
  /// The ranks that hold the same shards as I do, one per replica. Errors: mesh_error M11.
  GroupComm<Comm> replica(Lane lane = Lane::main) const { return handle(plan_.find_replica(lane)); }

 private:
  static CommunicatorPlan checked_plan(const Mesh& mesh, const Comm& world, LaneSet lanes) {
    check_world(mesh, world.size());
    return plan_communicators(mesh, world.rank(), lanes);
  }
  GroupComm<Comm> handle(int i) const {
    if (i < 0) return GroupComm<Comm>(world_->rank(), world_);
    return {comms_[static_cast<std::size_t>(i)], plan_[i].group};
  }

  Mesh mesh_;
  Comm* world_;
  CommunicatorPlan plan_;
  mutable std::deque<Comm> comms_;  // handles point into it
};

}  // namespace pleat::inline v0
