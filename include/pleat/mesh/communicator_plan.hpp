// Which communicators a rank makes for a mesh: the groups in use, without groups of one, each rank set once per lane.
#pragma once

#include <initializer_list>

#include <pleat/mesh/concept.hpp>

namespace pleat::inline v0 {

/// What must be able to run at the same time has a lane, and so a communicator, of its own: gather and reduce of FSDP,
/// and the backward half of an overlapped pipeline (`overlap`) beside its forward half (`main`).
enum class Lane : unsigned char { main, gather, reduce, overlap };

/// A group that a template communicates over. `dp` alone is none of them: parameters are sharded over dp x cp, and
/// data is read, not sent, along dp.
enum class GroupUse : unsigned char { pp, cp, stage, ep, expert_dp, dense_shard, expert_shard, replica };

/// How many lanes there are, and uses of groups.
inline constexpr int lane_count = 4;
inline constexpr int group_use_count = 8;

PLEAT_HD constexpr const char* name_of(Lane lane) {
  switch (lane) {
    case Lane::main:
      return "main";
    case Lane::gather:
      return "gather";
    case Lane::reduce:
      return "reduce";
    case Lane::overlap:
      return "overlap";
  }
  return "?";
}
PLEAT_HD constexpr const char* name_of(GroupUse use) {
  switch (use) {
    case GroupUse::pp:
      return "pp";
    case GroupUse::cp:
      return "cp";
    case GroupUse::stage:
      return "dp x cp";
    case GroupUse::ep:
      return "ep";
    case GroupUse::expert_dp:
      return "expert_dp";
    case GroupUse::dense_shard:
      return "dense shard";
    case GroupUse::expert_shard:
      return "expert shard";
    case GroupUse::replica:
      return "replica";
  }
  return "?";
}
constexpr void append_to(Message& message, Lane lane) {
  message.append(name_of(lane));
}
constexpr void append_to(Message& message, GroupUse use) {
  message.append(name_of(use));
}

/// The one table of what runs in which lane.
constexpr bool in_use(GroupUse use, Lane lane) {
  switch (lane) {
    case Lane::main:
      return true;
    case Lane::gather:
      return use == GroupUse::dense_shard || use == GroupUse::expert_shard;
    case Lane::reduce:
      return use == GroupUse::dense_shard || use == GroupUse::expert_shard || use == GroupUse::replica;
    case Lane::overlap:
      return use == GroupUse::pp || use == GroupUse::cp || use == GroupUse::ep;
  }
  return false;
}

/// The ranks of a use, as a shape.
template <folded_mesh Mesh>
constexpr GroupShape group_shape(const Mesh& mesh, GroupUse use) {
  switch (use) {
    case GroupUse::pp:
      return group_shape<Axis::pp>(mesh);
    case GroupUse::cp:
      return group_shape<Axis::cp>(mesh);
    case GroupUse::stage:
      return group_shape<Axis::dp, Axis::cp>(mesh);
    case GroupUse::ep:
      return group_shape<Axis::ep>(mesh);
    case GroupUse::expert_dp:
      return group_shape<Axis::expert_dp>(mesh);
    case GroupUse::dense_shard:
      return shard_group_shape(mesh, Param::dense);
    case GroupUse::expert_shard:
      return shard_group_shape(mesh, Param::expert);
    case GroupUse::replica:
      return replica_group_shape(mesh);
  }
  return {};
}

/// Some lanes, in no order: a plan goes through them in the order of the enumeration, on every rank.
class LaneSet {
 public:
  constexpr LaneSet(std::initializer_list<Lane> lanes) : LaneSet(lanes.begin(), lanes.end()) {}
  /// From any contiguous range of Lane, such as std::span.
  template <class Lanes>
  requires requires(const Lanes& lanes) { static_cast<const Lane*>(lanes.data() + lanes.size()); }
  constexpr LaneSet(const Lanes& lanes) : LaneSet(lanes.data(), lanes.data() + lanes.size()) {}

  /// Whether the lane is one of them.
  constexpr bool contains(Lane lane) const { return (bits_ >> static_cast<unsigned>(lane) & 1U) != 0; }

 private:
  constexpr LaneSet(const Lane* first, const Lane* last) {
    for (; first != last; ++first) bits_ |= 1U << static_cast<unsigned>(*first);
  }
  unsigned bits_ = 0;
};

/// One communicator to make: `split(color, key)` of the world, called by every rank, gives the one of this rank's
/// `group`, with its ranks in ascending order.
struct PlannedCommunicator {
  Lane lane{};
  Group group{};      ///< of the rank that the plan is for; shape and lane identify the entry
  unsigned uses = 0;  ///< bit `use` is set for every GroupUse that it serves
  int color = 0;      ///< the number of the group among those of its shape
  int key = 0;        ///< the place of the rank in its group

  /// Whether the communicator is the group of this use.
  constexpr bool serves(GroupUse use) const { return (uses >> static_cast<unsigned>(use) & 1U) != 0; }
};

/// The communicators of one rank, in the order in which every rank makes them. The list itself - lanes, shapes, uses -
/// is the same on every rank; groups, colors and keys differ.
class CommunicatorPlan {
 public:
  using iterator = const PlannedCommunicator*;

  template <folded_mesh Mesh>
  constexpr CommunicatorPlan(const Mesh& mesh, int rank, LaneSet lanes) {
    detail::require_rank(rank, mesh.world_size);
    for (int i = 0; i < lane_count; ++i) {
      for (int j = 0; j < group_use_count; ++j) {
        const auto lane = static_cast<Lane>(i);
        const auto use = static_cast<GroupUse>(j);
        index_[i][j] =
            lanes.contains(lane) && in_use(use, lane) ? add(lane, use, group_shape(mesh, use), rank) : not_planned;
      }
    }
  }

  constexpr int size() const { return size_; }
  constexpr const PlannedCommunicator& operator[](int i) const { return entries_[i]; }
  constexpr iterator begin() const { return entries_; }
  constexpr iterator end() const { return entries_ + size_; }

  /// The place in this plan of the communicator for a use, -1 where its groups have one rank.
  /// Errors: M11 when the lane does not have that use.
  constexpr int find(GroupUse use, Lane lane) const {
    const int i = index_[static_cast<int>(lane)][static_cast<int>(use)];
    if (i == not_planned) {
      fail<mesh_error>("pleat[M11]: no communicator for ", use, " is planned in lane ", lane, "; valid: ", *this);
    }
    return i;
  }
  /// The same by axes: pp, cp, dp x cp (or expert_dp x ep, the same ranks), ep, expert_dp. M11 when no template
  /// communicates along them.
  constexpr int find(const AxisSet& axes, Lane lane = Lane::main) const {
    if (axes == AxisSet(Axis::pp)) return find(GroupUse::pp, lane);
    if (axes == AxisSet(Axis::cp)) return find(GroupUse::cp, lane);
    if (axes == AxisSet(Axis::ep)) return find(GroupUse::ep, lane);
    if (axes == AxisSet(Axis::expert_dp)) return find(GroupUse::expert_dp, lane);
    if (axes == AxisSet(Axis::dp, Axis::cp) || axes == AxisSet(Axis::expert_dp, Axis::ep)) {
      return find(GroupUse::stage, lane);
    }
    fail<mesh_error>("pleat[M11]: no template communicates along ", axes, "; valid: ", *this);
  }
  template <Axis... Axes>
  constexpr int find(Lane lane = Lane::main) const {
    return find(AxisSet(Axes...), lane);
  }
  constexpr int find_shard(Param param, Lane lane = Lane::main) const {
    return find(param == Param::dense ? GroupUse::dense_shard : GroupUse::expert_shard, lane);
  }
  constexpr int find_replica(Lane lane = Lane::main) const { return find(GroupUse::replica, lane); }

  /// The uses of each lane: `main: pp, cp, dp x cp; gather: dense shard`.
  friend constexpr void append_to(Message& message, const CommunicatorPlan& plan) {
    const char* next_lane = "";
    for (int i = 0; i < lane_count; ++i) {
      const char* separator = ": ";
      for (int j = 0; j < group_use_count; ++j) {
        if (plan.index_[i][j] == not_planned) continue;
        if (separator[0] == ':') message.append(next_lane).append(name_of(static_cast<Lane>(i)));
        message.append(separator).append(name_of(static_cast<GroupUse>(j)));
        separator = ", ";
        next_lane = "; ";
      }
    }
  }

 private:
  static constexpr int group_of_one = -1;
  static constexpr int not_planned = -2;

  /// Equal shapes are equal sets of ranks, so that every rank merges the same uses.
  constexpr int add(Lane lane, GroupUse use, const GroupShape& shape, int rank) {
    if (shape.size() == 1) return group_of_one;
    int i = 0;
    while (i < size_ && !(entries_[i].lane == lane && entries_[i].group.shape == shape)) ++i;
    if (i == size_) entries_[size_++] = {lane, shape.of(rank), 0, shape.number(rank), shape.index(rank)};
    entries_[i].uses |= 1U << static_cast<unsigned>(use);
    return i;
  }

  PlannedCommunicator entries_[lane_count * group_use_count] = {};
  int index_[lane_count][group_use_count] = {};
  int size_ = 0;
};

/// The communicators that `rank` makes for `mesh` in `lanes`. Pure; all ranks that pass the same mesh and lanes get the
/// same list. Errors: M04.
template <folded_mesh Mesh>
constexpr CommunicatorPlan plan_communicators(const Mesh& mesh, int rank, LaneSet lanes) {
  return {mesh, rank, lanes};
}

}  // namespace pleat::inline v0
