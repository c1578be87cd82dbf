// Splits: members and their order for any colors and keys, groups of groups, groups in use at the same time.
#pragma once

#include <conformance/collectives.hpp>
#include <conformance/exchanges.hpp>

namespace conformance {

/// The ranks of one color, by key, then by rank.
template <class Color, class Key>
std::vector<int> members_of(int ranks, int color, Color color_of, Key key_of) {
  std::vector<int> members;
  for (int r = 0; r < ranks; ++r) {
    if (color_of(r) == color) members.push_back(r);
  }
  std::stable_sort(members.begin(), members.end(), [&](int a, int b) { return key_of(a) < key_of(b); });
  return members;
}

template <class Site, class Comm>
Bytes gather_ranks(Site& site, Comm& group, int mine) {
  const auto value = static_cast<std::int64_t>(mine);
  Bytes bytes(sizeof value);
  std::memcpy(bytes.data(), &value, sizeof value);
  auto in = site.upload(bytes);
  typename Site::Buffer out(sizeof value * static_cast<std::size_t>(group.size()));
  group.all_gather(in.block().data, out.block().data, 1, DType::i64, site.s());
  return site.download(out);
}

/// Checks that `group` consists of `members` (as each of them names itself by `mine`), in that order.
template <class Site, class Comm>
void require_members(Site& site, Comm& group, int mine, const std::vector<int>& members) {
  require(group.size() == static_cast<int>(members.size()), "a split gave ", group.size(), " ranks instead of ",
          members.size());
  require(members[static_cast<std::size_t>(group.rank())] == mine, "a split gave rank ", mine, " the place ",
          group.rank());
  const std::vector<std::int64_t> expected(members.begin(), members.end());
  Bytes bytes(expected.size() * sizeof(std::int64_t));
  std::memcpy(bytes.data(), expected.data(), bytes.size());
  require_equal(gather_ranks(site, group, mine), bytes, "the members of a split");
}

template <class Site, class Color, class Key>
auto checked_split(Site& site, Color color_of, Key key_of) {
  auto group = site.comm.split(color_of(site.rank()), key_of(site.rank()));
  require_members(site, group, site.rank(), members_of(site.size(), color_of(site.rank()), color_of, key_of));
  return group;
}

template <backend Backend>
void check_splits() {
  at_all_sizes_on_ranks<Backend, Whole>("split by color and key", [](auto& site) {
    const int n = site.size();
    const auto zero = [](int) { return 0; };
    const auto rank = [](int r) { return r; };
    checked_split(site, zero, rank);
    checked_split(site, zero, [n](int r) { return n - r; });    // reversed
    checked_split(site, zero, [](int r) { return -3 * r; });    // negative
    checked_split(site, zero, zero);                            // all tied
    checked_split(site, zero, [](int r) { return -(r % 2); });  // some tied
    checked_split(site, zero, [](int r) { return r % 2 == 0 ? 2147483647 : -2147483647 - 1; });
    checked_split(site, rank, zero);  // everybody alone
    checked_split(
        site, [](int r) { return r % 2; }, rank);
    checked_split(
        site, [](int r) { return r / 3 - 1; }, [](int r) { return -r; });  // a negative color
    checked_split(
        site, [](int r) { return r == 0 ? 1000000007 : 5; }, zero);
  });
  at_all_sizes_on_ranks<Backend, Whole>("groups of groups", [](auto& site) {
    const int n = site.size();
    auto outer = checked_split(
        site, [](int r) { return r % 2; }, [n](int r) { return n - r; });
    auto inner = outer.split(outer.rank() / 2, -outer.rank());
    std::vector<int> members;
    const auto of_outer = members_of(
        n, site.rank() % 2, [](int r) { return r % 2; }, [n](int r) { return n - r; });
    for (int r = outer.size() - 1; r >= 0; --r) {
      if (r / 2 == outer.rank() / 2) members.push_back(of_outer[static_cast<std::size_t>(r)]);
    }
    require_members(site, inner, site.rank(), members);
    auto again = inner.split(0, 0);
    require_members(site, again, site.rank(), members);
  });
  at_all_sizes_on_ranks<Backend, Whole>("splits between operations on older groups", [](auto& site) {
    using Comm = std::remove_cvref_t<decltype(site.comm)>;
    std::vector<Comm> groups;
    std::vector<std::vector<int>> members;
    for (int round = 0; round < 6; ++round) {
      const auto color = [round](int r) { return (r + round) / 2 % 3; };
      const auto key = [round](int r) { return round % 2 == 0 ? r : -r; };
      groups.push_back(site.comm.split(color(site.rank()), key(site.rank())));
      members.push_back(members_of(site.size(), color(site.rank()), color, key));
      site.dawdle();
      for (std::size_t i = 0; i < groups.size(); ++i) require_members(site, groups[i], site.rank(), members[i]);
    }
    // Older groups go first; the newest still works, and so does the world.
    groups.erase(groups.begin(), groups.end() - 1);
    require_members(site, groups[0], site.rank(), members.back());
    broadcast_once(site, 9, 0, DType::f32, 60);
  });
  // Rows and columns of a grid: at any time some ranks are in one of their groups and some in the other.
  at_all_sizes_on_ranks<Backend, Whole>("two groups of each rank in use", [](auto& site) {
    const int columns = 3;
    auto row = site.comm.split(site.rank() / columns, site.rank());
    auto column = site.comm.split(site.rank() % columns, site.rank());
    using Comm = std::remove_cvref_t<decltype(row)>;
    conformance::Site<Backend, Comm> in_row(row, row), in_column(column, column);
    for (unsigned round = 0, end = static_cast<unsigned>(repeats(25)); round < end; ++round) {
      site.dawdle();
      all_gather_once(in_row, 5, DType::f32, round % 2 == 0, 70 + round);
      all_to_all_once(in_column, 4, DType::bf16, 70 + round);
      std::vector<PlannedMessage> ring;
      for (int r = 0; r < row.size(); ++r) ring.push_back({r, (r + 1) % row.size(), 3, 70 + round});
      exchange_once(in_row, ring, DType::u8);
      site.dawdle();
      if (round % 5 == 0) broadcast_once(site, 7, static_cast<int>(round) % site.size(), DType::i32, 70 + round);
    }
  });
}

}  // namespace conformance
