// Whether two checkpoints hold the same model, bit for bit, however they are cut into files.
#pragma once

#include <string>

#include <pleat/checkpoint.hpp>

namespace validate {

/// What was compared, and the first difference; empty when there is none.
struct CheckpointDifference {
  std::size_t tensors = 0;
  std::uint64_t bytes = 0;
  std::string first;
};

inline std::string tensor_bytes(const pleat::checkpoint::Catalog& catalog,
                                const pleat::checkpoint::CatalogTensor& tensor) {
  const std::uint64_t width = pleat::checkpoint::element_bytes(tensor.dtype);
  std::string bytes;
  for (const pleat::checkpoint::Chunk& chunk : tensor.chunks) {  // ascending, without gaps
    const std::size_t begin = bytes.size();
    bytes.resize(begin + static_cast<std::uint64_t>(chunk.elems) * width);
    pleat::checkpoint::File::read(catalog.path(chunk.file))
        .read_at(bytes.data() + begin, bytes.size() - begin, chunk.offset_bytes);
  }
  return bytes;
}

/// Of the newest checkpoints in two folders: names, shapes, values, and all bytes of all tensors. Errors: those of
/// checkpoint::open; std::bad_optional_access where there is none.
inline CheckpointDifference compare_checkpoints(const std::string& a_root, const std::string& b_root) {
  namespace ck = pleat::checkpoint;
  const auto newest = [](const std::string& root) { return ck::open(ck::step_folder(root, ck::latest(root).value())); };
  const ck::Catalog a = newest(a_root), b = newest(b_root);
  CheckpointDifference found;
  if (a.values != b.values) found.first = "values such as the position in the data";
  if (a.tensors.size() != b.tensors.size()) found.first = "the number of tensors";
  for (const auto& [name, tensor] : a.tensors) {
    const auto other = b.tensors.find(name);
    if (other == b.tensors.end() || other->second.dtype != tensor.dtype || other->second.shape != tensor.shape) {
      found.first = "the dtype or shape of " + name;
      return found;
    }
    const std::string bytes = tensor_bytes(a, tensor);
    ++found.tensors;
    found.bytes += bytes.size();
    if (bytes != tensor_bytes(b, other->second) && found.first.empty()) found.first = name;
  }
  return found;
}

}  // namespace validate
