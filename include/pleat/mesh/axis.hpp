// The axes of a folded mesh, and the two views of a stage that they belong to.
#pragma once

#include <pleat/core/config.hpp>
#include <pleat/core/error.hpp>
#include <pleat/mesh/factorization.hpp>

namespace pleat::inline v0 {

/// One factor of a view. `pp` is outermost in both; `dp` and `cp` are of attention, `expert_dp` and `ep` of the
/// experts.
enum class Axis : unsigned char { pp, dp, cp, expert_dp, ep };

/// How a stage is factored: (dp, cp), or (expert_dp, ep).
enum class View : unsigned char { attention, expert };

/// What a parameter belongs to: dense ones are sharded over dp x cp, a routed expert's over expert_dp.
enum class Param : unsigned char { dense, expert };

PLEAT_HD constexpr const char* name_of(Axis axis) {
  switch (axis) {
    case Axis::pp:
      return "pp";
    case Axis::dp:
      return "dp";
    case Axis::cp:
      return "cp";
    case Axis::expert_dp:
      return "expert_dp";
    case Axis::ep:
      return "ep";
  }
  return "?";
}
constexpr void append_to(Message& message, Axis axis) {
  message.append(name_of(axis));
}

/// The axes of a view, outermost first: row-major, so `rank = (pp * DP + dp) * CP + cp` for attention, and
/// `rank = (pp * EXPERT_DP + expert_dp) * EP + ep` for the experts. PP is outermost in both, and so one axis.
PLEAT_HD constexpr Factorization<Axis, 3> attention_view(int pp, int dp, int cp) {
  return {{{Axis::pp, pp}, {Axis::dp, dp}, {Axis::cp, cp}}};
}
PLEAT_HD constexpr Factorization<Axis, 3> expert_view(int pp, int expert_dp, int ep) {
  return {{{Axis::pp, pp}, {Axis::expert_dp, expert_dp}, {Axis::ep, ep}}};
}
namespace detail {
[[noreturn]] PLEAT_HD inline void M05_axis_is_named_twice(Axis axis) {
  fail<mesh_error>("pleat[M05]: a group names axis ", axis, " twice; name each axis once");
}
}  // namespace detail

/// The axes along which the ranks of a group differ, in no order. M05 when one is named twice.
class AxisSet {
 public:
  constexpr AxisSet() = default;
  PLEAT_HD constexpr AxisSet(Axis a) { add(a); }
  PLEAT_HD constexpr AxisSet(Axis a, Axis b) : AxisSet(a) { add(b); }
  PLEAT_HD constexpr AxisSet(Axis a, Axis b, Axis c) : AxisSet(a, b) { add(c); }
  /// One more axis. Errors: M05 when it is there.
  PLEAT_HD constexpr AxisSet& add(Axis axis) {
    if (contains(axis)) detail::M05_axis_is_named_twice(axis);
    bits_ |= bit(axis);
    return *this;
  }
  /// Whether the axis is one of them.
  PLEAT_HD constexpr bool contains(Axis axis) const { return (bits_ & bit(axis)) != 0; }
  /// All axes of a view.
  PLEAT_HD static constexpr AxisSet view_axes(View view) {
    return view == View::attention ? AxisSet(Axis::pp, Axis::dp, Axis::cp)
                                   : AxisSet(Axis::pp, Axis::expert_dp, Axis::ep);
  }
  /// Whether the view has all of these axes.
  PLEAT_HD constexpr bool within(View view) const { return (bits_ & ~view_axes(view).bits_) == 0; }
  friend constexpr bool operator==(const AxisSet&, const AxisSet&) = default;

 private:
  PLEAT_HD static constexpr unsigned bit(Axis axis) { return 1U << static_cast<unsigned>(axis); }
  unsigned bits_ = 0;
};

/// The names, outermost first: `dp x cp`.
constexpr void append_to(Message& message, const AxisSet& axes) {
  const char* separator = "";
  for (int axis = 0; axis <= static_cast<int>(Axis::ep); ++axis) {
    if (!axes.contains(static_cast<Axis>(axis))) continue;
    message.append(separator).append(name_of(static_cast<Axis>(axis)));
    separator = " x ";
  }
}

}  // namespace pleat::inline v0
