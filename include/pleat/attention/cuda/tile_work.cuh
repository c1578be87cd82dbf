// Which rectangles a tile of queries or keys meets, in numbers relative to the tile; and which tiles a CTA has.
#pragma once

#include <pleat/attention/cuda/arguments.hpp>

namespace pleat::inline v0::attention_kernel {

/// Far beyond any number of tokens, and no overflow when two are added.
inline constexpr int everything = 1 << 30;

__device__ inline int clamped(std::int64_t value, int low, int high) {
  return static_cast<int>(value < low ? low : value > high ? high : value);
}

/// What the queries of a tile see of a rectangle: row i of the tile, i in [row_begin, row_end), its first
/// `i + diagonal` keys.
struct SeenKeys {
  __device__ SeenKeys(const Rectangle& r, std::int64_t q_begin, int rows)
      : row_begin(clamped(r.q0 - q_begin, 0, rows)),
        row_end(clamped(r.q1 - q_begin, 0, rows)),
        keys(static_cast<int>(r.k1 - r.k0)),
        diagonal(r.is_full() ? everything : clamped(q_begin - r.q0 + r.causal_offset + 1, -everything, everything)) {}

  /// How many keys row `i` sees, if it is one of the rectangle's.
  __device__ int seen(int i) const { return min(max(i + diagonal, 0), keys); }
  /// The same for any row.
  __device__ int seen_by(int i) const { return i >= row_begin && i < row_end ? seen(i) : 0; }
  /// How many keys some row of [begin, end) sees, and how many all of them see.
  __device__ int seen_by_any(int begin, int end) const {
    return max(begin, row_begin) < min(end, row_end) ? seen(min(end, row_end) - 1) : 0;
  }
  __device__ int seen_by_all(int begin, int end) const {
    return begin >= row_begin && end <= row_end ? seen(begin) : 0;
  }

  int row_begin, row_end, keys, diagonal;
};

/// Which queries of a rectangle see the keys of a tile: row i of the tile, i in [row_begin, row_end), is seen by the
/// rectangle's queries from number `i - diagonal` on.
struct SeeingQueries {
  __device__ SeeingQueries(const Rectangle& r, std::int64_t k_begin, int rows)
      : row_begin(clamped(r.k0 - k_begin, 0, rows)),
        row_end(clamped(r.k1 - k_begin, 0, rows)),
        queries(static_cast<int>(r.q1 - r.q0)),
        diagonal(r.is_full() ? everything : clamped(r.k0 - k_begin + r.causal_offset, -everything, everything)) {}

  /// The first query that sees row `i`, which is one of the rectangle's.
  __device__ int first(int i) const { return min(max(i - diagonal, 0), queries); }
  __device__ int first_of(int i) const { return i >= row_begin && i < row_end ? first(i) : queries; }
  /// From which query on some row of [begin, end) is seen, and from which on all of them are.
  __device__ int first_of_any(int begin, int end) const {
    return max(begin, row_begin) < min(end, row_end) ? first(max(begin, row_begin)) : queries;
  }
  __device__ int first_of_all(int begin, int end) const {
    return begin >= row_begin && end <= row_end ? first(end - 1) : queries;
  }

  int row_begin, row_end, queries, diagonal;
};

/// Calls f(rectangle) for those that `meets` says, in order. All threads of a CTA call it and get the same.
template <class Meets, class F>
__device__ void for_each_rectangle(const WorkList& work, Meets meets, F f) {
  for (int base = 0; base < work.count; base += 32) {
    const int mine = base + static_cast<int>(threadIdx.x) % 32;
    unsigned found = __ballot_sync(0xffffffffu, mine < work.count && meets(work.rectangles[mine]));
    for (; found != 0; found &= found - 1) f(work.rectangles[base + __ffs(static_cast<int>(found)) - 1]);
  }
}

template <class Meets>
__device__ bool meets_any(const WorkList& work, Meets meets) {
  bool found = false;
  for_each_rectangle(work, meets, [&](const Rectangle&) { found = true; });
  return found;
}

/// Calls f(tile, batch, head) for this CTA's share of all tiles: all heads of one tile, then the next tile. `from_last`
/// starts with the last one: with a causal mask it has most to do for queries, and the first one for keys.
template <class F>
__device__ void for_each_tile(int tiles, int batch, int heads, bool from_last, F f) {
  const int per_tile = batch * heads;
  for (int i = static_cast<int>(blockIdx.x); i < tiles * per_tile; i += static_cast<int>(gridDim.x)) {
    const int tile = i / per_tile, rest = i % per_tile;
    f(from_last ? tiles - 1 - tile : tile, rest / heads, rest % heads);
  }
}

}  // namespace pleat::inline v0::attention_kernel
