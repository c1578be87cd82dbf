#include <pleat/mesh/factorization.hpp>

// A factorization over names of the reader's choice: here a third view with a tensor-parallel axis inside.
namespace {
enum class Name { pp, dp, cp, tp };
constexpr pleat::Factorization<Name, 4> four{{{Name::pp, 2}, {Name::dp, 3}, {Name::cp, 4}, {Name::tp, 5}}};
constexpr pleat::Factorization<Name, 2> two{{{Name::pp, 2}, {Name::tp, 60}}};

constexpr pleat::GroupShape along(Name a, Name b) {
  return four.groups([=](Name name) { return name == a || name == b; });
}

static_assert(four.size() == 120);
static_assert(four.contains(Name::tp) && !two.contains(Name::cp));
static_assert(along(Name::tp, Name::tp) == pleat::GroupShape{5, 1, 1, 5});
static_assert(along(Name::pp, Name::pp) == pleat::GroupShape{120, 1, 60, 2});
static_assert(along(Name::dp, Name::cp) == pleat::GroupShape{60, 1, 5, 12}, "neighbours melt into one block");
static_assert(along(Name::dp, Name::tp) == pleat::GroupShape{20, 3, 1, 5}, "others are two");
static_assert(along(Name::dp, Name::tp) == along(Name::tp, Name::dp));

static_assert(share_outer_axis(four, two));
static_assert(!share_outer_axis(four, pleat::Factorization<Name, 2>{{{Name::dp, 2}, {Name::tp, 60}}}), "another name");
static_assert(!share_outer_axis(four, pleat::Factorization<Name, 2>{{{Name::pp, 4}, {Name::tp, 30}}}),
              "another extent");
static_assert(!share_outer_axis(four, pleat::Factorization<Name, 2>{{{Name::pp, 2}, {Name::tp, 30}}}), "another world");
}  // namespace
