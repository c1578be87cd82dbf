// What the trainer's kernels share: 16-byte vectors of elements, sums of a group of lanes, and sizes of grids.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include <pleat/core/dtype.hpp>
#include <pleat/cuda/kernel.hpp>

#include "../ops.hpp"

namespace train_moe::gpu {

inline constexpr int threads = 256;

/// `width` consecutive elements, moved at once.
template <class T, int width>
struct alignas(sizeof(T) * width) Vector {
  T elem[width];
};
/// Elements of 16 bytes.
template <class T>
inline constexpr int full_width = static_cast<int>(16 / sizeof(T));

template <int width, class T>
__device__ __forceinline__ Vector<std::remove_const_t<T>, width> load(T* data, std::int64_t at) {
  return *reinterpret_cast<const Vector<std::remove_const_t<T>, width>*>(data + at);
}
template <class T, int width>
__device__ __forceinline__ void store(T* data, std::int64_t at, const Vector<T, width>& value) {
  *reinterpret_cast<Vector<T, width>*>(data + at) = value;
}

/// The sum over groups of `lanes` neighbouring lanes, a power of two; all lanes of a group get it.
template <int lanes, class A>
__device__ __forceinline__ A sum_of_lanes(A value) {
#pragma unroll
  for (int distance = lanes / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(0xffffffffu, value, distance);
  return value;
}

/// CTAs for so many threads' work, in grid-stride loops: enough to fill the largest chips several times.
inline unsigned grid_of(std::int64_t work, int per_cta = threads) {
  return static_cast<unsigned>(std::clamp<std::int64_t>((work + per_cta - 1) / per_cta, 1, 132 * 16));
}

/// Whether arrays may be moved in vectors of 16 bytes whose rows have lengths and strides of `elems` elements of T.
template <class T>
bool is_vectorizable(std::initializer_list<std::int64_t> elems, std::initializer_list<const void*> arrays) {
  return std::all_of(elems.begin(), elems.end(), [](std::int64_t e) { return e % full_width<T> == 0; }) &&
         std::all_of(arrays.begin(), arrays.end(),
                     [](const void* a) { return reinterpret_cast<std::uintptr_t>(a) % 16 == 0; });
}

/// Calls `f` with the width as a constant: that of 16 bytes of `T`, or 1.
template <class T, class F>
void with_width(bool vectorizable, F f) {
  if (vectorizable) {
    f(std::integral_constant<int, full_width<T>>{});
  } else {
    f(std::integral_constant<int, 1>{});
  }
}

/// Calls `f` with the lanes that share a row of so many vectors, as a constant.
template <class F>
void with_lanes(std::int64_t vectors, F f) {
  if (vectors <= 4) return f(std::integral_constant<int, 4>{});
  if (vectors <= 16) return f(std::integral_constant<int, 16>{});
  f(std::integral_constant<int, 32>{});
}

}  // namespace train_moe::gpu
