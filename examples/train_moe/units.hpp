// The parameters of the model: their names, shapes and initial values, in the units that are gathered together, and
// which of them each stage of the pipeline has.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <pleat/fsdp.hpp>
#include <pleat/pipeline.hpp>

#include "ops.hpp"
#include "options.hpp"

namespace train_moe {

/// Parameters of an attention unit, in order; a layer without experts has no router.
namespace attention_param {
enum : int { norm, query, key, value, query_norm, key_norm, output, second_norm, router };
}
/// The same where keys and values are made of a latent.
namespace latent_param {
enum : int { norm, query, latent, latent_norm, key_up, value_up, output, second_norm, router };
}
/// Parameters of an expert unit, each [local experts, rows, columns], and of a dense MLP.
namespace mlp_param {
enum : int { gate, up, down };
}
/// Parameters of the last unit.
namespace head_param {
enum : int { norm, head };
}

/// The layers of a stage.
struct StageLayers {
  int first = 0;
  int count = 0;
  bool has_embedding = false;
  bool has_head = false;
};
/// Of each stage, in order.
inline std::vector<StageLayers> split_layers(int layers, int stages) {
  std::vector<StageLayers> split;
  int first = 0;
  for (const int count : pleat::pipeline::layers_of_stages(layers, stages)) {
    const int stage = static_cast<int>(split.size());
    split.push_back({first, count, stage == 0, stage == stages - 1});
    first += count;
  }
  return split;
}

/// The units of a layer, by their place in the list; -1 for what it has not.
struct LayerUnits {
  int layer = 0;  // in the whole model
  int attention = -1;
  int experts = -1;
  int mlp = -1;  // of a dense layer, or the shared experts
};
/// The units of one chunk of a rank.
struct ChunkUnits {
  int embedding = -1;
  std::vector<LayerUnits> layers;
  int head = -1;

  /// A pass takes the layers in steps, each with the units that it reads; a backward pass begins with the head.
  int forward_steps() const { return static_cast<int>(layers.size()); }
  int backward_steps() const { return forward_steps() + (head >= 0 ? 1 : 0); }
  /// The layer of a step that is not the head's.
  int backward_layer(int step) const { return backward_steps() - 1 - step; }
  void append_forward(int step, std::vector<int>& order) const {
    const LayerUnits& of = layers[static_cast<std::size_t>(step)];
    if (step == 0) append(embedding, order);
    for (const int unit : {of.attention, of.experts, of.mlp}) append(unit, order);
  }
  void append_backward(int step, std::vector<int>& order) const {
    if (head >= 0 && step == 0) return append(head, order);
    const LayerUnits& of = layers[static_cast<std::size_t>(backward_layer(step))];
    for (const int unit : {of.experts, of.mlp, of.attention}) append(unit, order);
  }

 private:
  static void append(int unit, std::vector<int>& order) {
    if (unit >= 0) order.push_back(unit);
  }
};
/// What a rank holds: units in the order of its chunks' forward passes.
struct RankUnits {
  std::vector<pleat::fsdp::UnitSpec> specs;
  std::vector<ChunkUnits> chunks;
};

/// The units that a step of `program` acquires, in order.
inline std::vector<int> unit_order(const RankUnits& units, const pleat::pipeline::Program& program) {
  const auto chunk_units = [&](int chunk) -> const ChunkUnits& {
    return units.chunks[static_cast<std::size_t>(chunk)];
  };
  std::vector<int> order;
  for (const pleat::pipeline::Op& op : program.ops) {
    const int forward = op.has_forward() ? chunk_units(op.forward.chunk).forward_steps() : 0;
    const int backward = op.has_input_gradient() ? chunk_units(op.backward.chunk).backward_steps() : 0;
    for (int step = 0; step < std::max(forward, backward); ++step) {
      if (step < forward) chunk_units(op.forward.chunk).append_forward(step, order);
      if (step < backward) chunk_units(op.backward.chunk).append_backward(step, order);
    }
  }
  return order;
}

namespace detail {
class UnitWriter {
 public:
  UnitWriter(const Options& o, int experts_local) : o_(o), experts_local_(experts_local) {}

  void chunk(const StageLayers& stage) {
    ChunkUnits units;
    const ModelShape& m = o_.model;
    if (stage.has_embedding) units.embedding = add("embedding", {matrix("tokens", m.vocabulary, m.hidden)});
    for (int layer = stage.first; layer < stage.first + stage.count; ++layer)
      units.layers.push_back(layer_units(layer));
    if (stage.has_head) units.head = add("head", {norm("norm", m.hidden), matrix("head", m.vocabulary, m.hidden)});
    made_.chunks.push_back(std::move(units));
  }
  RankUnits finish() { return std::move(made_); }

 private:
  using Params = std::vector<pleat::fsdp::ParamSpec>;

  int add(const std::string& name, Params params, int experts_local = 0) {
    const auto kind = experts_local > 0 ? pleat::Param::expert : pleat::Param::dense;
    made_.specs.push_back({name, kind, experts_local, std::move(params), {}});
    return static_cast<int>(made_.specs.size()) - 1;
  }
  static pleat::fsdp::ParamSpec matrix(const char* name, std::int64_t rows, std::int64_t columns) {
    pleat::fsdp::ParamSpec spec;
    spec.name = name;
    spec.shape = {rows, columns};
    return spec;
  }
  /// A matrix in the middle of the model.
  pleat::fsdp::ParamSpec inner(const char* name, std::int64_t rows, std::int64_t columns) const {
    pleat::fsdp::ParamSpec spec = matrix(name, rows, columns);
    spec.optimizer = o_.optimizer;
    return spec;
  }
  static pleat::fsdp::ParamSpec norm(const char* name, std::int64_t size) {
    pleat::fsdp::ParamSpec spec;
    spec.name = name;
    spec.shape = {size};
    spec.weight_decay = false;
    return spec;
  }
  Params mlp(std::int64_t width) const {
    const std::int64_t hidden = o_.model.hidden;
    return {inner("gate", width, hidden), inner("up", width, hidden), inner("down", hidden, width)};
  }

  LayerUnits layer_units(int layer) {
    const ModelShape& m = o_.model;
    const std::string name = "layers." + std::to_string(layer);
    const bool routes = m.routes(layer);
    Params params{norm("norm", m.hidden), inner("query", m.queries(), m.hidden)};
    if (m.has_latents()) {
      const LatentShape l = m.latents();
      params.push_back(inner("latent", l.width(), m.hidden));
      params.push_back(norm("latent_norm", l.lora));
      params.push_back(inner("key_up", l.heads * l.nope, l.lora));
      params.push_back(inner("value_up", l.heads * l.value, l.lora));
    } else {
      params.push_back(inner("key", m.keys(), m.hidden));
      params.push_back(inner("value", m.keys(), m.hidden));
      params.push_back(norm("query_norm", m.head_dim));
      params.push_back(norm("key_norm", m.head_dim));
    }
    params.push_back(inner("output", m.hidden, m.attended()));
    params.push_back(norm("second_norm", m.hidden));
    if (routes) params.push_back(matrix("router", m.experts, m.hidden));
    LayerUnits units{.layer = layer};
    units.attention = add(name + ".attention", std::move(params));
    if (routes) units.experts = add(name + ".experts", mlp(m.inner), experts_local_);
    if (m.mlp_inner(layer) > 0) units.mlp = add(name + ".mlp", mlp(m.mlp_inner(layer)));
    return units;
  }

  const Options& o_;
  int experts_local_;
  RankUnits made_;
};
}  // namespace detail

/// The units of a rank that holds `stages`, of which it is one ep rank among `ep`.
inline RankUnits make_units(const Options& o, int ep, std::span<const StageLayers> stages) {
  detail::UnitWriter writer(o, o.model.experts / ep);
  for (const StageLayers& stage : stages) writer.chunk(stage);
  return writer.finish();
}

/// The canonical name of a parameter, or of one expert's part of it: `layers.3.experts.gate.17`, numbered over all
/// ranks.
inline std::string parameter_name(const pleat::fsdp::UnitSpec& unit, int param, int global_expert = -1) {
  std::string name = unit.name;
  name.append(".").append(unit.params[static_cast<std::size_t>(param)].name);
  if (global_expert >= 0) name.append(".").append(std::to_string(global_expert));
  return name;
}

/// The initial values of the parameter of this canonical name: norms 1, matrices normal.
inline Initial initial_of(const std::string& name, bool is_norm, std::uint64_t seed) {
  std::uint64_t key = 0xcbf29ce484222325u ^ seed;  // FNV-1a of the name
  for (const char c : name) key = (key ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return is_norm ? Initial{key, 1, 0} : Initial{key, 0, 0.02};
}

}  // namespace train_moe
