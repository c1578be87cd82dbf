// What every plan of this folder refuses: sizes whose products do not fit, dtypes and options that are no values.
#pragma once

#include <cmath>
#include <cstdint>
#include <initializer_list>

#include <pleat/core/dtype.hpp>

namespace pleat::inline v0::moe {

/// Arrays of a plan have fewer elements, so that bytes and offsets fit their types whatever the dtype.
inline constexpr std::int64_t most_elems = std::int64_t{1} << 53;

/// Whether the product of sizes, each at least 1, stays below most_elems.
constexpr bool fits_product(std::initializer_list<std::int64_t> sizes) {
  std::int64_t product = 1;
  for (const std::int64_t size : sizes) {
    if (size >= most_elems / product) return false;
    product *= size;
  }
  return true;
}

/// Errors: shape_error T01.
inline void check_float(DType dtype) {
  if (dtype != DType::f64 && dtype != DType::f32 && dtype != DType::bf16) {
    fail<shape_error>("pleat[T01]: experts compute in f64, f32 or bf16, not in ", dtype);
  }
}

/// Errors: shape_error E02 when a token cannot choose k distinct experts.
constexpr void check_choice(int experts, int k) {
  if (experts < 1) fail<shape_error>("pleat[E02]: experts=", experts, " must be at least 1");
  if (k < 1 || k > experts) {
    fail<shape_error>("pleat[E02]: k=", k, " distinct experts of experts=", experts,
                      " cannot be chosen; valid k: 1 .. ", experts);
  }
}

/// Errors: shape_error E14, for a number that came from elsewhere and is no enumerator.
template <class Enum>
constexpr void check_enumerator(const char* name, Enum value, Enum last) {
  if (static_cast<int>(value) > static_cast<int>(last)) {
    fail<shape_error>("pleat[E14]: ", name, "=", static_cast<int>(value), " is no enumerator; valid: 0 .. ",
                      static_cast<int>(last));
  }
}
/// Errors: shape_error E14.
inline void check_number(const char* name, double value, bool may_be_zero) {
  if (!std::isfinite(value) || value < 0 || (value == 0 && !may_be_zero)) {
    fail<shape_error>("pleat[E14]: ", name, "=", value, " must be a finite number, ",
                      may_be_zero ? "0 or more" : "above 0");
  }
}

/// Choices counted over `ranks` ranks, of so many sequences at once. Errors: shape_error E07.
inline void check_counted(int ranks, std::int64_t max_sequences, int experts) {
  if (ranks < 1 || max_sequences < 1 || !fits_product({ranks, experts + std::int64_t{1}, max_sequences})) {
    fail<shape_error>("pleat[E07]: ranks=", ranks, " max_sequences=", max_sequences,
                      " must each be at least 1, their product with experts=", experts, " below 2^53");
  }
}

}  // namespace pleat::inline v0::moe
