// What the Hopper attention kernels load and in which order they visit it: tensor maps of heads, and the tiles of keys
// that the work gives a tile of queries.
#pragma once

#include <algorithm>

#include <pleat/attention/cuda/arguments.hpp>
#include <pleat/cuda/hopper/tma.cuh>

namespace pleat::inline v0::attention_kernel {

/// Token indices stay below this, so that sums of two fit 32 bits.
inline constexpr std::int64_t most_tokens = std::int64_t{1} << 30;

/// Rows [batch, tokens, heads, dim] as boxes of `rows` tokens of one head: axes (64 of the dim, tokens, dim / 64,
/// heads, batch), so that one box is a `hopper::Tile` of dim / 64 panels.
template <class T>
hopper::TensorBoxes<5> head_boxes(const HeadRows<const T>& x, std::int64_t batch, std::int64_t tokens, int heads,
                                  int dim, int rows) {
  constexpr std::int64_t size = sizeof(T);
  return {{64, tokens, dim / 64, heads, batch},
          {x.token_stride * size, 64 * size, x.head_stride * size, x.batch_stride * size},
          {64, rows, dim / 64, 1, 1}};
}

/// Loads the box that starts at `token`. One thread.
__device__ inline void load_rows(void* to, const CUtensorMap& map, hopper::Barrier& done, int token, int head,
                                 int batch) {
  hopper::load(to, map, done, 0, token, 0, head, batch);
}

/// Overwrites rows [begin, end) of a `hopper::Tile` of `Rows` rows and `Dim` elements each with 0, in shared memory:
/// what is no part of the work weighs 0, but may hold anything, and 0 times NaN is NaN. All threads of a warp group;
/// `barrier` is a named one of theirs alone.
template <int Rows, int Dim>
__device__ void zero_rows(void* tile, int begin, int end, int barrier) {
  constexpr int words_of_row = 128 / sizeof(uint4);
  for (int panel = 0; panel < Dim / 64; ++panel) {
    uint4* const words = static_cast<uint4*>(tile) + panel * Rows * words_of_row;
    for (int i = begin * words_of_row + static_cast<int>(threadIdx.x) % hopper::warp_group_threads;
         i < end * words_of_row; i += hopper::warp_group_threads) {
      words[i] = uint4{};
    }
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

/// The tiles of `Keys` keys that the queries [begin, end) visit, rectangle by rectangle. All lanes of a warp walk
/// together; every warp that walks the same work for the same queries sees the same tiles.
template <int Keys>
class KeyTiles {
 public:
  __device__ KeyTiles(WorkList work, int begin, int end) : work_(work), begin_(begin), end_(end) {}

  /// Moves to the next tile; the first call to the first one.
  __device__ bool next() {
    key_ += Keys;
    while (key_ >= stop_) {
      if (!next_rectangle()) return false;
      const int last = min(end_, rectangle_.q1) - 1;
      key_ = rectangle_.k0;
      stop_ = rectangle_.keys_end(last);
    }
    return true;
  }
  /// First key of the tile.
  __device__ int key() const { return key_; }
  /// How many of its keys belong to the rectangle; from `Keys` on, all of them.
  __device__ int keys() const { return rectangle_.k1 - key_; }
  /// Whether some query of [begin, end) does not see all keys of the tile.
  __device__ bool is_masked() const {
    return rectangle_.q0 > begin_ || rectangle_.q1 < end_ || rectangle_.keys_end(begin_) < key_ + Keys;
  }
  /// How many keys of the tile query `q` sees: the first ones; from `Keys` on, all of them; none below 1.
  __device__ int seen_by(int q) const {
    return q >= rectangle_.q0 && q < rectangle_.q1 ? rectangle_.keys_end(q) - key_ : 0;
  }

 private:
  __device__ bool next_rectangle() {
    while (hits_ == 0) {  // 32 rectangles at a time
      if (next_ >= work_.count) return false;
      base_ = next_;
      const int mine = base_ + static_cast<int>(threadIdx.x % 32);
      bool met = false, beyond = false;
      if (mine < work_.count) {
        const Rectangle& r = work_.rectangles[mine];
        beyond = r.q0 >= end_;
        met = !beyond && r.q1 > begin_;
      }
      hits_ = __ballot_sync(~0u, met);
      next_ = __any_sync(~0u, beyond) ? work_.count : base_ + 32;  // they ascend in q0
    }
    rectangle_ = TileRectangle::of(work_.rectangles[base_ + __ffs(static_cast<int>(hits_)) - 1]);
    hits_ &= hits_ - 1;
    return true;
  }

  WorkList work_;
  int begin_, end_;
  int key_ = 0, stop_ = 0;
  int base_ = 0, next_ = 0;
  unsigned hits_ = 0;
  TileRectangle rectangle_{};
};

/// The tiles of `Queries` queries that see keys of [begin, end), for each of `heads` query heads, rectangle by
/// rectangle; rules as of KeyTiles. Tiles of queries start at multiples of `Queries`.
template <int Queries>
class QueryTiles {
 public:
  __device__ QueryTiles(WorkList work, int begin, int end, int heads)
      : work_(work), begin_(begin), end_(end), heads_(heads) {}

  __device__ bool next() {
    query_ += Queries;
    while (query_ >= stop_) {
      if (!next_rectangle()) {
        if (++head_ >= heads_) return false;
        next_ = 0;
        continue;
      }
      // The first query that sees the rectangle's first key here, if any does.
      const int first = max(rectangle_.q0, max(begin_, rectangle_.k0) - rectangle_.diagonal + 1);
      query_ = first / Queries * Queries;
      stop_ = first < rectangle_.q1 ? rectangle_.q1 : query_;
    }
    return true;
  }
  __device__ int head() const { return head_; }
  /// First query of the tile.
  __device__ int query() const { return query_; }
  __device__ const TileRectangle& rectangle() const { return rectangle_; }
  /// Which queries of the tile belong to the rectangle: [first, last).
  __device__ int first() const { return max(rectangle_.q0 - query_, 0); }
  __device__ int last() const { return min(rectangle_.q1 - query_, Queries); }
  /// Whether some query of the rectangle does not see all keys of [begin, end).
  __device__ bool is_masked() const { return rectangle_.k0 > begin_ || rectangle_.keys_end(query_ + first()) < end_; }
  /// The first query of the tile that sees `key`; from `Queries` on, none.
  __device__ int first_to_see(int key) const {
    return key >= rectangle_.k0 && key < rectangle_.k1 ? key - rectangle_.diagonal + 1 - query_ : Queries;
  }

 private:
  __device__ bool next_rectangle() {
    while (hits_ == 0) {
      if (next_ >= work_.count) return false;
      base_ = next_;
      const int mine = base_ + static_cast<int>(threadIdx.x % 32);
      bool met = false;
      if (mine < work_.count) {
        const Rectangle& r = work_.rectangles[mine];
        met = r.k0 < end_ && r.k1 > begin_;
      }
      hits_ = __ballot_sync(~0u, met);
      next_ = base_ + 32;
    }
    rectangle_ = TileRectangle::of(work_.rectangles[base_ + __ffs(static_cast<int>(hits_)) - 1]);
    hits_ &= hits_ - 1;
    return true;
  }

  WorkList work_;
  int begin_, end_, heads_;
  int head_ = 0, query_ = 0, stop_ = 0;
  int base_ = 0, next_ = 0;
  unsigned hits_ = 0;
  TileRectangle rectangle_{};
};

/// Which tile of rows of which head a CTA of a persistent grid works on next: late rows first, which see the most keys
/// of a causal rectangle; of `heads_at_once` heads at a time, so that what they share stays in L2. Rounds run through
/// the CTAs back and forth, which evens out how much each gets.
struct Items {
  int tiles, heads, heads_at_once;

  struct Item {
    int tile, head;
  };
  __device__ std::int64_t count() const { return static_cast<std::int64_t>(tiles) * heads; }
  /// The item of this CTA in round `round`; past `count` there is none in this and later rounds.
  __device__ std::int64_t index(int round) const {
    const int place = round % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x;
    return static_cast<std::int64_t>(round) * gridDim.x + place;
  }
  __device__ Item operator[](std::int64_t i) const {
    const int group = static_cast<int>(i / (static_cast<std::int64_t>(tiles) * heads_at_once));
    const int rest = static_cast<int>(i - static_cast<std::int64_t>(group) * tiles * heads_at_once);
    const int width = min(heads_at_once, heads - group * heads_at_once);
    return {tiles - 1 - rest / width, group * heads_at_once + rest % width};
  }
};

}  // namespace pleat::inline v0::attention_kernel
