// The plans that all estimates of a mesh ask: of a layer, of shards, and which layers a rank has.
#pragma once

#include <pleat/estimate/work.hpp>

namespace pleat::inline v0::estimate {

/// What the ranks of a mesh have in common: the plans of their parts, and the stages they are spread over.
struct MeshPlans {
  MeshPlans(const Job& job, const RuntimeMesh& of)
      : mesh(of),
        placement{of.pp, job.chunks_per_rank(of)},
        plans(plan_layer(job, of)),
        arrays(job, plans),
        shards(job, of),
        units(shards.unit_sizes()),
        work(job, of, plans) {
    int first = 0;
    for (const int layers : pipeline::layers_of_stages(job.model.layers, placement.stages())) {
      stages.push_back(chunk_of(job.model, first, layers));
      first += layers;
    }
  }
  MeshPlans(const MeshPlans&) = delete;
  MeshPlans& operator=(const MeshPlans&) = delete;

  /// The layers of a pipeline rank, chunk by chunk.
  std::vector<Chunk> chunks(int rank) const {
    std::vector<Chunk> held;
    for (int c = 0; c < placement.chunks_per_rank; ++c) {
      held.push_back(stages[static_cast<std::size_t>(placement.stage(rank, c))]);
    }
    return held;
  }

  /// Of a live micro-batch of a chunk.
  double bytes_held(const Chunk& chunk) const {
    double held = chunk.has_head ? static_cast<double>(arrays.last_bytes()) : 0;
    for (int i = 0; i < chunk.layers(); ++i) {
      const LayerKind kind = i < chunk.dense_layers ? LayerKind::dense : LayerKind::moe;
      held += static_cast<double>(arrays.saved_bytes(kind, i > 0 || chunk.has_embedding));
    }
    return held;
  }

  RuntimeMesh mesh;
  pipeline::Placement placement;
  LayerPlans plans;
  LayerArrays arrays;
  ShardPlanner shards;
  UnitSizes units;
  LayerWork work;
  std::vector<Chunk> stages;
};

}  // namespace pleat::inline v0::estimate
