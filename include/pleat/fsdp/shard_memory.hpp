// A rank's shard of a unit in device memory: what an optimizer and a checkpoint take.
#pragma once

#include <type_traits>

#include <pleat/fsdp/layout.hpp>

namespace pleat::inline v0::fsdp {

/// This rank's shard of one unit; borrowed from the operation that owns it.
struct ShardMemory {
  void* master;    // [elems] of master_dtype
  void* gradient;  // [elems] of master_dtype; null when the unit has nothing to train
  void* compute;   // [elems] of compute_dtype, what is gathered; null when the master itself is gathered
  DType master_dtype;
  DType compute_dtype;
  std::int64_t elems;
  const UpdatePiece* pieces;  // [piece_count], device memory
  std::int64_t piece_count;
};
static_assert(std::is_trivially_copyable_v<ShardMemory> && std::is_trivially_copyable_v<UpdatePiece>,
              "kernels take the one by value and read the other");

}  // namespace pleat::inline v0::fsdp
