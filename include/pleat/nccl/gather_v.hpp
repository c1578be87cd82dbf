// How NcclComm gathers parts of unequal sizes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>

namespace pleat::inline v0 {

/// `equal`: one ncclAllGather, for parts that are equal after all; `messages`: a group of sends and receives;
/// `broadcasts`: a group of one broadcast per part.
enum class GatherV : unsigned char { equal, messages, broadcasts };

namespace detail {
struct GatherVRow {
  std::size_t from_bytes;  // of the largest part
  GatherV way;
};
/// The choice by size, ascending.
inline constexpr GatherVRow gather_v_table[] = {{0, GatherV::messages}};
}  // namespace detail

/// `counts`: elements of each rank.
inline GatherV gather_v_way(std::span<const std::size_t> counts, std::size_t elem_bytes) {
  const auto [least, most] = std::minmax_element(counts.begin(), counts.end());
  if (*least == *most) return GatherV::equal;
  GatherV way = GatherV::messages;
  for (const auto& row : detail::gather_v_table) {
    if (*most * elem_bytes >= row.from_bytes) way = row.way;
  }
  return way;
}

}  // namespace pleat::inline v0
