// Tiles in shared memory and the tensor core's m16n8k16 product on them: what the portable kernels are made of.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <pleat/attention/cuda/arguments.hpp>

namespace pleat::inline v0::attention_kernel {

inline constexpr float log2e = 1.4426950408889634f;
inline constexpr float ln2 = 0.6931471805599453f;
inline constexpr float minus_infinity = -__builtin_huge_valf();

/// What follows from threadIdx.x is kept in registers, or made anew where it is needed, which costs a few instructions:
/// for kernels whose sums leave no registers.
enum class Indices { kept, anew };

template <Indices Are>
__device__ int thread_index() {
  int thread = static_cast<int>(threadIdx.x);
  if constexpr (Are == Indices::anew) asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

/// 2^x; 0 for -inf. source: PTX ISA, ex2
__device__ inline float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// The scale of scores in powers of 2; positive, so that a score of -inf stays -inf.
__device__ inline float log2_scale(float scale) {
  return fmaxf(scale * log2e, 1e-37f);
}

/// Two floats, rounded to T, `low` in the lower half.
template <class T>
__device__ std::uint32_t packed(float low, float high) {
  if constexpr (std::is_same_v<T, bfloat16>) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const std::uint32_t&>(pair);
  } else {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const std::uint32_t&>(pair);
  }
}

/// The accumulator of a 16 x 8 product: lane l has rows l / 4 (elements 0, 1) and l / 4 + 8 (2, 3), columns 2 (l % 4)
/// and the next. As left operand, two of them side by side are 16 x 16 of T. source: PTX ISA, mma.m16n8k16 fragments
struct Sums {
  float at[4];
};
struct Left {
  std::uint32_t at[4];
};
/// Right operands of two products that are neighbours in columns: {at[0], at[1]} and {at[2], at[3]}.
struct RightPair {
  std::uint32_t at[4];
};

/// sums += left [16 x 16] * right [16 x 8]
template <class T>
__device__ void multiply(Sums& sums, const Left& left, std::uint32_t right0, std::uint32_t right1) {
  if constexpr (std::is_same_v<T, bfloat16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sums.at[0]), "+f"(sums.at[1]), "+f"(sums.at[2]), "+f"(sums.at[3])
        : "r"(left.at[0]), "r"(left.at[1]), "r"(left.at[2]), "r"(left.at[3]), "r"(right0), "r"(right1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sums.at[0]), "+f"(sums.at[1]), "+f"(sums.at[2]), "+f"(sums.at[3])
        : "r"(left.at[0]), "r"(left.at[1]), "r"(left.at[2]), "r"(left.at[3]), "r"(right0), "r"(right1));
  }
}
/// The same for both products of a pair.
template <class T>
__device__ void multiply(Sums& low, Sums& high, const Left& left, const RightPair& right) {
  multiply<T>(low, left, right.at[0], right.at[1]);
  multiply<T>(high, left, right.at[2], right.at[3]);
}
/// What two neighbouring accumulators hold, as a left operand.
template <class T>
__device__ Left left_of(const Sums& low, const Sums& high) {
  return {{packed<T>(low.at[0], low.at[1]), packed<T>(low.at[2], low.at[3]), packed<T>(high.at[0], high.at[1]),
           packed<T>(high.at[2], high.at[3])}};
}

/// Which accumulators of a tile a thread has, when each warp has `warp_rows` rows of it.
template <Indices Are>
struct OwnSums {
  explicit __device__ OwnSums(int warp_rows) {
    const int thread = thread_index<Are>();
    lane = thread % 32;
    warp_row = thread / 32 * warp_rows;
    column = lane % 4 * 2;
  }
  /// The row of elements 2 * half and 2 * half + 1 of the warp's block number `block` of 16 rows.
  __device__ int row(int block, int half) const { return warp_row + block * 16 + half * 8 + lane / 4; }

  int lane, warp_row, column;
};

/// Where a lane reads 16 x 16 blocks of a tile from. Rows and columns of a block are multiples of 16; when they are
/// constants, its address is one xor and an offset away.
template <int RowBytes, bool IsTransposed, class To>
struct Blocks {
  __device__ To at(int row, int column) const {
    const int chunk = column / 8;
    const auto swizzle = static_cast<std::uint32_t>(chunk % 8 * 16);
    const auto offset = static_cast<std::uint32_t>(row * RowBytes + chunk / 8 * 128);
    To to;
    // The address is made here, one instruction per block: a compiler that sees it keeps all of them in registers.
    if constexpr (IsTransposed) {
      asm volatile(
          "{.reg .b32 at; xor.b32 at, %4, %5; add.u32 at, at, %6;\n"
          "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [at];}"
          : "=r"(to.at[0]), "=r"(to.at[1]), "=r"(to.at[2]), "=r"(to.at[3])
          : "r"(lane_address), "r"(swizzle), "r"(offset)
          : "memory");
    } else {
      asm volatile(
          "{.reg .b32 at; xor.b32 at, %4, %5; add.u32 at, at, %6;\n"
          "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [at];}"
          : "=r"(to.at[0]), "=r"(to.at[1]), "=r"(to.at[2]), "=r"(to.at[3])
          : "r"(lane_address), "r"(swizzle), "r"(offset)
          : "memory");
    }
    return to;
  }
  std::uint32_t lane_address;
};

/// Rows of `Dim` elements of T in shared memory, in chunks of 16 bytes. A chunk stands at its number xor the row's last
/// three bits, so that eight rows of one column lie in different banks. `Dim` is a multiple of 64, and the data is
/// aligned to 128 bytes.
template <class T, int Rows, int Dim, Indices Are>
class MmaTile {
  static_assert(sizeof(T) == 2 && Dim % 64 == 0 && Rows % 16 == 0);
  static constexpr int chunk_elems = 8, chunks = Dim / chunk_elems, row_bytes = 2 * Dim;

 public:
  static constexpr int bytes = Rows * row_bytes;

  explicit __device__ MmaTile(std::byte* data) : data_(static_cast<std::uint32_t>(__cvta_generic_to_shared(data))) {}

  /// Starts copying `count` rows of `dim` elements, `stride` apart, by all `Threads` of the CTA; zeros fill the rest.
  /// `is_aligned`: all rows and `dim` are multiples of 16 bytes. Arrives with the thread's asynchronous copies, or
  /// before the call returns.
  template <int Threads>
  __device__ void fill(const T* rows, std::int64_t stride, int count, int dim, bool is_aligned) const {
    // A panel of 8 chunks, or more where rows are few, is copied by as many threads of each row.
    constexpr int panel = Threads / Rows > 8 ? Threads / Rows : 8, step = Threads / panel;
    static_assert(Rows % step == 0 && step % 8 == 0);
    const int thread = thread_index<Are>(), first_row = thread / panel, first_chunk = thread % panel;
    const T* from = rows + first_row * stride + first_chunk * chunk_elems;
    const std::uint32_t to = address(first_row, first_chunk);
    count -= first_row;
    dim -= first_chunk * chunk_elems;
    if (is_aligned) {
#pragma unroll
      for (int row = 0; row < Rows; row += step) {
#pragma unroll
        for (int chunk = 0; chunk < chunks; chunk += panel) {
          const int exists = row < count && chunk * chunk_elems < dim ? 16 : 0;
          asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to + row * row_bytes + chunk * 16),
                       "l"(from + chunk * chunk_elems), "r"(exists)
                       : "memory");
        }
        from += step * stride;
      }
    } else {
#pragma unroll 1
      for (int row = 0; row < Rows; row += step) {
#pragma unroll 1
        for (int chunk = 0; chunk < chunks; chunk += panel) {
          gather(to + row * row_bytes + chunk * 16, from + chunk * chunk_elems,
                 row < count ? dim - chunk * chunk_elems : 0);
        }
        from += step * stride;
      }
    }
  }

  /// The blocks of rows `row` and on, as left operands.
  __device__ Blocks<row_bytes, false, Left> left(int row) const {
    const int lane = thread_index<Are>() % 32;
    return {address(row + lane % 16, lane / 16)};
  }
  /// The transposed blocks as right operands: rows are their columns.
  __device__ Blocks<row_bytes, false, RightPair> right_transposed() const {
    const int lane = thread_index<Are>() % 32;
    return {address(lane % 8 + lane / 16 * 8, lane / 8 % 2)};
  }
  /// The blocks as right operands.
  __device__ Blocks<row_bytes, true, RightPair> right() const {
    const int lane = thread_index<Are>() % 32;
    return {address(lane % 16, lane / 16)};
  }

 private:
  __device__ std::uint32_t address(int row, int chunk) const {
    return data_ + static_cast<std::uint32_t>(row * row_bytes + (chunk ^ (row % 8)) * 16);
  }
  /// One chunk of a row of any alignment.
  static __device__ void gather(std::uint32_t to, const T* from, int elems) {
    std::uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const std::uint32_t low = 2 * i < elems ? from[2 * i].bits : 0,
                          high = 2 * i + 1 < elems ? from[2 * i + 1].bits : 0;
      words[i] = low | high << 16;
    }
    asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]),
                 "r"(words[3])
                 : "memory");
  }

  std::uint32_t data_;
};

/// Waits for all copies that the thread has started.
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

/// Starts copying a float to shared memory; 0 where it does not exist.
__device__ inline void copy_float(float* to, const float* from, bool exists) {
  asm volatile(
      "cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(static_cast<std::uint32_t>(__cvta_generic_to_shared(to))),
      "l"(from), "r"(exists ? 4 : 0)
      : "memory");
}

/// Two neighbours of a row of accumulators; `count` of them exist. `is_aligned`: both lie in one 8-byte word.
__device__ inline float2 load_pair(const float* from, int count, bool is_aligned) {
  if (is_aligned) return count > 0 ? *reinterpret_cast<const float2*>(from) : float2{0, 0};
  return {count > 0 ? from[0] : 0, count > 1 ? from[1] : 0};
}
__device__ inline void store_pair(float* to, float2 pair, int count, bool is_aligned) {
  if (is_aligned) {
    if (count > 0) *reinterpret_cast<float2*>(to) = pair;
  } else {
    if (count > 0) to[0] = pair.x;
    if (count > 1) to[1] = pair.y;
  }
}
template <class T>
__device__ void store_pair(T* to, float2 pair, int count, bool is_aligned) {
  const std::uint32_t word = packed<T>(pair.x, pair.y);
  if (is_aligned) {
    if (count > 0) *reinterpret_cast<std::uint32_t*>(to) = word;
  } else {
    if (count > 0) to[0] = T::from_bits(static_cast<std::uint16_t>(word));
    if (count > 1) to[1] = T::from_bits(static_cast<std::uint16_t>(word >> 16));
  }
}

/// Bytes of shared memory that a CTA may have, of sm_80 and of sm_90. source: CUDA C++ Programming Guide, compute
/// capabilities
inline constexpr int shared_of_sm80 = 163 << 10, shared_of_sm90 = 227 << 10;

/// Which pointers and strides allow wide accesses: of inputs, 16 bytes; of outputs, pairs.
struct Alignment {
  bool inputs = false, outputs = false;
};

}  // namespace pleat::inline v0::attention_kernel
