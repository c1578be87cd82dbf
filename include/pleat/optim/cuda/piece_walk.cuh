// How the threads of a grid share the pieces of a shard: whole packs where there are, single elements at the edges.
#pragma once

#include <cstdint>
#include <type_traits>

#include <pleat/cuda/leaf.cuh>

namespace pleat::inline v0::detail {

/// The contiguous part of [0, elems) that one CTA works on; a multiple of `Width` elements but at the end, and a
/// function of the grid and `elems` only.
struct CtaRange {
  std::int64_t first, last;
};
template <int Width>
__device__ CtaRange cta_range(std::int64_t elems) {
  constexpr std::int64_t round = static_cast<std::int64_t>(leaf_threads) * Width;
  const std::int64_t rounds = (elems + round - 1) / round;
  const std::int64_t first = rounds * blockIdx.x / gridDim.x * round;
  const std::int64_t last = rounds * (blockIdx.x + 1) / gridDim.x * round;
  return {first, last < elems ? last : elems};
}

/// Calls f(piece, i, count) for the elements of the CTA's part of [0, elems) that pieces cover, spread over its
/// threads; `count` is an integral_constant: Width for elements i to i + Width where i is a multiple of it,
/// otherwise 1. Pieces have `begin` and `elems`, ascend, and may touch anywhere. All threads of the CTA meet before the
/// first call.
template <int Width, class Piece, class F>
__device__ void for_each_pack(const Piece* pieces, std::int64_t piece_count, std::int64_t elems, F f) {
  const CtaRange part = cta_range<Width>(elems);
  __shared__ std::int64_t shared_first;
  const auto is_past = [&](std::int64_t p) {
    return p == piece_count || pieces[p].begin + pieces[p].elems > part.first;
  };
  for (std::int64_t p = threadIdx.x; p <= piece_count; p += leaf_threads) {
    if (is_past(p) && (p == 0 || !is_past(p - 1))) shared_first = p;  // the first that ends behind the beginning
  }
  __syncthreads();
  std::int64_t p = shared_first;
  for (; p < piece_count; ++p) {
    const Piece piece = pieces[p];
    if (piece.begin >= part.last) return;
    const std::int64_t end = piece.begin + piece.elems;
    const std::int64_t first = piece.begin > part.first ? piece.begin : part.first;
    const std::int64_t last = end < part.last ? end : part.last;
    const std::int64_t rounded = (first + Width - 1) / Width * Width;
    const std::int64_t whole = rounded < last ? rounded : last;
    const std::int64_t tail = last / Width * Width > whole ? last / Width * Width : whole;
    if (first + threadIdx.x < whole) f(piece, first + threadIdx.x, std::integral_constant<int, 1>{});
    for (std::int64_t i = whole + threadIdx.x * Width; i < tail; i += leaf_threads * Width) {
      f(piece, i, std::integral_constant<int, Width>{});
    }
    if (tail + threadIdx.x < last) f(piece, tail + threadIdx.x, std::integral_constant<int, 1>{});
  }
}

/// `Count` consecutive elements at `data`, aligned to them.
template <int Count, class T>
__device__ Pack<T, Count> load_pack(const T* data) {
  return *reinterpret_cast<const Pack<T, Count>*>(data);
}
template <int Count, class T>
__device__ void store_pack(T* data, const Pack<T, Count>& pack) {
  *reinterpret_cast<Pack<T, Count>*>(data) = pack;
}

}  // namespace pleat::inline v0::detail
