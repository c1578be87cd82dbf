// bfloat16 storage: two bytes, the same type in every build; arithmetic happens in float.
#pragma once

#include <cstdint>

#include <pleat/core/config.hpp>

namespace pleat::inline v0 {

/// A 16-bit brain float: the upper half of a float. Converts to float exactly and from float by rounding to nearest,
/// ties to even; NaN stays NaN. `__nv_bfloat16` has the same bits and is mapped to it by dtype.
struct bfloat16 {
  std::uint16_t bits = 0;

  bfloat16() = default;
  PLEAT_HD constexpr explicit bfloat16(float value) noexcept : bits(round(__builtin_bit_cast(std::uint32_t, value))) {}
  PLEAT_HD constexpr operator float() const noexcept {
    return __builtin_bit_cast(float, static_cast<std::uint32_t>(bits) << 16);
  }

  static PLEAT_HD constexpr bfloat16 from_bits(std::uint16_t bits) noexcept {
    bfloat16 value;
    value.bits = bits;
    return value;
  }

 private:
  static PLEAT_HD constexpr std::uint16_t round(std::uint32_t word) noexcept {
    const bool is_nan = (word & 0x7fffffffu) > 0x7f800000u;
    if (is_nan) return static_cast<std::uint16_t>((word >> 16) | 0x40u);
    return static_cast<std::uint16_t>((word + 0x7fffu + ((word >> 16) & 1u)) >> 16);
  }
};
static_assert(sizeof(bfloat16) == 2);

}  // namespace pleat::inline v0
