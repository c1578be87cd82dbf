// What one warp does together: sums, and the best of many keys in the order that chooses experts.
#pragma once

#include <cstdint>
#include <type_traits>

#include <pleat/cuda/kernel.hpp>

namespace pleat::inline v0::moe::detail {

inline constexpr unsigned whole_warp = 0xffffffffu;

/// Of the kernels that move rows, a warp per row.
inline constexpr int row_threads = 512;

inline __device__ int lane_of_thread() {
  return static_cast<int>(threadIdx.x % 32);
}

inline __device__ float exp_of(float x) {
  return expf(x);
}
inline __device__ double exp_of(double x) {
  return exp(x);
}

template <class T>
__device__ T sum_of_warp(T value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(whole_warp, value, distance);
  return value;
}
/// NaN counts only where all values are.
template <class T>
__device__ T largest_of_warp(T value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value = std::is_same_v<T, double> ? fmax(value, __shfl_xor_sync(whole_warp, value, distance))
                                      : fmaxf(value, __shfl_xor_sync(whole_warp, value, distance));
  }
  return value;
}

/// A float type's values as unsigned numbers in the same order: NaN is 1, below all others, and 0 is no value.
template <class Acc>
using OrderedKey = std::conditional_t<std::is_same_v<Acc, double>, std::uint64_t, std::uint32_t>;
template <class Acc>
__device__ OrderedKey<Acc> ordered(Acc value) {
  using Key = OrderedKey<Acc>;
  if (value != value) return 1;
  const Key bits = __builtin_bit_cast(Key, value == 0 ? Acc{0} : value);
  constexpr Key sign = Key{1} << (8 * sizeof(Key) - 1);
  return (bits & sign) != 0 ? static_cast<Key>(~bits) : bits | sign;
}

/// A key and its index; larger keys come first, of equal ones the lower index.
template <class Key>
struct Candidate {
  Key key = 0;
  int index = -1;

  __device__ bool comes_before(const Candidate& other) const {
    return key != other.key ? key > other.key : index < other.index;
  }
};

/// The first of `count` candidates that comes after `last`; key 0 is none. All lanes call, and get the same.
template <class Key, class KeyOf>
__device__ Candidate<Key> next_best(int count, const Candidate<Key>& last, const KeyOf& key_of) {
  Candidate<Key> best;
  for (int i = lane_of_thread(); i < count; i += 32) {
    const Candidate<Key> one{key_of(i), i};
    if (last.comes_before(one) && one.comes_before(best)) best = one;
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    const Candidate<Key> other{__shfl_xor_sync(whole_warp, best.key, distance),
                               __shfl_xor_sync(whole_warp, best.index, distance)};
    if (other.comes_before(best)) best = other;
  }
  return best;
}
/// Comes before all candidates.
template <class Key>
__device__ Candidate<Key> before_all() {
  return {static_cast<Key>(~Key{0}), -1};
}

}  // namespace pleat::inline v0::moe::detail
