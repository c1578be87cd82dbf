// float16 storage: two bytes, the same type in every build; arithmetic happens in float.
#pragma once

#include <concepts>
#include <cstdint>

#include <pleat/core/config.hpp>

namespace pleat::inline v0 {

/// An IEEE half: 5 bits of exponent, 10 of fraction. Converts to float exactly and from float and double by rounding
/// once, to nearest, ties to even; from 65520 on to infinity; NaN stays NaN. `__half` has the same bits.
struct float16 {
  std::uint16_t bits = 0;

  float16() = default;
  PLEAT_HD constexpr explicit float16(float value) noexcept : bits(round(static_cast<double>(value))) {}
  template <std::same_as<double> Double>  // exactly double: an int takes the constructor above
  PLEAT_HD constexpr explicit float16(Double value) noexcept : bits(round(value)) {}
  PLEAT_HD constexpr operator float() const noexcept {
    const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16, rest = bits & 0x7fffu;
    if (rest >= 0x7c00u) return __builtin_bit_cast(float, sign | 0x7f800000u | (rest & 0x3ffu) << 13);
    const float magnitude =
        rest < 0x400u ? static_cast<float>(rest) * 0x1p-24f : __builtin_bit_cast(float, (rest << 13) + (112u << 23));
    return sign != 0 ? -magnitude : magnitude;
  }

  /// The number with this bit pattern.
  static PLEAT_HD constexpr float16 from_bits(std::uint16_t bits) noexcept {
    float16 value;
    value.bits = bits;
    return value;
  }

 private:
  static PLEAT_HD constexpr std::uint16_t round(double value) noexcept {
    const std::uint64_t word = __builtin_bit_cast(std::uint64_t, value);
    const auto sign = static_cast<std::uint16_t>((word >> 48) & 0x8000u);
    const double magnitude = value < 0 ? -value : value;
    if (!(magnitude < 65520)) {
      return static_cast<std::uint16_t>(sign | (value != value ? 0x7e00u | ((word >> 42) & 0x3ffu) : 0x7c00u));
    }
    const int exponent = static_cast<int>((word >> 52) & 0x7ffu) - 1023;
    const int unit = (exponent < -14 ? -14 : exponent) - 10;  // what the last bit counts, as a power of 2
    const double per_unit = __builtin_bit_cast(double, static_cast<std::uint64_t>(1023 - unit) << 52);
    constexpr double whole = 0x1p52;  // has no bits after the point: adding it rounds
    const double units = (magnitude * per_unit + whole) - whole;
    return static_cast<std::uint16_t>(
        sign | (static_cast<std::uint32_t>(units) + static_cast<std::uint32_t>(unit + 24) * 1024u));
  }
};
static_assert(sizeof(float16) == 2);

}  // namespace pleat::inline v0
