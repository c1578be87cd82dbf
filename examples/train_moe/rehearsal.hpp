// Every kernel of a rank is called once before the first step, on memory that is given back: code that is loaded at its
// first use may wait for the whole device, and so for a peer that waits for this rank.
#pragma once

#include <algorithm>
#include <cstdint>

#include "head_block.hpp"
#include "units.hpp"

namespace train_moe {

/// The calls of the blocks, with the most rows that they may have, on zeros that all arrays share.
template <class Backend, class T>
class Rehearsal {
 public:
  using A = pleat::accumulator_t<T>;
  using Kernels = ops<typename Backend::Device>;
  using Stream = typename Backend::Stream;

  /// `rows`: the most of a micro-batch; `units`: of this rank.
  Rehearsal(const ModelShape& model, const RankUnits& units, std::int64_t rows, Stream s)
      : m_(model), units_(&units), rows_(rows), s_(s), memory_(bytes()) {
    typename Backend::Executor{}.zero(memory_.data(), memory_.size_bytes(), s);
    pleat::Carver memory(memory_.block());
    ids_ = memory.take<std::int32_t>(static_cast<std::size_t>(rows));
    wide_ = memory.take<A>(static_cast<std::size_t>(most_elems()));
  }

  /// Of one lane. The memory is in use until the stream is done.
  void run(Kernels& kernels) const {
    for (const ChunkUnits& chunk : units_->chunks) {
      if (chunk.embedding >= 0) embedding(kernels);
      for (const LayerUnits& layer : chunk.layers) {
        attention(kernels, layer.attention);
        if (layer.mlp >= 0) mlp(kernels, layer.mlp);
      }
      if (chunk.head >= 0) head(kernels);
    }
  }

 private:
  T* x() const { return reinterpret_cast<T*>(wide_); }
  A* a() const { return wide_; }

  void embedding(Kernels& kernels) const {
    kernels.embed(ids_, x(), x(), rows_, m_.hidden, s_);
    kernels.embed_backward(ids_, x(), a(), rows_, m_.hidden, m_.vocabulary, s_);
  }
  void attention(Kernels& kernels, int unit) const {
    norm(kernels, rows_, m_.hidden, true);
    const auto& params = units_->specs[static_cast<std::size_t>(unit)].params;
    const int router = m_.has_latents() ? int{latent_param::router} : int{attention_param::router};
    for (int p = 0; p < static_cast<int>(params.size()); ++p) {
      const auto& shape = params[static_cast<std::size_t>(p)].shape;
      const bool expands = m_.has_latents() && (p == latent_param::key_up || p == latent_param::value_up);
      if (shape.size() != 2 || expands) continue;
      p == router ? linear<A>(kernels, shape[1], shape[0]) : linear<T>(kernels, shape[1], shape[0]);
    }
    m_.has_latents() ? latents(kernels) : grouped(kernels);
  }
  void grouped(Kernels& kernels) const {
    for (const std::int64_t heads : {m_.heads, m_.kv_heads}) {
      norm(kernels, rows_ * heads, m_.head_dim, false);
      rotate(kernels, heads * m_.head_dim, m_.head_dim, heads, m_.head_dim);
    }
  }
  void latents(Kernels& kernels) const {
    const LatentShape l = m_.latents();
    const Rows<T> latent{x(), l.width()};
    norm(kernels, rows_, l.lora, false, l.width());
    rotate(kernels, m_.queries(), l.key(), l.heads, l.rope);
    rotate(kernels, l.width(), 0, 1, l.rope);
    kernels.expand_latent(l, latent, x(), x(), x(), x(), rows_, s_);
    for_numbers_of_rows(rows_, [&](std::int64_t some) {
      kernels.template expand_latent_backward<T, A>(l, latent, x(), x(), a(), a(), Rows<A>{a(), l.width()}, false, a(),
                                                    a(), some, s_);
    });
  }
  void mlp(Kernels& kernels, int unit) const {
    const auto& gate = units_->specs[static_cast<std::size_t>(unit)].params[mlp_param::gate].shape;
    linear<T>(kernels, gate[1], gate[0]);
    linear<T>(kernels, gate[0], gate[1]);
    kernels.swiglu(x(), x(), x(), rows_ * gate[0], s_);
    kernels.swiglu_backward(x(), x(), x(), rows_ * gate[0], s_);
  }
  void head(Kernels& kernels) const {
    norm(kernels, rows_, m_.hidden, false);
    linear<T>(kernels, m_.hidden, m_.vocabulary, head_rows());
    kernels.cross_entropy(x(), ids_, reinterpret_cast<double*>(a()), head_rows(), m_.vocabulary, s_);
    kernels.add_constant(reinterpret_cast<double*>(a()), 0.0, s_);
  }

  void norm(Kernels& kernels, std::int64_t rows, std::int64_t dim, bool has_residual, std::int64_t stride = 0) const {
    const Rows<T> in{x(), std::max(stride, dim)};
    kernels.rms_norm(in, x(), in, a(), rows, dim, m_.epsilon, s_);
    kernels.rms_norm_backward(in, in, x(), a(), has_residual ? Rows<const T>(in) : Rows<const T>{}, in, a(), rows, dim,
                              s_);
  }
  void rotate(Kernels& kernels, std::int64_t token_stride, std::int64_t head_stride, std::int64_t heads,
              std::int64_t dim) const {
    kernels.rotate(x(), token_stride, head_stride, ids_, rows_, heads, dim, m_.rope_theta, 1, s_);
  }
  /// A product with a matrix [out, in], to rows of Y, and the two of its backward pass.
  template <class Y>
  void linear(Kernels& kernels, std::int64_t in, std::int64_t out, std::int64_t rows) const {
    Y* const y = reinterpret_cast<Y*>(wide_);
    kernels.linear(Rows<T>{x(), in}, x(), y, rows, in, out, nullptr, s_);
    kernels.linear_input_gradient(y, x(), x(), false, rows, in, out, s_);
    for_numbers_of_rows(rows, [&](std::int64_t some) {
      kernels.linear_weight_gradient(y, Rows<T>{x(), in}, a(), true, some, in, out, s_);
    });
  }
  template <class Y>
  void linear(Kernels& kernels, std::int64_t in, std::int64_t out) const {
    linear<Y>(kernels, in, out, rows_);
  }

  /// Sums over rows have algorithms for some numbers of them: f(most), and f of all powers of two below.
  template <class F>
  static void for_numbers_of_rows(std::int64_t most, F f) {
    f(most);
    for (std::int64_t rows = 1; rows < most; rows *= 2) f(rows);
  }
  std::int64_t head_rows() const { return HeadBlock<Backend, T>::rows_at_once(rows_); }
  /// Of the largest array.
  std::int64_t most_elems() const {
    std::int64_t most = std::max({rows_ * m_.hidden, rows_ * m_.queries(), rows_ * m_.latents().width(),
                                  rows_ * m_.experts, head_rows() * m_.vocabulary});
    for (const pleat::fsdp::UnitSpec& unit : units_->specs) {
      if (unit.experts_local > 0) continue;
      for (const pleat::fsdp::ParamSpec& param : unit.params) {
        if (param.shape.size() != 2) continue;
        most = std::max({most, param.shape[0] * param.shape[1], rows_ * param.shape[0], rows_ * param.shape[1]});
      }
    }
    return most;
  }
  std::size_t bytes() const {
    pleat::Carver memory;
    memory.take<std::int32_t>(static_cast<std::size_t>(rows_));
    memory.take<A>(static_cast<std::size_t>(most_elems()));
    return memory.used_bytes();
  }

  ModelShape m_;
  const RankUnits* units_;
  std::int64_t rows_;
  Stream s_;
  typename Backend::Buffer memory_;
  std::int32_t* ids_ = nullptr;
  A* wide_ = nullptr;
};

}  // namespace train_moe
