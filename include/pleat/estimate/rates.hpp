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

/// FLOP/s of attention. Forward comes near to `forward` with long sequences, and reaches half of it with
/// `forward_tokens` tokens; backward with many blocks of 128 keys on 132 multiprocessors, and half with
/// `backward_waves` times as many blocks as multiprocessors.
struct AttentionRates {
  double forward = 0, forward_tokens = 0;
  double backward = 0, backward_waves = 0;

  /// `tokens`: of a sequence.
  double of_forward(double tokens) const { return forward * tokens / (tokens + forward_tokens); }
  /// `keys`: of all sequences and heads of keys.
  double of_backward(double keys) const {
    const double waves = keys / 128 / 132;
    return backward * waves / (waves + backward_waves);
  }
};

/// On one H200, bf16; docs/planning.md says which runs they were fitted to.
struct Rates {
  /// Of a kernel that follows another on its stream, beside what its work takes: seconds.
  double kernel = 4e-6;
  /// Products of whole waves of tiles, FLOP/s.
  double product = 780e12;
  AttentionRates attention{660e12, 1060, 527e12, 1.05};
  /// With heads wider than 128.
  AttentionRates wide_attention{745e12, 1060, 577e12, 3.85};
  /// Newton-Schulz of Muon, with what it sends, FLOP/s.
  double newton_schulz = 560e12;
  /// Kernels that go over rows once, B/s.
  double rows = 2.9e12;
  /// Those that add rows up, as the gradients of norms' weights.
  double row_sums = 2e12;
  /// Those that place and sum rows of experts.
  double expert_rows = 3.65e12;
  /// What grouped products write, and updates, norms and sums of shards move, B/s.
  double stores = 4.1e12;
  double shards = 3.9e12;
  /// What is read where gradients of a rank alone are added, by products in the shard or by a pass of its own, B/s.
  double local_sums = 2.5e12;
  /// Rows of experts on the wire, B/s each way.
  double wire = 300e9;
  /// Gathers and sums of units, and sums over replicas, B/s each way; the ranks' meeting in each, seconds.
  double gathers = 360e9;
  double sums = 220e9;
  /// By how much longer a sum takes that is added to the one of the micro-batches before.
  double adding = 1.1;
  double replicas = 270e9;
  double meeting = 15e-6;
  /// By how much of their time gathers and sums slow what computes beside them.
  double disturbed = 0.2;
  /// The part of the time of experts' rows that a pair of passes hides.
  double hidden = 0.5;
  /// Of a step: what the host does while the device waits, seconds.
  double step = 0.75e-3;

  /// A product of [m, k] and [k, n] in tiles of 128 x 256, or smaller ones where they would be few.
  double product_seconds(double m, double n, double k) const {
    const double waves = std::ceil(m / 128) * std::ceil(n / 256) / 132;
    const double idle = waves > 1 ? std::ceil(waves) / waves : 1.15;
    return 2 * m * n * k / product * idle + kernel;
  }
};

}  // namespace pleat::inline v0::estimate
