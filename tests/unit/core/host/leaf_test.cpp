// The host's core leaves: casts of all pairs, sums whose order and precision show, squares.
#include <pleat/core/host/leaf.hpp>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include <doctest/doctest.h>

namespace {

using namespace pleat;
using leaf = core_leaf<host_device>;
constexpr HostStream s{};

template <class T>
std::vector<T> filled_with_nan(std::size_t n) {
  return std::vector<T>(n, static_cast<T>(std::numeric_limits<float>::quiet_NaN()));
}
template <class Out, class In>
std::vector<Out> cast(const std::vector<In>& in) {
  std::vector<Out> out = filled_with_nan<Out>(in.size() + 1);
  leaf::cast_copy(out.data(), dtype_of<Out>, in.data(), dtype_of<In>, in.size(), s);
  CHECK(std::isnan(static_cast<float>(out.back())));  // one past the end is untouched
  out.pop_back();
  return out;
}
/// Sums one-element parts.
template <class Out, class Part>
Out sum(const std::vector<Part>& terms) {
  std::vector<const void*> parts;
  for (const Part& term : terms) parts.push_back(&term);
  auto out = filled_with_nan<Out>(1);
  leaf::sum_ranks(out.data(), dtype_of<Out>, parts, dtype_of<Part>, 1, false, s);
  return out[0];
}

TEST_CASE_TEMPLATE("cast_copy rounds to nearest even, for all pairs", In, double, float, bfloat16) {
  const std::vector<In> in = {static_cast<In>(0.0f), static_cast<In>(-1.5f), static_cast<In>(0x1.fp100f),
                              static_cast<In>(0x1p-130f)};
  const auto doubles = cast<double>(in);
  const auto floats = cast<float>(in);
  const auto bfloats = cast<bfloat16>(in);
  for (std::size_t i = 0; i < in.size(); ++i) {
    CHECK(doubles[i] == static_cast<double>(in[i]));
    CHECK(floats[i] == static_cast<float>(in[i]));
    CHECK(bfloats[i].bits == bfloat16(static_cast<float>(in[i])).bits);
  }
  CHECK(cast<double>(std::vector<In>{}).empty());
}

TEST_CASE("cast_copy from double rounds once") {
  const std::vector<double> beside_a_tie = {1.0 + 0x1p-8 + 0x1p-40, 1.0 + 0x1p-24 + 0x1p-50};
  CHECK(cast<bfloat16>(beside_a_tie)[0].bits == 0x3f81);
  CHECK(cast<float>(beside_a_tie)[1] == 1.0f + 0x1p-23f);
}

TEST_CASE("cast_copy of one dtype copies bits, also of integers") {
  const std::int64_t in[] = {std::numeric_limits<std::int64_t>::min(), -1, 5};
  std::int64_t out[3] = {};
  leaf::cast_copy(out, DType::i64, in, DType::i64, 3, s);
  for (int i = 0; i < 3; ++i) CHECK(out[i] == in[i]);
  CHECK_THROWS_AS(leaf::cast_copy(out, DType::f32, in, DType::i64, 3, s), shape_error);
}

TEST_CASE("sum_ranks adds the parts in order") {
  const float big = 0x1p24f;
  CHECK(sum<float>(std::vector<float>{big, 1, 1, -big}) == 0.0f);  // each 1 is lost beside 2^24
  CHECK(sum<float>(std::vector<float>{1, 1, big, -big}) == 2.0f);
  CHECK(sum<float>(std::vector<float>{-big, big, 1, 1}) == 2.0f);
  CHECK(sum<double>(std::vector<double>{0x1p53, 1, 1, -0x1p53}) == 0.0);
  CHECK(sum<double>(std::vector<double>{1, 1, 0x1p53, -0x1p53}) == 2.0);
}

// source: facts/fsdp.json, `precision`.
TEST_CASE("bfloat16 parts are summed in float and rounded once") {
  CHECK(static_cast<float>(sum<bfloat16>(std::vector<bfloat16>(512, bfloat16(1.0f)))) == 512.0f);
  CHECK(sum<float>(std::vector<bfloat16>(512, bfloat16(1.0f))) == 512.0f);
  std::vector<bfloat16> terms(8, bfloat16(1.0f));
  terms[0] = bfloat16(256.0f);
  CHECK(sum<float>(terms) == 263.0f);
  CHECK(static_cast<float>(sum<bfloat16>(terms)) == 264.0f);
  CHECK(sum<float>(std::vector<bfloat16>(1000, bfloat16(1e-3f))) == 0.99945068359375f);
}

TEST_CASE("the sum runs in the accumulator of the wider dtype") {
  const std::vector<float> floats = {0x1p24f, 1, 1};
  CHECK(sum<double>(floats) == 0x1p24 + 2);
  const std::vector<double> doubles = {0x1p24, 1, 1};
  CHECK(sum<float>(doubles) == 0x1p24f + 2);
  CHECK(sum<bfloat16>(std::vector<double>{1.0, 0x1p-8, 0x1p-40}).bits == 0x3f81);  // rounded once, from double
}

TEST_CASE("accumulate adds the sum of the parts to what is there") {
  const float a[] = {1, 0x1p24f}, b[] = {2, 1}, c[] = {4, -0x1p24f};
  const void* parts[] = {a, b, c};
  float out[] = {100, 1};
  leaf::sum_ranks(out, DType::f32, parts, DType::f32, 2, true, s);
  CHECK(out[0] == 107.0f);
  CHECK(out[1] == 1.0f);  // 1 + ((2^24 + 1) - 2^24), the inner sum first
  leaf::sum_ranks(out, DType::f32, parts, DType::f32, 2, false, s);
  CHECK(out[0] == 7.0f);
}

TEST_CASE("out may be one of the parts") {
  for (int alias = 0; alias < 3; ++alias) {
    std::vector<std::vector<float>> rows = {{1, 10}, {2, 20}, {4, 40}};
    const void* parts[] = {rows[0].data(), rows[1].data(), rows[2].data()};
    float* out = rows[static_cast<std::size_t>(alias)].data();
    leaf::sum_ranks(out, DType::f32, parts, DType::f32, 2, false, s);
    CHECK(out[0] == 7.0f);
    CHECK(out[1] == 70.0f);
  }
}

TEST_CASE("no parts sum to zero, no elements touch nothing") {
  float out = 3;
  leaf::sum_ranks(&out, DType::f32, {}, DType::f32, 1, true, s);
  CHECK(out == 3.0f);
  leaf::sum_ranks(&out, DType::f32, {}, DType::f32, 1, false, s);
  CHECK(out == 0.0f);
  leaf::sum_ranks(nullptr, DType::f32, {}, DType::f32, 0, false, s);
  CHECK_THROWS_AS(leaf::sum_ranks(&out, DType::i32, {}, DType::f32, 1, false, s), shape_error);
}

TEST_CASE_TEMPLATE("sum_of_squares runs in float64", T, double, float, bfloat16) {
  const std::vector<T> values = {static_cast<T>(3.0f), static_cast<T>(-4.0f), static_cast<T>(0x1p20f)};
  double out = std::numeric_limits<double>::quiet_NaN();
  leaf::sum_of_squares(&out, values.data(), dtype_of<T>, values.size(), false, nullptr, s);
  CHECK(out == 25.0 + 0x1p40);
  leaf::sum_of_squares(&out, values.data(), dtype_of<T>, 2, true, nullptr, s);
  CHECK(out == 50.0 + 0x1p40);
  leaf::sum_of_squares(&out, nullptr, dtype_of<T>, 0, false, nullptr, s);
  CHECK(out == 0.0);
}

TEST_CASE("squares beyond the range of float do not overflow") {
  const float large = 1e30f;
  double out = 0;
  leaf::sum_of_squares(&out, &large, DType::f32, 1, false, nullptr, s);
  CHECK(std::isfinite(out));
  CHECK(out == static_cast<double>(large) * static_cast<double>(large));
}

}  // namespace
