// What the options of all optimizers have in common: which values can be.
#pragma once

#include <cmath>

#include <pleat/core/dtype.hpp>

namespace pleat::inline v0::optim {

namespace detail {
/// Whether `eps` is one that divides in sums of `dtype`.
inline bool is_eps(double eps, DType dtype) {
  return eps > 0 && eps <= 1 && (accumulator(dtype) == DType::f64 || static_cast<float>(eps) > 0);
}
inline bool is_decay(double decay) {
  return std::isfinite(decay) && decay >= 0;
}
inline void check_master(const char* optimizer, DType master) {
  if (master == accumulator(master)) return;
  fail<shape_error>("pleat[F16]: ", optimizer, " on masters of ", master, "; valid dtypes: f64 f32");
}
}  // namespace detail

}  // namespace pleat::inline v0::optim
