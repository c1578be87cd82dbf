// bfloat16 storage: two bytes, the same type in every build; arithmetic happens in float.
#pragma once

#include <concepts>
#include <cstdint>

#include <pleat/core/config.hpp>

namespace pleat::inline v0 {

/// A 16-bit brain float: the upper half of a float. Converts to float exactly and from float and double by rounding
/// once, to nearest, ties to even; NaN stays NaN. `__nv_bfloat16` has the same bits and is mapped to it by dtype.
struct bfloat16 {
  std::uint16_t bits = 0;

  bfloat16() = default;
  PLEAT_HD constexpr explicit bfloat16(float value) noexcept : bits(round(__builtin_bit_cast(std::uint32_t, value))) {}
  template <std::same_as<double> Double>  // exactly double: an int takes the constructor above
  PLEAT_HD constexpr explicit bfloat16(Double value) noexcept : bits(round(odd(value))) {}
  PLEAT_HD constexpr operator float() const noexcept {
    return __builtin_bit_cast(float, static_cast<std::uint32_t>(bits) << 16);
  }

  /// The number with this bit pattern.
  static PLEAT_HD constexpr bfloat16 from_bits(std::uint16_t bits) noexcept {
    bfloat16 value;
    value.bits = bits;
    return value;
  }

 private:
  /// The bits of `value` as a float, rounded to odd: towards zero, then the last bit set when anything was lost. Going
  /// through the nearest float would round twice, and let what lies just beside a tie become the tie.
  static PLEAT_HD constexpr std::uint32_t odd(double value) noexcept {
    const float nearest = static_cast<float>(value);
    std::uint32_t word = __builtin_bit_cast(std::uint32_t, nearest);
    const double back = static_cast<double>(nearest);
    if (back == value || value != value) return word;
    if (value < 0 ? back < value : back > value) --word;
    return word | 1u;
  }
  static PLEAT_HD constexpr std::uint16_t round(std::uint32_t word) noexcept {
    const bool is_nan = (word & 0x7fffffffu) > 0x7f800000u;
    if (is_nan) return static_cast<std::uint16_t>((word >> 16) | 0x40u);
    return static_cast<std::uint16_t>((word + 0x7fffu + ((word >> 16) & 1u)) >> 16);
  }
};
static_assert(sizeof(bfloat16) == 2);

}  // namespace pleat::inline v0
