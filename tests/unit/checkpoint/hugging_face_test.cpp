// Weights in the files and under the names of Hugging Face, loaded into shards of any mesh.
#include <doctest/doctest.h>

#include "unit/checkpoint/sample_model.hpp"

using namespace checkpoint_testing;

namespace {
using Specs = std::vector<fsdp::ParamSpec>;

/// A small model with the units of a preset.
Model preset(const RuntimeMesh& mesh, bool is_deepseek) {
  Model model{std::vector<std::vector<Unit>>(static_cast<std::size_t>(mesh.pp)), {}};
  const auto add = [&](int stage, const std::string& name, Param kind, const Specs& params, std::int64_t experts = 0) {
    model.stages[static_cast<std::size_t>(stage)].push_back(
        {name, kind,
         fsdp::plan_unit(params, shard_group_shape(mesh, kind).size(),
                         {.experts_local = experts, .alignment_elems = 8}),
         DType::f32});
  };
  const auto gated = [](std::int64_t inner) {
    return Specs{{.name = "gate", .shape = {inner, 8}},
                 {.name = "up", .shape = {inner, 8}},
                 {.name = "down", .shape = {8, inner}}};
  };
  add(0, "embedding", Param::dense, {{.name = "tokens", .shape = {32, 8}}});
  for (int layer = 0; layer < 2; ++layer) {
    const int stage = layer * mesh.pp / 2;
    const std::string name = "layers." + std::to_string(layer);
    const bool has_experts = !is_deepseek || layer != 0;
    Specs attention = {{.name = "norm", .shape = {8}}, {.name = "query", .shape = {12, 8}}};
    if (is_deepseek) {
      attention.insert(attention.end(), {{.name = "latent_down", .shape = {6, 8}},
                                         {.name = "latent_norm", .shape = {4}},
                                         {.name = "latent_up", .shape = {16, 4}}});
    } else {
      attention.insert(attention.end(), {{.name = "key", .shape = {6, 8}},
                                         {.name = "value", .shape = {6, 8}},
                                         {.name = "query_norm", .shape = {3}},
                                         {.name = "key_norm", .shape = {3}}});
    }
    attention.insert(attention.end(), {{.name = "output", .shape = {8, 12}}, {.name = "expert_norm", .shape = {8}}});
    if (has_experts) attention.push_back({.name = "router", .shape = {4, 8}});
    add(stage, name + ".attention", Param::dense, attention);
    if (!has_experts) {
      add(stage, name + ".dense", Param::dense, gated(10));
      continue;
    }
    if (is_deepseek) add(stage, name + ".shared", Param::dense, gated(6));
    add(stage, name + ".experts", Param::expert, gated(5), 4 / mesh.ep);
  }
  add(mesh.pp - 1, "head", Param::dense, {{.name = "norm", .shape = {8}}, {.name = "head", .shape = {32, 8}}});
  return model;
}

/// The value of an element in bf16, by its Hugging Face name.
bfloat16 weight(const std::string& name, std::int64_t i) {
  return static_cast<bfloat16>(static_cast<float>(value_of(name, i, 0) >> 48) / 32768.0f - 1);
}

using Shapes = std::map<std::string, std::vector<std::int64_t>>;

void write_tensors(const std::string& path, const Shapes& tensors) {
  checkpoint::TensorEntries entries;
  std::string data;
  for (const auto& [name, shape] : tensors) {
    const std::uint64_t begin = data.size();
    for (std::int64_t i = 0; i < checkpoint::checked_elems(shape); ++i) {
      const bfloat16 value = weight(name, i);
      data.append(reinterpret_cast<const char*>(&value), sizeof value);
    }
    entries[name] = {"BF16", shape, begin, data.size()};
  }
  write_file(path, checkpoint::make_header(entries) + data);
}

void check_import(std::span<const checkpoint::NamePair> table, bool is_deepseek, const Shapes& some) {
  const RuntimeMesh one(MeshDegrees{1, 1, 1, 1, 1});
  const checkpoint::LoadOptions options = checkpoint::hugging_face_options(table);
  Shapes all;
  const Model whole = preset(one, is_deepseek);
  checkpoint::for_each_tensor(whole, one, [&](const std::string& name, const Unit& unit, int param) {
    all[options.name_in_file(name)] = unit.layout.place(param).spec.shape;
  });
  for (const auto& [name, shape] : some) CHECK(all[name] == shape);

  // One file, and several with an index, as links like those of its cache.
  const TemporaryFolder single, several, blobs;
  write_tensors(static_cast<const std::string&>(single) + "/model.safetensors", all);
  Shapes halves[2];
  std::string weight_map;
  for (const auto& [name, shape] : all) {
    const std::size_t half = weight_map.size() / 80 % 2;
    halves[half][name] = shape;
    weight_map +=
        (weight_map.empty() ? "" : ",") + checkpoint::quoted_json(name) + ":\"part-" + std::to_string(half) + "\"";
  }
  for (const std::string half : {"0", "1"}) {
    const std::string blob = static_cast<const std::string&>(blobs) + '/' + half;
    write_tensors(blob, halves[half == "1"]);
    REQUIRE(::symlink(blob.c_str(), (static_cast<const std::string&>(several) + "/part-" + half).c_str()) == 0);
  }
  const std::string index = static_cast<const std::string&>(several) + "/model.safetensors.index.json";
  write_file(index, "{\"metadata\": {\"total_size\": 1.5e3}, \"weight_map\": {" + weight_map + "}}");

  for (const TemporaryFolder* folder : {&single, &several}) {
    const checkpoint::Catalog catalog = checkpoint::open_hugging_face(*folder);
    for (const RuntimeMesh& mesh :
         {one, RuntimeMesh(MeshDegrees{2, 2, 2, 4, 1}), RuntimeMesh(MeshDegrees{1, 4, 1, 2, 2})}) {
      const Model model = preset(mesh, is_deepseek);
      for (int rank = 0; rank < mesh.world_size; ++rank) {
        RankMemory memory(model, mesh, rank, 0xff);
        const HostBuffer staging(checkpoint::min_staging_bytes, 0xff);
        checkpoint::load(catalog, model, mesh, rank, memory.units(), staging.block(), HostExecutor{}, {}, options);
        for (const checkpoint::HeldPiece& piece : checkpoint::held_pieces(model, mesh, rank)) {
          const auto* values =
              reinterpret_cast<const float*>(checkpoint::array_of(memory.units(), piece.unit, 0)) + piece.at;
          std::int64_t wrong = 0;
          for (std::int64_t i = 0; i < piece.elems; ++i) {
            wrong += values[i] != static_cast<float>(weight(options.name_in_file(piece.tensor), piece.begin + i));
          }
          CHECK(wrong == 0);
        }
      }
    }
  }
  const auto open = [&] { checkpoint::open_hugging_face(several); };
  write_file(index, "{\"weight_map\": {\"a\": \"../part-0\"}}");
  expect_error("pleat[K06]", "'../part-0'", open);
  write_file(index, "{\"weight_map\": {\"a\": \"part-0\"}}");
  expect_error("pleat[K03]", "says that part-0 has tensor a", open);
  REQUIRE(::unlink((static_cast<const std::string&>(several) + "/part-1").c_str()) == 0);
  REQUIRE(::symlink((static_cast<const std::string&>(blobs) + "/0").c_str(),
                    (static_cast<const std::string&>(several) + "/part-1").c_str()) == 0);
  write_file(index, "{\"weight_map\": {\"a\": \"part-0\", \"b\": \"part-1\"}}");
  expect_error("pleat[K03]", "two files", open);
}
}  // namespace

TEST_CASE("qwen3-30b-a3b") {
  check_import(checkpoint::qwen3_moe_names, false,
               {{"model.embed_tokens.weight", {32, 8}},
                {"model.layers.1.self_attn.q_norm.weight", {3}},
                {"model.layers.0.mlp.gate.weight", {4, 8}},
                {"model.layers.1.mlp.experts.3.down_proj.weight", {8, 5}},
                {"lm_head.weight", {32, 8}}});
}

TEST_CASE("deepseek-v2-lite") {
  check_import(checkpoint::deepseek_v2_lite_names, true,
               {{"model.layers.0.self_attn.kv_a_proj_with_mqa.weight", {6, 8}},
                {"model.layers.0.mlp.up_proj.weight", {10, 8}},
                {"model.layers.1.mlp.shared_experts.gate_proj.weight", {6, 8}},
                {"model.layers.1.mlp.experts.0.gate_proj.weight", {5, 8}},
                {"model.norm.weight", {8}}});
}

TEST_CASE("a tensor that a table has no name for") {
  for (const std::string name :
       {"other", "layers.x.attention.norm", "layers.1.attention.norm2", "layers.1.attention.nor"}) {
    expect_error("pleat[K13]", name.c_str(), [&] { checkpoint::hugging_face_name(checkpoint::qwen3_moe_names, name); });
  }
}
