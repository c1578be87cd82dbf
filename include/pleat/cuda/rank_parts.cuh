// What kernels that add over ranks read: packs of elements, and where each rank's term lies.
#pragma once

#include <cstddef>
#include <span>

#include <pleat/core/error.hpp>

namespace pleat::inline v0::detail {

/// `Width` consecutive elements, moved as one or two 16-byte words when aligned.
template <class T, int Width>
struct alignas(Width * sizeof(T) < 16 ? Width * sizeof(T) : 16) Pack {
  T elem[Width];
};

/// Where the terms of a sum over ranks lie: a table, or equally spaced.
struct RankParts {
  static constexpr int most_scattered = 256;
  const void* part[most_scattered];
  std::ptrdiff_t spacing_bytes;  // used instead of the table when not 0
  int count;

  __device__ const std::byte* operator[](int r) const {
    return static_cast<const std::byte*>(spacing_bytes == 0 ? part[r] : part[0]) + r * spacing_bytes;
  }
};

/// The parts, each from `offset_bytes` on. Errors: shape_error T09.
inline RankParts rank_parts(std::span<const void* const> parts, std::size_t offset_bytes) {
  RankParts table{};
  table.count = static_cast<int>(parts.size());
  const auto at = [&](std::size_t r) { return static_cast<const std::byte*>(parts[r]) + offset_bytes; };
  const std::ptrdiff_t spacing = parts.size() < 2 ? 0 : at(1) - at(0);
  bool even = spacing != 0;
  for (std::size_t r = 2; even && r < parts.size(); ++r) even = at(r) - at(r - 1) == spacing;
  if (even) {
    table.part[0] = at(0);
    table.spacing_bytes = spacing;
    return table;
  }
  if (parts.size() > RankParts::most_scattered) {
    fail<shape_error>("pleat[T09]: a sum over ", parts.size(), " parts that are not equally spaced; at most ",
                      RankParts::most_scattered);
  }
  for (std::size_t r = 0; r < parts.size(); ++r) table.part[r] = at(r);
  return table;
}

}  // namespace pleat::inline v0::detail
