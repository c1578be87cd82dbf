// Texts of errors: every kind of part, the numbers at their limits, lists of choices, and what happens past the
// capacity.
#include <pleat/core/error.hpp>
#include <pleat/core/message.hpp>

#include <cstdint>
#include <limits>
#include <new>
#include <string>
#include <string_view>
#include <type_traits>

#include <doctest/doctest.h>

namespace {

using pleat::Divisors;
using pleat::Indices;
using pleat::List;
using pleat::Message;
using pleat::message_of;

template <class... Parts>
std::string text_of(const Parts&... parts) {
  return message_of(parts...).c_str();
}

struct Point {
  int x, y;
};
void append_to(Message& message, const Point& point) {
  message.append('(').append(point.x).append(", ").append(point.y).append(')');
}

TEST_CASE("parts of every kind are put one after the other") {
  CHECK(text_of("a", 'b', 12, true, false) == "ab12truefalse");
  CHECK(text_of(std::string("own"), ' ', std::string_view("view of more", 4)) == "own view");
  CHECK(text_of("at ", Point{3, -4}) == "at (3, -4)");
  CHECK(text_of() == "");
  CHECK(message_of("four").size() == 4);
}

TEST_CASE("integers are exact up to the limits of their types") {
  CHECK(text_of(0) == "0");
  CHECK(text_of(-1) == "-1");
  CHECK(text_of(std::numeric_limits<std::int64_t>::min()) == "-9223372036854775808");
  CHECK(text_of(std::numeric_limits<std::int64_t>::max()) == "9223372036854775807");
  CHECK(text_of(std::numeric_limits<std::uint64_t>::max()) == "18446744073709551615");
  CHECK(text_of(std::numeric_limits<std::int32_t>::min()) == "-2147483648");
  CHECK(text_of(std::uint8_t{200}, ' ', std::int16_t{-5}) == "200 -5");
}

TEST_CASE("a list is its values with one blank between them") {
  const int values[] = {7, 0, -3};
  CHECK(text_of(List<int>{values, 3}) == "7 0 -3");
  CHECK(text_of(List<int>{values, 1}) == "7");
  CHECK(text_of(List<int>{values, 0}) == "");
}

TEST_CASE("divisors ascend and each stands once") {
  for (const long long n : {1LL, 2LL, 12LL, 16LL, 36LL, 97LL, 360LL}) {
    std::string expected;
    for (long long d = 1; d <= n; ++d) {
      if (n % d == 0) expected += (expected.empty() ? "" : " ") + std::to_string(d);
    }
    CHECK(text_of(Divisors{n}) == expected);
  }
  CHECK(text_of(Divisors{0}) == "");
}

TEST_CASE("a text that fits exactly stays whole; one byte more ends it in dots") {
  const std::string most(Message::capacity_bytes - 1, 'x');
  CHECK(text_of(most) == most);

  const std::string cut = text_of(most, "y");
  CHECK(cut.size() == most.size());
  CHECK(cut == most.substr(3) + "...");
  CHECK(text_of(most, "and ", 12345, " more") == cut);
}

TEST_CASE("a text can be made at compile time") {
  constexpr Message text = [] {
    Message made;
    made.append("n=").append(42);
    return made;
  }();
  static_assert(text.size() == 4);
  CHECK(std::string(text.c_str()) == "n=42");
}

TEST_CASE("fail throws its type with the text of its parts") {
  CHECK_THROWS_WITH_AS(pleat::fail<pleat::mesh_error>("n=", 3, "; valid n: ", Divisors{4}), "n=3; valid n: 1 2 4",
                       pleat::mesh_error);
  CHECK_THROWS_AS(pleat::fail<pleat::nccl_error>("x"), pleat::error);
  CHECK_THROWS_AS(pleat::fail<pleat::cuda_error>("x"), std::exception);
}

TEST_CASE("copying an error cannot throw and keeps its text") {
  static_assert(std::is_nothrow_copy_constructible_v<pleat::shape_error>);
  static_assert(std::is_nothrow_copy_constructible_v<pleat::comm_error>);
  const pleat::shape_error first(message_of("kept"));
  const pleat::error copy = first;
  CHECK(std::string(copy.what()) == "kept");
}

TEST_CASE("numbers have up to 6 significant digits, and indices their range") {
  const auto text = [](double value) { return std::string(Message().append(value).c_str()); };
  CHECK(text(0) == "0");
  CHECK(text(-0.95) == "-0.95");
  CHECK(text(1e-8) == "1e-8");
  CHECK(text(3.14159265) == "3.14159");
  CHECK(text(0.00001234) == "0.00001234");
  CHECK(text(299600) == "299600");
  CHECK(text(-1234567) == "-1.23457e6");
  CHECK(text(999999.7) == "1e6");
  CHECK(text(1.5e300) == "1.5e300");
  CHECK(text(1e-310).substr(0, 1) == "1");
  CHECK(text(std::numeric_limits<double>::max()) == "1.79769e308");
  CHECK(text(std::numeric_limits<double>::infinity()) == "inf");
  CHECK(text(-std::numeric_limits<double>::infinity()) == "-inf");
  CHECK(text(std::numeric_limits<double>::quiet_NaN()) == "nan");
  CHECK(text(static_cast<double>(0.5F)) == "0.5");
  CHECK(std::string(message_of("units are ", Indices{3}).c_str()) == "units are 0 to 2");
  CHECK(std::string(message_of("units are ", Indices{0}).c_str()) == "units are none");
}

}  // namespace
