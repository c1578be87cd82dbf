// Loading: which bytes of which file a rank reads, and reading them through a staging block into its shards.
#pragma once

#include <algorithm>
#include <functional>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include <pleat/checkpoint/catalog.hpp>
#include <pleat/checkpoint/memory.hpp>
#include <pleat/core/block.hpp>
#include <pleat/core/executor.hpp>
#include <pleat/core/host/leaf.hpp>

namespace pleat::inline v0::checkpoint {

/// What a caller may allow or leave out when loading.
struct LoadOptions {
  /// The name in the catalog of a tensor of the model; empty for the same.
  std::function<std::string(const std::string&)> name_in_file = {};
  /// Values of another of the dtypes f64, f32, bf16 are converted, rounded to nearest even. Otherwise they are an
  /// error.
  bool convert = false;
  /// The catalog may have tensors that the model has not.
  bool allow_unused = false;
  /// Off where the ranks have shared `verify_files` and told each other.
  bool verify = true;
};

/// Elements of one file that belong to one array of this rank.
struct Read {
  int file = 0;
  std::uint64_t offset_bytes = 0;
  std::int64_t elems = 0;
  DType dtype = DType::f32;  // in the file
  /// Unit of the stage, array of the unit, first element in the array.
  int unit = 0, array = 0;
  std::int64_t at = 0;
};

namespace detail {
inline std::string name_in_file(const LoadOptions& options, const std::string& tensor) {
  return options.name_in_file ? options.name_in_file(tensor) : tensor;
}
inline DType dtype_in_file(const CatalogTensor& tensor, DType wanted, bool convert) {
  for (const DType dtype : convert ? std::span<const DType>(all_dtypes).first(3) : std::span(&wanted, 1)) {
    if (tensor.dtype == safetensors_name(dtype)) return dtype;
  }
  return DType::u8;  // check_tensors refused it
}
}  // namespace detail

/// The catalog has every tensor of the model, of all ranks, in its shape and dtype, and no others; so every rank meets
/// the same error. Pure. Errors: checkpoint_error K08, K09.
inline void check_tensors(const Catalog& catalog, const Model& model, const RuntimeMesh& mesh,
                          const LoadOptions& options = {}) {
  saving_stages(model, mesh);
  std::set<std::string> used;
  for_each_tensor(model, mesh, [&](const std::string& tensor, const Unit& unit, int param) {
    const std::string name = detail::name_in_file(options, tensor);
    const auto found = catalog.tensors.find(name);
    if (found == catalog.tensors.end()) {
      fail<checkpoint_error>("pleat[K09]: ", catalog.folder, " has no tensor ", name, "; it has ",
                             catalog.tensors.size(), ", which are of another model or optimizer");
    }
    const std::vector<std::int64_t>&is = found->second.shape, &wanted = unit.layout.place(param).spec.shape;
    const DType read = detail::dtype_in_file(found->second, unit.dtype, options.convert);
    if (is != wanted || found->second.dtype != safetensors_name(read)) {
      fail<checkpoint_error>("pleat[K09]: tensor ", name, " of ", catalog.folder, " is ", found->second.dtype, " [",
                             List<std::int64_t>{is.data(), is.size()}, "] and the model's is ",
                             safetensors_name(unit.dtype), " [", List<std::int64_t>{wanted.data(), wanted.size()}, ']',
                             options.convert ? "; F64, F32 and BF16 are converted" : "; dtypes must be the same");
    }
    used.insert(name);
  });
  if (options.allow_unused || used.size() == catalog.tensors.size()) return;
  for (const auto& [name, tensor] : catalog.tensors) {
    if (used.contains(name)) continue;
    fail<checkpoint_error>("pleat[K09]: ", catalog.folder, " has a tensor ", name,
                           ", which the model has not; set allow_unused to leave such tensors out");
  }
}

/// What `rank` reads, in the order of files and bytes; the catalog passed check_tensors. Pure.
inline std::vector<Read> plan_reads(const Catalog& catalog, const Model& model, const RuntimeMesh& mesh, int rank,
                                    const LoadOptions& options = {}) {
  std::vector<Read> reads;
  for (const HeldPiece& piece : held_pieces(model, mesh, rank)) {
    const CatalogTensor& tensor = catalog.tensors.at(detail::name_in_file(options, piece.tensor));
    const DType dtype = detail::dtype_in_file(tensor, piece.dtype, options.convert);
    const std::int64_t end = piece.begin + piece.elems;
    auto chunk = std::upper_bound(tensor.chunks.begin(), tensor.chunks.end(), piece.begin,
                                  [](std::int64_t begin, const Chunk& c) { return begin < c.begin + c.elems; });
    for (; chunk != tensor.chunks.end() && chunk->begin < end; ++chunk) {
      const std::int64_t first = std::max(piece.begin, chunk->begin), past = std::min(end, chunk->begin + chunk->elems);
      if (first == past) continue;
      const auto skipped = static_cast<std::uint64_t>(first - chunk->begin) * size_bytes(dtype);
      reads.push_back({chunk->file, chunk->offset_bytes + skipped, past - first, dtype, piece.unit, piece.array,
                       piece.at + first - piece.begin});
    }
  }
  std::sort(reads.begin(), reads.end(), [](const Read& a, const Read& b) {
    return a.file != b.file ? a.file < b.file : a.offset_bytes < b.offset_bytes;
  });
  return reads;
}

/// The least staging of a load.
inline constexpr std::size_t min_staging_bytes = 4096;

/// Fills this rank's shards, states and compute copies from a checkpoint of any mesh. All is checked, on every rank
/// alike, before anything is written; no communication. Blocks until the copies are done, also on `s`, on which they
/// run; the caller says so to a Sharder by `weights_changed`. Padding between parameters keeps what it has.
///
/// `memory`: of the units of this rank's stage. `staging`: host memory, pinned for a GPU; megabytes, so that reads are
/// large. Where units have compute copies, the leaf of the device is included.
/// Errors: checkpoint_error K01, K02, K05 and K07 of files, K08, K09, K10.
template <polling_executor Executor>
void load(const Catalog& catalog, const Model& model, const RuntimeMesh& mesh, int rank,
          std::span<const UnitMemory> memory, Block staging, const Executor& executor, typename Executor::stream_type s,
          const LoadOptions& options = {}) {
  check_tensors(catalog, model, mesh, options);
  if (staging.size_bytes < min_staging_bytes) {
    fail<checkpoint_error>("pleat[K10]: a load with ", staging.size_bytes, " bytes of staging; give at least ",
                           min_staging_bytes);
  }
  const std::vector<Read> reads = plan_reads(catalog, model, mesh, rank, options);
  for (const Read& read : reads) array_of(memory, read.unit, read.array);
  if (options.verify) verify_files(catalog);

  const std::vector<Unit>& units = model.stages[static_cast<std::size_t>(coordinate(mesh, rank).pp)];
  std::size_t used_bytes = 0;
  const auto drain = [&] {
    while (!executor.is_idle(s)) std::this_thread::yield();
    used_bytes = 0;
  };
  int open_file = -1;
  std::optional<File> file;
  for (Read read : reads) {
    if (read.file != open_file) file.emplace(File::read(catalog.path(read.file), catalog.links));
    open_file = read.file;
    const UnitMemory& unit = memory[static_cast<std::size_t>(read.unit)];
    const DType dtype = units[static_cast<std::size_t>(read.unit)].dtype;
    const std::size_t width = size_bytes(dtype), read_width = size_bytes(read.dtype);
    // Values that are converted stand beside what is made of them, the wider first so that both are aligned.
    const bool converts = read.dtype != dtype;
    const std::size_t room_width = width + (converts ? read_width : 0);
    while (read.elems != 0) {
      const std::size_t room = (staging.size_bytes - used_bytes) / room_width;
      const std::size_t elems = std::min(room, static_cast<std::size_t>(read.elems));
      if (elems == 0) {
        drain();
        continue;
      }
      std::byte* const base = staging.data + used_bytes;
      std::byte* const values = converts && read_width > width ? base + elems * read_width : base;
      std::byte* const raw = converts && read_width <= width ? base + elems * width : base;
      file->read_at(raw, elems * read_width, read.offset_bytes);
      if (converts) core_leaf<host_device>::cast_copy(values, dtype, raw, read.dtype, elems, {});
      const auto at = static_cast<std::size_t>(read.at);
      std::byte* const to = array_of(memory, read.unit, read.array) + at * width;
      executor.copy(to, values, elems * width, s);
      if (read.array == master_array && unit.compute != nullptr) {
        core_leaf<typename Executor::device_type>::cast_copy(
            static_cast<std::byte*>(unit.compute) + at * size_bytes(unit.compute_dtype), unit.compute_dtype, to, dtype,
            elems, s);
      }
      used_bytes = std::min(staging.size_bytes, (used_bytes + elems * room_width + 15) / 16 * 16);
      read.offset_bytes += elems * read_width;
      read.at += static_cast<std::int64_t>(elems);
      read.elems -= static_cast<std::int64_t>(elems);
    }
  }
  drain();
}

}  // namespace pleat::inline v0::checkpoint
