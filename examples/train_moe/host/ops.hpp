// The trainer's kernels on the host: what each of them means.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include <pleat/core/host/executor.hpp>
#include <pleat/core/host/gemm.hpp>

#include "../ops.hpp"

namespace train_moe {

template <>
class ops<pleat::host_device> {
 public:
  using Stream = pleat::HostStream;

  static std::size_t workspace_bytes(const OpsShape&) { return 0; }
  ops(const OpsShape&, pleat::Block, Stream) {}

  /// out [elems]: elements `first` and on.
  template <class A>
  void initialize(A* out, const Initial& initial, std::int64_t first, std::int64_t elems, Stream) {
    for (std::int64_t i = 0; i < elems; ++i) out[i] = static_cast<A>(initial(first + i));
  }

  /// out [rows, dim] = table [vocabulary, dim] at ids [rows].
  template <class T>
  void embed(const std::int32_t* ids, const T* table, T* out, std::int64_t rows, std::int64_t dim, Stream) {
    for (std::int64_t r = 0; r < rows; ++r) std::copy_n(table + ids[r] * dim, dim, out + r * dim);
  }
  /// dtable [vocabulary, dim] += dout [rows, dim] at ids, in the order of rows.
  template <class T, class A>
  void embed_backward(const std::int32_t* ids, const T* dout, A* dtable, std::int64_t rows, std::int64_t dim,
                      std::int64_t /*vocabulary*/, Stream) {
    for (std::int64_t r = 0; r < rows; ++r) {
      A* const to = dtable + ids[r] * dim;
      for (std::int64_t i = 0; i < dim; ++i) to[i] += static_cast<A>(dout[r * dim + i]);
    }
  }

  /// y = x * inverse_rms * weight per row, inverse_rms [rows] = 1 / sqrt(mean(x^2) + epsilon). `y` may be `x`. source:
  /// arXiv 1910.07467.
  template <class T, class A>
  void rms_norm(Rows<const T> x, const T* weight, Rows<T> y, A* inverse_rms, std::int64_t rows, std::int64_t dim,
                double epsilon, Stream) {
    for (std::int64_t r = 0; r < rows; ++r) {
      const T* const in = x.row(r);
      T* const out = y.row(r);
      A squares = 0;
      for (std::int64_t i = 0; i < dim; ++i) squares += static_cast<A>(in[i]) * static_cast<A>(in[i]);
      const A inverse = 1 / std::sqrt(squares / static_cast<A>(dim) + static_cast<A>(epsilon));
      inverse_rms[r] = inverse;
      for (std::int64_t i = 0; i < dim; ++i) {
        out[i] = static_cast<T>(static_cast<A>(in[i]) * inverse * static_cast<A>(weight[i]));
      }
    }
  }
  /// dx = residual (0 where there is none) + the gradient of x; dweight [dim] is overwritten. `dx` may be any of `dy`,
  /// `x` and `residual`.
  template <class T, class A>
  void rms_norm_backward(Rows<const T> dy, Rows<const T> x, const T* weight, const A* inverse_rms,
                         Rows<const T> residual, Rows<T> dx, A* dweight, std::int64_t rows, std::int64_t dim, Stream) {
    std::fill_n(dweight, dim, A{0});
    for (std::int64_t r = 0; r < rows; ++r) {
      const T *const gradient = dy.row(r), *const in = x.row(r);
      T* const out = dx.row(r);
      const A inverse = inverse_rms[r];
      A dot = 0;
      for (std::int64_t i = 0; i < dim; ++i) {
        const A g = static_cast<A>(gradient[i]), value = static_cast<A>(in[i]);
        dot += g * static_cast<A>(weight[i]) * value;
        dweight[i] += g * value * inverse;
      }
      const A along = dot * inverse * inverse / static_cast<A>(dim);
      for (std::int64_t i = 0; i < dim; ++i) {
        const A value =
            inverse * (static_cast<A>(gradient[i]) * static_cast<A>(weight[i]) - static_cast<A>(in[i]) * along);
        out[i] = static_cast<T>(residual.data == nullptr ? value : static_cast<A>(residual.row(r)[i]) + value);
      }
    }
  }

  /// Rotates `dim` numbers of each head of each token in place, x[t * token_stride + h * head_stride + i], by the
  /// token's position; pairs are (i, i + dim / 2). `direction` -1 undoes it, which is also its gradient. source: arXiv
  /// 2104.09864.
  template <class T>
  void rotate(T* x, std::int64_t token_stride, std::int64_t head_stride, const std::int32_t* positions,
              std::int64_t tokens, std::int64_t heads, std::int64_t dim, double theta, int direction, Stream) {
    using A = pleat::accumulator_t<T>;
    const std::int64_t half = dim / 2;
    for (std::int64_t t = 0; t < tokens; ++t) {
      for (std::int64_t i = 0; i < half; ++i) {
        const double angle = positions[t] * std::pow(theta, -2.0 * static_cast<double>(i) / static_cast<double>(dim));
        const A cosine = static_cast<A>(std::cos(angle)), sine = static_cast<A>(direction * std::sin(angle));
        for (std::int64_t h = 0; h < heads; ++h) {
          T* const head = x + t * token_stride + h * head_stride;
          const A a = static_cast<A>(head[i]), b = static_cast<A>(head[i + half]);
          head[i] = static_cast<T>(a * cosine - b * sine);
          head[i + half] = static_cast<T>(b * cosine + a * sine);
        }
      }
    }
  }

  /// act [elems] = silu(gate) * up.
  template <class T>
  void swiglu(const T* gate, const T* up, T* act, std::int64_t elems, Stream) {
    using A = pleat::accumulator_t<T>;
    for (std::int64_t i = 0; i < elems; ++i) {
      const A g = static_cast<A>(gate[i]);
      act[i] = static_cast<T>(g / (1 + std::exp(-g)) * static_cast<A>(up[i]));
    }
  }
  /// In place: `act` is its gradient on entry and becomes itself again, `gate` and `up` become their gradients.
  template <class T>
  void swiglu_backward(T* gate, T* up, T* act, std::int64_t elems, Stream) {
    using A = pleat::accumulator_t<T>;
    for (std::int64_t i = 0; i < elems; ++i) {
      const A g = static_cast<A>(gate[i]), u = static_cast<A>(up[i]), dact = static_cast<A>(act[i]);
      const A sigmoid = 1 / (1 + std::exp(-g)), silu = g * sigmoid;
      act[i] = static_cast<T>(silu * u);
      up[i] = static_cast<T>(dact * silu);
      gate[i] = static_cast<T>(dact * u * (sigmoid + silu * (1 - sigmoid)));
    }
  }

  /// *sum += value.
  void add_constant(double* sum, double value, Stream) { *sum += value; }

  /// *loss += sum over rows of -log softmax(logits)[label]; logits [rows, classes] become their gradient. A row whose
  /// label is below 0 has no target: it adds nothing, and its gradient is 0.
  template <class T>
  void cross_entropy(T* logits, const std::int32_t* labels, double* loss, std::int64_t rows, std::int64_t classes,
                     Stream) {
    using A = pleat::accumulator_t<T>;
    for (std::int64_t r = 0; r < rows; ++r, logits += classes) {
      if (labels[r] < 0) {
        std::fill_n(logits, classes, T{});
        continue;
      }
      A most = static_cast<A>(logits[0]);
      for (std::int64_t c = 1; c < classes; ++c) most = std::max(most, static_cast<A>(logits[c]));
      A sum = 0;
      for (std::int64_t c = 0; c < classes; ++c) sum += std::exp(static_cast<A>(logits[c]) - most);
      *loss += static_cast<double>(std::log(sum) + most - static_cast<A>(logits[labels[r]]));
      for (std::int64_t c = 0; c < classes; ++c) {
        const A share = std::exp(static_cast<A>(logits[c]) - most) / sum;
        logits[c] = static_cast<T>(share - (c == labels[r] ? 1 : 0));
      }
    }
  }

  /// y [rows, out] = x [rows, in] * weight [out, in]^T + residual [rows, out], or without one; `y` may be `residual`.
  template <class T, class Y>
  void linear(Rows<const T> x, const T* weight, Y* y, std::int64_t rows, std::int64_t in, std::int64_t out,
              const std::type_identity_t<Y>* residual, Stream) {
    if (residual != nullptr && residual != y) std::copy_n(residual, rows * out, y);
    pleat::gemm(pleat::Op::none, pleat::Op::transpose, rows, out, in, 1, x.data, x.stride, weight, in,
                residual == nullptr ? 0 : 1, y, out);
  }
  /// dx [rows, in] (add ? += : =) dy [rows, out] * weight.
  template <class D, class T>
  void linear_input_gradient(const D* dy, const T* weight, T* dx, bool add, std::int64_t rows, std::int64_t in,
                             std::int64_t out, Stream) {
    pleat::gemm(pleat::Op::none, pleat::Op::none, rows, in, out, 1, dy, out, weight, in, add ? 1 : 0, dx, in);
  }
  /// dweight [out, in] (add ? += : =) dy [rows, out]^T * x [rows, in].
  template <class D, class T, class A>
  void linear_weight_gradient(const D* dy, Rows<const T> x, A* dweight, bool add, std::int64_t rows, std::int64_t in,
                              std::int64_t out, Stream) {
    pleat::gemm(pleat::Op::transpose, pleat::Op::none, out, in, rows, 1, dy, out, x.data, x.stride, add ? 1 : 0,
                dweight, in);
  }

  /// Of each latent row: keys [rows, heads, key()] = [key_weight [heads, nope, lora] * lora part | rope part] and
  /// values [rows, heads, value] = value_weight [heads, value, lora] * lora part.
  template <class T>
  void expand_latent(const LatentShape& l, Rows<const T> latent, const T* key_weight, const T* value_weight, T* keys,
                     T* values, std::int64_t rows, Stream) {
    using pleat::Op;
    pleat::gemm(Op::none, Op::transpose, rows, l.heads * l.value, l.lora, 1, latent.data, latent.stride, value_weight,
                l.lora, 0, values, l.heads * l.value);
    for (std::int64_t h = 0; h < l.heads; ++h) {
      T* const of_head = keys + h * l.key();
      pleat::gemm(Op::none, Op::transpose, rows, l.nope, l.lora, 1, latent.data, latent.stride,
                  key_weight + h * l.nope * l.lora, l.lora, 0, of_head, l.heads * l.key());
      for (std::int64_t r = 0; r < rows; ++r) {
        std::copy_n(latent.row(r) + l.lora, l.rope, of_head + r * l.heads * l.key() + l.nope);
      }
    }
  }
  /// dkeys and dvalues, shaped as keys and values, of the accumulator -> dlatent (add ? += : =), and the gradients of
  /// both weights, which are added to.
  template <class T, class A>
  void expand_latent_backward(const LatentShape& l, Rows<const T> latent, const T* key_weight, const T* value_weight,
                              const A* dkeys, const A* dvalues, Rows<A> dlatent, bool add, A* dkey_weight,
                              A* dvalue_weight, std::int64_t rows, Stream) {
    using pleat::Op;
    const std::int64_t values = l.heads * l.value, keys = l.heads * l.key();
    pleat::gemm(Op::none, Op::none, rows, l.lora, values, 1, dvalues, values, value_weight, l.lora, add ? 1 : 0,
                dlatent.data, dlatent.stride);
    pleat::gemm(Op::transpose, Op::none, values, l.lora, rows, 1, dvalues, values, latent.data, latent.stride, 1,
                dvalue_weight, l.lora);
    for (std::int64_t h = 0; h < l.heads; ++h) {
      const A* const of_head = dkeys + h * l.key();
      pleat::gemm(Op::none, Op::none, rows, l.lora, l.nope, 1, of_head, keys, key_weight + h * l.nope * l.lora, l.lora,
                  1, dlatent.data, dlatent.stride);
      pleat::gemm(Op::transpose, Op::none, l.nope, l.lora, rows, 1, of_head, keys, latent.data, latent.stride, 1,
                  dkey_weight + h * l.nope * l.lora, l.lora);
      for (std::int64_t r = 0; r < rows; ++r) {
        A* const rope = dlatent.row(r) + l.lora;
        for (std::int64_t i = 0; i < l.rope; ++i) {
          rope[i] = (add || h > 0 ? rope[i] : A{0}) + of_head[r * keys + l.nope + i];
        }
      }
    }
  }
};

}  // namespace train_moe
