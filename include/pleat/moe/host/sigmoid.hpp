// The logistic function of router and experts.
#pragma once

#include <cmath>

namespace pleat::inline v0::moe::detail {

template <class Acc>
Acc sigmoid(Acc x) {
  return 1 / (1 + std::exp(-x));
}

}  // namespace pleat::inline v0::moe::detail
