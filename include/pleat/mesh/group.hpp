// Groups of ranks in closed form: where a group starts and how it strides, never a table of ranks.
#pragma once

#include <cstddef>

#include <pleat/core/config.hpp>
#include <pleat/core/message.hpp>

namespace pleat::inline v0 {

/// The rank `distance` places after `rank`, or before it where that is below 0, on a ring of `size` ranks.
PLEAT_HD constexpr int cyclic(int rank, int distance, int size) {
  return ((rank + distance) % size + size) % size;
}

/// Random-access iterator over any small value `Range` with `operator[](int)`; owns a copy of the range.
/// Models std::random_access_iterator without `<iterator>`, which alone would cost more than the mesh.
template <class Range>
class IndexIterator {
 public:
  using value_type = decltype(Range{}[0]);
  using difference_type = std::ptrdiff_t;

  constexpr IndexIterator() = default;
  PLEAT_HD constexpr IndexIterator(const Range& range, difference_type index) : range_(range), index_(index) {}

  PLEAT_HD constexpr value_type operator*() const { return range_[static_cast<int>(index_)]; }
  PLEAT_HD constexpr value_type operator[](difference_type n) const { return *(*this + n); }

  PLEAT_HD constexpr IndexIterator& operator+=(difference_type n) {
    index_ += n;
    return *this;
  }
  PLEAT_HD constexpr IndexIterator& operator-=(difference_type n) { return *this += -n; }
  PLEAT_HD constexpr IndexIterator& operator++() { return *this += 1; }
  PLEAT_HD constexpr IndexIterator& operator--() { return *this -= 1; }
  PLEAT_HD constexpr IndexIterator operator++(int) {
    IndexIterator old = *this;
    ++*this;
    return old;
  }
  PLEAT_HD constexpr IndexIterator operator--(int) {
    IndexIterator old = *this;
    --*this;
    return old;
  }

  PLEAT_HD friend constexpr IndexIterator operator+(IndexIterator it, difference_type n) { return it += n; }
  PLEAT_HD friend constexpr IndexIterator operator+(difference_type n, IndexIterator it) { return it += n; }
  PLEAT_HD friend constexpr IndexIterator operator-(IndexIterator it, difference_type n) { return it -= n; }
  PLEAT_HD friend constexpr difference_type operator-(const IndexIterator& a, const IndexIterator& b) {
    return a.index_ - b.index_;
  }
  // The four orders one by one: operator<=> would need <compare>.
  PLEAT_HD friend constexpr bool operator==(const IndexIterator& a, const IndexIterator& b) { return a - b == 0; }
  PLEAT_HD friend constexpr bool operator<(const IndexIterator& a, const IndexIterator& b) { return a - b < 0; }
  PLEAT_HD friend constexpr bool operator>(const IndexIterator& a, const IndexIterator& b) { return b < a; }
  PLEAT_HD friend constexpr bool operator<=(const IndexIterator& a, const IndexIterator& b) { return !(b < a); }
  PLEAT_HD friend constexpr bool operator>=(const IndexIterator& a, const IndexIterator& b) { return !(a < b); }

 private:
  Range range_{};
  difference_type index_ = 0;
};

struct Group;

/// What all groups along the same axes share: `outer_count` blocks, `outer_stride` ranks apart, of `count` ranks each,
/// `stride` ranks apart.
/// Canonical when built by `append`: a single block has `outer_count == 1` and `outer_stride == stride * count`. Two
/// canonical shapes are equal exactly when they cut a world into the same sets of ranks.
struct GroupShape {
  int outer_stride = 1;
  int outer_count = 1;
  int stride = 1;
  int count = 1;

  /// Takes one more axis in, from the innermost to the outermost; neighbours melt into one block.
  PLEAT_HD constexpr GroupShape& append(int axis_stride, int axis_extent) {
    if (axis_extent == 1) return *this;
    const bool single = outer_count == 1;
    if (size() == 1) {
      stride = axis_stride;
      count = axis_extent;
    } else if (single && axis_stride == stride * count) {
      count *= axis_extent;
    } else {
      // A second block, or more of it: Factorization has no room for a third.
      if (single) outer_stride = axis_stride;
      outer_count *= axis_extent;
    }
    if (outer_count == 1) outer_stride = stride * count;
    return *this;
  }

  PLEAT_HD constexpr int size() const { return outer_count * count; }
  /// Consecutive ranks that an aligned run of such groups fills: the world is cut at multiples of it.
  PLEAT_HD constexpr int span() const { return outer_stride * outer_count; }

  /// The place of `rank` in its group.
  PLEAT_HD constexpr int index(int rank) const {
    return rank / outer_stride % outer_count * count + rank / stride % count;
  }
  /// The `i`-th rank of a group, counted from its first.
  PLEAT_HD constexpr int offset(int i) const { return i / count * outer_stride + i % count * stride; }

  /// The number of the group of `rank`, groups counted in the order of their first ranks.
  PLEAT_HD constexpr int number(int rank) const {
    const int block = stride * count;
    return rank % stride + stride * (rank / block % (outer_stride / block) + outer_stride / block * (rank / span()));
  }
  /// The first rank of group `number`.
  PLEAT_HD constexpr int first_of(int number) const {
    const int block = stride * count;
    const int gaps = outer_stride / block;
    return number % stride + number / stride % gaps * block + number / (stride * gaps) * span();
  }

  /// The group of this shape that `rank` is in.
  PLEAT_HD constexpr Group of(int rank) const;
  friend constexpr bool operator==(const GroupShape&, const GroupShape&) = default;
};

/// The ranks of one group in ascending order: a random-access range of int.
struct Group {
  int first = 0;
  GroupShape shape{};

  using iterator = IndexIterator<Group>;

  PLEAT_HD constexpr int size() const { return shape.size(); }
  PLEAT_HD constexpr int operator[](int i) const { return first + shape.offset(i); }
  PLEAT_HD constexpr int front() const { return first; }
  PLEAT_HD constexpr int back() const { return (*this)[size() - 1]; }
  PLEAT_HD constexpr iterator begin() const;
  PLEAT_HD constexpr iterator end() const;

  /// The place of `rank` in this group, -1 when it is no member.
  PLEAT_HD constexpr int index_of(int rank) const {
    const int distance = rank - first;
    if (distance < 0) return -1;
    const int i = shape.index(distance);
    return shape.offset(i) == distance ? i : -1;
  }
  PLEAT_HD constexpr bool contains(int rank) const { return index_of(rank) >= 0; }

  friend constexpr bool operator==(const Group&, const Group&) = default;
};

/// Every group of one shape in a world, in the order of first ranks: a random-access range of Group.
struct GroupList {
  int world_size = 1;
  GroupShape shape{};

  using iterator = IndexIterator<GroupList>;

  PLEAT_HD constexpr int size() const { return world_size / shape.size(); }
  PLEAT_HD constexpr Group operator[](int i) const { return {shape.first_of(i), shape}; }
  PLEAT_HD constexpr iterator begin() const;
  PLEAT_HD constexpr iterator end() const;
};

PLEAT_HD constexpr Group GroupShape::of(int rank) const {
  return {rank - offset(index(rank)), *this};
}
PLEAT_HD constexpr Group::iterator Group::begin() const {
  return {*this, 0};
}
PLEAT_HD constexpr Group::iterator Group::end() const {
  return {*this, size()};
}
PLEAT_HD constexpr GroupList::iterator GroupList::begin() const {
  return {*this, 0};
}
PLEAT_HD constexpr GroupList::iterator GroupList::end() const {
  return {*this, size()};
}

/// The ranks in braces, as far as the text has room for them.
constexpr void append_to(Message& message, const Group& group) {
  message.append('{');
  for (int i = 0; i < group.size() && message.size() + 1 < Message::capacity_bytes; ++i) {
    if (i != 0) message.append(", ");
    message.append(group[i]);
  }
  message.append('}');
}

}  // namespace pleat::inline v0
