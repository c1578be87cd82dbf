// What a step does to its totals and to one element: the arithmetic that the leaves of all devices share.
#pragma once

#include <cmath>

#include <pleat/core/config.hpp>
#include <pleat/optim/muon_leaf.hpp>

namespace pleat::inline v0::optim {

/// The status of two: any but 0 counts, the largest, and first of all NaN.
PLEAT_HD inline double worse_status(double a, double b) {
  if (std::isnan(a) || b == 0) return a;
  return a == 0 || !(b <= a) ? b : a;
}
/// What a status word of an operation adds to a rank's terms.
PLEAT_HD inline void add_status(StepPartial& partial, std::int64_t word) {
  partial.sums.status = worse_status(partial.sums.status, static_cast<double>(word));
}

/// Adds a rank's terms; called in rank order.
PLEAT_HD inline void add_partial(StepPartial& total, const StepPartial& partial) {
  total.sum_of_squares += partial.sum_of_squares;
  total.sums.loss += partial.sums.loss;
  total.sums.aux_loss += partial.sums.aux_loss;
  total.sums.tokens += partial.sums.tokens;
  total.sums.status = worse_status(total.sums.status, partial.sums.status);
}

/// Whether a global batch can have this number of target tokens.
PLEAT_HD inline bool is_token_count(double tokens) {
  return std::isfinite(tokens) && tokens > 0;
}

/// The step that follows from the terms of all ranks.
PLEAT_HD inline void finish_step(StepResult& result, const StepPartial& total, double max_norm) {
  result.tokens = total.sums.tokens;
  result.status = total.sums.status;
  result.loss = total.sums.loss / result.tokens;
  result.aux_loss = total.sums.aux_loss;
  result.norm = std::sqrt(total.sum_of_squares) / result.tokens;
  const double clip = max_norm > 0 ? max_norm / (result.norm + 1e-6) : 1.0;
  result.grad_scale = (clip < 1.0 ? clip : 1.0) / result.tokens;
  const bool is_finite = std::isfinite(result.norm) && std::isfinite(result.grad_scale);
  result.applied = is_finite && is_token_count(result.tokens) && result.status == 0 ? 1 : 0;
  ++(result.applied ? result.steps : result.skipped);
}

/// What a learning rate that is read on the device does to a step.
PLEAT_HD inline void check_rate(StepResult& result, double lr) {
  if (is_rate(lr) || !result.applied) return;
  result.status = bad_rate;
  result.applied = 0;
  --result.steps;
  ++result.skipped;
}

/// a * b, rounded. Compilers fuse a plain product into a sum on one path of a kernel and not on the other, and the bits
/// of an element would depend on where shards are cut.
PLEAT_HD inline float product(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}
PLEAT_HD inline double product(double a, double b) {
#if defined(__CUDA_ARCH__)
  return __dmul_rn(a, b);
#else
  return a * b;
#endif
}

/// AdamW on elements of `T`. source: as AdamwOptions; eps is added to the corrected root.
template <class T>
struct AdamwRule {
  T unscale, beta1, beta2, step_size, root_correction2, eps, keep;

  AdamwRule() = default;
  PLEAT_HD AdamwRule(const AdamwOptions& options, double lr, const StepResult& result)
      : unscale(static_cast<T>(result.grad_scale)),
        beta1(static_cast<T>(options.beta1)),
        beta2(static_cast<T>(options.beta2)),
        step_size(static_cast<T>(lr / (1 - std::pow(options.beta1, static_cast<double>(result.steps))))),
        root_correction2(static_cast<T>(std::sqrt(1 - std::pow(options.beta2, static_cast<double>(result.steps))))),
        eps(static_cast<T>(options.eps)),
        keep(static_cast<T>(1 - lr * options.weight_decay)) {}

  /// Updates one element and its moments.
  PLEAT_HD void apply(T& p, T& first, T& second, T gradient, bool weight_decay) const {
    const T g = product(gradient, unscale);
    first = product(beta1, first) + product(1 - beta1, g);
    second = product(beta2, second) + product(product(1 - beta2, g), g);
    const T denominator = std::sqrt(second) / root_correction2 + eps;
    p = (weight_decay ? product(p, keep) : p) - product(step_size, first / denominator);
  }
};

/// The momentum of Muon on elements of `T`, by its form.
template <class T>
struct MuonRule {
  T unscale, mu;
  bool keller, nesterov;

  MuonRule() = default;
  PLEAT_HD MuonRule(const MuonOptions& options, const StepResult& result)
      : unscale(static_cast<T>(result.grad_scale)),
        mu(static_cast<T>(options.momentum)),
        keller(options.form == MuonForm::keller),
        nesterov(options.nesterov) {}

  /// Updates the momentum and returns what is orthogonalized.
  PLEAT_HD T apply(T& momentum, T gradient) const {
    const T g = product(gradient, unscale);
    momentum = keller ? momentum + product(1 - mu, g - momentum) : product(mu, momentum) + g;
    if (!nesterov) return momentum;
    return g + product(mu, keller ? momentum - g : momentum);
  }
};

/// What an orthogonal direction does to the elements of one piece.
template <class T>
struct MuonUpdate {
  T keep, rate;

  PLEAT_HD MuonUpdate(const MuonPiece& piece, double lr, double weight_decay)
      : keep(static_cast<T>(piece.weight_decay ? 1 - lr * weight_decay : 1)), rate(static_cast<T>(lr * piece.scale)) {}

  /// The element after the update.
  PLEAT_HD T apply(T p, T direction) const { return product(p, keep) - product(rate, direction); }
};

}  // namespace pleat::inline v0::optim
