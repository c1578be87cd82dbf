// Attention of one rank in float64, by the definition: whole rows of weights and the Jacobian of softmax. Shares
// nothing with the library, so that both can only agree by being right.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

namespace oracle {

struct Problem {
  std::int64_t batch = 1;
  std::int64_t tokens = 0;
  int q_heads = 1;
  int kv_heads = 1;
  int qk_dim = 8;
  int v_dim = 8;
  bool causal = true;
  std::vector<std::int64_t> cu_seqlens{};  // empty: one document

  double scale() const { return 1 / std::sqrt(static_cast<double>(qk_dim)); }
  std::size_t rows(int heads) const { return static_cast<std::size_t>(batch * tokens * heads); }
  std::size_t row(std::int64_t b, std::int64_t token, int heads, int head) const {
    return static_cast<std::size_t>((b * tokens + token) * heads + head);
  }
  int document_of(std::int64_t token) const {
    if (cu_seqlens.empty()) return 0;
    const auto next = std::upper_bound(cu_seqlens.begin(), cu_seqlens.end(), token);
    return next == cu_seqlens.end() ? -1 : static_cast<int>(next - cu_seqlens.begin());
  }
  bool sees(std::int64_t query, std::int64_t key) const {
    const int document = document_of(query);
    return document >= 0 && document == document_of(key) && (!causal || key <= query);
  }
};

/// q, k, v and the gradient of the output: [batch, tokens, heads, dim], all tokens of the sequence.
struct Inputs {
  std::vector<double> q, k, v, dout;
};
struct Outputs {
  std::vector<double> out, lse, dq, dk, dv;  // lse [batch, tokens, q_heads]
};

/// Normal numbers, each as `round` leaves it.
template <class Round>
Inputs draw(const Problem& p, unsigned seed, Round round) {
  std::mt19937 generator(seed);
  std::normal_distribution<double> normal;
  const auto fill = [&](int heads, int dim) {
    std::vector<double> values(p.rows(heads) * static_cast<std::size_t>(dim));
    for (double& value : values) value = round(normal(generator));
    return values;
  };
  Inputs in;
  in.q = fill(p.q_heads, p.qk_dim);
  in.k = fill(p.kv_heads, p.qk_dim);
  in.v = fill(p.kv_heads, p.v_dim);
  in.dout = fill(p.q_heads, p.v_dim);
  return in;
}

inline Outputs solve(const Problem& p, const Inputs& in) {
  Outputs a;
  a.out.assign(in.dout.size(), 0);
  a.lse.assign(p.rows(p.q_heads), -std::numeric_limits<double>::infinity());
  a.dq.assign(in.q.size(), 0);
  a.dk.assign(in.k.size(), 0);
  a.dv.assign(in.v.size(), 0);
  const auto qk = static_cast<std::size_t>(p.qk_dim);
  const auto vd = static_cast<std::size_t>(p.v_dim);
  for (std::int64_t b = 0; b < p.batch; ++b) {
    for (int h = 0; h < p.q_heads; ++h) {
      const int kv = h * p.kv_heads / p.q_heads;
      for (std::int64_t query = 0; query < p.tokens; ++query) {
        const std::size_t row = p.row(b, query, p.q_heads, h);
        std::vector<std::size_t> keys;
        std::vector<double> weight;
        for (std::int64_t key = 0; key < p.tokens; ++key) {
          if (!p.sees(query, key)) continue;
          keys.push_back(p.row(b, key, p.kv_heads, kv));
          double score = 0;
          for (std::size_t d = 0; d < qk; ++d) score += in.q[row * qk + d] * in.k[keys.back() * qk + d];
          weight.push_back(score * p.scale());
        }
        if (keys.empty()) continue;
        const double peak = *std::max_element(weight.begin(), weight.end());
        double sum = 0;
        for (double& w : weight) sum += w = std::exp(w - peak);
        a.lse[row] = peak + std::log(sum);
        std::vector<double> dweight(keys.size());
        double mean = 0;
        for (std::size_t j = 0; j < keys.size(); ++j) {
          weight[j] /= sum;
          for (std::size_t d = 0; d < vd; ++d) {
            a.out[row * vd + d] += weight[j] * in.v[keys[j] * vd + d];
            a.dv[keys[j] * vd + d] += weight[j] * in.dout[row * vd + d];
            dweight[j] += in.dout[row * vd + d] * in.v[keys[j] * vd + d];
          }
          mean += weight[j] * dweight[j];
        }
        for (std::size_t j = 0; j < keys.size(); ++j) {
          const double dscore = p.scale() * weight[j] * (dweight[j] - mean);
          for (std::size_t d = 0; d < qk; ++d) {
            a.dq[row * qk + d] += dscore * in.k[keys[j] * qk + d];
            a.dk[keys[j] * qk + d] += dscore * in.q[row * qk + d];
          }
        }
      }
    }
  }
  return a;
}

/// ||a - b|| / ||b||, NaN where a has one. Where b is smaller than `least`, that is the measure: gradients of inputs of
/// size 1 are differences of terms of size 1, and may cancel.
inline double relative_l2(const std::vector<double>& a, const std::vector<double>& b, double least = 1) {
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < b.size(); ++i) {
    difference += (a[i] - b[i]) * (a[i] - b[i]);
    norm += b[i] * b[i];
  }
  return std::sqrt(difference) / std::max(std::sqrt(norm), least);
}
/// The same with the largest |a - b| and the largest |b|.
inline double relative_max(const std::vector<double>& a, const std::vector<double>& b, double least = 1) {
  double difference = 0, largest = least;
  for (std::size_t i = 0; i < b.size(); ++i) {
    const double d = std::abs(a[i] - b[i]);
    if (!(d <= difference)) difference = d;
    largest = std::max(largest, std::abs(b[i]));
  }
  return difference / largest;
}

}  // namespace oracle
