// The sizes of a Mixture-of-Experts transformer, and its parameters as the units that FSDP shards.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include <pleat/core/message.hpp>
#include <pleat/fsdp/plan.hpp>

namespace pleat::inline v0::estimate {

/// A layer either has experts or one dense MLP.
enum class LayerKind : unsigned char { dense, moe };

/// The sizes of a decoder: RMSNorm, attention (grouped queries, or latents as in MLA), SwiGLU experts, a head that is
/// not tied to the embedding. The first `dense_layers` have one MLP in place of experts.
struct Model {
  std::string name = "custom";
  int layers = 0;
  int hidden = 0;
  int vocabulary = 0;
  int heads = 0;
  int kv_heads = 0;
  int qk_dim = 0;
  int v_dim = 0;
  /// MLA: the numbers per token that keys and values are made of, and those of the rope key that all heads share; both
  /// 0 for grouped queries.
  int latent = 0;
  int rope_dim = 0;
  /// RMSNorm of each head's queries and keys.
  bool qk_norm = false;
  int experts = 0;
  int top_k = 0;
  int inner = 0;  ///< of one expert, a shared one too
  int shared_experts = 0;
  int dense_layers = 0;
  int dense_inner = 0;
  /// Whether the load-balance loss counts each sequence alone, or the global batch.
  bool balances_sequences = false;

  /// Whether keys and values come from a latent; numbers per token of queries, keys, values, and of what is attended
  /// to.
  bool has_latent() const { return latent > 0; }
  std::int64_t queries() const { return std::int64_t{heads} * qk_dim; }
  std::int64_t keys() const { return std::int64_t{kv_heads} * qk_dim; }
  std::int64_t values() const { return std::int64_t{kv_heads} * v_dim; }
  std::int64_t attended() const { return std::int64_t{heads} * v_dim; }
  /// Width of the MLP that all tokens of a layer take: of a dense layer, or the shared experts; 0 for none.
  std::int64_t mlp_inner(LayerKind kind) const {
    return kind == LayerKind::dense ? dense_inner : std::int64_t{shared_experts} * inner;
  }
  /// What travels per token of a ring of latents: the latent and the shared rope key; 0 otherwise.
  int latent_row() const { return has_latent() ? latent + rope_dim : 0; }
};

/// The models that are known by name. source: the published config.json of each.
inline std::vector<Model> presets() {
  return {{.name = "qwen3-30b-a3b",
           .layers = 48,
           .hidden = 2048,
           .vocabulary = 151936,
           .heads = 32,
           .kv_heads = 4,
           .qk_dim = 128,
           .v_dim = 128,
           .qk_norm = true,
           .experts = 128,
           .top_k = 8,
           .inner = 768},
          {.name = "deepseek-v2-lite",
           .layers = 27,
           .hidden = 2048,
           .vocabulary = 102400,
           .heads = 16,
           .kv_heads = 16,
           .qk_dim = 192,
           .v_dim = 128,
           .latent = 512,
           .rope_dim = 64,
           .experts = 64,
           .top_k = 6,
           .inner = 1408,
           .shared_experts = 2,
           .dense_layers = 1,
           .dense_inner = 10944,
           .balances_sequences = true}};
}
/// Errors: shape_error N01.
inline Model preset(std::string_view name) {
  std::string known;
  for (Model& model : presets()) {
    if (model.name == name) return std::move(model);
    known += ' ' + model.name;
  }
  fail<shape_error>("pleat[N01]: no model is called \"", name, "\"; valid:", std::string_view(known),
                    ", or sizes one by one");
}

/// Errors: shape_error N02 for a size that cannot be; E02 and A01 come from the plans.
inline void check_model(const Model& m) {
  constexpr int most_width = 1 << 24, most_count = 1 << 14;  // of numbers in a row; of layers, and of experts
  const struct {
    const char* name;
    int value, least, most = most_width;
  } sizes[] = {{"layers", m.layers, 1, most_count},
               {"hidden", m.hidden, 1},
               {"vocabulary", m.vocabulary, 1},
               {"heads", m.heads, 1},
               {"kv_heads", m.kv_heads, 1},
               {"qk_dim", m.qk_dim, 1},
               {"v_dim", m.v_dim, 1},
               {"latent", m.latent, 0},
               {"rope_dim", m.rope_dim, m.latent > 0 ? 1 : 0},
               {"experts", m.experts, 1, most_count},
               {"top_k", m.top_k, 1},
               {"inner", m.inner, 1},
               {"shared_experts", m.shared_experts, 0, most_count},
               {"dense_layers", m.dense_layers, 0},
               {"dense_inner", m.dense_inner, m.dense_layers > 0 ? 1 : 0}};
  for (const auto& size : sizes) {
    if (size.value < size.least || size.value > size.most) {
      fail<shape_error>("pleat[N02]: ", size.name, "=", size.value, " of a model; valid: ", size.least, " to ",
                        size.most);
    }
  }
  if (m.dense_layers > m.layers || m.rope_dim > (m.has_latent() ? m.qk_dim : 0)) {
    fail<shape_error>("pleat[N02]: dense_layers=", m.dense_layers, " of layers=", m.layers,
                      " and rope_dim=", m.rope_dim, " of qk_dim=", m.qk_dim,
                      ": a part is no larger than the whole, and only a model "
                      "with latents has a rope key of its own");
  }
}

/// Consecutive layers that one rank runs as one stage.
struct Chunk {
  int dense_layers = 0;
  int moe_layers = 0;
  bool has_embedding = false;
  bool has_head = false;
  friend bool operator==(const Chunk&, const Chunk&) = default;

  /// Layers of the chunk.
  int layers() const { return dense_layers + moe_layers; }
};
/// Layers [first, first + count) of the model, as a chunk.
inline Chunk chunk_of(const Model& m, int first, int count) {
  const int dense = std::max(0, std::min(m.dense_layers - first, count));
  return {dense, count - dense, first == 0, first + count == m.layers};
}

namespace detail {
inline fsdp::ParamSpec matrix(const char* name, std::int64_t rows, std::int64_t cols,
                              fsdp::Optimizer optimizer = fsdp::Optimizer::adamw) {
  fsdp::ParamSpec spec{.name = name};
  spec.shape = {rows, cols};
  spec.optimizer = optimizer;
  return spec;
}
inline fsdp::ParamSpec norm(const char* name, std::int64_t size) {
  fsdp::ParamSpec spec{.name = name, .weight_decay = false};
  spec.shape = {size};
  return spec;
}
}  // namespace detail

/// The units of one layer, in forward order: attention, the experts of this rank, the MLP that all tokens take.
/// `optimizer` updates the matrices but the router, which like norms, embedding and head stays with AdamW.
inline std::vector<fsdp::UnitSpec> units_of_layer(const Model& m, LayerKind kind, std::int64_t experts_local,
                                                  fsdp::Optimizer optimizer) {
  using detail::matrix, detail::norm;
  std::vector<fsdp::ParamSpec> dense{norm("norm", m.hidden), matrix("query", m.queries(), m.hidden, optimizer)};
  if (m.has_latent()) {
    dense.push_back(matrix("latent", m.latent_row(), m.hidden, optimizer));
    dense.push_back(norm("latent_norm", m.latent));
    dense.push_back(matrix("key_up", std::int64_t{m.heads} * (m.qk_dim - m.rope_dim), m.latent, optimizer));
    dense.push_back(matrix("value_up", std::int64_t{m.heads} * m.v_dim, m.latent, optimizer));
  } else {
    dense.push_back(matrix("key", m.keys(), m.hidden, optimizer));
    dense.push_back(matrix("value", m.values(), m.hidden, optimizer));
  }
  if (m.qk_norm) {
    dense.push_back(norm("query_norm", m.qk_dim));
    dense.push_back(norm("key_norm", m.qk_dim));
  }
  dense.push_back(matrix("output", m.hidden, m.attended(), optimizer));
  dense.push_back(norm("second_norm", m.hidden));
  if (kind == LayerKind::moe) dense.push_back(matrix("router", m.experts, m.hidden));
  std::vector<fsdp::UnitSpec> units{{"attention", Param::dense, 0, std::move(dense), {}}};
  const auto add_mlp = [&](const char* name, Param param, std::int64_t local, std::int64_t inner) {
    units.push_back({name,
                     param,
                     local,
                     {matrix("gate", inner, m.hidden, optimizer), matrix("up", inner, m.hidden, optimizer),
                      matrix("down", m.hidden, inner, optimizer)},
                     {}});
  };
  if (kind == LayerKind::moe) add_mlp("experts", Param::expert, experts_local, m.inner);
  if (const std::int64_t inner = m.mlp_inner(kind); inner > 0) add_mlp("mlp", Param::dense, 0, inner);
  return units;
}
inline fsdp::UnitSpec embedding_unit(const Model& m) {
  return {"embedding", Param::dense, 0, {detail::matrix("tokens", m.vocabulary, m.hidden)}, {}};
}
inline fsdp::UnitSpec head_unit(const Model& m) {
  return {
      "head", Param::dense, 0, {detail::norm("norm", m.hidden), detail::matrix("head", m.vocabulary, m.hidden)}, {}};
}

/// The units of the chunks of a rank, in forward order.
inline std::vector<fsdp::UnitSpec> units_of(const Model& m, std::span<const Chunk> chunks, std::int64_t experts_local,
                                            fsdp::Optimizer optimizer) {
  std::vector<fsdp::UnitSpec> units;
  const auto add = [&](LayerKind kind, int layers) {
    for (int i = 0; i < layers; ++i) {
      for (fsdp::UnitSpec& unit : units_of_layer(m, kind, experts_local, optimizer)) units.push_back(std::move(unit));
    }
  };
  for (const Chunk& chunk : chunks) {
    if (chunk.has_embedding) units.push_back(embedding_unit(m));
    add(LayerKind::dense, chunk.dense_layers);
    add(LayerKind::moe, chunk.moe_layers);
    if (chunk.has_head) units.push_back(head_unit(m));
  }
  return units;
}

/// Parameters of the whole model.
inline std::int64_t parameter_count(const Model& m) {
  const Chunk whole = chunk_of(m, 0, m.layers);
  std::int64_t count = 0;
  for (const fsdp::UnitSpec& unit : units_of(m, {&whole, 1}, m.experts, fsdp::Optimizer::adamw)) {
    for (const fsdp::ParamSpec& param : unit.params) {
      count += fsdp::elems_of(param.shape) * std::max<std::int64_t>(unit.experts_local, 1);
    }
  }
  return count;
}

}  // namespace pleat::inline v0::estimate
