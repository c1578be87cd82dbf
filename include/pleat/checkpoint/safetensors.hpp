// The header of a safetensors file: which tensor lies at which bytes. Pure: text in, text out.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <pleat/checkpoint/json.hpp>
#include <pleat/core/dtype.hpp>

namespace pleat::inline v0::checkpoint {

/// The name that safetensors gives a dtype.
constexpr const char* safetensors_name(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return "F64";
    case DType::f32:
      return "F32";
    case DType::bf16:
      return "BF16";
    case DType::f16:
      return "F16";
    case DType::i64:
      return "I64";
    case DType::i32:
      return "I32";
    case DType::u8:
      return "U8";
  }
  return "?";
}
/// Every dtype that pleat has.
inline constexpr DType all_dtypes[] = {DType::f64, DType::f32, DType::bf16, DType::f16,
                                       DType::i64, DType::i32, DType::u8};

/// Bytes of an element of any dtype that the format names, those that pleat has no type for too; 0 for other names.
constexpr std::uint64_t element_bytes(std::string_view dtype) {
  for (const DType known : all_dtypes) {
    if (dtype == safetensors_name(known)) return size_bytes(known);
  }
  if (dtype == "U64") return 8;
  if (dtype == "U32") return 4;
  if (dtype == "I16" || dtype == "U16") return 2;
  if (dtype == "I8" || dtype == "BOOL" || dtype == "F8_E4M3" || dtype == "F8_E5M2") return 1;
  return 0;
}

/// A tensor of a file: bytes [begin, end) of the data, which follows the header.
struct TensorEntry {
  std::string dtype;
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0, end = 0;
  friend bool operator==(const TensorEntry&, const TensorEntry&) = default;
};
using TensorEntries = std::map<std::string, TensorEntry>;

/// What the header of a file says.
struct SafetensorsHeader {
  /// Where the data begins in the file.
  std::uint64_t data_begin = 0;
  TensorEntries tensors;
};

/// Bytes before the header's text: its length, little-endian.
inline constexpr std::uint64_t length_bytes = 8;
inline constexpr std::uint64_t max_header_bytes = 100'000'000;

/// The product of `shape`, or -1 when it is 2^63 or more.
inline std::int64_t checked_elems(std::span<const std::int64_t> shape) {
  std::int64_t elems = 1;
  for (const std::int64_t extent : shape) {
    if (__builtin_mul_overflow(elems, extent, &elems)) return -1;
  }
  return elems;
}

/// The length of the header's text, from the first 8 bytes of a file of `file_bytes`. Errors: checkpoint_error K02.
inline std::uint64_t header_text_bytes(const unsigned char (&first)[length_bytes], std::uint64_t file_bytes,
                                       const std::string& where) {
  std::uint64_t bytes = 0;
  for (int i = 7; i >= 0; --i) bytes = bytes << 8 | first[i];
  if (bytes > max_header_bytes || bytes > file_bytes - length_bytes) {
    fail<checkpoint_error>("pleat[K02]: ", where, " of ", file_bytes, " bytes says that its header has ", bytes,
                           "; the file is truncated, or no safetensors file");
  }
  return bytes;
}

/// Parses the header's text of a file of `file_bytes`. Errors: checkpoint_error K01 for what is not JSON as the format
/// has it, K02 when tensors do not fill the data of the file, each byte once.
inline SafetensorsHeader parse_header(std::string_view text, std::uint64_t file_bytes, const std::string& where) {
  SafetensorsHeader header;
  header.data_begin = length_bytes + text.size();
  JsonReader json(text, where);
  json.object([&](const std::string& name) {
    if (name == "__metadata__") {
      json.object([&](const std::string&) { json.string(); });
      return;
    }
    TensorEntry tensor;
    std::vector<std::int64_t> offsets;
    json.object([&](const std::string& key) {
      if (key == "dtype") {
        tensor.dtype = json.string();
      } else if (key == "shape") {
        json.array([&] { tensor.shape.push_back(json.integer()); });
      } else if (key == "data_offsets") {
        json.array([&] { offsets.push_back(json.integer()); });
      } else {
        json.skip();
      }
    });
    if (offsets.size() != 2 || element_bytes(tensor.dtype) == 0) {
      fail<checkpoint_error>("pleat[K01]: tensor ", name, " of ", where, " has dtype '", tensor.dtype, "' and ",
                             offsets.size(),
                             " data_offsets; the format's dtypes have names such as F32, and there are "
                             "two offsets");
    }
    tensor.begin = static_cast<std::uint64_t>(offsets[0]);
    tensor.end = static_cast<std::uint64_t>(offsets[1]);
    if (!header.tensors.emplace(name, std::move(tensor)).second) {
      fail<checkpoint_error>("pleat[K01]: ", where, " has two tensors ", name, "; names are unique");
    }
  });
  json.end();

  std::vector<const TensorEntries::value_type*> in_order;
  for (const auto& tensor : header.tensors) in_order.push_back(&tensor);
  std::sort(in_order.begin(), in_order.end(), [](auto* a, auto* b) {
    return a->second.begin != b->second.begin ? a->second.begin < b->second.begin : a->second.end < b->second.end;
  });
  std::uint64_t end = 0;
  for (const auto* tensor : in_order) {
    const auto& [name, entry] = *tensor;
    const std::int64_t elems = checked_elems(entry.shape);
    std::uint64_t bytes = 0;
    const bool fits =
        elems >= 0 && !__builtin_mul_overflow(static_cast<std::uint64_t>(elems), element_bytes(entry.dtype), &bytes);
    if (!fits || entry.begin != end || entry.end < entry.begin || entry.end - entry.begin != bytes) {
      fail<checkpoint_error>("pleat[K02]: tensor ", name, " of ", where, " lies at bytes ", entry.begin, " to ",
                             entry.end, "; its ", elems, " elements of ", entry.dtype, " must begin at ", end,
                             " and fill what they lie in");
    }
    end = entry.end;
  }
  if (header.data_begin + end != file_bytes) {
    fail<checkpoint_error>("pleat[K02]: ", where, " has ", file_bytes, " bytes, and its header speaks of ",
                           header.data_begin + end, "; the file is truncated, or was not written to its end");
  }
  return header;
}

/// A file's bytes up to its data: length and text, padded so that the data begins at a multiple of 8.
inline std::string make_header(const TensorEntries& tensors) {
  std::string text = R"({"__metadata__":{"format":"pleat"})";
  for (const auto& [name, tensor] : tensors) {
    text += ',' + quoted_json(name) + R"(:{"dtype":)" + quoted_json(tensor.dtype) + R"(,"shape":[)";
    for (std::size_t axis = 0; axis < tensor.shape.size(); ++axis) {
      if (axis != 0) text += ',';
      text += std::to_string(tensor.shape[axis]);
    }
    text += R"(],"data_offsets":[)" + std::to_string(tensor.begin) + ',' + std::to_string(tensor.end) + "]}";
  }
  text += '}';
  text.resize((text.size() + 7) / 8 * 8, ' ');
  std::string header(length_bytes, '\0');
  for (std::size_t i = 0; i < length_bytes; ++i) header[i] = static_cast<char>(text.size() >> (8 * i));
  return header + text;
}

}  // namespace pleat::inline v0::checkpoint
