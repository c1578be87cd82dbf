// The grouped products, and what the warp groups of their Hopper kernel share.
#pragma once

#include <cstdint>

#include <pleat/core/bfloat16.hpp>
#include <pleat/cuda/hopper/cluster.cuh>
#include <pleat/cuda/hopper/wgmma.cuh>
#include <pleat/moe/cuda/grouped_tiles.cuh>

namespace pleat::inline v0::moe::detail {

/// Per expert e, over its rows; W, G and U are its matrices, row-major.
/// - product: out [rows, columns] = a [rows, depth] W [columns, depth]^T
/// - gate_up: gate = a G^T, up = a U^T, act = silu(gate) * up
/// - down_backward: dact [rows, columns] = a [rows, depth] W [depth, columns]; out: dgate, dup and act
/// - rows_gradient: out = a W [depth, columns], or the sum of two such products
/// - weight_gradient: out [rows, columns] (+)= a [depth, rows]^T b [depth, columns] over the depth of the expert's rows
enum class Grouped { product, gate_up, down_backward, rows_gradient, weight_gradient };

/// One launch. Axes of the maps: a [row, element], b and matrices that are results [expert, row, column], others [row,
/// column].
struct GroupedArguments {
  CUtensorMap a[2], b[2];  // of each source; b of gate_up: gate and up
  CUtensorMap saved[2];    // gate and up, of down_backward
  CUtensorMap out[3];
  bfloat16* results[3];  // the arrays of `out` where rows are jagged
  const std::int64_t* offsets;
  int experts, columns;
  int rows;            // of each matrix, of weight_gradient
  int depth, sources;  // of the others
  bool accumulate;     // of weight_gradient
  bool is_narrow;      // its results are bf16
};

inline constexpr int box_bytes = 64 * 128;  // 64 rows of 128 bytes, staged for a store

/// Depth of a stage. Shallow ones are given back sooner and twice as many fit; less than 64 needs operands whose
/// contiguous axis is not the summed one.
template <Grouped Op>
inline constexpr int depth_step = 64;

template <Grouped Op>
struct GroupedTraits {
  static constexpr bool is_matrix = Op == Grouped::weight_gradient;
  static constexpr hopper::Major major_a = is_matrix ? hopper::Major::mn : hopper::Major::k;
  static constexpr hopper::Major major_b =
      Op == Grouped::product || Op == Grouped::gate_up ? hopper::Major::k : hopper::Major::mn;
  static constexpr int width = Op == Grouped::gate_up ? 128 : 256;    // columns of a tile, in each result
  static constexpr int boxes = Op == Grouped::down_backward ? 5 : 2;  // staged at once by each consumer
  static constexpr int step = depth_step<Op>;
  static_assert(step == 64 || (major_a == hopper::Major::mn && major_b == hopper::Major::mn));
  static constexpr int panel_bytes = step * 128;                                   // 64 rows or columns of an operand
  static constexpr int stages = (28 - 2 * boxes) * box_bytes / (6 * panel_bytes);  // in all nearly 227 KiB
};

inline constexpr int grouped_consumers = 2;  // warp groups; the last warp group loads
inline constexpr int grouped_threads = (grouped_consumers + 1) * hopper::warp_group_threads;

/// A [128, step] as two halves of 64 rows, B [256, step] as two halves of 128, each with the contiguous axis of its
/// source.
template <Grouped Op>
struct GroupedShared {
  using Traits = GroupedTraits<Op>;
  static constexpr int stage_bytes = 6 * Traits::panel_bytes;

  alignas(1024) unsigned char a[Traits::stages][2][Traits::panel_bytes];
  unsigned char b[Traits::stages][2][2 * Traits::panel_bytes];
  unsigned char staged[grouped_consumers][Traits::boxes][box_bytes];
  hopper::Barrier full[Traits::stages], empty[Traits::stages];
  hopper::Barrier tile_full[2], tile_empty[2];
  hopper::Barrier saved_full[grouped_consumers][2];
  GroupedTile tiles[2];
  ExpertOrder order;  // of weight_gradient
};

}  // namespace pleat::inline v0::moe::detail
