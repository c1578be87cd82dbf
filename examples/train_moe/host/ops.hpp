// The trainer's kernels on the host.
#pragma once

#include <cmath>
#include <cstdint>

#include <pleat/core/host/executor.hpp>
#include <pleat/core/host/gemm.hpp>

#include "../ops.hpp"

namespace train_moe {

template <>
struct ops<pleat::host_device> {
  using Stream = pleat::HostStream;

  /// out [rows, dim] = table [vocabulary, dim] at ids [rows].
  template <class T>
  static void embed(const std::int32_t* ids, const T* table, T* out, std::int64_t rows, std::int64_t dim, Stream s) {
    for (std::int64_t r = 0; r < rows; ++r) {
      pleat::HostExecutor{}.copy(out + r * dim, table + ids[r] * dim, static_cast<std::size_t>(dim) * sizeof(T), s);
    }
  }
  /// dtable [vocabulary, dim] += dout [rows, dim] at ids, in the order of rows.
  template <class T, class A>
  static void embed_backward(const std::int32_t* ids, const T* dout, A* dtable, std::int64_t rows, std::int64_t dim,
                             Stream) {
    for (std::int64_t r = 0; r < rows; ++r) {
      A* to = dtable + ids[r] * dim;
      for (std::int64_t i = 0; i < dim; ++i) to[i] += dout[r * dim + i];
    }
  }

  /// y = x * inverse_rms * weight per row, inverse_rms = 1 / sqrt(mean(x^2) + epsilon). source: arXiv 1910.07467.
  template <class T, class A>
  static void rms_norm(const T* x, const T* weight, T* y, A* inverse_rms, std::int64_t rows, std::int64_t dim,
                       double epsilon, Stream) {
    for (std::int64_t r = 0; r < rows; ++r, x += dim, y += dim) {
      A squares = 0;
      for (std::int64_t i = 0; i < dim; ++i) squares += static_cast<A>(x[i]) * x[i];
      const A inverse = 1 / std::sqrt(squares / static_cast<A>(dim) + static_cast<A>(epsilon));
      inverse_rms[r] = inverse;
      for (std::int64_t i = 0; i < dim; ++i) y[i] = static_cast<T>(x[i] * inverse * weight[i]);
    }
  }
  /// dx (+)= and dweight (+)= of rms_norm. `dx` may be `dy` when it does not accumulate.
  template <class T, class A>
  static void rms_norm_backward(const T* dy, const T* x, const T* weight, const A* inverse_rms, T* dx, bool add_dx,
                                A* dweight, bool add_dweight, std::int64_t rows, std::int64_t dim, Stream) {
    if (!add_dweight) std::fill_n(dweight, dim, A{0});
    for (std::int64_t r = 0; r < rows; ++r, dy += dim, x += dim, dx += dim) {
      const A inverse = inverse_rms[r];
      A dot = 0;
      for (std::int64_t i = 0; i < dim; ++i) {
        dot += static_cast<A>(dy[i]) * weight[i] * x[i];
        dweight[i] += static_cast<A>(dy[i]) * x[i] * inverse;
      }
      const A along = dot * inverse * inverse / static_cast<A>(dim);
      for (std::int64_t i = 0; i < dim; ++i) {
        const A value = inverse * (static_cast<A>(dy[i]) * weight[i] - x[i] * along);
        dx[i] = static_cast<T>(add_dx ? dx[i] + value : value);
      }
    }
  }

  /// Rotates x [tokens, heads, dim] in place by its positions; pairs are (i, i + dim / 2). `direction` -1 undoes it,
  /// which is also its gradient. source: arXiv 2104.09864.
  template <class T>
  static void rotate(T* x, const std::int32_t* positions, std::int64_t tokens, std::int64_t heads, std::int64_t dim,
                     double theta, int direction, Stream) {
    using A = pleat::accumulator_t<T>;
    const std::int64_t half = dim / 2;
    for (std::int64_t t = 0; t < tokens; ++t) {
      for (std::int64_t i = 0; i < half; ++i) {
        const double angle = positions[t] * std::pow(theta, -2.0 * static_cast<double>(i) / static_cast<double>(dim));
        const A cosine = static_cast<A>(std::cos(angle)), sine = static_cast<A>(direction * std::sin(angle));
        for (std::int64_t h = 0; h < heads; ++h) {
          T* head = x + (t * heads + h) * dim;
          const A a = head[i], b = head[i + half];
          head[i] = static_cast<T>(a * cosine - b * sine);
          head[i + half] = static_cast<T>(b * cosine + a * sine);
        }
      }
    }
  }

  /// x [elems] += y.
  template <class T>
  static void add(T* x, const T* y, std::int64_t elems, Stream) {
    for (std::int64_t i = 0; i < elems; ++i) x[i] = static_cast<T>(x[i] + y[i]);
  }

  /// *sum += value.
  static void add_constant(double* sum, double value, Stream) { *sum += value; }

  /// *loss += sum over rows of -log softmax(logits)[label]; logits [rows, classes] become their gradient.
  template <class T>
  static void cross_entropy(T* logits, const std::int32_t* labels, double* loss, std::int64_t rows,
                            std::int64_t classes, Stream) {
    using A = pleat::accumulator_t<T>;
    for (std::int64_t r = 0; r < rows; ++r, logits += classes) {
      A most = logits[0];
      for (std::int64_t c = 1; c < classes; ++c) most = std::max<A>(most, logits[c]);
      A sum = 0;
      for (std::int64_t c = 0; c < classes; ++c) sum += std::exp(static_cast<A>(logits[c]) - most);
      *loss += static_cast<double>(std::log(sum) + most - logits[labels[r]]);
      for (std::int64_t c = 0; c < classes; ++c) {
        const A share = std::exp(static_cast<A>(logits[c]) - most) / sum;
        logits[c] = static_cast<T>(share - (c == labels[r] ? 1 : 0));
      }
    }
  }

  /// y [rows, out] (+)= x [rows, in] * weight [out, in]^T.
  template <class T>
  static void linear(const T* x, const T* weight, T* y, std::int64_t rows, std::int64_t in, std::int64_t out, bool add,
                     Stream) {
    pleat::gemm(pleat::Op::none, pleat::Op::transpose, rows, out, in, 1, x, in, weight, in, add ? 1 : 0, y, out);
  }
  /// dx [rows, in] (+)= dy [rows, out] * weight; dweight [out, in] (+)= dy^T * x.
  template <class T, class A>
  static void linear_backward(const T* dy, const T* x, const T* weight, T* dx, bool add_dx, A* dweight,
                              bool add_dweight, std::int64_t rows, std::int64_t in, std::int64_t out, Stream) {
    using pleat::Op;
    pleat::gemm(Op::none, Op::none, rows, in, out, 1, dy, out, weight, in, add_dx ? 1 : 0, dx, in);
    pleat::gemm(Op::transpose, Op::none, out, in, rows, 1, dy, out, x, in, add_dweight ? 1 : 0, dweight, in);
  }
};

}  // namespace train_moe
