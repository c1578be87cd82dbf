// One way to count ranks: a row-major array over named axes, the outermost first.
#pragma once

#include <pleat/core/config.hpp>
#include <pleat/mesh/group.hpp>

namespace pleat::inline v0 {

/// The ranks of a world as a row-major array over `N` named axes; the last axis has stride 1.
/// Another view of the same ranks is another value of this type; `share_outer_axis` says whether two of them agree on
/// what is outermost, which is what lets them fold the same stage.
template <class Name, int N>
struct Factorization {
  static_assert(N >= 1 && N <= 4, "a group of a longer factorization can need more than the two blocks of GroupShape");
  struct Factor {
    Name name;
    int extent;
  };
  Factor factors[static_cast<unsigned>(N)];

  PLEAT_HD constexpr int size() const {
    int product = 1;
    for (const Factor& factor : factors) product *= factor.extent;
    return product;
  }
  /// Whether an axis has this name.
  PLEAT_HD constexpr bool contains(Name name) const {
    for (const Factor& factor : factors) {
      if (factor.name == name) return true;
    }
    return false;
  }
  /// The shape of the groups whose ranks differ only along the axes that `wanted(name)` accepts.
  template <class Wanted>
  PLEAT_HD constexpr GroupShape groups(Wanted wanted) const {
    GroupShape shape;
    for (int i = N - 1, stride = 1; i >= 0; stride *= factors[i--].extent) {
      if (wanted(factors[i].name)) shape.append(stride, factors[i].extent);
    }
    return shape;
  }
};

/// Whether both count the same ranks with the same outermost axis.
template <class Name, int N, int M>
PLEAT_HD constexpr bool share_outer_axis(const Factorization<Name, N>& a, const Factorization<Name, M>& b) {
  return a.factors[0].name == b.factors[0].name && a.factors[0].extent == b.factors[0].extent && a.size() == b.size();
}

}  // namespace pleat::inline v0
