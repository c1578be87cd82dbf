// What the Hopper attention kernels load and in which order they visit it: tensor maps of heads, the tiles of keys that
// the work gives a tile of queries and the tiles of queries that it gives a tile of keys.
#pragma once

#include <algorithm>

#include <pleat/attention/cuda/arguments.hpp>
#include <pleat/cuda/hopper/tma.cuh>

namespace pleat::inline v0::attention_kernel {

/// Token indices stay below this, so that sums of two fit 32 bits.
inline constexpr std::int64_t most_tokens = std::int64_t{1} << 30;

/// Where number `count` of things that two places hold in turn lies.
struct DoubleBuffer {
  unsigned count = 0;

  __device__ int place() const { return static_cast<int>(count % 2); }
  /// Of the place's `full` barrier; of the `empty` one the other.
  __device__ std::uint32_t parity() const { return count / 2 % 2; }
};

/// Rows [batch, tokens, heads, dim] as boxes of `rows` tokens and `columns` of the dim of one head. Axes (panel of 128
/// bytes, tokens, panels, heads, batch), so that a box of 16-bit elements is a `hopper::Tile`.
template <class T>
hopper::TensorBoxes<5> head_boxes(const HeadRows<T>& x, std::int64_t batch, std::int64_t tokens, int heads, int dim,
                                  int rows, int columns) {
  constexpr int size = sizeof(T), panel = 128 / size;
  return {{panel, tokens, dim / panel, heads, batch},
          {x.token_stride * size, 128, x.head_stride * size, x.batch_stride * size},
          {panel, rows, columns / panel, 1, 1}};
}
template <class T>
CUtensorMap head_map(const HeadRows<T>& x, std::int64_t batch, std::int64_t tokens, int heads, int dim, int rows,
                     int columns) {
  return hopper::tensor_map(x.data, head_boxes(x, batch, tokens, heads, dim, rows, columns), hopper::Swizzle::b128);
}
template <class T>
bool is_head_mappable(const HeadRows<T>& x, std::int64_t batch, std::int64_t tokens, int heads, int dim) {
  return hopper::is_mappable(x.data, head_boxes(x, batch, tokens, heads, dim, 1, dim));
}

/// Loads the box of all columns that starts at `token`. One thread.
__device__ inline void load_rows(void* to, const CUtensorMap& map, hopper::Barrier& done, int token, int head,
                                 int batch) {
  hopper::load(to, map, done, 0, token, 0, head, batch);
}

/// Overwrites what is outside of rows [begin, end) of a `hopper::Tile` of `Rows` rows and `Dim` elements each with 0,
/// in shared memory: what is no part of the work weighs 0, but may hold anything, and 0 times NaN is NaN. All threads
/// of a warp group; `barrier` is a named one of theirs alone.
template <int Rows, int Dim>
__device__ void zero_outside(void* tile, int begin, int end, int barrier) {
  if (begin <= 0 && end >= Rows) return;
  constexpr int words_of_row = 128 / sizeof(uint4);
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x) % hopper::warp_group_threads; i < Dim / 64 * Rows * words_of_row;
       i += hopper::warp_group_threads) {
    const int row = i / words_of_row % Rows;
    if (row < begin || row >= end) static_cast<uint4*>(tile)[i] = uint4{};
  }
  hopper::fence_async_proxy();
  hopper::named_sync(barrier, hopper::warp_group_threads);
}

/// A rectangle of the work in 32 bits: query q of [q0, q1) sees the keys [k0, min(q + diagonal, k1)).
struct TileRectangle {
  int q0, q1, k0, k1, diagonal;

  __device__ static TileRectangle of(const Rectangle& r) {
    const std::int64_t diagonal = r.is_full() ? most_tokens : r.k0 - r.q0 + r.causal_offset + 1;
    return {static_cast<int>(r.q0), static_cast<int>(r.q1), static_cast<int>(r.k0), static_cast<int>(r.k1),
            static_cast<int>(min(max(diagonal, -most_tokens), most_tokens))};
  }
  __device__ int keys_end(int q) const { return min(q + diagonal, k1); }
};

/// Walks the rectangles of the work that some test picks, 32 at a time: all lanes of a warp call together.
class RectangleWalk {
 public:
  __device__ explicit RectangleWalk(const WorkList& work) : work_(work) {}

  /// Moves to the next rectangle for which `meets` is true; false when there is none, or none before the first for
  /// which `is_beyond` is true.
  template <class Meets, class IsBeyond>
  __device__ bool next(Meets meets, IsBeyond is_beyond) {
    hits_ &= hits_ - 1;
    while (hits_ == 0) {
      base_ += 32;
      if (base_ >= work_.count) return false;
      const int mine = base_ + static_cast<int>(threadIdx.x % 32);
      const bool exists = mine < work_.count;
      const bool beyond = exists && is_beyond(work_.rectangles[mine]);
      hits_ = __ballot_sync(~0u, exists && !beyond && meets(work_.rectangles[mine]));
      if (hits_ == 0 && __any_sync(~0u, beyond)) return false;
    }
    rectangle_ = TileRectangle::of(work_.rectangles[index()]);
    return true;
  }
  __device__ void restart() {
    base_ = -32;
    hits_ = 0;
  }
  __device__ const TileRectangle& rectangle() const { return rectangle_; }
  __device__ int index() const { return base_ + __ffs(static_cast<int>(hits_)) - 1; }

 private:
  const WorkList& work_;
  int base_ = -32;     // of the 32 at hand,
  unsigned hits_ = 0;  // of which these are left, the one at hand first
  TileRectangle rectangle_{};
};

/// The tiles of `Keys` keys that the queries [begin, end) visit, rectangle by rectangle. All lanes of a warp walk
/// together; every warp that walks the same work for the same queries sees the same tiles.
template <int Keys>
class KeyTiles {
 public:
  __device__ KeyTiles(const WorkList& work, int begin, int end) : walk_(work), begin_(begin), end_(end) {}

  /// Moves to the next tile; the first call to the first one.
  __device__ bool next() {
    key_ += Keys;
    while (key_ >= stop_) {
      const bool found = walk_.next([&](const Rectangle& r) { return r.q0 < end_ && r.q1 > begin_; },
                                    [&](const Rectangle& r) { return r.q0 >= end_; });  // they ascend in q0
      if (!found) return false;
      const TileRectangle& r = walk_.rectangle();
      key_ = r.k0;
      stop_ = r.keys_end(min(end_, r.q1) - 1);
    }
    return true;
  }
  __device__ const TileRectangle& rectangle() const { return walk_.rectangle(); }
  /// First key of the tile.
  __device__ int key() const { return key_; }
  /// How many of its keys belong to the rectangle; from `Keys` on, all of them.
  __device__ int keys() const { return walk_.rectangle().k1 - key_; }
  /// Whether some query of [begin, end) does not see all keys of the tile.
  __device__ bool is_masked() const {
    const TileRectangle& r = walk_.rectangle();
    return r.q0 > begin_ || r.q1 < end_ || r.keys_end(begin_) < key_ + Keys;
  }
  /// How many keys of the tile query `q` sees: the first ones; from `Keys` on, all of them; none below 1.
  __device__ int seen_by(int q) const {
    const TileRectangle& r = walk_.rectangle();
    return q >= r.q0 && q < r.q1 ? r.keys_end(q) - key_ : 0;
  }

 private:
  RectangleWalk walk_;
  int begin_, end_;
  int key_ = 0, stop_ = 0;
};

/// What consumers must know of a tile of queries, beside its data.
struct TileOfQueries {
  int first, last;  // which rows belong to the rectangle: [first, last)
  int k0, k1;       // the rectangle's keys
  int shift;        // the first row that sees key k of them: k + shift
  bool is_masked;   // whether some row in [first, last) does not see all keys of the item
  bool is_final;    // of its item
};

/// The tiles of `Queries` queries that see keys of [begin, end), for each of `heads` query heads, rectangle by
/// rectangle; rules as of KeyTiles. Tiles of queries start at multiples of `Queries`. Late ones come first: the tiles
/// of keys of a causal rectangle that run together then start with the same queries, and read them from L2.
template <int Queries>
class QueryTiles {
 public:
  __device__ QueryTiles(const WorkList& work, int begin, int end, int heads)
      : walk_(work), begin_(begin), end_(end), heads_(heads) {}

  __device__ bool next() {
    query_ -= Queries;
    while (query_ < stop_) {
      if (!walk_.next([&](const Rectangle& r) { return r.k0 < end_ && r.k1 > begin_; },
                      [](const Rectangle&) { return false; })) {
        if (++head_ >= heads_) return false;
        walk_.restart();
        continue;
      }
      const TileRectangle& r = walk_.rectangle();
      // The first query that sees the rectangle's first key here, if any does.
      const int first = max(r.q0, max(begin_, r.k0) - r.diagonal + 1);
      query_ = (r.q1 - 1) / Queries * Queries;
      stop_ = first < r.q1 ? first / Queries * Queries : query_ + 1;
    }
    return true;
  }
  __device__ int head() const { return head_; }
  /// First of the keys.
  __device__ int begin() const { return begin_; }
  /// First query of the tile.
  __device__ int query() const { return query_; }
  /// Which rectangle of the work this is.
  __device__ int index() const { return walk_.index(); }
  __device__ TileOfQueries tile() const {
    const TileRectangle& r = walk_.rectangle();
    const int first = max(r.q0 - query_, 0), last = min(r.q1 - query_, Queries);
    const bool is_masked = r.k0 > begin_ || r.keys_end(query_ + first) < end_;
    return {first, last, r.k0, r.k1, 1 - r.diagonal - query_, is_masked, false};
  }

 private:
  RectangleWalk walk_;
  int begin_, end_, heads_;
  int head_ = 0, query_ = 0, stop_ = 1;
};

/// What a CTA of a persistent grid works on: items (place in the order of tiles, head), dealt out in rounds through the
/// CTAs, back and forth, the places with most work first. That gives each CTA as much work as the others; it takes its
/// share in an order of its own, `heads_at_once` heads after another, so that what CTAs read at a time stays in L2.
struct Items {
  int places, heads, heads_at_once;

  /// Whether items of `rows` of the tokens of so many heads can be numbered in 31 bits.
  static bool fits(std::int64_t tokens, int rows, std::int64_t heads) {
    return ((tokens + rows - 1) / rows + 1) * heads < std::int64_t{1} << 31;
  }

  struct Item {
    int place, head;
  };
  /// The place of a CTA in its share; starts before the first item.
  struct Share {
    int first_head = 0, round = -1;
  };
  /// Moves to the next item of this CTA; false after the last one. With few heads at once most rounds are passed over,
  /// so the lanes of a warp, which call together, look at 32 of them.
  __device__ bool next(Share& at, Item& item) const {
    while (at.first_head < heads) {
      const unsigned round = at.round + 1 + threadIdx.x % 32;
      const unsigned i = round * gridDim.x + (round % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
      const unsigned place = i / heads, head = i % heads;
      const bool exists = place < static_cast<unsigned>(places);
      const bool is_now = head - at.first_head < static_cast<unsigned>(heads_at_once);
      const unsigned hits = __ballot_sync(~0u, exists && is_now);
      if (hits != 0) {
        const int first = __ffs(static_cast<int>(hits)) - 1;
        item = {__shfl_sync(~0u, static_cast<int>(place), first), __shfl_sync(~0u, static_cast<int>(head), first)};
        at.round += 1 + first;
        return true;
      }
      at.round += 32;
      if (!__all_sync(~0u, exists)) at = {at.first_head + heads_at_once, -1};  // later rounds have none either
    }
    return false;
  }
};

}  // namespace pleat::inline v0::attention_kernel
