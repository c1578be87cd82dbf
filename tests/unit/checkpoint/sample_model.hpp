// A small model with everything that is odd, on any mesh, whose values follow from names: what saves and loads are
// tested on.
#pragma once

#include <stdlib.h>

#include <cstring>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <pleat/checkpoint.hpp>
#include <pleat/core/host/buffer.hpp>

namespace checkpoint_testing {

using namespace pleat;
using checkpoint::Model;
using checkpoint::Unit;
using checkpoint::UnitMemory;

/// A new folder that is removed at the end.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string name = "/tmp/pleat-checkpoint-XXXXXX";
    REQUIRE(::mkdtemp(name.data()) != nullptr);
    path_ = name;
  }
  ~TemporaryFolder() {
    for (const std::string& name : checkpoint::names_in(path_)) {
      const std::string path = path_ + '/' + name;
      if (::unlink(path.c_str()) != 0) checkpoint::remove_folder(path);
    }
    checkpoint::remove_folder(path_);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  operator const std::string&() const { return path_; }

 private:
  std::string path_;
};

inline constexpr int sample_layers = 4, sample_experts = 8;

/// The model on `mesh`: its layers fall to stages in order; the embedding is held by the first and the last stage.
inline Model sample_model(const RuntimeMesh& mesh, std::int64_t alignment = 4, int layers = sample_layers) {
  using fsdp::Optimizer;
  using fsdp::ParamSpec;
  Model model;
  model.stages.resize(static_cast<std::size_t>(mesh.pp));
  const auto add = [&](int stage, const std::string& name, Param kind, const std::vector<ParamSpec>& params,
                       std::int64_t experts = 0, bool replicated = false) {
    Unit unit{name, kind, {}, replicated ? DType::f64 : DType::f32, replicated};
    const int ranks = replicated ? 1 : shard_group_shape(mesh, kind).size();
    unit.layout = fsdp::plan_unit(params, ranks, {.experts_local = experts, .alignment_elems = alignment});
    model.stages[static_cast<std::size_t>(stage)].push_back(std::move(unit));
  };
  const ParamSpec embedding{.name = "tokens", .shape = {11, 6}, .copies = mesh.pp == 1 ? 1 : 2};
  add(0, "embedding", Param::dense,
      {embedding,
       {.name = "head", .shape = {11, 6}, .tied_to = 0},
       {.name = "nothing", .shape = {0, 3}},
       {.name = "scale", .shape = {}}});
  for (int layer = 0; layer < layers; ++layer) {
    const int stage = layer * mesh.pp / layers;
    const std::string name = "layers." + std::to_string(layer);
    add(stage, name + ".attention", Param::dense,
        {{.name = "norm", .shape = {6}, .weight_decay = false},
         {.name = "query", .shape = {6, 7}, .optimizer = Optimizer::muon},
         {.name = "adapted", .shape = {3, 5}, .frozen = true},
         {.name = "output", .shape = {7, 6}, .optimizer = Optimizer::muon}});
    add(stage, name + ".experts", Param::expert,
        {{.name = "gate", .shape = {3, 5}, .optimizer = Optimizer::muon}, {.name = "bias", .shape = {5}}},
        sample_experts / mesh.ep);
    add(stage, name + ".selection", Param::dense, {{.name = "bias", .shape = {sample_experts}, .frozen = true}}, 0,
        true);
  }
  if (mesh.pp > 1) {
    add(mesh.pp - 1, "embedding", Param::dense, {embedding});
  }
  return model;
}

/// Bytes that name, element and step say, for a master or a state: a new value for each, also in its last bits.
inline std::uint64_t value_of(const std::string& tensor, std::int64_t element, std::int64_t step) {
  std::uint64_t state = 0xcbf29ce484222325u ^ static_cast<std::uint64_t>(element * 1000003 + step * 7919);
  for (const char c : tensor) state = (state ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  state ^= state >> 29;
  return state * 0x9e3779b97f4a7c15u;
}

/// The memory of one rank.
class RankMemory {
 public:
  RankMemory(const Model& model, const RuntimeMesh& mesh, int rank, unsigned char fill)
      : pieces_(checkpoint::held_pieces(model, mesh, rank)) {
    for (const Unit& unit : model.stages[static_cast<std::size_t>(coordinate(mesh, rank).pp)]) {
      const auto array = [&](std::int64_t elems) {
        buffers_.emplace_back(static_cast<std::size_t>(elems) * size_bytes(unit.dtype), fill);
        return buffers_.back().data();
      };
      UnitMemory memory{.master = array(unit.layout.max_shard_elems())};
      for (const auto& state : model.states)
        memory.states.push_back(array(max_state_elems(unit.layout, state.optimizer)));
      units_.push_back(std::move(memory));
    }
  }
  void set(std::int64_t step) {
    for_each([&](std::byte* at, std::uint64_t value, std::size_t bytes) { std::memcpy(at, &value, bytes); }, step);
  }
  std::int64_t wrong(std::int64_t step) {
    std::int64_t count = 0;
    for_each(
        [&](std::byte* at, std::uint64_t value, std::size_t bytes) { count += std::memcmp(at, &value, bytes) != 0; },
        step);
    return count;
  }
  /// Whether no byte was written since it was filled.
  bool untouched(unsigned char fill) const {
    for (const HostBuffer& buffer : buffers_) {
      for (std::size_t i = 0; i < buffer.size_bytes(); ++i) {
        if (buffer.data()[i] != std::byte{fill}) return false;
      }
    }
    return true;
  }
  std::span<const UnitMemory> units() const { return units_; }

 private:
  template <class F>
  void for_each(F f, std::int64_t step) {
    for (const checkpoint::HeldPiece& piece : pieces_) {
      const std::size_t bytes = size_bytes(piece.dtype);
      std::byte* const array = checkpoint::array_of(units_, piece.unit, piece.array);
      for (std::int64_t i = 0; i < piece.elems; ++i) {
        f(array + static_cast<std::size_t>(piece.at + i) * bytes, value_of(piece.tensor, piece.begin + i, step), bytes);
      }
    }
  }

  std::vector<checkpoint::HeldPiece> pieces_;
  std::vector<HostBuffer> buffers_;
  std::vector<UnitMemory> units_;
};

/// Saves the values of `step`, rank after rank.
inline void save_sample(const std::string& root, const RuntimeMesh& mesh, std::int64_t step,
                        const std::string& run = "run") {
  const Model model = sample_model(mesh);
  for (int rank = mesh.world_size - 1; rank >= 0; --rank) {
    const checkpoint::Saver saver(model, mesh, rank, root, run);
    RankMemory memory(model, mesh, rank, 0xff);
    memory.set(step);
    const HostBuffer host(saver.footprint().pinned_host, 0xff);
    saver.snapshot(memory.units(), host.block(), HostExecutor{}, {});
    saver.write(step, host.block());
    if (rank == 0) saver.commit(step, {{"position", 100 * step}}, 1);
  }
}

/// Loads on `rank`, and returns how many elements are wrong.
inline std::int64_t load_sample(const std::string& folder, const RuntimeMesh& mesh, int rank, std::int64_t step,
                                std::size_t staging_bytes = checkpoint::min_staging_bytes) {
  const Model model = sample_model(mesh, 8);
  RankMemory memory(model, mesh, rank, 0xff);
  const HostBuffer staging(staging_bytes, 0xff);
  checkpoint::load(checkpoint::open(folder), model, mesh, rank, memory.units(), staging.block(), HostExecutor{}, {});
  return memory.wrong(step);
}

/// The text of the error that `f` ends in; empty when there is none.
template <class F>
std::string error_of(F f) {
  try {
    f();
  } catch (const checkpoint_error& e) {
    return e.what();
  }
  return {};
}
template <class F>
void expect_error(const char* id, const char* part, F f) {
  const std::string text = error_of(f);
  CAPTURE(text);
  CHECK(text.find(id) != std::string::npos);
  CHECK(text.find(part) != std::string::npos);
}

inline std::string read_file(const std::string& path) {
  return checkpoint::read_text(path, checkpoint::Links::follow, std::uint64_t{1} << 30);
}
inline void write_file(const std::string& path, const std::string& text) {
  checkpoint::File::create(path).write(text.data(), text.size());
}

}  // namespace checkpoint_testing
