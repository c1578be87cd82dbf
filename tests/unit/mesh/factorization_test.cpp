#include <doctest/doctest.h>

#include <pleat/mesh/factorization.hpp>

#include "support/meshes.hpp"

using testing_support::at_compile_time;

// A factorization over names of the reader's choice: here a view with a tensor-parallel axis inside.
namespace {
enum class Name { pp, dp, cp, tp };
constexpr pleat::Factorization<Name, 4> four{{{Name::pp, 2}, {Name::dp, 3}, {Name::cp, 4}, {Name::tp, 5}}};
constexpr pleat::Factorization<Name, 2> two{{{Name::pp, 2}, {Name::tp, 60}}};

constexpr pleat::GroupShape along(Name a, Name b) {
  return four.groups([=](Name name) { return name == a || name == b; });
}
constexpr bool fold_together(Name outer, int extent, int rest) {
  return share_outer_axis(four, pleat::Factorization<Name, 2>{{{outer, extent}, {Name::tp, rest}}});
}
}  // namespace

TEST_CASE("strides are row-major, the last axis has stride 1") {
  CHECK(at_compile_time(four.size() == 120));
  CHECK(at_compile_time(along(Name::tp, Name::tp) == pleat::GroupShape{5, 1, 1, 5}));
  CHECK(at_compile_time(along(Name::pp, Name::pp) == pleat::GroupShape{120, 1, 60, 2}));
}

TEST_CASE("neighbours melt into one block, others are two") {
  CHECK(at_compile_time(along(Name::dp, Name::cp) == pleat::GroupShape{60, 1, 5, 12}));
  CHECK(at_compile_time(along(Name::dp, Name::tp) == pleat::GroupShape{20, 3, 1, 5}));
  CHECK(at_compile_time(along(Name::tp, Name::dp) == along(Name::dp, Name::tp)));
}

TEST_CASE("twins share the name and extent of the outer axis, and the world") {
  CHECK(at_compile_time(share_outer_axis(four, two)));
  CHECK(at_compile_time(fold_together(Name::pp, 2, 60)));
  CHECK(at_compile_time(!fold_together(Name::dp, 2, 60)));
  CHECK(at_compile_time(!fold_together(Name::pp, 4, 30)));
  CHECK(at_compile_time(!fold_together(Name::pp, 2, 30)));
}
