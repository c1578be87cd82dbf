// DType: names, sizes, the mapping from types, and the dispatch from values back to types.
#include <pleat/core/dtype.hpp>

#include <string>
#include <type_traits>

#include <doctest/doctest.h>

namespace {

using namespace pleat;

static_assert(dtype_of<double> == DType::f64 && dtype_of<float> == DType::f32 && dtype_of<bfloat16> == DType::bf16);
static_assert(dtype_of<float16> == DType::f16);
static_assert(dtype_of<std::int64_t> == DType::i64 && dtype_of<std::int32_t> == DType::i32);
static_assert(dtype_of<std::uint8_t> == DType::u8 && dtype_of<std::byte> == DType::u8);
static_assert(dtype_of<const float> == DType::f32 && dtype_of<volatile const double> == DType::f64);
static_assert(element<const bfloat16> && !element<bool> && !element<short> && !element<float*> && !element<void>);
static_assert(std::is_same_v<accumulator_t<double>, double> && std::is_same_v<accumulator_t<float>, float> &&
              std::is_same_v<accumulator_t<bfloat16>, float> && std::is_same_v<accumulator_t<float16>, float>);
static_assert(accumulator(DType::f64) == DType::f64 && accumulator(DType::f32) == DType::f32 &&
              accumulator(DType::bf16) == DType::f32 && accumulator(DType::f16) == DType::f32);

using AllTypes = TypeList<double, float, bfloat16, float16, std::int64_t, std::int32_t, std::uint8_t>;

constexpr std::size_t size_by_dispatch(DType dtype) {
  return dispatch_dtype(AllTypes{}, dtype, [](auto type) { return sizeof(typename decltype(type)::type); });
}
static_assert(size_by_dispatch(DType::bf16) == 2);

TEST_CASE("names and sizes") {
  const std::pair<DType, std::string> names[] = {{DType::f64, "f64"}, {DType::f32, "f32"}, {DType::bf16, "bf16"},
                                                 {DType::f16, "f16"}, {DType::i64, "i64"}, {DType::i32, "i32"},
                                                 {DType::u8, "u8"}};
  for (const auto& [dtype, name] : names) {
    CHECK(name_of(dtype) == name);
    CHECK(message_of(dtype).c_str() == name);
    CHECK(size_bytes(dtype) == size_by_dispatch(dtype));
  }
}

TEST_CASE("dispatch calls once, with the type that the value names") {
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16, DType::i64, DType::i32, DType::u8}) {
    int calls = 0;
    DType seen{};
    dispatch_dtype(AllTypes{}, dtype, [&](auto type) {
      ++calls;
      seen = dtype_of<typename decltype(type)::type>;
    });
    CHECK(calls == 1);
    CHECK(seen == dtype);
  }
}

TEST_CASE("dispatch returns a value common to all types") {
  const auto one_half = [](auto type) { return static_cast<typename decltype(type)::type>(0.5); };
  static_assert(std::is_same_v<decltype(dispatch_dtype(AccumulatorTypes{}, DType::f32, one_half)), double>);
  CHECK(dispatch_dtype(AccumulatorTypes{}, DType::f32, one_half) == 0.5);
  const auto name = [](auto type) { return std::string(name_of(dtype_of<typename decltype(type)::type>)); };
  CHECK(dispatch_dtype(FloatTypes{}, DType::bf16, name) == "bf16");
}

TEST_CASE("a dtype outside the list gives T01 with the choices") {
  const char* text = "pleat[T01]: dtype i32 is not supported here; valid dtypes: f64 f32 bf16";
  CHECK_THROWS_WITH_AS(dispatch_dtype(FloatTypes{}, DType::i32, [](auto) {}), text, shape_error);
  CHECK_THROWS_WITH_AS(dispatch_dtype(FloatTypes{}, DType::i32, [](auto) { return 1; }), text, shape_error);
  CHECK_THROWS_WITH_AS(dispatch_dtype(AccumulatorTypes{}, DType::bf16, [](auto) {}),
                       "pleat[T01]: dtype bf16 is not supported here; valid dtypes: f64 f32", shape_error);
}

TEST_CASE("what the function throws goes through") {
  CHECK_THROWS_WITH(dispatch_dtype(FloatTypes{}, DType::f32, [](auto) { fail<shape_error>("mine"); }), "mine");
}

}  // namespace
