// What a rank's own arguments must be before it turns to its peers: dtypes that exist, bytes that can be counted, times
// that can be waited.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>

#include <pleat/comm/communicator.hpp>
#include <pleat/core/error.hpp>

namespace pleat::inline v0::detail {

/// The bytes of `elems` elements, `ranks` times as many of which an operation moves or holds. Errors: shape_error T01
/// when `dtype` is the number of none; comm_error C05 when no memory has as many bytes.
constexpr std::size_t bytes_of(const char* operation, std::size_t elems, DType dtype, std::int64_t ranks = 1) {
  const std::size_t width = size_bytes(dtype);
  if (width == 0) {
    fail<shape_error>("pleat[T01]: ", operation, " of elements of dtype number ", static_cast<int>(dtype),
                      "; valid dtypes: f64 f32 bf16 f16 i64 i32 u8");
  }
  if (elems > PTRDIFF_MAX / width / static_cast<std::size_t>(ranks < 1 ? 1 : ranks)) {
    fail<comm_error>("pleat[C05]: ", operation, " of ", elems, " ", dtype, " on ", ranks,
                     " ranks is more bytes than memory can have");
  }
  return elems * width;
}
/// The same for elements that differ by rank.
constexpr void check_counts(const char* operation, Counts counts, DType dtype) {
  std::size_t sum = 0;
  for (const std::size_t elems : counts) {
    sum = elems > SIZE_MAX - sum ? SIZE_MAX : sum + elems;
    (void)bytes_of(operation, sum, dtype);
  }
}

/// How long a rank waits: what is longer than a century is a century, which a clock can still count. Errors: comm_error
/// C35 for a time below 0.
inline std::chrono::milliseconds checked_deadline(std::chrono::milliseconds deadline) {
  constexpr std::chrono::milliseconds century = std::chrono::hours(24 * 36525);
  if (deadline.count() < 0) {
    fail<comm_error>("pleat[C35]: a deadline of ", deadline.count(), " ms; valid deadlines: 0 ms or more");
  }
  return deadline < century ? deadline : century;
}

}  // namespace pleat::inline v0::detail
