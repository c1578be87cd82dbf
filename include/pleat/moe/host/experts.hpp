// The leaves of the experts on the host: one dense product per expert.
#pragma once

#include <algorithm>

#include <pleat/core/host/executor.hpp>
#include <pleat/core/host/gemm.hpp>
#include <pleat/moe/experts.hpp>
#include <pleat/moe/host/sigmoid.hpp>

namespace pleat::inline v0::moe::detail {

/// Calls f(expert, first row, rows) for every expert.
template <class F>
void each_expert(const ExpertPlan& plan, const std::int64_t* offsets, const F& f) {
  for (int e = 0; e < plan.shape.experts_local; ++e) f(e, offsets[e], offsets[e + 1] - offsets[e]);
}

template <class T>
T* expert_data(const TensorRef& matrices, int expert) {
  return static_cast<T*>(matrices.data()) + expert * matrices.stride(0);
}

struct HostExpertLeaf {
  /// gate = rows * gate_w^T, up = rows * up_w^T, act = silu(gate) * up.
  static void gate_up(const ExpertPlan& plan, const void* rows, const std::int64_t* offsets, const TensorRef& gate_w,
                      const TensorRef& up_w, void* gate, void* up, void* act, HostStream) {
    typed(plan, [&](auto type) {
      using T = typename decltype(type)::type;
      using Acc = accumulator_t<T>;
      const std::int64_t hidden = plan.shape.hidden, inner = plan.shape.inner;
      each_expert(plan, offsets, [&](int e, std::int64_t first, std::int64_t count) {
        const T* in = static_cast<const T*>(rows) + first * hidden;
        T* g = static_cast<T*>(gate) + first * inner;
        T* u = static_cast<T*>(up) + first * inner;
        gemm(Op::none, Op::transpose, count, inner, hidden, 1, in, hidden, expert_data<T>(gate_w, e), hidden, 0, g,
             inner);
        gemm(Op::none, Op::transpose, count, inner, hidden, 1, in, hidden, expert_data<T>(up_w, e), hidden, 0, u,
             inner);
        T* a = static_cast<T*>(act) + first * inner;
        for (std::int64_t i = 0; i < count * inner; ++i) {
          const Acc x = static_cast<Acc>(g[i]);
          a[i] = static_cast<T>(x * sigmoid(x) * static_cast<Acc>(u[i]));
        }
      });
    });
  }

  /// out = act * down_w^T.
  static void down(const ExpertPlan& plan, const void* act, const std::int64_t* offsets, const TensorRef& down_w,
                   void* out, HostStream) {
    typed(plan, [&](auto type) {
      using T = typename decltype(type)::type;
      const std::int64_t hidden = plan.shape.hidden, inner = plan.shape.inner;
      each_expert(plan, offsets, [&](int e, std::int64_t first, std::int64_t count) {
        gemm(Op::none, Op::transpose, count, hidden, inner, 1, static_cast<const T*>(act) + first * inner, inner,
             expert_data<T>(down_w, e), inner, 0, static_cast<T*>(out) + first * hidden, hidden);
      });
    });
  }

  /// From dout through `down` and the activation: dgate and dup; act is computed again.
  static void down_backward(const ExpertPlan& plan, const void* dout, const std::int64_t* offsets,
                            const TensorRef& down_w, const void* gate, const void* up, void* dgate, void* dup,
                            void* act, HostStream) {
    typed(plan, [&](auto type) {
      using T = typename decltype(type)::type;
      using Acc = accumulator_t<T>;
      const std::int64_t hidden = plan.shape.hidden, inner = plan.shape.inner;
      each_expert(plan, offsets, [&](int e, std::int64_t first, std::int64_t count) {
        each_tile(count, inner, [&](std::int64_t row, std::int64_t rows, std::int64_t col, std::int64_t cols) {
          Acc dact[tile * tile];
          gemm(Op::none, Op::none, rows, cols, hidden, 1, static_cast<const T*>(dout) + (first + row) * hidden, hidden,
               expert_data<T>(down_w, e) + col, inner, 0, dact, cols);
          for (std::int64_t i = 0; i < rows * cols; ++i) {
            const std::int64_t at = (first + row + i / cols) * inner + col + i % cols;
            const Acc g = static_cast<Acc>(static_cast<const T*>(gate)[at]);
            const Acc u = static_cast<Acc>(static_cast<const T*>(up)[at]);
            const Acc sig = sigmoid(g), silu = g * sig;
            static_cast<T*>(act)[at] = static_cast<T>(silu * u);
            static_cast<T*>(dup)[at] = static_cast<T>(dact[i] * silu);
            static_cast<T*>(dgate)[at] = static_cast<T>(dact[i] * u * (sig + silu * (1 - sig)));
          }
        });
      });
    });
  }

  /// drows = dgate * gate_w + dup * up_w, rounded once.
  static void gate_up_backward(const ExpertPlan& plan, const void* dgate, const void* dup, const std::int64_t* offsets,
                               const TensorRef& gate_w, const TensorRef& up_w, void* drows, HostStream) {
    typed(plan, [&](auto type) {
      using T = typename decltype(type)::type;
      using Acc = accumulator_t<T>;
      const std::int64_t hidden = plan.shape.hidden, inner = plan.shape.inner;
      each_expert(plan, offsets, [&](int e, std::int64_t first, std::int64_t count) {
        each_tile(count, hidden, [&](std::int64_t row, std::int64_t rows, std::int64_t col, std::int64_t cols) {
          Acc sums[tile * tile];
          const std::int64_t at = (first + row) * inner;
          gemm(Op::none, Op::none, rows, cols, inner, 1, static_cast<const T*>(dgate) + at, inner,
               expert_data<T>(gate_w, e) + col, hidden, 0, sums, cols);
          gemm(Op::none, Op::none, rows, cols, inner, 1, static_cast<const T*>(dup) + at, inner,
               expert_data<T>(up_w, e) + col, hidden, 1, sums, cols);
          T* to = static_cast<T*>(drows) + (first + row) * hidden + col;
          for (std::int64_t i = 0; i < rows * cols; ++i) to[i / cols * hidden + i % cols] = static_cast<T>(sums[i]);
        });
      });
    });
  }

  /// dw [d_cols, x_cols] = (accumulate ? dw : 0) + d^T * x over each expert's rows; products are rounded to dw's dtype
  /// before they are added.
  static void weight_gradient(const ExpertPlan& plan, const void* d, std::int64_t d_cols, const void* x,
                              std::int64_t x_cols, const std::int64_t* offsets, bool accumulate, const TensorRef& dw,
                              HostStream) {
    typed(plan, [&](auto type) {
      using T = typename decltype(type)::type;
      using Acc = accumulator_t<T>;
      each_expert(plan, offsets, [&](int e, std::int64_t first, std::int64_t count) {
        const T *const of_d = static_cast<const T*>(d) + first * d_cols, *const of_x =
                                                                             static_cast<const T*>(x) + first * x_cols;
        if (dw.dtype() == dtype_of<Acc>) {
          return gemm(Op::transpose, Op::none, d_cols, x_cols, count, 1, of_d, d_cols, of_x, x_cols,
                      accumulate ? Acc{1} : Acc{0}, expert_data<Acc>(dw, e), x_cols);
        }
        each_tile(d_cols, x_cols, [&](std::int64_t row, std::int64_t rows, std::int64_t col, std::int64_t cols) {
          Acc sums[tile * tile];
          gemm(Op::transpose, Op::none, rows, cols, count, 1, of_d + row, d_cols, of_x + col, x_cols, Acc{0}, sums,
               cols);
          for (std::int64_t i = 0; i < rows * cols; ++i) {
            T& to = expert_data<T>(dw, e)[(row + i / cols) * x_cols + col + i % cols];
            const T product = static_cast<T>(sums[i]);
            to = accumulate ? static_cast<T>(static_cast<Acc>(to) + static_cast<Acc>(product)) : product;
          }
        });
      });
    });
  }

 private:
  static constexpr std::int64_t tile = 64;  // the block of gemm

  template <class F>
  static void typed(const ExpertPlan& plan, const F& f) {
    dispatch_dtype(FloatTypes{}, plan.shape.dtype, f);
  }
  /// Calls f(row, rows, col, cols) for the tiles of a matrix [rows, cols].
  template <class F>
  static void each_tile(std::int64_t rows, std::int64_t cols, const F& f) {
    for (std::int64_t row = 0; row < rows; row += tile) {
      for (std::int64_t col = 0; col < cols; col += tile) {
        f(row, std::min(tile, rows - row), col, std::min(tile, cols - col));
      }
    }
  }
};

}  // namespace pleat::inline v0::moe::detail
