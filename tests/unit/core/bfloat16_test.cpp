// bfloat16: every bit pattern, both roundings at and beside ties, the values at the ends of the range.
#include <pleat/core/bfloat16.hpp>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <type_traits>

#include <doctest/doctest.h>

namespace {

using pleat::bfloat16;

float float_of(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

/// The nearest bfloat16 found by comparing distances in long double: nothing of the code under test.
std::uint16_t nearest_by_distance(double value) {
  const bool negative = std::signbit(value);
  const long double magnitude = std::fabs(static_cast<long double>(value));
  const auto at = [](std::uint32_t bits) -> long double {
    return bits == 0x7f80 ? 0x1p128L : static_cast<long double>(float_of(bits << 16));  // inf: the next power
  };
  std::uint32_t low = 0, high = 0x7f80;
  while (high - low > 1) {
    const std::uint32_t middle = (low + high) / 2;
    (at(middle) <= magnitude ? low : high) = middle;
  }
  const long double below = magnitude - at(low), above = at(high) - magnitude;
  const bool up = above < below || (above == below && high % 2 == 0);
  return static_cast<std::uint16_t>((up ? high : low) | (negative ? 0x8000u : 0u));
}

static_assert(sizeof(bfloat16) == 2 && alignof(bfloat16) == 2);
static_assert(std::is_trivially_copyable_v<bfloat16> && std::is_standard_layout_v<bfloat16>);
static_assert(!std::is_convertible_v<float, bfloat16> && std::is_convertible_v<bfloat16, float>);
static_assert(bfloat16(1.0f).bits == 0x3f80 && bfloat16(1.0).bits == 0x3f80 && bfloat16(1).bits == 0x3f80);
static_assert(static_cast<float>(bfloat16::from_bits(0xc040)) == -3.0f);
static_assert(bfloat16{}.bits == 0);

TEST_CASE("every bit pattern survives the way through float and through double") {
  int wrong = 0;
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto value = bfloat16::from_bits(static_cast<std::uint16_t>(bits));
    const float wide = value;
    const bool is_nan = (bits & 0x7fff) > 0x7f80;
    if (std::isnan(wide) != is_nan) ++wrong;
    const std::uint32_t expected = is_nan ? bits | 0x40 : bits;  // a signalling NaN becomes quiet
    if (bfloat16(wide).bits != expected) ++wrong;
    if (!is_nan && bfloat16(static_cast<double>(wide)).bits != bits) ++wrong;
    if (is_nan && !std::isnan(static_cast<float>(bfloat16(static_cast<double>(wide))))) ++wrong;
  }
  CHECK(wrong == 0);
}

TEST_CASE("ties go to even, neighbours of ties to the nearer value") {
  CHECK(bfloat16(float_of(0x3f808000)).bits == 0x3f80);  // between 0x3f80 and 0x3f81
  CHECK(bfloat16(float_of(0x3f818000)).bits == 0x3f82);
  CHECK(bfloat16(float_of(0x3f808001)).bits == 0x3f81);
  CHECK(bfloat16(float_of(0x3f817fff)).bits == 0x3f81);
  CHECK(bfloat16(float_of(0xbf808000)).bits == 0xbf80);
  CHECK(bfloat16(float_of(0xbf818000)).bits == 0xbf82);
  CHECK(bfloat16(float_of(0x3fffffff)).bits == 0x4000);  // carries into the exponent
}

TEST_CASE("a double is rounded once") {
  const double tie = 1.0 + 0x1p-8;
  CHECK(bfloat16(tie).bits == 0x3f80);
  CHECK(bfloat16(tie + 0x1p-40).bits == 0x3f81);  // through float this would be the tie
  CHECK(bfloat16(-tie - 0x1p-40).bits == 0xbf81);
  const double odd_tie = 1.0 + 3 * 0x1p-8;
  CHECK(bfloat16(odd_tie).bits == 0x3f82);
  CHECK(bfloat16(odd_tie - 0x1p-40).bits == 0x3f81);
}

TEST_CASE("random floats and doubles go to the nearest value") {
  std::mt19937_64 random(20240607);
  int wrong = 0;
  for (int i = 0; i < 20000; ++i) {
    const float f = float_of(static_cast<std::uint32_t>(random()));
    if (!std::isnan(f) && !std::isinf(f) && bfloat16(f).bits != nearest_by_distance(static_cast<double>(f))) ++wrong;
    const double mantissa = 1.0 + static_cast<double>(random() >> 12) * 0x1p-52;
    double d = std::ldexp(mantissa, static_cast<int>(random() % 300) - 160);
    if (i % 2 == 0) d = std::ldexp(1.0 + (2.0 * static_cast<double>(random() % 128) + 1) * 0x1p-8, i % 60 - 30);
    if (i % 4 == 0) d = std::nextafter(d, random() % 2 == 0 ? 0.0 : 1e300);
    if (random() % 2 == 0) d = -d;
    if (bfloat16(d).bits != nearest_by_distance(d)) ++wrong;
  }
  CHECK(wrong == 0);
}

TEST_CASE("the ends of the range") {
  constexpr float inf = std::numeric_limits<float>::infinity();
  CHECK(bfloat16(inf).bits == 0x7f80);
  CHECK(bfloat16(-inf).bits == 0xff80);
  CHECK(bfloat16(static_cast<double>(inf)).bits == 0x7f80);
  CHECK(bfloat16(std::numeric_limits<float>::max()).bits == 0x7f80);
  CHECK(bfloat16(float_of(0x7f7f7fff)).bits == 0x7f7f);
  CHECK(bfloat16(1e300).bits == 0x7f80);
  CHECK(bfloat16(-1e300).bits == 0xff80);
  CHECK(bfloat16(1e-300).bits == 0x0000);
  CHECK(bfloat16(-1e-300).bits == 0x8000);
  CHECK(bfloat16(-0.0f).bits == 0x8000);
  CHECK(bfloat16(std::numeric_limits<float>::denorm_min()).bits == 0);
  CHECK(bfloat16(float_of(0x00010000)).bits == 1);  // the smallest bfloat16
  CHECK(bfloat16(float_of(0x00008000)).bits == 0);  // half of it: to even
  CHECK(bfloat16(float_of(0x00008001)).bits == 1);
  CHECK(bfloat16(float_of(0x00018000)).bits == 2);
  CHECK(bfloat16(float_of(0x007fffff)).bits == 0x0080);  // the largest denormal float rounds to a normal number
  // Every NaN stays one, also where its payload lies in the half that is cut off.
  CHECK((bfloat16(float_of(0x7f800001)).bits & 0x7fff) > 0x7f80);
  CHECK((bfloat16(float_of(0xffffffff)).bits & 0x7fff) > 0x7f80);
  CHECK((bfloat16(std::numeric_limits<double>::quiet_NaN()).bits & 0x7fff) > 0x7f80);
}

TEST_CASE("arithmetic happens in float") {
  const bfloat16 a(1.0f), b(0x1p-9f);
  static_assert(std::is_same_v<decltype(a + b), float>);
  CHECK(a + b == 1.0f + 0x1p-9f);
}

}  // namespace
