#include <doctest/doctest.h>

#include <algorithm>
#include <iterator>
#include <pleat/mesh/group.hpp>
#include <ranges>
#include <string>
#include <type_traits>
#include <vector>

#include "support/meshes.hpp"

using pleat::Group;
using pleat::GroupList;
using pleat::GroupShape;
using testing_support::at_compile_time;
using testing_support::ranks_of;

static_assert(std::ranges::random_access_range<Group> && std::ranges::sized_range<Group>);
static_assert(std::ranges::random_access_range<GroupList> && std::ranges::sized_range<GroupList>);
static_assert(std::random_access_iterator<Group::iterator>);
static_assert(std::is_trivially_copyable_v<Group>);
static_assert(std::same_as<std::ranges::range_value_t<Group>, int>);

static_assert(pleat::cyclic(3, 1, 4) == 0 && pleat::cyclic(0, -1, 4) == 3 && pleat::cyclic(2, 9, 4) == 3);
static_assert(pleat::cyclic(1, -10, 4) == 3 && pleat::cyclic(0, 5, 1) == 0);

TEST_CASE("axes of extent 1 leave no trace and neighbours melt, so that equal shapes are equal sets of ranks") {
  CHECK(at_compile_time(GroupShape{}.append(1, 1).append(1, 4).append(4, 2) == GroupShape{}.append(1, 8)));
  CHECK(at_compile_time(GroupShape{}.append(4, 1) == GroupShape{}));
  CHECK(at_compile_time(GroupShape{}.append(1, 4).append(8, 2) != GroupShape{}.append(1, 8)));
  CHECK(
      at_compile_time(GroupShape{}.append(1, 2).append(8, 2).append(16, 3) == GroupShape{}.append(1, 2).append(8, 6)));
}

TEST_CASE("a group of one block") {
  constexpr Group group =
      GroupShape{}.append(4, 3).of(18);  // coordinate 1 of 3 at stride 4, in the span that starts at 12
  CHECK(ranks_of(group) == std::vector<int>{14, 18, 22});
  CHECK(group.size() == 3);
  CHECK(group[2] == 22);
  CHECK(group.front() == 14);
  CHECK(group.back() == 22);
  CHECK(group.index_of(18) == 1);
  for (const int other : {-2, 10, 13, 15, 16, 26, 1 << 30}) CHECK_FALSE(group.contains(other));
}

TEST_CASE("a group of two blocks") {
  constexpr Group group = GroupShape{}.append(1, 4).append(16, 2).of(29);
  CHECK(ranks_of(group) == std::vector<int>{12, 13, 14, 15, 28, 29, 30, 31});
  CHECK(group.index_of(28) == 4);
  for (int rank = -40; rank < 80; ++rank) {
    const auto found = std::ranges::find(group, rank);
    CHECK(group.contains(rank) == (found != group.end()));
    if (found != group.end()) CHECK(group.index_of(rank) == found - group.begin());
  }
}

TEST_CASE("iterators go everywhere") {
  constexpr Group group = GroupShape{}.append(2, 5).of(0);
  CHECK(*std::ranges::lower_bound(group, 6) == 6);
  CHECK(std::vector<int>(std::reverse_iterator(group.end()), std::reverse_iterator(group.begin())) ==
        std::vector<int>{8, 6, 4, 2, 0});
  auto it = group.begin() + 3;
  CHECK(*it-- == 6);
  CHECK(*it++ == 4);
  CHECK(it[-1] == 4);
  CHECK(1 + it == group.end() - 1);
  CHECK((it > group.begin() && it <= it && it >= group.begin() && it < group.end()));
}

TEST_CASE("groups of a shape are a partition, numbered in the order of their first ranks") {
  const GroupShape shapes[] = {GroupShape{}, GroupShape{}.append(1, 6), GroupShape{}.append(3, 4),
                               GroupShape{}.append(1, 3).append(12, 2), GroupShape{}.append(2, 3).append(12, 4)};
  for (const GroupShape& shape : shapes) {
    const GroupList groups{48, shape};
    std::vector<int> seen;
    int last_first = -1;
    for (int number = 0; number < groups.size(); ++number) {
      const Group group = groups[number];
      CHECK(group.front() > last_first);
      last_first = group.front();
      for (int i = 0; i < group.size(); ++i) {
        CHECK(shape.of(group[i]) == group);
        CHECK(shape.index(group[i]) == i);
        CHECK(shape.number(group[i]) == number);
        seen.push_back(group[i]);
      }
    }
    std::ranges::sort(seen);
    REQUIRE(seen.size() == 48);
    for (int rank = 0; rank < 48; ++rank) CHECK(seen[static_cast<std::size_t>(rank)] == rank);
  }
}

TEST_CASE("a group in an error text") {
  pleat::Message text;
  append_to(text, GroupShape{}.append(1, 3).of(7));
  CHECK(std::string(text.c_str()) == "{6, 7, 8}");
}
