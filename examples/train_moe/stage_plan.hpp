// The plan of a rank's stages.
#pragma once

#include <algorithm>
#include <vector>

#include <pleat/pipeline.hpp>

#include "attention_block.hpp"
#include "expert_block.hpp"
#include "groups.hpp"
#include "places.hpp"
#include "units.hpp"

namespace train_moe {

/// The stages of one rank: which layers, how many micro-batches they hold at one time, and the plans of the blocks.
template <class Backend, class T>
struct StagePlan {
  using Attention = AttentionBlock<Backend, T>;
  using Experts = ExpertBlock<Backend, T>;

  ModelShape model;
  std::vector<StageLayers> chunks;
  Places activations, deferred;
  int lanes = 1;
  typename Attention::Plan attention;
  typename Experts::Plan experts;  // lane 0's; the others' have no loss

  typename Experts::Plan experts_of(int lane) const {
    typename Experts::Plan own = experts;
    if (lane > 0) own.balanced_layers = 0;
    return own;
  }
  OpsShape ops_shape() const {
    const std::int64_t widest = std::max({std::int64_t{model.hidden}, model.queries(), model.attended(),
                                          std::int64_t{model.dense_inner}, std::int64_t{model.shared} * model.inner});
    return {attention.tokens, model.hidden, model.vocabulary, widest, pleat::dtype_of<T>};
  }

  static StagePlan make(const Options& o, const Groups<typename Backend::Comm>& groups, const DataMap& data,
                        const pleat::pipeline::Schedule& schedule) {
    StagePlan made;
    made.model = o.model;
    const int rank = groups.me.pp;
    const auto split = split_layers(o.model.layers, schedule.placement.stages());
    for (int chunk = 0; chunk < schedule.placement.chunks_per_rank; ++chunk) {
      made.chunks.push_back(split[static_cast<std::size_t>(schedule.placement.stage(rank, chunk))]);
    }
    made.activations = activation_places(schedule, rank);
    made.deferred = deferred_places(schedule, rank);
    for (const pleat::pipeline::Op& op : schedule.programs[static_cast<std::size_t>(rank)].ops) {
      if (op.kind == pleat::pipeline::OpKind::overlapped) made.lanes = 2;
    }
    made.attention = Attention::plan(o, data, groups.mesh.cp);
    int layers = 0;
    for (const StageLayers& chunk : made.chunks) layers += chunk.count;
    const int counted = o.balance ? groups.counted_over(*o.balance).size() : 1;
    made.experts = Experts::plan(o, data.streams(), made.attention.tokens, groups.mesh.ep, counted, layers);
    return made;
  }

  /// What the stages need of the arena, beside the parameters.
  pleat::Footprint symmetric() const {
    pleat::Footprint need = attention.footprint();
    for (int lane = 0; lane < lanes; ++lane) need = need + experts_of(lane).footprint();
    return need;
  }
  int status_words() const { return lanes * experts.layer.dispatch.status_words(); }
};

}  // namespace train_moe
