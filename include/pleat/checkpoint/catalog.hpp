// The catalog of a checkpoint: every tensor, and the parts of files that make it up. What all loads begin from.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <pleat/checkpoint/file.hpp>
#include <pleat/checkpoint/safetensors.hpp>

namespace pleat::inline v0::checkpoint {

/// Elements [begin, begin + elems) of a tensor lie at `offset_bytes` of a file.
struct Chunk {
  int file = 0;
  std::uint64_t offset_bytes = 0;
  std::int64_t begin = 0, elems = 0;
};
struct CatalogTensor {
  std::string dtype;
  std::vector<std::int64_t> shape;
  std::vector<Chunk> chunks = {};  // ascending, once `check_catalog` was there
};
struct CatalogFile {
  std::string name;
  std::uint64_t size_bytes = 0;
};
struct Catalog {
  std::string folder;
  std::vector<CatalogFile> files;
  std::map<std::string, CatalogTensor> tensors;
  /// What was given to the save beside tensors: steps, positions.
  std::map<std::string, std::int64_t> values;
  Links links = Links::refuse;

  /// Where file number `file` lies.
  std::string path(int file) const { return path_in(folder, files[static_cast<std::size_t>(file)].name); }
};

/// What a chunk is called in its file: as the tensor when it is all of it, else with the range of elements behind it.
inline std::string chunk_name(const std::string& tensor, std::int64_t begin, std::int64_t elems, std::int64_t of) {
  if (elems == of) return tensor;
  return tensor + '[' + std::to_string(begin) + ':' + std::to_string(begin + elems) + ']';
}

/// Sorts the chunks of each tensor and checks that they cover it, each element once, inside their files.
/// Errors: checkpoint_error K03 for dtypes, files and places that cannot be, K04 for gaps and overlaps.
inline void check_catalog(Catalog& catalog) {
  for (auto& [name, tensor] : catalog.tensors) {
    const std::int64_t elems = checked_elems(tensor.shape);
    const std::uint64_t width = element_bytes(tensor.dtype);
    if (elems < 0 || width == 0) {
      fail<checkpoint_error>("pleat[K03]: tensor ", name, " of ", catalog.folder, " has dtype '", tensor.dtype,
                             "' and shape [", List<std::int64_t>{tensor.shape.data(), tensor.shape.size()},
                             "], which cannot be");
    }
    std::sort(tensor.chunks.begin(), tensor.chunks.end(),
              [](const Chunk& a, const Chunk& b) { return a.begin < b.begin; });
    std::int64_t end = 0;
    for (const Chunk& chunk : tensor.chunks) {
      const bool has_file = chunk.file >= 0 && chunk.file < static_cast<int>(catalog.files.size());
      const std::uint64_t file_bytes = has_file ? catalog.files[static_cast<std::size_t>(chunk.file)].size_bytes : 0;
      if (chunk.offset_bytes > file_bytes || chunk.elems < 0 ||
          static_cast<std::uint64_t>(chunk.elems) > (file_bytes - chunk.offset_bytes) / width) {
        fail<checkpoint_error>("pleat[K03]: tensor ", name, " of ", catalog.folder, " has ", chunk.elems,
                               " elements at byte ", chunk.offset_bytes, " of file ", chunk.file,
                               ", which has no such bytes");
      }
      if (chunk.begin != end) {
        fail<checkpoint_error>("pleat[K04]: elements ", end < chunk.begin ? end : chunk.begin, " to ",
                               end < chunk.begin ? chunk.begin : end, " of tensor ", name, " in ", catalog.folder,
                               end < chunk.begin ? " are missing" : " are there twice",
                               "; the chunks of a tensor cover it once");
      }
      end = chunk.begin + chunk.elems;
    }
    if (end != elems) {
      fail<checkpoint_error>("pleat[K04]: the chunks of tensor ", name, " in ", catalog.folder, " end at element ", end,
                             " of ", elems, "; the chunks of a tensor cover it once");
    }
  }
}

/// Reads the header of a file. Errors: checkpoint_error K01, K02, K07.
inline SafetensorsHeader read_header(const std::string& path, Links links) {
  const File file = File::read(path, links);
  const std::uint64_t file_bytes = file.size_bytes();
  unsigned char first[length_bytes];
  file.read_at(first, length_bytes, 0);
  std::string text(header_text_bytes(first, file_bytes, path), '\0');
  file.read_at(text.data(), text.size(), length_bytes);
  return parse_header(text, file_bytes, path);
}

/// Every `parts`-th file from number `part` on has the size and the tensors that the catalog says, and no others.
/// All files by default, so that every rank meets the same error; ranks that share the work tell each other.
/// Errors: checkpoint_error K01, K02, K05 when a file and the catalog contradict each other, K07.
inline void verify_files(const Catalog& catalog, int part = 0, int parts = 1) {
  std::vector<TensorEntries> wanted(catalog.files.size());
  for (const auto& [name, tensor] : catalog.tensors) {
    const std::int64_t elems = checked_elems(tensor.shape);
    for (const Chunk& chunk : tensor.chunks) {
      const std::uint64_t bytes = static_cast<std::uint64_t>(chunk.elems) * element_bytes(tensor.dtype);
      wanted[static_cast<std::size_t>(chunk.file)][chunk_name(name, chunk.begin, chunk.elems, elems)] = {
          tensor.dtype, chunk.elems == elems ? tensor.shape : std::vector<std::int64_t>{chunk.elems},
          chunk.offset_bytes, chunk.offset_bytes + bytes};
    }
  }
  for (int f = part; f < static_cast<int>(catalog.files.size()); f += parts) {
    const auto file = static_cast<std::size_t>(f);
    const SafetensorsHeader header = read_header(catalog.path(f), catalog.links);
    TensorEntries found;
    for (auto [name, entry] : header.tensors) {
      entry.begin += header.data_begin;
      entry.end += header.data_begin;
      found.emplace(name, entry);
    }
    if (found == wanted[file]) continue;
    const auto name_of_difference = [&] {
      for (const auto& [name, entry] : wanted[file]) {
        if (const auto at = found.find(name); at == found.end() || at->second != entry) return name;
      }
      for (const auto& [name, entry] : found) {
        if (!wanted[file].contains(name)) return name;
      }
      return std::string();
    };
    fail<checkpoint_error>("pleat[K05]: ", catalog.path(f), " and the index of its folder disagree about tensor ",
                           name_of_difference(), "; they are not of one save");
  }
}

}  // namespace pleat::inline v0::checkpoint
