// The model's floating-point operations of a step: two per multiply-add, and a backward pass as twice the forward. What
// is computed again, norms and the like do not count.
#pragma once

#include <cstdint>

#include "options.hpp"

namespace train_moe {

/// Multiply-adds of one token's forward pass, but for attention's scores and sums.
inline double token_products(const ModelShape& m) {
  const auto hidden = static_cast<double>(m.hidden);
  double sum = hidden * m.vocabulary;
  for (int layer = 0; layer < m.layers; ++layer) {
    sum += hidden * static_cast<double>(m.queries() + m.attended());
    if (m.has_latents()) {
      const LatentShape l = m.latents();
      sum += hidden * static_cast<double>(l.width()) + static_cast<double>(l.lora * l.heads * (l.nope + l.value));
    } else {
      sum += 2 * hidden * static_cast<double>(m.keys());
    }
    if (m.routes(layer)) sum += hidden * m.experts + 3 * hidden * m.inner * m.top_k;
    sum += 3 * hidden * m.mlp_inner(layer);
  }
  return sum;
}
/// Multiply-adds of one layer for a query and a key that it sees.
inline double pair_products(const ModelShape& m) {
  return static_cast<double>(m.queries() + m.attended());
}

/// Of `tokens` tokens, which see `pairs` keys in all.
inline double training_flops(const ModelShape& m, double tokens, double pairs) {
  return 6 * (tokens * token_products(m) + pairs * m.layers * pair_products(m));
}

}  // namespace train_moe
