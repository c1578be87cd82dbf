// Cutting one block of memory into typed arrays; the same walk measures a footprint and hands out its pointers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <pleat/core/block.hpp>
#include <pleat/core/error.hpp>

namespace pleat::inline v0 {

/// Hands out consecutive aligned arrays of a block. Without a block it only counts, so that a plan and a bind share one
/// function that describes the layout:
///
///     struct Buffers { float* rows; int* ids; };
///     Buffers carve(Carver& memory, const Plan& p) { return {memory.take<float>(p.rows), memory.take<int>(p.rows)}; }
///
/// Errors: shape_error T02 when the block is too small, or its address no multiple of `alignment_bytes`.
class Carver {
 public:
  /// Offsets of all arrays are multiples of this; a block must be aligned to it.
  static constexpr std::size_t alignment_bytes = 128;

  /// Measures: hands out null pointers and counts.
  constexpr Carver() = default;
  /// Hands out the block.
  explicit constexpr Carver(Block block) : block_(block), measures_(false) {
    if (std::is_constant_evaluated()) return;
    const auto past = reinterpret_cast<std::uintptr_t>(block.data) % alignment_bytes;
    if (past != 0) {
      fail<shape_error>("pleat[T02]: a block of ", block.size_bytes, " bytes begins ", past,
                        " bytes past a multiple of ", alignment_bytes, "; its address must be one");
    }
  }

  /// The next array of the block, aligned. Errors: shape_error T02 when the block ends before.
  template <class T>
  constexpr T* take(std::size_t elems) {
    return reinterpret_cast<T*>(take_bytes(elems * sizeof(T)));
  }
  /// The same in bytes.
  constexpr std::byte* take_bytes(std::size_t bytes) {
    const std::size_t at = used_bytes_;
    used_bytes_ += (bytes + alignment_bytes - 1) / alignment_bytes * alignment_bytes;
    if (measures_) return nullptr;
    if (used_bytes_ > block_.size_bytes) {
      fail<shape_error>("pleat[T02]: a block of ", block_.size_bytes, " bytes is too small; at least ", used_bytes_,
                        " are needed: allocate what footprint() says");
    }
    return block_.data + at;
  }
  /// Bytes handed out so far, alignment included: of a walk that measures, the footprint.
  constexpr std::size_t used_bytes() const { return used_bytes_; }

 private:
  Block block_;
  bool measures_ = true;
  std::size_t used_bytes_ = 0;
};

}  // namespace pleat::inline v0
