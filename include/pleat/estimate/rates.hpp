// What the operations of a step reach on a GPU: the one table that predictions are made of, as machine.hpp is of
// bounds.
#pragma once

#include <algorithm>
#include <cmath>

namespace pleat::inline v0::estimate {

/// A time as it is at least, and as it is expected.
struct Seconds {
  double bound = 0;
  double expected = 0;

  friend Seconds operator+(const Seconds& a, const Seconds& b) { return {a.bound + b.bound, a.expected + b.expected}; }
  friend Seconds operator*(double x, const Seconds& a) { return {x * a.bound, x * a.expected}; }
};

/// FLOP/s of attention: what long sequences come near to, and the tokens of which half of it is reached.
struct AttentionRate {
  double most = 0;
  double half_tokens = 0;

  /// FLOP/s for a sequence of so many tokens.
  double at(double tokens) const { return most * tokens / (tokens + half_tokens); }
};

/// Rates are of bf16. source of the defaults: docs/planning.md says which runs they were fitted to.
struct Rates {
  /// From the end of a kernel to the first work of the next on its stream, and the end of its last wave: seconds.
  double kernel = 4e-6;
  /// Products of large matrices, FLOP/s, by whole waves of tiles.
  double product = 720e12;
  double grouped = 690e12;
  double grouped_weights = 600e12;
  AttentionRate attention_forward{700e12, 900};
  AttentionRate attention_backward{560e12, 700};
  /// Kernels that go over rows once, B/s.
  double rows = 2.9e12;
  /// Those that place and sum rows of experts.
  double expert_rows = 2.4e12;
  /// Updates and norms of shards, and sums of gradients in local memory.
  double shards = 3.7e12;
  /// Rows of experts on the wire, B/s each way.
  double wire = 300e9;
  /// Gathers and sums of units, B/s each way, and the ranks' meeting in each.
  double gathers = 360e9;
  double sums = 330e9;
  double replicas = 270e9;
  double meeting = 15e-6;
  /// By how much of their time gathers and sums slow what computes beside them.
  double disturbed = 0.1;
  /// The part of the time of experts' rows that a pair of passes hides.
  double hidden = 0.5;
  /// Of a step: what the host does while the device waits, seconds.
  double step = 0.5e-3;

  /// A product of [m, k] and [k, n]: whole waves of tiles of 128 x 256 on 132 multiprocessors.
  double product_seconds(double m, double n, double k) const {
    const double tiles = std::ceil(m / 128) * std::ceil(n / 256), waves = std::ceil(tiles / 132);
    // A product of few tiles is cut along k.
    const double filled = tiles < 132 ? std::max(tiles, std::min(132.0, tiles * std::ceil(k / 2048))) / 132 : waves;
    return 2 * 128 * 256 * k * 132 * std::max(filled, tiles / 132) * (tiles < 132 ? 1.0 : 1.0) / product + kernel;
  }
};

}  // namespace pleat::inline v0::estimate
