// Weights of Hugging Face: their folders as catalogs, and the names of two models' tensors there.
#pragma once

#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <pleat/checkpoint/load.hpp>

namespace pleat::inline v0::checkpoint {

/// A tensor's name in a model of this library and in its Hugging Face files. `{layer}` and `{expert}` stand for
/// numbers.
struct NamePair {
  std::string_view model, hugging_face;
};

/// qwen3-30b-a3b. source: the tensor names of Qwen/Qwen3-30B-A3B.
inline constexpr NamePair qwen3_moe_names[] = {
    {"embedding.tokens", "model.embed_tokens.weight"},
    {"layers.{layer}.attention.norm", "model.layers.{layer}.input_layernorm.weight"},
    {"layers.{layer}.attention.query", "model.layers.{layer}.self_attn.q_proj.weight"},
    {"layers.{layer}.attention.key", "model.layers.{layer}.self_attn.k_proj.weight"},
    {"layers.{layer}.attention.value", "model.layers.{layer}.self_attn.v_proj.weight"},
    {"layers.{layer}.attention.query_norm", "model.layers.{layer}.self_attn.q_norm.weight"},
    {"layers.{layer}.attention.key_norm", "model.layers.{layer}.self_attn.k_norm.weight"},
    {"layers.{layer}.attention.output", "model.layers.{layer}.self_attn.o_proj.weight"},
    {"layers.{layer}.attention.expert_norm", "model.layers.{layer}.post_attention_layernorm.weight"},
    {"layers.{layer}.attention.router", "model.layers.{layer}.mlp.gate.weight"},
    {"layers.{layer}.experts.gate.{expert}", "model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight"},
    {"layers.{layer}.experts.up.{expert}", "model.layers.{layer}.mlp.experts.{expert}.up_proj.weight"},
    {"layers.{layer}.experts.down.{expert}", "model.layers.{layer}.mlp.experts.{expert}.down_proj.weight"},
    {"head.norm", "model.norm.weight"},
    {"head.head", "lm_head.weight"},
};

/// deepseek-v2-lite: latent attention, a first layer without experts, shared experts as one matrix each.
/// source: the tensor names of deepseek-ai/DeepSeek-V2-Lite.
inline constexpr NamePair deepseek_v2_lite_names[] = {
    {"embedding.tokens", "model.embed_tokens.weight"},
    {"layers.{layer}.attention.norm", "model.layers.{layer}.input_layernorm.weight"},
    {"layers.{layer}.attention.query", "model.layers.{layer}.self_attn.q_proj.weight"},
    {"layers.{layer}.attention.latent_down", "model.layers.{layer}.self_attn.kv_a_proj_with_mqa.weight"},
    {"layers.{layer}.attention.latent_norm", "model.layers.{layer}.self_attn.kv_a_layernorm.weight"},
    {"layers.{layer}.attention.latent_up", "model.layers.{layer}.self_attn.kv_b_proj.weight"},
    {"layers.{layer}.attention.output", "model.layers.{layer}.self_attn.o_proj.weight"},
    {"layers.{layer}.attention.expert_norm", "model.layers.{layer}.post_attention_layernorm.weight"},
    {"layers.{layer}.attention.router", "model.layers.{layer}.mlp.gate.weight"},
    {"layers.{layer}.dense.gate", "model.layers.{layer}.mlp.gate_proj.weight"},
    {"layers.{layer}.dense.up", "model.layers.{layer}.mlp.up_proj.weight"},
    {"layers.{layer}.dense.down", "model.layers.{layer}.mlp.down_proj.weight"},
    {"layers.{layer}.shared.gate", "model.layers.{layer}.mlp.shared_experts.gate_proj.weight"},
    {"layers.{layer}.shared.up", "model.layers.{layer}.mlp.shared_experts.up_proj.weight"},
    {"layers.{layer}.shared.down", "model.layers.{layer}.mlp.shared_experts.down_proj.weight"},
    {"layers.{layer}.experts.gate.{expert}", "model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight"},
    {"layers.{layer}.experts.up.{expert}", "model.layers.{layer}.mlp.experts.{expert}.up_proj.weight"},
    {"layers.{layer}.experts.down.{expert}", "model.layers.{layer}.mlp.experts.{expert}.down_proj.weight"},
    {"head.norm", "model.norm.weight"},
    {"head.head", "lm_head.weight"},
};

namespace detail {
struct Placeholder {
  std::string_view name, digits;
};
/// Whether `name` is `pattern` with digits for placeholders, which are appended to `found`.
inline bool matches(std::string_view pattern, std::string_view name, std::vector<Placeholder>& found) {
  while (!pattern.empty()) {
    if (pattern.front() == '{') {
      const std::size_t close = pattern.find('}'), past = name.find_first_not_of("0123456789");
      const std::string_view digits = name.substr(0, past);
      if (digits.empty()) return false;
      found.push_back({pattern.substr(0, close + 1), digits});
      pattern.remove_prefix(close + 1);
      name.remove_prefix(digits.size());
    } else {
      if (name.empty() || name.front() != pattern.front()) return false;
      pattern.remove_prefix(1);
      name.remove_prefix(1);
    }
  }
  return name.empty();
}
}  // namespace detail

/// The Hugging Face name of a tensor of the model. Errors: checkpoint_error K13 when the table has none.
inline std::string hugging_face_name(std::span<const NamePair> table, const std::string& tensor) {
  for (const NamePair& pair : table) {
    std::vector<detail::Placeholder> values;
    if (!detail::matches(pair.model, tensor, values)) continue;
    std::string name(pair.hugging_face);
    for (const auto& [placeholder, digits] : values) name.replace(name.find(placeholder), placeholder.size(), digits);
    return name;
  }
  fail<checkpoint_error>("pleat[K13]: the table of ", table.size(), " names has none for tensor ", tensor,
                         "; add a row, or call the unit and its parameter as the table does");
}

/// How to load Hugging Face weights into masters: by name, converted to their dtype. `table` is borrowed; the model has
/// no states, since such files have none.
inline LoadOptions hugging_face_options(std::span<const NamePair> table) {
  return {.name_in_file = [table](const std::string& tensor) { return hugging_face_name(table, tensor); },
          .convert = true};
}

/// The catalog of a folder of Hugging Face: `model.safetensors`, or the files that `model.safetensors.index.json`
/// names. Links are followed, for their cache is made of them.
/// Errors: checkpoint_error K01, K02, K03 when a tensor is missing or there twice, K06, K07.
inline Catalog open_hugging_face(const std::string& folder) {
  Catalog catalog;
  catalog.folder = folder;
  catalog.links = Links::follow;
  const std::string index = "model.safetensors.index.json", where = path_in(folder, index);
  std::map<std::string, std::string> file_of;
  std::set<std::string> names;
  if (exists(where)) {
    const std::string text = read_text(where, catalog.links, max_header_bytes);
    JsonReader json(text, where);
    json.object([&](const std::string& key) {
      if (key != "weight_map") return json.skip();
      json.object([&](const std::string& tensor) {
        const std::string file = json.string();
        check_plain_name(file, where);
        names.insert(file);
        file_of.emplace(tensor, file);
      });
    });
    json.end();
  } else {
    names.insert("model.safetensors");
  }
  for (const std::string& name : names) {
    const int file = static_cast<int>(catalog.files.size());
    catalog.files.push_back({name, File::read(path_in(folder, name), catalog.links).size_bytes()});
    const SafetensorsHeader header = read_header(catalog.path(file), catalog.links);
    for (const auto& [tensor, entry] : header.tensors) {
      CatalogTensor made{entry.dtype, entry.shape};
      made.chunks.push_back({file, header.data_begin + entry.begin, 0, checked_elems(entry.shape)});
      if (!catalog.tensors.emplace(tensor, std::move(made)).second) {
        fail<checkpoint_error>("pleat[K03]: two files of ", folder, " have a tensor ", tensor);
      }
    }
  }
  for (const auto& [tensor, file] : file_of) {
    const auto found = catalog.tensors.find(tensor);
    if (found == catalog.tensors.end() ||
        catalog.files[static_cast<std::size_t>(found->second.chunks[0].file)].name != file) {
      fail<checkpoint_error>("pleat[K03]: ", where, " says that ", file, " has tensor ", tensor, ", which it has not");
    }
  }
  check_catalog(catalog);
  return catalog;
}

}  // namespace pleat::inline v0::checkpoint
