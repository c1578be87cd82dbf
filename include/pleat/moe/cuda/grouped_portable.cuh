// The grouped products on any chip and for any type: tiles in shared memory, multiply-adds in the accumulator, mma.sync
// for bf16. For float and double, and where the kernel of grouped_gemm.cuh cannot run.
#pragma once

#include <algorithm>
#include <cstdint>

#include <pleat/core/dtype.hpp>
#include <pleat/cuda/kernel.hpp>
#include <pleat/moe/cuda/grouped_shared.cuh>

namespace pleat::inline v0::moe::detail {

/// A matrix of each expert, or rows of all experts (`expert_stride` 0); element (i, k) of an operand is at i * stride +
/// k * k_stride.
template <class T>
struct PortableOperand {
  const T* data = nullptr;
  std::int64_t expert_stride = 0, stride = 0, k_stride = 0;
};

/// As GroupedArguments; b[1] is that of the second source, or of gate_up's up. Results of rows are [rows, columns].
template <class T>
struct PortableArguments {
  PortableOperand<T> a[2], b[2];
  const T* saved[2];
  T* results[3];
  void* matrices;  // of weight_gradient: accumulator_t<T>, or T
  std::int64_t matrix_stride;
  const std::int64_t* offsets;
  int experts, columns, rows, depth, sources;
  bool accumulate, is_narrow;
};

inline constexpr int portable_size = 64;      // rows and columns of a tile
inline constexpr int portable_threads = 256;  // 4 x 4 sums each
inline constexpr int portable_step = 16;      // of depth

/// One step of both operands in shared memory, and the 16 sums of a thread: sums[i][j] is element (row(i, j), column(i,
/// j)) of the tile.
template <class T>
struct PortableStep {
  using Acc = accumulator_t<T>;
  Acc a[portable_step][portable_size + 1], b[portable_step][portable_size + 1];

  __device__ static void put(Acc (&to)[portable_step][portable_size + 1], int x, int k, T value) {
    to[k][x] = static_cast<Acc>(value);
  }
  __device__ static int row(int i, int) { return static_cast<int>(threadIdx.x) / 16 + 16 * i; }
  __device__ static int column(int, int j) { return static_cast<int>(threadIdx.x) % 16 + 16 * j; }

  __device__ void multiply(Acc (&sums)[4][4]) const {
#pragma unroll
    for (int k = 0; k < portable_step; ++k) {
      Acc left[4], right[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        left[i] = a[k][row(i, 0)];
        right[i] = b[k][column(0, i)];
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[i][j] += left[i] * right[j];
      }
    }
  }
};

/// Tensor cores: a warp has 16 rows and 32 columns, sums[i] are 8 of those.
template <>
struct PortableStep<bfloat16> {
  static constexpr int pitch = portable_step + 8;  // spreads the rows that a warp reads over all banks
  alignas(4) bfloat16 a[portable_size][pitch], b[portable_size][pitch];

  __device__ static void put(bfloat16 (&to)[portable_size][pitch], int x, int k, bfloat16 value) { to[x][k] = value; }
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
  __device__ static int first_row() { return static_cast<int>(threadIdx.x) / 64 * 16; }
  __device__ static int first_column() { return static_cast<int>(threadIdx.x) / 32 % 2 * 32; }
  __device__ static int row(int, int j) { return first_row() + lane() / 4 + j / 2 * 8; }
  __device__ static int column(int i, int j) { return first_column() + 8 * i + lane() % 4 * 2 + j % 2; }
  __device__ static std::uint32_t pair(const bfloat16 (&row)[pitch], int half) {
    return *reinterpret_cast<const std::uint32_t*>(&row[lane() % 4 * 2 + 8 * half]);
  }

  __device__ void multiply(float (&sums)[4][4]) const {
    const auto &upper = a[first_row() + lane() / 4], &lower = a[first_row() + lane() / 4 + 8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const auto& column = b[first_column() + 8 * i + lane() / 4];
      asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
          "{%0, %1, %2, %3};"
          : "+f"(sums[i][0]), "+f"(sums[i][1]), "+f"(sums[i][2]), "+f"(sums[i][3])
          : "r"(pair(upper, 0)), "r"(pair(lower, 0)), "r"(pair(upper, 1)), "r"(pair(lower, 1)), "r"(pair(column, 0)),
            "r"(pair(column, 1)));
    }
  }
};

/// sums += a b^T for elements [k, k + depth) of rows `row` + [0, rows) and columns `column` + [0, columns).
template <class T>
__device__ void portable_multiply(accumulator_t<T> (&sums)[4][4], PortableStep<T>& shared, PortableOperand<T> a,
                                  PortableOperand<T> b, std::int64_t row, std::int64_t rows, std::int64_t column,
                                  std::int64_t columns, std::int64_t k, std::int64_t depth) {
  const int thread = static_cast<int>(threadIdx.x);
  for (std::int64_t step = 0; step < depth; step += portable_step) {
    for (int i = thread; i < portable_size * portable_step; i += portable_threads) {
      // The contiguous axis runs fastest over the threads.
      const auto fetch = [&](const PortableOperand<T>& from, auto& to, std::int64_t first, std::int64_t count) {
        const bool k_runs = from.k_stride == 1;
        const int x = k_runs ? i / portable_step : i % portable_size;
        const int at = k_runs ? i % portable_step : i / portable_size;
        const bool exists = x < count && step + at < depth;
        PortableStep<T>::put(
            to, x, at,
            exists ? from.data[(first + x) * from.stride + (k + step + at) * from.k_stride] : static_cast<T>(0.0f));
      };
      fetch(a, shared.a, row, rows);
      fetch(b, shared.b, column, columns);
    }
    __syncthreads();
    shared.multiply(sums);
    __syncthreads();
  }
}

template <class Acc>
__device__ Acc exact_sigmoid(Acc x) {
  return 1 / (1 + exp(-x));
}

/// One tile of an expert: rows [row, row + rows) of the row arrays, or of its matrix.
template <Grouped Op, class T>
__device__ void portable_tile(const PortableArguments<T>& args, PortableStep<T>& shared, int expert, std::int64_t row,
                              std::int64_t rows, std::int64_t k, std::int64_t depth) {
  using Acc = accumulator_t<T>;
  constexpr bool is_matrix = Op == Grouped::weight_gradient;
  const std::int64_t column = static_cast<std::int64_t>(blockIdx.x) * portable_size, columns = args.columns - column;
  const auto of_expert = [&](PortableOperand<T> operand) {
    operand.data += expert * operand.expert_stride;
    return operand;
  };
  Acc sums[4][4] = {}, second[4][4] = {};
  portable_multiply(sums, shared, of_expert(args.a[0]), of_expert(args.b[0]), row, rows, column, columns, k, depth);
  if constexpr (Op == Grouped::gate_up) {
    portable_multiply(second, shared, args.a[0], of_expert(args.b[1]), row, rows, column, columns, k, depth);
  }
  if (Op == Grouped::rows_gradient && args.sources == 2) {
    portable_multiply(sums, shared, args.a[1], of_expert(args.b[1]), row, rows, column, columns, k, depth);
  }
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < 4; ++j) {
      const int r = PortableStep<T>::row(i, j), c = PortableStep<T>::column(i, j);
      if (r >= rows || c >= columns) continue;
      const std::int64_t at = (row + r) * args.columns + column + c;
      if constexpr (is_matrix) {
        const auto put = [&]<class Out>(Out* matrices, Out product) {
          Out& to = matrices[expert * args.matrix_stride + at];
          to = args.accumulate ? static_cast<Out>(static_cast<Acc>(to) + static_cast<Acc>(product)) : product;
        };
        args.is_narrow ? put(static_cast<T*>(args.matrices), static_cast<T>(sums[i][j]))
                       : put(static_cast<Acc*>(args.matrices), sums[i][j]);
      } else if constexpr (Op == Grouped::gate_up) {
        const T gate = static_cast<T>(sums[i][j]), up = static_cast<T>(second[i][j]);
        args.results[0][at] = gate;
        args.results[1][at] = up;
        args.results[2][at] = static_cast<T>(Acc(gate) * exact_sigmoid(Acc(gate)) * Acc(up));
      } else if constexpr (Op == Grouped::down_backward) {
        const Acc gate = static_cast<Acc>(args.saved[0][at]), up = static_cast<Acc>(args.saved[1][at]);
        const Acc sig = exact_sigmoid(gate), silu = gate * sig;
        args.results[0][at] = static_cast<T>(sums[i][j] * up * (sig + silu * (1 - sig)));
        args.results[1][at] = static_cast<T>(sums[i][j] * silu);
        args.results[2][at] = static_cast<T>(silu * up);
      } else {
        args.results[0][at] = static_cast<T>(sums[i][j]);
      }
    }
  }
}

template <Grouped Op, class T>
PLEAT_KERNEL void __launch_bounds__(portable_threads)
    portable_grouped_kernel(const __grid_constant__ PortableArguments<T> args) {
  __shared__ PortableStep<T> shared;
  if constexpr (Op == Grouped::weight_gradient) {
    const int expert = static_cast<int>(blockIdx.z);
    const std::int64_t row = static_cast<std::int64_t>(blockIdx.y) * portable_size, first = args.offsets[expert];
    portable_tile<Op>(args, shared, expert, row, args.rows - row, first, args.offsets[expert + 1] - first);
  } else {
    std::int64_t tile = blockIdx.y;  // counted from the expert's first one
    for (int expert = 0; expert < args.experts; ++expert) {
      const std::int64_t first = args.offsets[expert], rows = args.offsets[expert + 1] - first;
      const std::int64_t tiles = (rows + portable_size - 1) / portable_size;
      for (; tile < tiles; tile += gridDim.y) {
        portable_tile<Op>(args, shared, expert, first + tile * portable_size, rows - tile * portable_size, 0,
                          args.depth);
      }
      tile -= tiles;
    }
  }
}

/// Errors: cuda_error C20.
template <Grouped Op, class T>
void launch_portable(const PortableArguments<T>& args, cudaStream_t s) {
  constexpr int row_workers = 256;
  const auto tiles = [](int elems) { return static_cast<unsigned>((elems + portable_size - 1) / portable_size); };
  const dim3 grid = Op == Grouped::weight_gradient
                        ? dim3(tiles(args.columns), tiles(args.rows), static_cast<unsigned>(args.experts))
                        : dim3(tiles(args.columns), row_workers);
  portable_grouped_kernel<Op, T><<<grid, portable_threads, 0, s>>>(args);
  check_launch("portable_grouped_kernel");
}

}  // namespace pleat::inline v0::moe::detail
