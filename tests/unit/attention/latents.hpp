// Latents of a tiny MLA: their expansion to keys and values on the host, and the answer in float64 on one rank.
#pragma once

#include <pleat/attention/expansion.hpp>

#include "unit/attention/ring_run.hpp"

namespace latents {

using namespace pleat;
using oracle::Problem;

/// latent = [compressed (lora) | rope key]; keys of head h = [key_weights[h] compressed | rope], values =
/// value_weights[h] compressed.
struct Widths {
  int lora = 6, rope = 3, nope = 5, v_dim = 4;
  int latent() const { return lora + rope; }
  int qk_dim() const { return nope + rope; }
};

/// The expansion with weights [kv_heads, nope, lora] and [kv_heads, v_dim, lora], in T with sums in its accumulator.
template <class T>
class HostExpander {
 public:
  using A = accumulator_t<T>;

  HostExpander(const Widths& widths, int heads, const std::vector<double>& weights)
      : w_(widths), heads_(heads), weights_(weights.begin(), weights.end()), gradients_(weights.size()) {}

  void expand(const TensorRef& latent, const TensorRef& keys, const TensorRef& values, HostStream) {
    each_row(latent, [&](std::int64_t b, std::int64_t row, const T* c) {
      for (int h = 0; h < heads_; ++h) {
        T* const key = at<T>(keys, b, row, h);
        for (int i = 0; i < w_.nope; ++i) key[i] = static_cast<T>(product(key_weights(h, i), c));
        std::copy_n(c + w_.lora, w_.rope, key + w_.nope);
        for (int i = 0; i < w_.v_dim; ++i)
          at<T>(values, b, row, h)[i] = static_cast<T>(product(value_weights(h, i), c));
      }
    });
  }

  void expand_backward(const TensorRef& latent, const TensorRef& dkeys, const TensorRef& dvalues,
                       const TensorRef& dlatent, bool accumulate, HostStream) {
    each_row(latent, [&](std::int64_t b, std::int64_t row, const T* c) {
      std::vector<A> sum(static_cast<std::size_t>(w_.latent()));
      const auto add = [&](std::size_t weights, A gradient) {
        for (int j = 0; j < w_.lora; ++j) {
          sum[static_cast<std::size_t>(j)] += weights_[weights + static_cast<std::size_t>(j)] * gradient;
          gradients_[weights + static_cast<std::size_t>(j)] += gradient * static_cast<A>(c[j]);
        }
      };
      for (int h = 0; h < heads_; ++h) {
        const A* const dkey = at<A>(dkeys, b, row, h);
        for (int i = 0; i < w_.nope; ++i) add(key_weights(h, i), dkey[i]);
        for (int i = 0; i < w_.rope; ++i) sum[static_cast<std::size_t>(w_.lora + i)] += dkey[w_.nope + i];
        for (int i = 0; i < w_.v_dim; ++i) add(value_weights(h, i), at<A>(dvalues, b, row, h)[i]);
      }
      A* const out = dlatent.as<A>() + b * dlatent.stride(0) + row * dlatent.stride(1);
      for (int j = 0; j < w_.latent(); ++j) out[j] = (accumulate ? out[j] : 0) + sum[static_cast<std::size_t>(j)];
    });
  }

  const std::vector<A>& gradients() const { return gradients_; }
  static std::size_t weight_count(const Widths& w, int heads) {
    return static_cast<std::size_t>(heads * (w.nope + w.v_dim) * w.lora);
  }

 private:
  template <class U>
  static U* at(const TensorRef& t, std::int64_t b, std::int64_t row, int h) {
    return t.as<U>() + b * t.stride(0) + row * t.stride(1) + h * t.stride(2);
  }
  template <class F>
  static void each_row(const TensorRef& latent, F f) {
    for (std::int64_t b = 0; b < latent.extent(0); ++b) {
      for (std::int64_t row = 0; row < latent.extent(1); ++row)
        f(b, row, latent.as<T>() + b * latent.stride(0) + row * latent.stride(1));
    }
  }
  std::size_t key_weights(int h, int i) const { return static_cast<std::size_t>((h * w_.nope + i) * w_.lora); }
  std::size_t value_weights(int h, int i) const {
    return static_cast<std::size_t>((heads_ * w_.nope + h * w_.v_dim + i) * w_.lora);
  }
  A product(std::size_t weights, const T* c) const {
    A sum = 0;
    for (int j = 0; j < w_.lora; ++j) sum += weights_[weights + static_cast<std::size_t>(j)] * static_cast<A>(c[j]);
    return sum;
  }

  Widths w_;
  int heads_;
  std::vector<A> weights_, gradients_;
};
static_assert(ring::latent_expander<HostExpander<double>, HostStream>);

struct LatentInputs {
  std::vector<double> q, latent, weights, dout;
};
struct LatentOutputs {
  std::vector<double> out, dq, dlatent, dweights;
  friend bool operator==(const LatentOutputs&, const LatentOutputs&) = default;
};

inline Problem problem_of(const Widths& w, Problem p) {
  p.qk_dim = w.qk_dim();
  p.v_dim = w.v_dim;
  return p;
}
template <class T>
LatentInputs draw(const Widths& w, const Problem& p, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<double> normal;
  const auto fill = [&](std::size_t count) {
    std::vector<double> values(count);
    for (double& value : values) value = ring_run::as_stored<T>(normal(generator));
    return values;
  };
  LatentInputs in;
  in.q = fill(p.rows(p.q_heads) * static_cast<std::size_t>(p.qk_dim));
  in.latent = fill(p.rows(1) * static_cast<std::size_t>(w.latent()));
  in.weights = fill(HostExpander<T>::weight_count(w, p.kv_heads));
  for (double& weight : in.weights) weight = ring_run::as_stored<T>(weight / w.lora);
  in.dout = fill(p.rows(p.q_heads) * static_cast<std::size_t>(p.v_dim));
  return in;
}

/// One rank in float64: all keys and values first, then attention by its definition, then the expansion backwards.
inline LatentOutputs solve(const Widths& w, const Problem& p, LatentInputs in) {
  HostExpander<double> expander(w, p.kv_heads, in.weights);
  oracle::Inputs expanded{in.q, std::vector<double>(p.rows(p.kv_heads) * static_cast<std::size_t>(p.qk_dim)),
                          std::vector<double>(p.rows(p.kv_heads) * static_cast<std::size_t>(p.v_dim)), in.dout};
  const auto tensor = [&](std::vector<double>& data, int dim) {
    return TensorRef(data.data(), {p.batch, p.tokens, p.kv_heads, dim});
  };
  LatentOutputs result;
  result.dlatent.resize(in.latent.size());
  const TensorRef latent(in.latent.data(), {p.batch, p.tokens, w.latent()});
  const TensorRef dlatent(result.dlatent.data(), {p.batch, p.tokens, w.latent()});
  expander.expand(latent, tensor(expanded.k, p.qk_dim), tensor(expanded.v, p.v_dim), {});
  oracle::Outputs solved = oracle::solve(p, expanded);
  expander.expand_backward(latent, tensor(solved.dk, p.qk_dim), tensor(solved.dv, p.v_dim), dlatent, false, {});
  result.out = solved.out;
  result.dq = solved.dq;
  result.dweights = expander.gradients();
  return result;
}

}  // namespace latents
