// Latent attention: queries of the normed input, keys and values of a latent, which alone travels around the ring.
#pragma once

#include <pleat/attention.hpp>
#include <pleat/fsdp.hpp>

#include "lane.hpp"
#include "units.hpp"

namespace train_moe {

/// Makes keys and values of blocks of latents, on the kernels of a lane.
template <class Backend, class T>
class LatentExpander {
 public:
  using A = pleat::accumulator_t<T>;

  /// `dkey_up` and `dvalue_up` are added to by backward.
  LatentExpander(ops<typename Backend::Device>& kernels, const LatentShape& shape, const T* key_up, const T* value_up,
                 A* dkey_up, A* dvalue_up)
      : kernels_(&kernels),
        shape_(shape),
        key_up_(key_up),
        value_up_(value_up),
        dkey_up_(dkey_up),
        dvalue_up_(dvalue_up) {}

  template <class Stream>
  void expand(const pleat::TensorRef& latent, const pleat::TensorRef& keys, const pleat::TensorRef& values, Stream s) {
    for (std::int64_t b = 0; b < latent.extent(0); ++b) {
      kernels_->expand_latent(shape_, rows_of<const T>(latent, b), key_up_, value_up_, entry<T>(keys, b),
                              entry<T>(values, b), latent.extent(1), s);
    }
  }
  template <class Stream>
  void expand_backward(const pleat::TensorRef& latent, const pleat::TensorRef& dkeys, const pleat::TensorRef& dvalues,
                       const pleat::TensorRef& dlatent, bool accumulate, Stream s) {
    for (std::int64_t b = 0; b < latent.extent(0); ++b) {
      kernels_->expand_latent_backward(shape_, rows_of<const T>(latent, b), key_up_, value_up_,
                                       static_cast<const A*>(entry<A>(dkeys, b)),
                                       static_cast<const A*>(entry<A>(dvalues, b)), rows_of<A>(dlatent, b), accumulate,
                                       dkey_up_, dvalue_up_, latent.extent(1), s);
    }
  }

 private:
  template <class E>
  static E* entry(const pleat::TensorRef& t, std::int64_t b) {
    return t.template as<std::remove_const_t<E>>() + b * t.stride(0);
  }
  template <class E>
  static Rows<E> rows_of(const pleat::TensorRef& t, std::int64_t b) {
    return {entry<E>(t, b), t.stride(1)};
  }

  ops<typename Backend::Device>* kernels_;
  LatentShape shape_;
  const T *key_up_, *value_up_;
  A *dkey_up_, *dvalue_up_;
};

/// Multi-head latent attention without a latent of the queries. source: DeepSeek-V2, arXiv 2405.04434.
template <class Backend, class T>
class LatentHeads {
 public:
  using A = pleat::accumulator_t<T>;
  using Executor = typename Backend::Executor;
  using Ring = pleat::ring::RingAttention<Executor, typename Backend::Comm, typename Backend::Arena>;
  using Gradient = pleat::fsdp::GradientView<Executor>;

  /// Of all rows. The first half of backward leaves the gradients of the two products in query and latent_raw for the
  /// second, and those of the norm and of the expansion at the end.
  struct Activations {
    T* query;
    T *latent_raw, *latent;  // [rows, lora + rope], before the norm and the rotation and after
    T* attended;
    A* latent_rms;
    A *dlatent_norm, *dkey_up, *dvalue_up;
    pleat::ring::Saved ring;
  };
  struct Scratch {
    T *dattended, *dquery, *dlatent;
  };

  explicit LatentHeads(const ModelShape& model) : m_(model), l_(model.latents()) {}

  static void shape_ring(const ModelShape& m, pleat::ring::Shape& shape) {
    const LatentShape l = m.latents();
    shape.q_heads = shape.kv_heads = m.heads;
    shape.qk_dim = static_cast<int>(l.key());
    shape.v_dim = static_cast<int>(l.value);
    shape.latent_dim = static_cast<int>(l.width());
  }
  static Activations carve_activations(pleat::Carver& memory, const ModelShape& m, std::int64_t tokens) {
    const LatentShape l = m.latents();
    const auto rows = [&](std::int64_t width) { return memory.take<T>(static_cast<std::size_t>(tokens * width)); };
    const auto numbers = [&](std::int64_t count) { return memory.take<A>(static_cast<std::size_t>(count)); };
    Activations a{};
    a.query = rows(m.queries());
    a.latent_raw = rows(l.width());
    a.latent = rows(l.width());
    a.attended = rows(m.attended());
    a.latent_rms = numbers(tokens);
    a.dlatent_norm = numbers(l.lora);
    a.dkey_up = numbers(l.heads * l.nope * l.lora);
    a.dvalue_up = numbers(l.heads * l.value * l.lora);
    return a;
  }
  static Scratch carve_scratch(pleat::Carver& memory, const ModelShape& m, std::int64_t tokens) {
    const auto rows = [&](std::int64_t width) { return memory.take<T>(static_cast<std::size_t>(tokens * width)); };
    T *const dattended = rows(m.attended()), *const dquery = rows(m.queries());
    return {dattended, dquery, rows(m.latents().width())};
  }

  /// normed [rows, hidden] -> a.attended [rows, heads * value]. `streams` streams of as many tokens each.
  void forward(const Lane<Backend>& lane, Ring& ring, std::int64_t streams, const DeviceBatch& batch,
               const pleat::fsdp::UnitView& w, const T* normed, Activations& a) const {
    namespace param = latent_param;
    auto& kernels = *lane.kernels;
    const auto s = lane.stream();
    const std::int64_t rows = batch.rows(), hidden = m_.hidden, width = l_.width();
    kernels.linear(rows_in(normed, hidden), weight(w, param::query), a.query, rows, hidden, m_.queries(), nullptr, s);
    kernels.linear(rows_in(normed, hidden), weight(w, param::latent), a.latent_raw, rows, hidden, width, nullptr, s);
    rotate(lane, batch, a.query + l_.nope, m_.queries(), l_.key(), l_.heads, 1);
    kernels.rms_norm(rows_in(a.latent_raw, width), weight(w, param::latent_norm), rows_out(a.latent, width),
                     a.latent_rms, rows, l_.lora, m_.epsilon, s);
    copy_rope(a.latent, a.latent_raw, rows, s);
    rotate(lane, batch, a.latent + l_.lora, width, 0, 1, 1);
    auto expander = expander_of(lane, w, a);
    ring.forward_latent(lane.streams, batch.placed, expander, queries(a.query, streams, rows),
                        latents(a.latent, streams, rows), values(a.attended, streams, rows), a.ring);
  }

  /// From scratch.dattended: dnormed [rows, hidden], overwritten.
  void input_backward(const Lane<Backend>& lane, Ring& ring, std::int64_t streams, const DeviceBatch& batch,
                      const pleat::fsdp::UnitView& w, const Scratch& scratch, Activations& a, T* dnormed) const {
    namespace param = latent_param;
    auto& kernels = *lane.kernels;
    const Executor executor;
    const auto s = lane.stream();
    const std::int64_t rows = batch.rows(), hidden = m_.hidden, width = l_.width();
    executor.zero(a.dkey_up, static_cast<std::size_t>(l_.heads * l_.nope * l_.lora) * sizeof(A), s);
    executor.zero(a.dvalue_up, static_cast<std::size_t>(l_.heads * l_.value * l_.lora) * sizeof(A), s);
    auto expander = expander_of(lane, w, a);
    ring.backward_latent(lane.streams, expander, values(scratch.dattended, streams, rows), a.ring,
                         queries(scratch.dquery, streams, rows), latents(scratch.dlatent, streams, rows));
    rotate(lane, batch, scratch.dquery + l_.nope, m_.queries(), l_.key(), l_.heads, -1);
    rotate(lane, batch, scratch.dlatent + l_.lora, width, 0, 1, -1);
    executor.copy(a.query, scratch.dquery, static_cast<std::size_t>(rows * m_.queries()) * sizeof(T), s);
    kernels.rms_norm_backward(rows_in(scratch.dlatent, width), rows_in(a.latent_raw, width),
                              weight(w, param::latent_norm), a.latent_rms, Rows<const T>{},
                              rows_out(a.latent_raw, width), a.dlatent_norm, rows, l_.lora, s);
    copy_rope(a.latent_raw, scratch.dlatent, rows, s);
    kernels.linear_input_gradient(a.query, weight(w, param::query), dnormed, false, rows, hidden, m_.queries(), s);
    kernels.linear_input_gradient(a.latent_raw, weight(w, param::latent), dnormed, true, rows, hidden, width, s);
  }

  void weight_backward(const Lane<Backend>& lane, const DeviceBatch& batch, Gradient& gradient, const T* normed,
                       const Activations& a) const {
    namespace param = latent_param;
    const auto product = [&](int p, const T* d, std::int64_t width) {
      const auto [dweight, add] = gradient.write(p);
      lane.kernels->linear_weight_gradient(d, rows_in(normed, m_.hidden), dweight.template as<A>(), add, batch.rows(),
                                           m_.hidden, width, lane.stream());
    };
    product(param::query, a.query, m_.queries());
    product(param::latent, a.latent_raw, l_.width());
    write_gradient<Executor>(gradient, param::latent_norm, a.dlatent_norm, lane.stream());
    write_gradient<Executor>(gradient, param::key_up, a.dkey_up, lane.stream());
    write_gradient<Executor>(gradient, param::value_up, a.dvalue_up, lane.stream());
  }

 private:
  using Stream = typename Backend::Stream;

  static const T* weight(const pleat::fsdp::UnitView& w, int param) { return w[param].template as<T>(); }
  LatentExpander<Backend, T> expander_of(const Lane<Backend>& lane, const pleat::fsdp::UnitView& w,
                                         const Activations& a) const {
    return {*lane.kernels, l_,         weight(w, latent_param::key_up), weight(w, latent_param::value_up),
            a.dkey_up,     a.dvalue_up};
  }
  void rotate(const Lane<Backend>& lane, const DeviceBatch& batch, T* x, std::int64_t token_stride,
              std::int64_t head_stride, std::int64_t heads, int direction) const {
    lane.kernels->rotate(x, token_stride, head_stride, batch.positions, batch.rows(), heads, l_.rope, m_.rope_theta,
                         direction, lane.stream());
  }
  /// The rotated part of each latent row.
  void copy_rope(T* out, const T* in, std::int64_t rows, Stream s) const {
    const std::size_t pitch = static_cast<std::size_t>(l_.width()) * sizeof(T);
    Executor{}.copy_2d(out + l_.lora, pitch, in + l_.lora, pitch, static_cast<std::size_t>(l_.rope) * sizeof(T),
                       static_cast<std::size_t>(rows), s);
  }
  pleat::TensorRef queries(T* x, std::int64_t streams, std::int64_t rows) const {
    return tensor_of<Backend>(x, {streams, rows / streams, l_.heads, l_.key()});
  }
  pleat::TensorRef values(T* x, std::int64_t streams, std::int64_t rows) const {
    return tensor_of<Backend>(x, {streams, rows / streams, l_.heads, l_.value});
  }
  pleat::TensorRef latents(T* x, std::int64_t streams, std::int64_t rows) const {
    return tensor_of<Backend>(x, {streams, rows / streams, l_.width()});
  }

  ModelShape m_;
  LatentShape l_;
};

}  // namespace train_moe
