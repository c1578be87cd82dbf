// The MLP that all tokens of a layer take: of a dense layer, or the shared experts beside the routed ones.
#pragma once

#include <pleat/core/carve.hpp>
#include <pleat/fsdp.hpp>

#include "lane.hpp"
#include "units.hpp"

namespace train_moe {

template <class Backend, class T>
class MlpBlock {
 public:
  using A = pleat::accumulator_t<T>;
  using Gradient = pleat::fsdp::GradientView<typename Backend::Executor>;

  /// [tokens, inner] each. The first half of backward leaves the gradients of gate and up in their place, and the
  /// activation beside them, for the second.
  struct Activations {
    T *gate, *up, *act;
  };
  static Activations carve_activations(pleat::Carver& memory, std::int64_t tokens, std::int64_t inner) {
    const auto rows = [&] { return memory.take<T>(static_cast<std::size_t>(tokens * inner)); };
    T *const gate = rows(), *const up = rows();
    return {gate, up, rows()};
  }

  /// out [rows, hidden] = residual + MLP(x); `out` may be `residual`. source: SwiGLU, arXiv 2002.05202.
  static void forward(const Lane<Backend>& lane, std::int64_t rows, std::int64_t hidden, std::int64_t inner,
                      const pleat::fsdp::UnitView& w, const T* x, const T* residual, const Activations& a, T* out) {
    auto& kernels = *lane.kernels;
    kernels.linear(rows_in(x, hidden), weight(w, mlp_param::gate), a.gate, rows, hidden, inner, nullptr, lane.stream());
    kernels.linear(rows_in(x, hidden), weight(w, mlp_param::up), a.up, rows, hidden, inner, nullptr, lane.stream());
    kernels.swiglu(a.gate, a.up, a.act, rows * inner, lane.stream());
    kernels.linear(rows_in(a.act, inner), weight(w, mlp_param::down), out, rows, inner, hidden, residual,
                   lane.stream());
  }

  /// dx [rows, hidden] (add ? += : =) the gradient of x, from d, that of the output.
  static void input_backward(const Lane<Backend>& lane, std::int64_t rows, std::int64_t hidden, std::int64_t inner,
                             const pleat::fsdp::UnitView& w, const T* d, const Activations& a, T* dx, bool add) {
    auto& kernels = *lane.kernels;
    kernels.linear_input_gradient(d, weight(w, mlp_param::down), a.act, false, rows, inner, hidden, lane.stream());
    kernels.swiglu_backward(a.gate, a.up, a.act, rows * inner, lane.stream());
    kernels.linear_input_gradient(a.gate, weight(w, mlp_param::gate), dx, add, rows, hidden, inner, lane.stream());
    kernels.linear_input_gradient(a.up, weight(w, mlp_param::up), dx, true, rows, hidden, inner, lane.stream());
  }

  static void weight_backward(const Lane<Backend>& lane, std::int64_t rows, std::int64_t hidden, std::int64_t inner,
                              Gradient& gradient, const T* d, const T* x, const Activations& a) {
    const auto product = [&](int param, const T* dy, const T* in, std::int64_t in_width, std::int64_t out_width) {
      const auto [dweight, add] = gradient.write(param);
      lane.kernels->linear_weight_gradient(dy, rows_in(in, in_width), dweight.template as<A>(), add, rows, in_width,
                                           out_width, lane.stream());
    };
    product(mlp_param::down, d, a.act, inner, hidden);
    product(mlp_param::gate, a.gate, x, hidden, inner);
    product(mlp_param::up, a.up, x, hidden, inner);
  }

 private:
  static const T* weight(const pleat::fsdp::UnitView& w, int param) { return w[param].template as<T>(); }
};

}  // namespace train_moe
