// Grouped-query attention: queries, keys and values of the normed input, rotary positions, the ring.
#pragma once

#include <pleat/attention.hpp>
#include <pleat/fsdp.hpp>

#include "lane.hpp"
#include "units.hpp"

namespace train_moe {

template <class Backend, class T>
class GroupedHeads {
 public:
  using A = pleat::accumulator_t<T>;
  using Executor = typename Backend::Executor;
  using Ring = pleat::ring::RingAttention<Executor, typename Backend::Comm, typename Backend::Arena>;
  using Gradient = pleat::fsdp::GradientView<Executor>;

  /// Of all rows. The first half of backward leaves the gradients of the three products in query, key and value for the
  /// second, and the norms' own at the end.
  struct Activations {
    T *query_raw, *key_raw;  // before the norm
    T *query, *key, *value;
    T* attended;
    A *query_rms, *key_rms;
    A *dquery_norm, *dkey_norm;
    pleat::ring::Saved ring;
  };
  struct Scratch {
    T *dattended, *dquery, *dkey, *dvalue;
  };

  explicit GroupedHeads(const ModelShape& model) : m_(model) {}

  static void shape_ring(const ModelShape& m, pleat::ring::Shape& shape) {
    shape.q_heads = m.heads;
    shape.kv_heads = m.kv_heads;
    shape.qk_dim = shape.v_dim = m.head_dim;
  }
  static Activations carve_activations(pleat::Carver& memory, const ModelShape& m, std::int64_t tokens) {
    const auto rows = [&](std::int64_t width) { return memory.take<T>(static_cast<std::size_t>(tokens * width)); };
    const auto numbers = [&](std::int64_t count) { return memory.take<A>(static_cast<std::size_t>(count)); };
    Activations a{};
    for (T** queries : {&a.query_raw, &a.query, &a.attended}) *queries = rows(m.queries());
    for (T** keys : {&a.key_raw, &a.key, &a.value}) *keys = rows(m.keys());
    a.query_rms = numbers(tokens * m.heads);
    a.key_rms = numbers(tokens * m.kv_heads);
    a.dquery_norm = numbers(m.head_dim);
    a.dkey_norm = numbers(m.head_dim);
    return a;
  }
  static Scratch carve_scratch(pleat::Carver& memory, const ModelShape& m, std::int64_t tokens) {
    const auto rows = [&](std::int64_t width) { return memory.take<T>(static_cast<std::size_t>(tokens * width)); };
    T *const dattended = rows(m.queries()), *const dquery = rows(m.queries()), *const dkey = rows(m.keys());
    return {dattended, dquery, dkey, rows(m.keys())};
  }

  /// normed [rows, hidden] -> a.attended [rows, heads * head_dim]. `streams` streams of as many tokens each.
  void forward(const Lane<Backend>& lane, Ring& ring, std::int64_t streams, const DeviceBatch& batch,
               const pleat::fsdp::UnitView& w, const T* normed, Activations& a) const {
    namespace param = attention_param;
    auto& kernels = *lane.kernels;
    const auto s = lane.stream();
    const std::int64_t rows = batch.rows(), hidden = m_.hidden, dim = m_.head_dim;
    const auto product = [&](int p, T* out, std::int64_t width) {
      kernels.linear(rows_in(normed, hidden), weight(w, p), out, rows, hidden, width, nullptr, s);
    };
    product(param::query, a.query_raw, m_.queries());
    product(param::key, a.key_raw, m_.keys());
    product(param::value, a.value, m_.keys());
    const auto place = [&](int norm, const T* raw, T* out, A* rms, std::int64_t heads) {
      kernels.rms_norm(rows_in(raw, dim), weight(w, norm), rows_out(out, dim), rms, rows * heads, dim, m_.epsilon, s);
      kernels.rotate(out, heads * dim, dim, batch.positions, rows, heads, dim, m_.rope_theta, 1, s);
    };
    place(param::query_norm, a.query_raw, a.query, a.query_rms, m_.heads);
    place(param::key_norm, a.key_raw, a.key, a.key_rms, m_.kv_heads);
    const auto heads_of = [&](T* x, int heads) { return heads_tensor(x, streams, rows, heads); };
    ring.forward(lane.streams, batch.placed, heads_of(a.query, m_.heads), heads_of(a.key, m_.kv_heads),
                 heads_of(a.value, m_.kv_heads), heads_of(a.attended, m_.heads), a.ring);
  }

  /// From scratch.dattended: dnormed [rows, hidden], overwritten.
  void input_backward(const Lane<Backend>& lane, Ring& ring, std::int64_t streams, const DeviceBatch& batch,
                      const pleat::fsdp::UnitView& w, const Scratch& scratch, Activations& a, T* dnormed) const {
    namespace param = attention_param;
    auto& kernels = *lane.kernels;
    const auto s = lane.stream();
    const std::int64_t rows = batch.rows(), hidden = m_.hidden, dim = m_.head_dim;
    const auto heads_of = [&](T* x, int heads) { return heads_tensor(x, streams, rows, heads); };
    ring.backward(lane.streams, heads_of(scratch.dattended, m_.heads), a.ring, heads_of(scratch.dquery, m_.heads),
                  heads_of(scratch.dkey, m_.kv_heads), heads_of(scratch.dvalue, m_.kv_heads));
    const auto take_back = [&](int norm, T* d, const T* raw, const A* rms, T* out, A* dnorm, std::int64_t heads) {
      kernels.rotate(d, heads * dim, dim, batch.positions, rows, heads, dim, m_.rope_theta, -1, s);
      kernels.rms_norm_backward(rows_in(d, dim), rows_in(raw, dim), weight(w, norm), rms, Rows<const T>{},
                                rows_out(out, dim), dnorm, rows * heads, dim, s);
    };
    take_back(param::query_norm, scratch.dquery, a.query_raw, a.query_rms, a.query, a.dquery_norm, m_.heads);
    take_back(param::key_norm, scratch.dkey, a.key_raw, a.key_rms, a.key, a.dkey_norm, m_.kv_heads);
    Executor{}.copy(a.value, scratch.dvalue, static_cast<std::size_t>(rows * m_.keys()) * sizeof(T), s);
    const auto product = [&](int p, const T* d, std::int64_t width, bool add) {
      kernels.linear_input_gradient(d, weight(w, p), dnormed, add, rows, hidden, width, s);
    };
    product(param::query, a.query, m_.queries(), false);
    product(param::key, a.key, m_.keys(), true);
    product(param::value, a.value, m_.keys(), true);
  }

  void weight_backward(const Lane<Backend>& lane, const DeviceBatch& batch, Gradient& gradient, const T* normed,
                       const Activations& a) const {
    namespace param = attention_param;
    const auto product = [&](int p, const T* d, std::int64_t width) {
      const auto [dweight, add] = gradient.write(p);
      lane.kernels->linear_weight_gradient(d, rows_in(normed, m_.hidden), dweight.template as<A>(), add, batch.rows(),
                                           m_.hidden, width, lane.stream());
    };
    product(param::query, a.query, m_.queries());
    product(param::key, a.key, m_.keys());
    product(param::value, a.value, m_.keys());
    write_gradient<Executor>(gradient, param::query_norm, a.dquery_norm, lane.stream());
    write_gradient<Executor>(gradient, param::key_norm, a.dkey_norm, lane.stream());
  }

 private:
  static const T* weight(const pleat::fsdp::UnitView& w, int param) { return w[param].template as<T>(); }
  pleat::TensorRef heads_tensor(T* x, std::int64_t streams, std::int64_t rows, int heads) const {
    return tensor_of<Backend>(x, {streams, rows / streams, heads, m_.head_dim});
  }

  ModelShape m_;
};

}  // namespace train_moe
