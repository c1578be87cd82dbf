#include <doctest/doctest.h>

#include <pleat/mesh/axis.hpp>
#include <string>

using pleat::Axis;
using pleat::AxisSet;
using pleat::View;

TEST_CASE("an axis is within a view exactly when the view is factored by it") {
  for (const Axis axis : {Axis::pp, Axis::dp, Axis::cp, Axis::expert_dp, Axis::ep}) {
    CAPTURE(name_of(axis));
    CHECK(AxisSet(axis).within(View::attention) == pleat::attention_view(1, 1, 1).contains(axis));
    CHECK(AxisSet(axis).within(View::expert) == pleat::expert_view(1, 1, 1).contains(axis));
  }
}

TEST_CASE("a set of axes has no order") {
  CHECK(AxisSet(Axis::cp, Axis::dp) == AxisSet(Axis::dp, Axis::cp));
  CHECK(AxisSet(Axis::cp) != AxisSet(Axis::dp, Axis::cp));
  CHECK(AxisSet().within(View::attention));
  CHECK_FALSE(AxisSet(Axis::pp, Axis::dp, Axis::ep).within(View::attention));
  CHECK(std::string(pleat::message_of(AxisSet(Axis::ep, Axis::pp)).c_str()) == "pp x ep");
}
