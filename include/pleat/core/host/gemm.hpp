// A dense matrix product on the host: packed tiles and one register-blocked kernel that compilers vectorize.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include <pleat/core/dtype.hpp>

namespace pleat::inline v0 {

/// How a row-major operand enters a product: as stored, or transposed.
enum class Op : unsigned char { none, transpose };

namespace detail {

/// Tile sizes of `gemm`: a register tile of row_regs x col_regs sums, blocks that stay in the first-level cache.
template <class Sum>
struct GemmTile {
  static constexpr int row_regs = 4;
  static constexpr int col_regs = 32 / static_cast<int>(sizeof(Sum));
  static constexpr int rows = 64;
  static constexpr int cols = 64;
  static constexpr int depth = 64;
};

/// Packs a block of `lines` lines of `depth` elements each, groups of `Width` lines interleaved: out[group][p][line].
/// The lines past the end are zero, so that the kernel knows no edges.
template <int Width, class Sum, class T>
void gemm_pack(Sum* out, const T* in, std::int64_t line_stride, std::int64_t depth_stride, int lines, int depth) {
  for (int first = 0; first < lines; first += Width) {
    const int width = std::min(Width, lines - first);
    const T* group = in + first * line_stride;
    for (int p = 0; p < depth; ++p, out += Width) {
      for (int i = 0; i < width; ++i) out[i] = static_cast<Sum>(group[i * line_stride + p * depth_stride]);
      for (int i = width; i < Width; ++i) out[i] = Sum{0};
    }
  }
}

/// sums[row_regs][cols] += a[depth][row_regs]^T * b[depth][col_regs], in ascending order of depth.
template <class Sum>
void gemm_kernel(Sum* sums, const Sum* a, const Sum* b, int depth) {
  using Tile = GemmTile<Sum>;
  Sum tile[Tile::row_regs][Tile::col_regs];
  for (int i = 0; i < Tile::row_regs; ++i) {
    for (int j = 0; j < Tile::col_regs; ++j) tile[i][j] = sums[i * Tile::cols + j];
  }
  for (int p = 0; p < depth; ++p, a += Tile::row_regs, b += Tile::col_regs) {
    for (int i = 0; i < Tile::row_regs; ++i) {
      for (int j = 0; j < Tile::col_regs; ++j) tile[i][j] += a[i] * b[j];
    }
  }
  for (int i = 0; i < Tile::row_regs; ++i) {
    for (int j = 0; j < Tile::col_regs; ++j) sums[i * Tile::cols + j] = tile[i][j];
  }
}

}  // namespace detail

/// The type `gemm` sums in: the widest accumulator of its operands.
template <class A, class B, class C>
using gemm_sum_t = std::common_type_t<accumulator_t<A>, accumulator_t<B>, accumulator_t<C>>;

/// C = alpha * op_a(A) * op_b(B) + beta * C, with op_a(A) [m, k], op_b(B) [k, n] and C [m, n], all row-major with
/// leading dimensions in elements: A is [m, k] as stored or [k, m] transposed, B [k, n] or [n, k].
///
/// Every element of C is one sum over k in ascending order in `gemm_sum_t`, rounded once: it depends on its row of A
/// and its column of B only, not on m, n or the tiling. With beta 0, C is written and never read. C aliases neither
/// operand. Any extent may be 0.
template <class A, class B, class C>
void gemm(Op op_a, Op op_b, std::int64_t m, std::int64_t n, std::int64_t k,
          std::type_identity_t<gemm_sum_t<A, B, C>> alpha, const A* a, std::int64_t lda, const B* b, std::int64_t ldb,
          std::type_identity_t<gemm_sum_t<A, B, C>> beta, C* c, std::int64_t ldc) {
  using Sum = gemm_sum_t<A, B, C>;
  using Tile = detail::GemmTile<Sum>;
  const std::int64_t a_row = op_a == Op::none ? lda : 1, a_depth = op_a == Op::none ? 1 : lda;
  const std::int64_t b_col = op_b == Op::none ? 1 : ldb, b_depth = op_b == Op::none ? ldb : 1;

  alignas(64) Sum sums[Tile::rows * Tile::cols];
  alignas(64) Sum packed_a[Tile::rows * Tile::depth];
  alignas(64) Sum packed_b[Tile::cols * Tile::depth];
  for (std::int64_t row = 0; row < m; row += Tile::rows) {
    const int rows = static_cast<int>(std::min<std::int64_t>(Tile::rows, m - row));
    for (std::int64_t col = 0; col < n; col += Tile::cols) {
      const int cols = static_cast<int>(std::min<std::int64_t>(Tile::cols, n - col));
      std::fill_n(sums, (rows + Tile::row_regs - 1) / Tile::row_regs * Tile::row_regs * Tile::cols, Sum{0});
      for (std::int64_t p = 0; p < k; p += Tile::depth) {
        const int depth = static_cast<int>(std::min<std::int64_t>(Tile::depth, k - p));
        detail::gemm_pack<Tile::row_regs>(packed_a, a + row * a_row + p * a_depth, a_row, a_depth, rows, depth);
        detail::gemm_pack<Tile::col_regs>(packed_b, b + col * b_col + p * b_depth, b_col, b_depth, cols, depth);
        for (int i = 0; i < rows; i += Tile::row_regs) {
          for (int j = 0; j < cols; j += Tile::col_regs) {
            detail::gemm_kernel(sums + i * Tile::cols + j, packed_a + i * depth, packed_b + j * depth, depth);
          }
        }
      }
      for (int i = 0; i < rows; ++i) {
        C* to = c + (row + i) * ldc + col;
        const Sum* from = sums + i * Tile::cols;
        for (int j = 0; j < cols; ++j) {
          const Sum product = alpha * from[j];
          to[j] = static_cast<C>(beta == Sum{0} ? product : product + beta * static_cast<Sum>(to[j]));
        }
      }
    }
  }
}

}  // namespace pleat::inline v0
