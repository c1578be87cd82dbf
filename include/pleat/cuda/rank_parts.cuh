// What kernels that add over ranks read: packs of elements, and where each rank's term lies.
#pragma once

#include <cstddef>

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

}  // namespace pleat::inline v0::detail
