// The index of a checkpoint: what each rank's file holds, computed by one rank alone, and read back as a catalog.
#pragma once

#include <cstdio>
#include <optional>
#include <string>
#include <vector>

#include <pleat/checkpoint/catalog.hpp>
#include <pleat/checkpoint/model.hpp>

namespace pleat::inline v0::checkpoint {

/// The index's file name, the format that it names, and what it may have at most.
inline constexpr const char* index_name = "index.json";
inline constexpr const char* index_format = "pleat-checkpoint-1";
inline constexpr std::uint64_t max_index_bytes = std::uint64_t{1} << 32;

/// A piece in its rank's file; the offset counts from the file's beginning.
struct FilePiece {
  HeldPiece piece;
  std::uint64_t offset_bytes;
  std::uint64_t size_bytes() const { return static_cast<std::uint64_t>(piece.elems) * pleat::size_bytes(piece.dtype); }
};
/// The file that a rank writes: `header`, then the pieces in order, without gaps.
struct FilePlan {
  std::string name;
  std::string header;
  std::vector<FilePiece> pieces;
  std::uint64_t size_bytes = 0;
  std::uint64_t data_bytes() const { return size_bytes - header.size(); }
};

/// The ranks of replica 0 save.
inline bool saves(const RuntimeMesh& mesh, int rank) {
  return replica_group(mesh, rank).front() == rank;
}

/// What `rank` writes; nothing for a rank that does not save. `savers` are the saving_stages of the model. Pure: every
/// rank can compute any rank's.
inline std::optional<FilePlan> plan_file(const Model& model, const RuntimeMesh& mesh, int rank,
                                         const std::map<std::string, int>& savers) {
  if (!saves(mesh, rank)) return std::nullopt;
  const int stage = coordinate(mesh, rank).pp;
  FilePlan plan;
  TensorEntries entries;
  std::uint64_t end = 0;
  for (HeldPiece& piece : held_pieces(model, mesh, rank)) {
    const Unit& unit = model.stages[static_cast<std::size_t>(stage)][static_cast<std::size_t>(piece.unit)];
    if (savers.at(parameter_name(unit, piece.param)) != stage) continue;
    if (unit.replicated && rank % mesh.stage_size != 0) continue;
    const std::int64_t elems = fsdp::elems_of(piece.shape);
    plan.pieces.push_back({std::move(piece), end});
    const HeldPiece& held = plan.pieces.back().piece;
    const std::uint64_t begin = end;
    end += plan.pieces.back().size_bytes();
    entries[chunk_name(held.tensor, held.begin, held.elems, elems)] = {
        safetensors_name(held.dtype), held.elems == elems ? held.shape : std::vector<std::int64_t>{held.elems}, begin,
        end};
  }
  char name[40];
  std::snprintf(name, sizeof name, "rank-%06d.safetensors", rank);
  plan.name = name;
  plan.header = make_header(entries);
  plan.size_bytes = plan.header.size() + end;
  for (FilePiece& piece : plan.pieces) piece.offset_bytes += plan.header.size();
  return plan;
}

/// The catalog of a save, from the plan alone. Errors: those of saving_stages.
inline Catalog plan_catalog(const Model& model, const RuntimeMesh& mesh) {
  const std::map<std::string, int> savers = saving_stages(model, mesh);
  Catalog catalog;
  for (int rank = 0; rank < mesh.world_size; ++rank) {
    const std::optional<FilePlan> plan = plan_file(model, mesh, rank, savers);
    if (!plan) continue;
    const int file = static_cast<int>(catalog.files.size());
    catalog.files.push_back({plan->name, plan->size_bytes});
    for (const auto& [piece, offset_bytes] : plan->pieces) {
      CatalogTensor& tensor = catalog.tensors[piece.tensor];
      tensor.dtype = safetensors_name(piece.dtype);
      tensor.shape = piece.shape;
      tensor.chunks.push_back({file, offset_bytes, piece.begin, piece.elems});
    }
  }
  return catalog;
}

namespace detail {
/// `open`, what `each(item)` makes of every item with commas between, `close`.
template <class Items, class F>
std::string json_list(char open, const Items& items, char close, const char* separator, F each) {
  std::string text(1, open);
  for (const auto& item : items) text += (text.size() == 1 ? "" : separator) + each(item);
  return text + close;
}
}  // namespace detail

/// The text of the index. A chunk is [file, byte in the file, first element, elements].
inline std::string make_index(const Catalog& catalog) {
  using detail::json_list;
  const auto number = [](auto value) { return std::to_string(value); };
  std::string text = "{\n\"format\": " + quoted_json(index_format) + ",\n\"values\": ";
  text += json_list('{', catalog.values, '}', ", ",
                    [](const auto& v) { return quoted_json(v.first).append(": ").append(std::to_string(v.second)); });
  text += ",\n\"files\": ";
  text += json_list('[', catalog.files, ']', ",\n", [](const CatalogFile& file) {
    return "{\"name\": " + quoted_json(file.name) + ", \"bytes\": " + std::to_string(file.size_bytes) + '}';
  });
  text += ",\n\"tensors\": ";
  text += json_list('{', catalog.tensors, '}', ",\n", [&](const auto& named) {
    const CatalogTensor& tensor = named.second;
    return quoted_json(named.first) + ": {\"dtype\": " + quoted_json(tensor.dtype) +
           ", \"shape\": " + json_list('[', tensor.shape, ']', ",", number) + ", \"chunks\": " +
           json_list('[', tensor.chunks, ']', ",",
                     [&](const Chunk& chunk) {
                       return '[' + number(chunk.file) + ',' + number(chunk.offset_bytes) + ',' + number(chunk.begin) +
                              ',' + number(chunk.elems) + ']';
                     }) +
           '}';
  });
  return text + "\n}\n";
}

/// The catalog that an index says, checked. Errors: checkpoint_error K01, K03, K04, K06.
inline Catalog parse_index(std::string_view text, const std::string& folder) {
  const std::string where = path_in(folder, index_name);
  Catalog catalog;
  catalog.folder = folder;
  std::string format;
  JsonReader json(text, where);
  const auto repeated = [&](const std::string& name) {
    fail<checkpoint_error>("pleat[K03]: ", where, " says '", name, "' twice");
  };
  const auto chunk = [&] {
    std::vector<std::int64_t> numbers;
    json.array([&] { numbers.push_back(json.integer()); });
    if (numbers.size() != 4 || numbers[0] >= std::int64_t{1} << 31) {
      fail<checkpoint_error>("pleat[K03]: ", where, " has a chunk of ", numbers.size(),
                             " numbers; a chunk is [file, byte in the file, first element, elements]");
    }
    return Chunk{static_cast<int>(numbers[0]), static_cast<std::uint64_t>(numbers[1]), numbers[2], numbers[3]};
  };
  json.object([&](const std::string& key) {
    if (key == "format") {
      format = json.string();
    } else if (key == "values") {
      json.object([&](const std::string& name) {
        if (!catalog.values.emplace(name, json.integer()).second) repeated(name);
      });
    } else if (key == "files") {
      json.array([&] {
        CatalogFile file;
        json.object([&](const std::string& member) {
          if (member == "name") {
            file.name = json.string();
          } else if (member == "bytes") {
            file.size_bytes = static_cast<std::uint64_t>(json.integer());
          } else {
            json.skip();
          }
        });
        check_plain_name(file.name, where);
        catalog.files.push_back(std::move(file));
      });
    } else if (key == "tensors") {
      json.object([&](const std::string& name) {
        CatalogTensor tensor;
        json.object([&](const std::string& member) {
          if (member == "dtype") {
            tensor.dtype = json.string();
          } else if (member == "shape") {
            json.array([&] { tensor.shape.push_back(json.integer()); });
          } else if (member == "chunks") {
            json.array([&] { tensor.chunks.push_back(chunk()); });
          } else {
            json.skip();
          }
        });
        if (!catalog.tensors.emplace(name, std::move(tensor)).second) repeated(name);
      });
    } else {
      json.skip();
    }
  });
  json.end();
  if (format != index_format) {
    fail<checkpoint_error>("pleat[K03]: ", where, " has the format '", format, "'; this version reads ", index_format);
  }
  check_catalog(catalog);
  return catalog;
}

/// The catalog of the checkpoint in `folder`, from its index alone. Errors: checkpoint_error K01, K02, K03, K04, K06,
/// K07.
inline Catalog open(const std::string& folder) {
  return parse_index(read_text(path_in(folder, index_name), Links::refuse, max_index_bytes), folder);
}

}  // namespace pleat::inline v0::checkpoint
