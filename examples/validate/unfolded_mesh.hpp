// The mesh before folding, as a baseline: world = pp * dp * cp * ep, every degree an axis of its own.
#pragma once

#include <deque>
#include <string>

#include "groups.hpp"

namespace validate {

/// Ranks count ep fastest, then cp, dp and pp. Data is read over dp and ep: each of these ranks has tokens of its own.
/// Dense parameters are sharded over all ranks of a stage, an expert's over those with the same ep coordinate.
struct UnfoldedMesh {
  int pp = 1;
  int dp = 1;
  int cp = 1;
  int ep = 1;

  int stage_size() const { return dp * cp * ep; }
  int world_size() const { return pp * stage_size(); }
  int data_ranks() const { return dp * ep; }

  /// The mesh of the same degrees pp, cp and ep on as many ranks. Errors: usage_error where they do not fit, which is
  /// what folding is for.
  static UnfoldedMesh like(const pleat::RuntimeMesh& folded) {
    const int used = folded.pp * folded.cp * folded.ep;
    if (folded.replicas != 1 || folded.world_size % used != 0) {
      throw train_moe::usage_error("no mesh without folding has pp=" + std::to_string(folded.pp) +
                                   " cp=" + std::to_string(folded.cp) + " ep=" + std::to_string(folded.ep) + " on " +
                                   std::to_string(folded.world_size) + " ranks: their product must divide it");
    }
    return {folded.pp, folded.world_size / used, folded.cp, folded.ep};
  }
};

/// The communicators of an unfolded mesh, in the trainer's terms: a data rank is one of dp * ep.
template <class Comm>
class UnfoldedComms {
 public:
  /// Collective over `world`, which must outlive this.
  UnfoldedComms(const UnfoldedMesh& mesh, Comm& world) : mesh_(mesh), world_(&world), rank_(world.rank()) {}

  /// Collective; once.
  train_moe::Groups<Comm> groups() {
    using pleat::GroupShape;
    const UnfoldedMesh& m = mesh_;
    const GroupShape stage = GroupShape{}.append(1, m.stage_size());
    const GroupShape same_ep = GroupShape{}.append(m.ep, m.dp * m.cp);
    train_moe::Groups<Comm> groups;
    groups.mesh = pleat::RuntimeMesh({.pp = m.pp, .dp = m.data_ranks(), .cp = m.cp, .ep = m.ep});
    const int ep = rank_ % m.ep, cp = rank_ / m.ep % m.cp, dp = rank_ / (m.ep * m.cp) % m.dp;
    groups.me.pp = rank_ / m.stage_size();
    groups.me.dp = dp * m.ep + ep;
    groups.me.cp = cp;
    groups.me.ep = ep;
    groups.me.expert_dp = dp * m.cp + cp;
    groups.world = pleat::GroupComm<Comm>(*world_);
    groups.stage = split(stage);
    groups.pp = split(GroupShape{}.append(m.stage_size(), m.pp));
    groups.cp = split(GroupShape{}.append(m.ep, m.cp));
    groups.ep = split(GroupShape{}.append(1, m.ep));
    using Lanes = typename pleat::fsdp::Groups<Comm>::Lanes;
    groups.shards.dense = Lanes(split(stage), split(stage));
    groups.shards.expert = Lanes(split(same_ep), split(same_ep));
    groups.shards.replica = pleat::GroupComm<Comm>(rank_, world_);
    return groups;
  }

 private:
  pleat::GroupComm<Comm> split(const pleat::GroupShape& shape) {
    comms_.push_back(world_->split(shape.number(rank_), shape.index(rank_)));
    return {comms_.back(), shape.of(rank_)};
  }

  UnfoldedMesh mesh_;
  Comm* world_;
  int rank_;
  std::deque<Comm> comms_;
};

}  // namespace validate
