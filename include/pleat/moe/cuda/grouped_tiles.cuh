// Which tiles of a grouped product a CTA computes, found on the device from the row offsets of the experts.
#pragma once

#include <cstdint>

namespace pleat::inline v0::moe::detail {

/// A tile of results of one expert.
struct GroupedTile {
  int expert = -1;  ///< negative: no more tiles
  int row = 0;      ///< its first row: of the row array, or of the expert's matrix
  int rows = 0;     ///< rows of it that exist, more where it reaches the tile's full height; none below 1
  int column = 0;   ///< its first column
  int depth_first = 0;
  int depth = 0;          ///< what is summed over: elements [depth_first, depth_first + depth)
  bool shares_b = false;  ///< the CTAs of a pair take tiles below each other, and B; otherwise side by side, and A
};

/// Heights, widths and order of tiles. Consecutive units go to CTAs (or pairs of CTAs) that run at the same time; about
/// as many rows as columns are live at once, so that both operands come from L2.
struct TileShape {
  static constexpr int height = 128;
  static constexpr int live_tiles = 16;  // below each other, before the next column begins
};

__device__ inline int tiles_of(std::int64_t elems, int size) {
  return static_cast<int>((elems + size - 1) / size);
}

/// The unit that worker `worker` of `workers` does in round `round`: odd rounds run backwards, so that work sorted by
/// size is spread evenly.
__device__ inline int unit_of_round(int round, int worker, int workers) {
  return round * workers + (round % 2 == 0 ? worker : workers - 1 - worker);
}

/// Cuts a grid of `rows` x `columns` units into bands of `live` rows; inside a band the row runs fastest.
struct BandPlace {
  int row, column;

  __device__ BandPlace(int unit, int rows, int columns, int live) {
    const int band = unit / (live * columns), inside = unit - band * live * columns;
    const int height = min(live, rows - band * live);
    column = inside / height;
    row = band * live + inside - column * height;
  }
};

/// Products with jagged rows: expert e has rows [offsets[e], offsets[e + 1]). A worker is a cluster of `Ctas` CTAs. In
/// a pair of CTAs an odd last row of tiles is computed side by side. All threads of a warp call, with rising units.
template <int Ctas>
class RowTiles {
 public:
  /// Tiles are `width` columns wide.
  __device__ RowTiles(const std::int64_t* offsets, int experts, int columns, int width, int depth, int rank)
      : offsets_(offsets),
        experts_(experts),
        columns_(tiles_of(columns, width)),
        width_(width),
        depth_(depth),
        rank_(rank) {}

  __device__ GroupedTile find(int unit) {
    while (unit >= end_) {
      if (next_ >= experts_) return {};
      scan();
    }
    const unsigned begun = __ballot_sync(0xffffffffu, start_ <= unit);
    const int owner = 31 - __clz(static_cast<int>(begun));
    const int first = __shfl_sync(0xffffffffu, first_, owner), rows = __shfl_sync(0xffffffffu, rows_, owner);
    int local = unit - __shfl_sync(0xffffffffu, start_, owner);
    const int height = tiles_of(rows, TileShape::height), pairs = height / Ctas;
    GroupedTile tile;
    tile.expert = next_ - 32 + owner;
    tile.depth = depth_;
    int row = height - 1, column = 0;
    if (local < pairs * columns_) {
      const BandPlace place(local, pairs, columns_, TileShape::live_tiles / Ctas);
      row = place.row * Ctas + rank_;
      column = place.column;
      tile.shares_b = true;
    } else {
      column = (local - pairs * columns_) * Ctas + rank_;
    }
    tile.row = first + row * TileShape::height;
    tile.rows = column < columns_ ? rows - row * TileShape::height : 0;
    tile.column = column * width_;
    return tile;
  }

 private:
  /// Reads the next 32 experts, one per lane.
  __device__ void scan() {
    const int lane = static_cast<int>(threadIdx.x % 32), expert = next_ + lane;
    first_ = rows_ = 0;
    if (expert < experts_) {
      first_ = static_cast<int>(offsets_[expert]);
      rows_ = static_cast<int>(offsets_[expert + 1]) - first_;
    }
    const int height = tiles_of(rows_, TileShape::height);
    const int units = height / Ctas * columns_ + height % Ctas * tiles_of(columns_, Ctas);
    int sum = units;
    for (int distance = 1; distance < 32; distance *= 2) {
      const int before = __shfl_up_sync(0xffffffffu, sum, distance);
      if (lane >= distance) sum += before;
    }
    start_ = end_ + sum - units;
    end_ += __shfl_sync(0xffffffffu, sum, 31);
    next_ += 32;
  }

  const std::int64_t* offsets_;
  int experts_, columns_, width_, depth_, rank_;
  int next_ = 0, end_ = 0;                // the first expert, and unit, not scanned yet
  int start_ = 0, first_ = 0, rows_ = 0;  // of this lane's expert: first unit, first row, rows
};

/// The experts by falling numbers of rows, for products whose cost they are. In shared memory.
struct ExpertOrder {
  static constexpr int most_experts = 1024;  // more keep their own order
  std::uint16_t expert[most_experts];

  /// `rows` is scratch [experts] in shared memory. All threads of the CTA; a barrier follows.
  __device__ void sort(const std::int64_t* offsets, int experts, int* rows) {
    if (experts > most_experts) return;
    const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
    for (int e = thread; e < experts; e += threads) rows[e] = static_cast<int>(offsets[e + 1] - offsets[e]);
    __syncthreads();
    for (int e = thread; e < experts; e += threads) {
      const int mine = rows[e];
      int larger = 0;
#pragma unroll 8
      for (int other = 0; other < experts; ++other) {
        larger += rows[other] > mine || (rows[other] == mine && other < e) ? 1 : 0;
      }
      expert[larger] = static_cast<std::uint16_t>(e);
    }
  }
};

/// Products summed over jagged rows: a matrix [rows, columns] per expert, over rows [offsets[e], offsets[e + 1]).
template <int Ctas>
class MatrixTiles {
 public:
  __device__ MatrixTiles(const std::int64_t* offsets, int experts, int rows, int columns, int width, int rank,
                         const ExpertOrder& order)
      : offsets_(offsets),
        experts_(experts),
        rows_(rows),
        width_(width),
        rank_(rank),
        down_(tiles_of(rows, TileShape::height)),
        across_(tiles_of(columns, width)),
        shares_b_(down_ % Ctas == 0 || across_ % Ctas != 0),
        order_(order) {
    if (shares_b_) {
      down_ = tiles_of(down_, Ctas);
    } else {
      across_ = tiles_of(across_, Ctas);
    }
  }

  __device__ GroupedTile find(int unit) {
    const int each = down_ * across_, slot = unit / each;
    if (slot >= experts_) return {};
    GroupedTile tile;
    tile.expert = experts_ > ExpertOrder::most_experts ? slot : order_.expert[slot];
    const BandPlace place(unit - slot * each, down_, across_, TileShape::live_tiles / Ctas);
    tile.shares_b = shares_b_;
    tile.row = (shares_b_ ? place.row * Ctas + rank_ : place.row) * TileShape::height;
    tile.rows = rows_ - tile.row;
    tile.column = (shares_b_ ? place.column : place.column * Ctas + rank_) * width_;
    tile.depth_first = static_cast<int>(offsets_[tile.expert]);
    tile.depth = static_cast<int>(offsets_[tile.expert + 1]) - tile.depth_first;
    return tile;
  }

 private:
  const std::int64_t* offsets_;
  int experts_, rows_, width_, rank_, down_, across_;
  bool shares_b_;
  const ExpertOrder& order_;
};

}  // namespace pleat::inline v0::moe::detail
