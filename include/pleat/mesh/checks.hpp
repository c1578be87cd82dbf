// The rules of a folded mesh, M00..M05: as compile errors that carry the values, and as exceptions that list the
// choices.
#pragma once

#include <pleat/core/error.hpp>
#include <pleat/mesh/axis.hpp>

namespace pleat::inline v0 {

/// The degrees that define a mesh; `expert_dp` follows from them.
struct MeshDegrees {
  int pp = 1;
  int dp = 1;
  int cp = 1;
  int ep = 1;
  int replicas = 1;
};

/// The degrees that fold a world; `dp` and `expert_dp` follow from them.
struct FoldDegrees {
  int world = 1;
  int pp = 1;
  int cp = 1;
  int ep = 1;
  int replicas = 1;
};

namespace detail {

constexpr int largest_world = 2147483647;

PLEAT_HD constexpr bool divides(long long part, long long whole) {
  return part >= 1 && whole % part == 0;
}
PLEAT_HD constexpr bool world_fits_int(int pp, int dp, int cp) {
  return dp <= largest_world / pp && cp <= largest_world / (pp * dp);
}

// Static form. Each template holds one rule and has the values as its parameters, so that the first `error:` line has
// the id and the fix, and the same diagnostic the values: "required from 'struct EP_must_divide_stage<4, 6>'". Only a
// rule that is broken is instantiated, which is why a legal mesh costs next to nothing.

template <int... Degrees>
constexpr bool all_at_least_1 = ((Degrees >= 1) && ...);
template <Axis... Axes>
constexpr bool all_differ = ((1U << static_cast<unsigned>(Axes)) + ... + 0U) ==
                            ((1U << static_cast<unsigned>(Axes)) | ... | 0U);
template <Axis... Axes>
constexpr bool all_within_a_view = (AxisSet(Axes).within(View::attention) && ...) ||
                                   (AxisSet(Axes).within(View::expert) && ...);

template <int... Degrees>
struct degrees_must_be_at_least_1 {
  static_assert(all_at_least_1<Degrees...>, "pleat[M00]: every degree of a mesh must be at least 1");
};
template <int PP, int DP, int CP>
struct world_must_fit_int {
  static_assert(world_fits_int(PP, DP, CP), "pleat[M00]: the world size PP*DP*CP must fit in int: lower a degree");
};
template <int PP, int World>
struct PP_must_divide_world {
  static_assert(divides(PP, World), "pleat[M01]: PP must divide the world size: choose PP among the divisors of World");
};
template <int CP, int Stage>
struct CP_must_divide_stage {
  static_assert(divides(CP, Stage), "pleat[M01]: CP must divide the stage size World/PP: choose CP among its divisors");
};
template <int EP, int Stage>
struct EP_must_divide_stage {
  static_assert(divides(EP, Stage), "pleat[M02]: EP must divide the stage size DP*CP: choose EP among its divisors");
};
template <int Replicas, int ExpertDP>
struct Replicas_must_divide_expert_dp {
  static_assert(divides(Replicas, ExpertDP),
                "pleat[M03]: Replicas must divide expert_dp = DP*CP/EP: choose Replicas among its divisors");
};
template <Axis... Axes>
struct axes_of_a_group_must_differ {
  static_assert(all_differ<Axes...>, "pleat[M05]: a group names an axis twice: name each axis once");
};
template <Axis... Axes>
struct axes_of_a_group_must_share_a_view {
  static_assert(all_within_a_view<Axes...>,
                "pleat[M05]: the axes of a group must belong to one view: take them from (pp, dp, cp) or from "
                "(pp, expert_dp, ep)");
};

/// Makes the compiler say what is wrong, and nothing else.
template <class Rule, class Result>
consteval Result broken(Result result) {
  [[maybe_unused]] constexpr int said = sizeof(Rule);
  return result;
}

/// What follows from the degrees.
struct MeshSizes {
  int stage = 1;
  int world = 1;
  int expert_dp = 1;
};

/// The sizes of a legal mesh. Stops at the first rule that is broken, so that one mistake gives one error.
template <int PP, int DP, int CP, int EP, int Replicas>
consteval MeshSizes static_sizes() {
  if constexpr (PP < 1 || DP < 1 || CP < 1 || EP < 1 || Replicas < 1) {
    return broken<degrees_must_be_at_least_1<PP, DP, CP, EP, Replicas>>(MeshSizes{});
  } else if constexpr (!world_fits_int(PP, DP, CP)) {
    return broken<world_must_fit_int<PP, DP, CP>>(MeshSizes{});
  } else if constexpr (!divides(EP, DP * CP)) {
    return broken<EP_must_divide_stage<EP, DP * CP>>(MeshSizes{});
  } else if constexpr (!divides(Replicas, DP * CP / EP)) {
    return broken<Replicas_must_divide_expert_dp<Replicas, DP * CP / EP>>(MeshSizes{});
  } else {
    static_assert(share_outer_axis(attention_view(PP, DP, CP), expert_view(PP, DP * CP / EP, EP)));
    return {DP * CP, PP * DP * CP, DP * CP / EP};
  }
}

/// The `dp` that folds `World`, 1 when a rule is broken.
template <int World, int PP, int CP>
consteval int static_fold_dp() {
  if constexpr (World < 1 || PP < 1 || CP < 1) {
    return broken<degrees_must_be_at_least_1<World, PP, CP>>(1);
  } else if constexpr (!divides(PP, World)) {
    return broken<PP_must_divide_world<PP, World>>(1);
  } else if constexpr (!divides(CP, World / PP)) {
    return broken<CP_must_divide_stage<CP, World / PP>>(1);
  } else {
    return World / PP / CP;
  }
}

template <Axis... Axes>
consteval bool axes_are_legal() {
  if constexpr (!all_differ<Axes...>) {
    return broken<axes_of_a_group_must_differ<Axes...>>(false);
  } else if constexpr (!all_within_a_view<Axes...>) {
    return broken<axes_of_a_group_must_share_a_view<Axes...>>(false);
  } else {
    return true;
  }
}

// Run-time form: the same rules with the values and the choices.

PLEAT_HD constexpr void require_at_least_1(const char* name, long long value) {
  if (value < 1) fail<mesh_error>("pleat[M00]: ", name, "=", value, " must be at least 1");
}
PLEAT_HD constexpr void require_divides(const char* id, const char* part, long long part_value, const char* whole,
                                        long long whole_value) {
  if (divides(part_value, whole_value)) return;
  fail<mesh_error>("pleat[", id, "]: ", part, "=", part_value, " does not divide ", whole, "=", whole_value, "; valid ",
                   part, ": ", Divisors{whole_value});
}

/// The sizes of a legal mesh; M00, M02 or M03 otherwise.
PLEAT_HD constexpr MeshSizes checked_sizes(const MeshDegrees& d) {
  require_at_least_1("pp", d.pp);
  require_at_least_1("dp", d.dp);
  require_at_least_1("cp", d.cp);
  require_at_least_1("ep", d.ep);
  require_at_least_1("replicas", d.replicas);
  if (!world_fits_int(d.pp, d.dp, d.cp)) {
    fail<mesh_error>("pleat[M00]: a world of pp=", d.pp, " * dp=", d.dp, " * cp=", d.cp,
                     " ranks does not fit in int; valid: at most ", int{largest_world}, " ranks");
  }
  const int stage = d.dp * d.cp;
  require_divides("M02", "ep", d.ep, "stage", stage);
  require_divides("M03", "replicas", d.replicas, "expert_dp", stage / d.ep);
  return {stage, d.pp * stage, stage / d.ep};
}

/// The `dp` that folds the world; M00 or M01 otherwise.
PLEAT_HD constexpr int checked_fold_dp(const FoldDegrees& d) {
  require_at_least_1("world", d.world);
  require_at_least_1("pp", d.pp);
  require_at_least_1("cp", d.cp);
  require_divides("M01", "pp", d.pp, "world", d.world);
  require_divides("M01", "cp", d.cp, "stage", d.world / d.pp);
  return d.world / d.pp / d.cp;
}

PLEAT_HD constexpr void require_one_view(const AxisSet& axes) {
  if (axes.within(View::attention) || axes.within(View::expert)) return;
  fail<mesh_error>("pleat[M05]: a group along ", axes,
                   " mixes the views; valid: axes of (pp, dp, cp), or axes of (pp, expert_dp, ep)");
}

// M04. A constant expression cannot throw: there the name of the thrower is the message.

[[noreturn]] PLEAT_HD inline void M04_rank_is_out_of_range(int rank, int world) {
  fail<mesh_error>("pleat[M04]: rank=", rank, " is out of range; valid rank: 0..", world - 1);
}
[[noreturn]] PLEAT_HD inline void M04_coordinate_is_out_of_range(Axis axis, int value, int extent) {
  fail<mesh_error>("pleat[M04]: ", axis, "=", value, " is out of range; valid ", axis, ": 0..", extent - 1);
}
[[noreturn]] PLEAT_HD inline void M04_views_name_different_ranks(int attention_rank, int expert_rank) {
  fail<mesh_error>("pleat[M04]: the coordinates name rank=", attention_rank,
                   " in the attention view and rank=", expert_rank,
                   " in the expert view; valid: coordinates of one rank");
}
PLEAT_HD constexpr void require_rank(int rank, int world) {
  if (rank < 0 || rank >= world) M04_rank_is_out_of_range(rank, world);
}
PLEAT_HD constexpr void require_coordinate(Axis axis, int value, int extent) {
  if (value < 0 || value >= extent) M04_coordinate_is_out_of_range(axis, value, extent);
}

}  // namespace detail
}  // namespace pleat::inline v0
