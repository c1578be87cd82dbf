// Element types as values, and the one crossing from values to types.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <pleat/core/bfloat16.hpp>
#include <pleat/core/error.hpp>
#include <pleat/core/float16.hpp>

namespace pleat::inline v0 {

/// The element types of tensors and messages.
enum class DType : std::uint8_t { f64, f32, bf16, f16, i64, i32, u8 };

constexpr const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return "f64";
    case DType::f32:
      return "f32";
    case DType::bf16:
      return "bf16";
    case DType::f16:
      return "f16";
    case DType::i64:
      return "i64";
    case DType::i32:
      return "i32";
    case DType::u8:
      return "u8";
  }
  return "?";
}
constexpr void append_to(Message& message, DType dtype) {
  message.append(name_of(dtype));
}

/// Bytes of one element.
PLEAT_HD constexpr std::size_t size_bytes(DType dtype) {
  switch (dtype) {
    case DType::f64:
    case DType::i64:
      return 8;
    case DType::f32:
    case DType::i32:
      return 4;
    case DType::bf16:
    case DType::f16:
      return 2;
    case DType::u8:
      return 1;
  }
  return 0;
}

namespace detail {
template <class T>
struct DTypeOf;  // a type without a dtype ends here
template <>
struct DTypeOf<double> : std::integral_constant<DType, DType::f64> {};
template <>
struct DTypeOf<float> : std::integral_constant<DType, DType::f32> {};
template <>
struct DTypeOf<bfloat16> : std::integral_constant<DType, DType::bf16> {};
template <>
struct DTypeOf<float16> : std::integral_constant<DType, DType::f16> {};
template <>
struct DTypeOf<std::int64_t> : std::integral_constant<DType, DType::i64> {};
template <>
struct DTypeOf<std::int32_t> : std::integral_constant<DType, DType::i32> {};
template <>
struct DTypeOf<std::uint8_t> : std::integral_constant<DType, DType::u8> {};
template <>
struct DTypeOf<std::byte> : std::integral_constant<DType, DType::u8> {};
}  // namespace detail

/// A type with a dtype.
template <class T>
concept element = requires {
  detail::DTypeOf<std::remove_cv_t<T>>::value;
};

/// The dtype of an element type, const or not.
template <element T>
inline constexpr DType dtype_of = detail::DTypeOf<std::remove_cv_t<T>>::value;

/// The type sums over `T` are kept in: double for double, float for all others.
template <class T>
using accumulator_t = std::conditional_t<std::is_same_v<T, double>, double, float>;
PLEAT_HD constexpr DType accumulator(DType dtype) {
  return dtype == DType::f64 ? DType::f64 : DType::f32;
}

/// Types that `dispatch_dtype` chooses from.
template <class... Ts>
struct TypeList {};
/// The types that parameters may have.
using FloatTypes = TypeList<double, float, bfloat16>;
/// The types an accumulator can have.
using AccumulatorTypes = TypeList<double, float>;

/// Calls `f(std::type_identity<T>{})` for each type of the list.
template <class... Ts, class F>
constexpr void for_each_type(TypeList<Ts...>, F&& f) {
  (f(std::type_identity<Ts>{}), ...);
}

/// Calls `f(std::type_identity<T>{})` with the type of the list that `dtype` names.
/// Errors: shape_error T01 with the dtype and the valid choices.
template <class... Ts, class F>
constexpr decltype(auto) dispatch_dtype(TypeList<Ts...>, DType dtype, F&& f) {
  if constexpr (sizeof...(Ts) == 0) {
    static_assert(sizeof...(Ts) != 0, "pleat: a dispatch needs at least one type");
  } else {
    using Result = std::common_type_t<std::invoke_result_t<F, std::type_identity<Ts>>...>;
    if constexpr (std::is_void_v<Result>) {
      const bool found = ((dtype == dtype_of<Ts> && (f(std::type_identity<Ts>{}), true)) || ...);
      if (!found) {
        Message choices;
        (choices.append(' ').append(name_of(dtype_of<Ts>)), ...);
        fail<shape_error>("pleat[T01]: dtype ", dtype, " is not supported here; valid dtypes:", choices.c_str());
      }
    } else {
      Result result{};
      dispatch_dtype(TypeList<Ts...>{}, dtype, [&](auto type) { result = f(type); });
      return result;
    }
  }
}

}  // namespace pleat::inline v0
