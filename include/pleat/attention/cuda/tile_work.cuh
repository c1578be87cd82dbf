// Which rectangles a tile of queries or keys meets, in numbers relative to the tile; and which tiles a CTA has.
#pragma once

#include <pleat/attention/cuda/mma_tile.cuh>

namespace pleat::inline v0::attention_kernel {

/// Far beyond any number of tokens, and no overflow when two are added.
inline constexpr int everything = 1 << 30;

__device__ inline int clamped(std::int64_t value, int low, int high) {
  return static_cast<int>(value < low ? low : value > high ? high : value);
}

/// The rows of a tile: `rows` from `begin` on, of one head.
struct TileRows {
  int batch, head, rows;
  std::int64_t begin;
};

/// What the queries of a tile see of a rectangle: row i of the tile, i in [row_begin, row_end), its first
/// `i + diagonal` keys; `keys` are those that some row sees.
struct SeenKeys {
  __device__ SeenKeys(const Rectangle& r, const TileRows& tile)
      : row_begin(clamped(r.q0 - tile.begin, 0, tile.rows)),
        row_end(clamped(r.q1 - tile.begin, 0, tile.rows)),
        diagonal(r.is_full() ? everything : clamped(tile.begin - r.q0 + r.causal_offset + 1, -everything, everything)),
        keys(row_begin < row_end ? clamped(r.k1 - r.k0, 0, max(row_end - 1 + diagonal, 0)) : 0) {}

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

  int row_begin, row_end, diagonal, keys;
};

/// Which queries of a rectangle see the keys of a tile: row i of the tile, i in [row_begin, row_end), is seen by the
/// rectangle's queries from number `i - diagonal` on; `first` is the first that sees some row.
struct SeeingQueries {
  __device__ SeeingQueries(const Rectangle& r, const TileRows& tile)
      : row_begin(clamped(r.k0 - tile.begin, 0, tile.rows)),
        row_end(clamped(r.k1 - tile.begin, 0, tile.rows)),
        queries(static_cast<int>(r.q1 - r.q0)),
        diagonal(r.is_full() ? everything : clamped(r.k0 - tile.begin + r.causal_offset, -everything, everything)),
        first(first_of_any(0, tile.rows)) {}

  /// The first query that sees row `i`, which is one of the rectangle's.
  __device__ int seen_from(int i) const { return min(max(i - diagonal, 0), queries); }
  __device__ int first_of(int i) const { return i >= row_begin && i < row_end ? seen_from(i) : queries; }
  /// From which query on some row of [begin, end) is seen, and from which on all of them are.
  __device__ int first_of_any(int begin, int end) const {
    return max(begin, row_begin) < min(end, row_end) ? seen_from(max(begin, row_begin)) : queries;
  }
  __device__ int first_of_all(int begin, int end) const {
    return begin >= row_begin && end <= row_end ? seen_from(end - 1) : queries;
  }

  int row_begin, row_end, queries, diagonal, first;
};

/// Where a CTA is in its work, in tiles of `Rows` rows: numbers that all its threads have in common, one in each lane
/// of a register. Kernels whose sums fill the registers ask here, where they need a number, and keep none between. All
/// lanes of a warp call the functions.
template <int Rows>
class Position {
 public:
  enum Number { item, tile, rows, batch, head, query_head, query_heads_end, rectangle };

  __device__ int operator[](Number number) const { return __shfl_sync(0xffffffffu, own_, number); }
  __device__ void set(Number number, int value) {
    if (thread_index<Indices::anew>() % 32 == number) own_ = value;
  }
  __device__ TileRows tile_rows() const {
    return {(*this)[batch], (*this)[head], (*this)[rows], static_cast<std::int64_t>((*this)[tile]) * Rows};
  }

 private:
  int own_ = 0;
};

/// Calls f(position) for this CTA's share of all tiles of `Rows` rows: all heads of one tile, then the next tile.
/// `from_last` starts with the last one: with a causal mask it has most to do for queries, and the first one for keys.
template <int Rows, class F>
__device__ void for_each_tile(std::int64_t tokens, int batch, int heads, bool from_last, F f) {
  using P = Position<Rows>;
  P position;
  for (position.set(P::item, static_cast<int>(blockIdx.x));;
       position.set(P::item, position[P::item] + static_cast<int>(gridDim.x))) {
    const auto tiles = static_cast<int>((tokens + Rows - 1) / Rows);
    const int item = position[P::item], number = item / heads / batch, tile = from_last ? tiles - 1 - number : number;
    if (number >= tiles) return;
    position.set(P::tile, tile);
    position.set(P::rows, clamped(tokens - static_cast<std::int64_t>(tile) * Rows, 0, Rows));
    position.set(P::batch, item / heads % batch);
    position.set(P::head, item % heads);
    f(position);
  }
}

/// Calls f() for the `group` query heads of a tile of keys.
template <int Rows, class F>
__device__ void for_each_query_head(Position<Rows>& position, int group, F f) {
  using P = Position<Rows>;
  position.set(P::query_head, position[P::head] * group);
  position.set(P::query_heads_end, (position[P::head] + 1) * group);
  for (; position[P::query_head] < position[P::query_heads_end];
       position.set(P::query_head, position[P::query_head] + 1))
    f();
}

/// Whether `meets(rectangle, tile)` holds for one from the position's on, which becomes the position's.
template <int Rows, class Meets>
__device__ bool find_rectangle(const WorkList& work, Position<Rows>& position, Meets meets) {
  const TileRows tile = position.tile_rows();
  for (int base = position[Position<Rows>::rectangle]; base < work.count; base += 32) {
    const int mine = base + thread_index<Indices::anew>() % 32;
    const unsigned found = __ballot_sync(0xffffffffu, mine < work.count && meets(work.rectangles[mine], tile));
    if (found == 0) continue;
    position.set(Position<Rows>::rectangle, base + __ffs(static_cast<int>(found)) - 1);
    return true;
  }
  return false;
}
template <int Rows, class Meets>
__device__ bool meets_any(const WorkList& work, Position<Rows>& position, Meets meets) {
  position.set(Position<Rows>::rectangle, 0);
  return find_rectangle(work, position, meets);
}
/// Calls f(rectangle) for those that the tile meets, in order. All threads of a CTA call it and get the same.
template <int Rows, class Meets, class F>
__device__ void for_each_rectangle(const WorkList& work, Position<Rows>& position, Meets meets, F f) {
  using P = Position<Rows>;
  for (position.set(P::rectangle, 0); find_rectangle(work, position, meets);
       position.set(P::rectangle, position[P::rectangle] + 1)) {
    f(work.rectangles[position[P::rectangle]]);
  }
}

}  // namespace pleat::inline v0::attention_kernel
