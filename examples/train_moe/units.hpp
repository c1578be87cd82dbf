// The parameters of the model: their names, shapes and initial values, in the units that are gathered together.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include <pleat/fsdp.hpp>

#include "options.hpp"

namespace train_moe {

/// Parameters of an attention unit, in order.
namespace attention_param {
enum : int { norm, query, key, value, query_norm, key_norm, output, expert_norm, router };
}
/// Parameters of an expert unit, in order; each is [local experts, rows, columns].
namespace expert_param {
enum : int { gate, up, down };
}
/// Parameters of the last unit.
namespace head_param {
enum : int { norm, head };
}

/// The units in forward order: embedding, then attention and experts of every layer, then the head.
struct UnitIndex {
  int layers;
  int embedding() const { return 0; }
  int attention(int layer) const { return 1 + 2 * layer; }
  int experts(int layer) const { return 2 + 2 * layer; }
  int head() const { return 1 + 2 * layers; }
  int count() const { return 2 + 2 * layers; }

  /// The units a micro-batch uses, in order: forward, and backward in reverse. The head's forward and backward are one
  /// use; the embedding's backward needs no parameters.
  std::vector<int> order() const {
    std::vector<int> units;
    for (int unit = 0; unit <= head(); ++unit) units.push_back(unit);
    for (int unit = head() - 1; unit > embedding(); --unit) units.push_back(unit);
    return units;
  }
};

inline std::vector<pleat::fsdp::UnitSpec> make_units(const ModelShape& m, int experts_local) {
  using pleat::Param;
  using pleat::fsdp::ParamSpec;
  const auto matrix = [](const char* name, std::int64_t rows, std::int64_t columns) {
    ParamSpec spec;
    spec.name = name;
    spec.shape = {rows, columns};
    return spec;
  };
  const auto norm = [](const char* name, std::int64_t size) {
    ParamSpec spec;
    spec.name = name;
    spec.shape = {size};
    spec.weight_decay = false;
    return spec;
  };
  const std::int64_t queries = static_cast<std::int64_t>(m.heads) * m.head_dim;
  const std::int64_t keys = static_cast<std::int64_t>(m.kv_heads) * m.head_dim;
  std::vector<pleat::fsdp::UnitSpec> units;
  units.push_back({"embedding", Param::dense, 0, {matrix("tokens", m.vocabulary, m.hidden)}, {}});
  for (int layer = 0; layer < m.layers; ++layer) {
    const std::string name = "layers." + std::to_string(layer);
    units.push_back(
        {name + ".attention",
         Param::dense,
         0,
         {norm("norm", m.hidden), matrix("query", queries, m.hidden), matrix("key", keys, m.hidden),
          matrix("value", keys, m.hidden), norm("query_norm", m.head_dim), norm("key_norm", m.head_dim),
          matrix("output", m.hidden, queries), norm("expert_norm", m.hidden), matrix("router", m.experts, m.hidden)},
         {}});
    units.push_back(
        {name + ".experts",
         Param::expert,
         experts_local,
         {matrix("gate", m.inner, m.hidden), matrix("up", m.inner, m.hidden), matrix("down", m.hidden, m.inner)},
         {}});
  }
  units.push_back({"head", Param::dense, 0, {norm("norm", m.hidden), matrix("head", m.vocabulary, m.hidden)}, {}});
  return units;
}

/// The canonical name of a parameter, or of one expert's part of it: `layers.3.experts.gate.17`, numbered over all
/// ranks.
inline std::string parameter_name(const pleat::fsdp::UnitSpec& unit, int param, int global_expert = -1) {
  std::string name = unit.name;
  name.append(".").append(unit.params[static_cast<std::size_t>(param)].name);
  if (global_expert >= 0) name.append(".").append(std::to_string(global_expert));
  return name;
}

/// Initial values of the parameter of this canonical name: norms 1, matrices normal with deviation 0.02. They depend on
/// name and seed alone, so that every mesh starts from the same model.
inline std::vector<double> initial_values(const std::string& name, bool is_norm, std::int64_t elems,
                                          std::uint64_t seed) {
  std::vector<double> values(static_cast<std::size_t>(elems), 1.0);
  if (is_norm) return values;
  std::uint64_t state = 0xcbf29ce484222325u ^ seed;  // FNV-1a of the name
  for (const char c : name) state = (state ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  const auto uniform = [&state] {  // splitmix64, in (0, 1)
    state += 0x9e3779b97f4a7c15u;
    std::uint64_t z = state;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return (static_cast<double>((z ^ (z >> 31)) >> 11) + 0.5) * 0x1p-53;
  };
  for (double& value : values) {  // Box-Muller, one of the pair
    const double radius = std::sqrt(-2 * std::log(uniform()));
    // Rounded to float, so that a run in f32 and its reference in f64 start alike.
    value = static_cast<float>(0.02 * radius * std::cos(2 * 3.14159265358979323846 * uniform()));
  }
  return values;
}

}  // namespace train_moe
