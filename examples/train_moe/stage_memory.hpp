// What the stages of a rank keep of micro-batches, and how a pass finds its way in it.
#pragma once

#include <vector>

#include "head_block.hpp"
#include "mlp_block.hpp"
#include "stage_plan.hpp"

namespace train_moe {

/// Places in memory of the caller's; see places.hpp for how many.
template <class Backend, class T>
class StageMemory {
 public:
  using Plan = StagePlan<Backend, T>;
  using Attention = AttentionBlock<Backend, T>;
  using Experts = ExpertBlock<Backend, T>;
  using Mlp = MlpBlock<Backend, T>;

  struct LayerActivations {
    typename Attention::Activations attention;
    typename Experts::Activations experts;
    typename Mlp::Activations mlp{};
  };
  /// Of a micro-batch on a chunk.
  struct Slot {
    std::vector<LayerActivations> layers;
    T* last = nullptr;  // [tokens, hidden]: the output of the last layer, then its gradient; with a head
  };
  using DeferredLayers = std::vector<typename Experts::Deferred>;
  struct Chunk {
    std::vector<Slot> slots;
    std::vector<DeferredLayers> deferred;
  };

  StageMemory() = default;
  StageMemory(pleat::Carver& memory, const Plan& plan) {
    const auto tokens = static_cast<std::size_t>(plan.attention.tokens);
    const auto rows = [&](std::int64_t width) { return memory.take<T>(tokens * static_cast<std::size_t>(width)); };
    bool has_head = false;
    for (std::size_t c = 0; c < plan.chunks.size(); ++c) {
      const StageLayers& stage = plan.chunks[c];
      has_head = has_head || stage.has_head;
      Chunk& chunk = chunks.emplace_back();
      for (int place = 0; place < plan.activations.count[c]; ++place)
        chunk.slots.push_back(carve_slot(memory, plan, stage));
      for (int place = 0; place < plan.deferred.count[c]; ++place) {
        DeferredLayers& layers = chunk.deferred.emplace_back(static_cast<std::size_t>(stage.count));
        for (int i = 0; i < stage.count; ++i) {
          if (plan.model.routes(stage.first + i))
            layers[static_cast<std::size_t>(i)] = plan.experts.layer.carve_deferred(memory);
        }
      }
    }
    for (int lane = 0; lane < plan.lanes; ++lane) dsecond.push_back(rows(plan.model.hidden));
    if (has_head) head = HeadBlock<Backend, T>(memory, plan.model, plan.attention.tokens);
  }

  std::vector<Chunk> chunks;
  std::vector<T*> dsecond;     // [lane], each [tokens, hidden]: scratch
  HeadBlock<Backend, T> head;  // of the rank that ends the model

 private:
  static Slot carve_slot(pleat::Carver& memory, const Plan& plan, const StageLayers& stage) {
    const auto rows = [&] {
      return memory.take<T>(static_cast<std::size_t>(plan.attention.tokens * plan.model.hidden));
    };
    Slot slot;
    for (int i = 0; i < stage.count; ++i) {
      const int layer = stage.first + i;
      const bool routes = plan.model.routes(layer);
      LayerActivations a;
      a.attention = Attention::carve_activations(memory, plan.attention, routes);
      if (i > 0 || stage.has_embedding) a.attention.x = rows();
      if (routes) a.experts = Experts::carve_activations(memory, plan.experts);
      if (const int inner = plan.model.mlp_inner(layer); inner > 0)
        a.mlp = Mlp::carve_activations(memory, plan.attention.tokens, inner);
      slot.layers.push_back(std::move(a));
    }
    if (stage.has_head) slot.last = rows();
    return slot;
  }
};

/// One pass of a micro-batch over a chunk: its places, and what stands before and behind them.
template <class Backend, class T>
struct StagePass {
  using Memory = StageMemory<Backend, T>;

  const Lane<Backend>* lane;
  const ChunkUnits* units;
  const StageLayers* stage;
  int first_layer;  // among the rank's
  typename Memory::Slot* slot;
  const typename Memory::DeferredLayers* deferred;  // null: the weights' gradients follow at once
  const DeviceBatch* batch;
  T* output;  // forward, of a stage without a head
  const T* output_gradient;
  T* input_gradient;

  std::int64_t rows() const { return batch->rows(); }
  /// Whether a step of a backward pass is that of the head.
  bool is_head(int step) const { return units->head >= 0 && step == 0; }
  int layers() const { return static_cast<int>(slot->layers.size()); }
  typename Memory::LayerActivations& layer(int i) const { return slot->layers[static_cast<std::size_t>(i)]; }
  const LayerUnits& layer_units(int i) const { return units->layers[static_cast<std::size_t>(i)]; }
  /// Where layer i puts its output.
  T* output_of(int i) const {
    if (i + 1 < layers()) return layer(i + 1).attention.x;
    return stage->has_head ? slot->last : output;
  }
  /// Where the gradient of the output of layer i is, and where that of its input goes: in the places of the values.
  const T* output_gradient_of(int i) const {
    if (i + 1 < layers()) return layer(i + 1).attention.x;
    return stage->has_head ? slot->last : output_gradient;
  }
  T* input_gradient_of(int i) const { return i > 0 || stage->has_embedding ? layer(i).attention.x : input_gradient; }
};

}  // namespace train_moe
