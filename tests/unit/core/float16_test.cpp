// float16: every bit pattern, ties and their neighbours, the ends of the range, against distances in long double.
#include <pleat/core/float16.hpp>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <type_traits>

#include <doctest/doctest.h>

namespace {

using pleat::float16;

/// The value of a bit pattern, by the definition of the format; infinity counts as the next power of 2.
long double value_of(std::uint32_t bits) {
  const auto exponent = static_cast<int>(bits >> 10), fraction = static_cast<int>(bits & 0x3ff);
  return exponent == 0 ? std::ldexp(static_cast<long double>(fraction), -24)
                       : std::ldexp(static_cast<long double>(1024 + fraction), exponent - 25);
}
std::uint16_t nearest_by_distance(double value) {
  const long double magnitude = std::fabs(static_cast<long double>(value));
  std::uint32_t low = 0, high = 0x7c00;
  while (high - low > 1) {
    const std::uint32_t middle = (low + high) / 2;
    (value_of(middle) <= magnitude ? low : high) = middle;
  }
  const long double below = magnitude - value_of(low), above = value_of(high) - magnitude;
  const bool up = above < below || (above == below && high % 2 == 0);
  return static_cast<std::uint16_t>((up ? high : low) | (std::signbit(value) ? 0x8000u : 0u));
}

static_assert(sizeof(float16) == 2 && alignof(float16) == 2);
static_assert(std::is_trivially_copyable_v<float16> && std::is_standard_layout_v<float16>);
static_assert(!std::is_convertible_v<float, float16> && std::is_convertible_v<float16, float>);
static_assert(float16(1.0f).bits == 0x3c00 && float16(1.0).bits == 0x3c00 && float16(1).bits == 0x3c00);
static_assert(static_cast<float>(float16::from_bits(0xc200)) == -3.0f && float16{}.bits == 0);

TEST_CASE("every bit pattern is the value of its definition and survives the way through float and double") {
  int wrong = 0;
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float wide = float16::from_bits(static_cast<std::uint16_t>(bits));
    const std::uint32_t rest = bits & 0x7fff;
    if (rest > 0x7c00) {
      wrong += !std::isnan(wide) || (float16(wide).bits & 0x7fff) <= 0x7c00;
      continue;
    }
    if (rest < 0x7c00) wrong += static_cast<long double>(std::fabs(wide)) != value_of(rest);
    wrong += std::signbit(wide) != (bits > 0x7fff);
    wrong += float16(wide).bits != bits || float16(static_cast<double>(wide)).bits != bits;
  }
  CHECK(wrong == 0);
}

TEST_CASE("random numbers, ties and their neighbours go to the nearest value") {
  std::mt19937_64 random(std::random_device{}());
  int wrong = 0;
  for (int i = 0; i < 20000; ++i) {
    double value =
        std::ldexp(1.0 + static_cast<double>(random() >> 12) * 0x1p-52, static_cast<int>(random() % 50) - 30);
    if (i % 2 == 0) value = static_cast<double>((value_of(i % 0x7bff) + value_of(i % 0x7bff + 1)) / 2);
    if (i % 4 == 0) value = std::nextafter(value, random() % 2 == 0 ? 0.0 : 1e300);
    if (random() % 2 == 0) value = -value;
    wrong += float16(value).bits != nearest_by_distance(value);
    const auto single = static_cast<float>(value);
    wrong += float16(single).bits != nearest_by_distance(static_cast<double>(single));
  }
  CHECK(wrong == 0);
}

TEST_CASE("the ends of the range") {
  constexpr double inf = std::numeric_limits<double>::infinity();
  CHECK(float16(inf).bits == 0x7c00);
  CHECK(float16(-inf).bits == 0xfc00);
  CHECK(float16(65504.0).bits == 0x7bff);
  CHECK(float16(std::nextafter(65520.0, 0.0)).bits == 0x7bff);
  CHECK(float16(65520.0).bits == 0x7c00);
  CHECK(float16(-1e300).bits == 0xfc00);
  CHECK(float16(0x1p-24).bits == 1);  // the smallest float16
  CHECK(float16(0x1p-25).bits == 0);  // half of it: to even
  CHECK(float16(std::nextafter(0x1p-25, 1.0)).bits == 1);
  CHECK(float16(std::nextafter(0x1p-14, 0.0)).bits == 0x0400);  // rounds up to the smallest normal number
  CHECK(float16(-0.0).bits == 0x8000);
  CHECK(float16(-1e-300).bits == 0x8000);
  CHECK((float16(std::numeric_limits<float>::signaling_NaN()).bits & 0x7fff) > 0x7c00);
  CHECK((float16(std::numeric_limits<double>::quiet_NaN()).bits & 0x7fff) > 0x7c00);
}

}  // namespace
