// The layout of units: facts of flat layouts and of ceil-chunk shards, granules, expert-major units, ties, and the
// properties that every layout has.
#include <pleat/fsdp/layout.hpp>

#include <array>
#include <map>
#include <random>
#include <set>

#include <doctest/doctest.h>

#include "support/json.hpp"

namespace {

using namespace pleat::fsdp;
using testing_support::Json;
using Ranges = std::vector<std::vector<std::int64_t>>;

#if !defined(__clang__)  // clang 14 cannot make a std::string of libstdc++ 12 at compile time
static_assert([] {
  const ParamSpec specs[] = {{.name = "norm", .shape = {5}}, {.name = "wq", .shape = {6, 4}}};
  return plan_unit(specs, 4, {.alignment_elems = 8}).boundaries[1];
}() == 8);
#endif

std::vector<std::int64_t> sizes(const UnitLayout& unit) {
  std::vector<std::int64_t> all;
  for (int r = 0; r < unit.shard_count(); ++r) all.push_back(unit.shard_elems(r));
  return all;
}

/// Per rank the range [begin, end) of a parameter that the rank holds, {0, 0} for none. At most one piece per rank.
Ranges rank_ranges(const UnitLayout& unit, int param) {
  Ranges all;
  for (int r = 0; r < unit.shard_count(); ++r) {
    all.push_back({0, 0});
    for (const Piece& piece : unit.pieces(r)) {
      if (piece.param == param) all.back() = {piece.param_begin, piece.param_begin + piece.elems};
    }
  }
  return all;
}

std::vector<std::int64_t> ceil_chunks(std::int64_t rows, std::int64_t row_elems, int ranks) {
  const std::int64_t chunk = (rows + ranks - 1) / ranks;
  std::vector<std::int64_t> boundaries;
  for (int r = 0; r <= ranks; ++r) boundaries.push_back(std::min(rows, r * chunk) * row_elems);
  return boundaries;
}

TEST_CASE("shards are equal shares of whole alignments") {
  const ParamSpec specs[] = {{.name = "norm", .shape = {5}}, {.name = "wq", .shape = {6, 4}}};
  CHECK(plan_unit(specs, 4, {.alignment_elems = 8}).boundaries == std::vector<std::int64_t>{0, 8, 16, 24, 32});
}

TEST_CASE("flat layouts of the facts: offsets, totals, what each rank holds") {
  const Json facts = Json::facts("fsdp.json");
  int cases = 0;
  for (const auto& entry : facts["flat_layout"].object()) {
    if (entry.first == "rule") continue;
    CAPTURE(entry.first);
    const Json& fact = entry.second;
    std::vector<ParamSpec> specs;
    for (const Json& param : fact["params"].array()) {
      specs.push_back({.name = param["name"].text(), .shape = param["shape"].integers()});
    }
    const auto world = static_cast<int>(fact["world"].integer());
    const std::int64_t alignment = fact["align_bytes"].integer() / fact["elem_bytes"].integer();
    const UnitLayout unit = plan_unit(specs, world, {.alignment_elems = alignment});
    CHECK(unit.total_elems() == fact["total_padded"].integer());
    CHECK(unit.max_shard_elems() == fact["per_rank"].integer());
    CHECK(sizes(unit) == std::vector<std::int64_t>(static_cast<std::size_t>(world), fact["per_rank"].integer()));
    for (std::size_t p = 0; p < specs.size(); ++p) {
      const Json& expected = fact["params"][p];
      CAPTURE(specs[p].name);
      CHECK(unit.params[p].offset == expected["offset"].integer());
      CHECK(unit.params[p].elems == expected["numel"].integer());
      Ranges ranges;
      for (const Json& range : expected["rank_ranges"].array()) ranges.push_back(range.integers());
      CHECK(rank_ranges(unit, static_cast<int>(p)) == ranges);
    }
    ++cases;
  }
  CHECK(cases == 5);
}

TEST_CASE("ceil-chunk shards of the facts, by boundaries that the caller gives") {
  const Json facts = Json::facts("fsdp.json");
  for (const Json& fact : facts["shard_geometry"]["cases"].array()) {
    const std::int64_t rows = fact["dim0"].integer();
    const auto world = static_cast<int>(fact["world"].integer());
    CAPTURE(rows);
    CAPTURE(world);
    const std::int64_t columns = 3;
    const std::vector<std::int64_t> boundaries = ceil_chunks(rows, columns, world);
    const ParamSpec spec{.name = "w", .shape = {rows, columns}, .granule = Granule::row()};
    const UnitLayout unit = plan_unit({&spec, 1}, world, {.alignment_elems = 1, .boundaries = boundaries});
    std::vector<std::int64_t> row_counts, empty;
    for (int r = 0; r < world; ++r) {
      row_counts.push_back(unit.shard_elems(r) / columns);
      if (unit.pieces(r).empty()) empty.push_back(r);
      CHECK(unit.shard_begin(r) == fact["torch_chunk"][static_cast<std::size_t>(r)].integers()[0] * columns);
    }
    CHECK(row_counts == fact["torch_sizes"].integers());
    CHECK(empty == fact["empty_ranks"].integers());
  }
}

TEST_CASE("shapes that others got wrong") {
  SUBCASE("10 rows over 4 ranks are 3, 3, 3, 1 by ceil-chunks and whole rows by granule") {
    const ParamSpec spec{.name = "w", .shape = {10, 6}, .granule = Granule::row()};
    const auto chunks = ceil_chunks(10, 6, 4);
    CHECK(sizes(plan_unit({&spec, 1}, 4, {.alignment_elems = 1, .boundaries = chunks})) ==
          std::vector<std::int64_t>{18, 18, 18, 6});
    CHECK(sizes(plan_unit({&spec, 1}, 4, {.alignment_elems = 1})) == std::vector<std::int64_t>{18, 12, 18, 12});
  }
  SUBCASE("6 elements over 4 ranks are 2, 2, 2, 0") {
    const ParamSpec spec{.name = "w", .shape = {6}};
    const UnitLayout unit = plan_unit({&spec, 1}, 4, {.alignment_elems = 1});
    CHECK(rank_ranges(unit, 0) == Ranges{{0, 2}, {2, 4}, {4, 6}, {0, 0}});
  }
  SUBCASE("a scalar over 4 ranks has one owner") {
    const ParamSpec spec{.name = "scale", .shape = {}};
    for (const std::int64_t alignment : {1, 2, 128}) {
      const UnitLayout unit = plan_unit({&spec, 1}, 4, {.alignment_elems = alignment});
      CHECK(rank_ranges(unit, 0) == Ranges{{0, 1}, {0, 0}, {0, 0}, {0, 0}});
    }
  }
  SUBCASE("18 rows over 8 ranks are 3 x 6, 0, 0 by ceil-chunks") {
    const ParamSpec spec{.name = "w", .shape = {18, 7}, .granule = Granule::row()};
    const auto chunks = ceil_chunks(18, 7, 8);
    CHECK(sizes(plan_unit({&spec, 1}, 8, {.alignment_elems = 1, .boundaries = chunks})) ==
          std::vector<std::int64_t>{21, 21, 21, 21, 21, 21, 0, 0});
  }
  SUBCASE("a unit without parameters, and one whose parameter is empty") {
    CHECK(plan_unit({}, 3).total_elems() == 0);
    const ParamSpec spec{.name = "none", .shape = {0, 4}, .granule = Granule::whole()};
    const UnitLayout unit = plan_unit({&spec, 1}, 3);
    CHECK(unit.total_elems() == 0);
    for (int r = 0; r < 3; ++r) CHECK(unit.pieces(r).empty());
  }
}

TEST_CASE("a boundary inside a granule moves up to its end") {
  const auto boundaries = [](Granule granule, std::vector<std::int64_t> shape, int ranks) {
    const ParamSpec spec{.name = "w", .shape = std::move(shape), .granule = granule};
    return plan_unit({&spec, 1}, ranks, {.alignment_elems = 1}).boundaries;
  };
  using B = std::vector<std::int64_t>;
  CHECK(boundaries(Granule::element(), {10, 6}, 4) == B{0, 15, 30, 45, 60});
  CHECK(boundaries(Granule::row(), {10, 6}, 4) == B{0, 18, 30, 48, 60});
  CHECK(boundaries(Granule::rows(2), {10, 6}, 4) == B{0, 24, 36, 48, 60});
  CHECK(boundaries(Granule::rows(2), {5, 3}, 2) == B{0, 12, 16});  // the last block of rows is short, then padding
  CHECK(boundaries(Granule::matrix(), {3, 4, 5}, 2) == B{0, 40, 60});
  CHECK(boundaries(Granule::whole(), {60}, 1) == B{0, 60});
  CHECK(boundaries(Granule::row(), {10}, 5) == B{0, 2, 4, 6, 8, 10});  // a row of one axis is one element
}

TEST_CASE("a granule larger than an equal share falls back to rows or is an error") {
  const std::vector<std::int64_t> shape{8, 4};
  const ParamSpec strict{.name = "w", .shape = shape, .granule = Granule::matrix()};
  CHECK_THROWS_WITH_AS(plan_unit({&strict, 1}, 4, {.alignment_elems = 1}),
                       doctest::Contains("pleat[F01]: a granule of parameter w has 32 elements, more than the 8"),
                       pleat::shape_error);
  const ParamSpec loose{.name = "w", .shape = shape, .granule = Granule::matrix().or_else_rows()};
  const UnitLayout unit = plan_unit({&loose, 1}, 3, {.alignment_elems = 1});
  CHECK(unit.boundaries == std::vector<std::int64_t>{0, 12, 24, 33});
  CHECK_THROWS_WITH_AS(plan_unit({&loose, 1}, 16, {.alignment_elems = 1}), doctest::Contains("pleat[F01]"),
                       pleat::shape_error);
}

std::vector<ParamSpec> expert_specs(Granule granule) {
  return {{.name = "gate", .shape = {6, 4}, .granule = granule},
          {.name = "up", .shape = {6, 4}, .granule = granule},
          {.name = "down", .shape = {4, 6}, .granule = granule}};
}

TEST_CASE("an expert unit holds all of expert 0, then all of expert 1") {
  const UnitLayout unit = plan_unit(expert_specs(Granule::matrix()), 2, {.experts_local = 4, .alignment_elems = 16});
  CHECK(unit.expert_stride == 96);  // 24 elements at 0, 32, 64, and the next expert at a multiple of 16 past 88
  CHECK(unit.params[2].offset == 64);
  CHECK(unit.total_elems() == 384);
  // Whole experts fall to one rank when the shard group divides their number: rank 1 begins with expert 2.
  CHECK(unit.boundaries == std::vector<std::int64_t>{0, 192, 384});
  const std::vector<Piece> pieces = unit.pieces(1);
  REQUIRE(pieces.size() == 6);
  CHECK(pieces[0] == Piece{0, 48, 0, 24});
  CHECK(pieces[1] == Piece{1, 48, 32, 24});
  CHECK(pieces[5] == Piece{2, 72, 160, 24});
}

TEST_CASE("whole experts fall to one rank whenever the shard group divides their number") {
  for (const std::int64_t alignment : {1, 8, 128}) {
    for (const int ranks : {1, 2, 3, 4, 6}) {
      const UnitLayout unit =
          plan_unit(expert_specs(Granule::element()), ranks, {.experts_local = 12, .alignment_elems = alignment});
      for (int r = 0; r <= ranks; ++r) {
        CHECK(unit.boundaries[static_cast<std::size_t>(r)] == 12 / ranks * r * unit.expert_stride);
      }
    }
  }
}

TEST_CASE("a tied parameter has the storage of its target, once") {
  const ParamSpec specs[] = {{.name = "embedding", .shape = {6, 4}},
                             {.name = "norm", .shape = {4}},
                             {.name = "head", .shape = {6, 4}, .tied_to = 0},
                             {.name = "again", .shape = {6, 4}, .tied_to = 2}};
  const UnitLayout unit = plan_unit(specs, 2, {.alignment_elems = 4});
  CHECK(unit.storage_of(3) == 0);
  CHECK(unit.params[3].offset == unit.params[0].offset);
  CHECK(unit.total_elems() == 32);
  for (int r = 0; r < 2; ++r) {
    for (const Piece& piece : unit.pieces(r)) CHECK(piece.param < 2);
  }
}

TEST_CASE("trainable ranges join over padding and leave out frozen parameters") {
  const ParamSpec specs[] = {{.name = "a", .shape = {8}},
                             {.name = "b", .shape = {8}},
                             {.name = "c", .shape = {3}},
                             {.name = "d", .shape = {4}},
                             {.name = "e", .shape = {4}, .frozen = true},
                             {.name = "f", .shape = {4}}};
  const UnitLayout unit = plan_unit(specs, 1, {.alignment_elems = 4});
  CHECK(trainable_ranges(unit, unit.pieces(0)) == std::vector<Range>{{0, 24}, {28, 4}});
}

TEST_CASE("what cannot be is an error with the values") {
  const std::array<ParamSpec, 1> one{{{.name = "w", .shape = {10}}}};
  const auto plan = [&](std::vector<std::int64_t> boundaries) {
    return plan_unit(one, 2, {.alignment_elems = 1, .boundaries = boundaries});
  };
  CHECK(plan({0, 3, 12}).boundaries == std::vector<std::int64_t>{0, 3, 12});
  for (const auto& bad : {std::vector<std::int64_t>{0, 10}, {1, 3, 10}, {0, 3, 9}, {0, 11, 10}}) {
    CHECK_THROWS_WITH_AS(plan(bad), doctest::Contains("pleat[F02]"), pleat::shape_error);
  }
  CHECK_THROWS_WITH_AS(plan({0, 3, 9}), doctest::Contains("boundaries 0 3 9 do not cover a unit of 10 elements over 2"),
                       pleat::shape_error);

  const auto fails = [](const char* text, const ParamSpec& second, int ranks = 2, std::int64_t alignment = 8) {
    const ParamSpec specs[] = {{.name = "first", .shape = {2}}, second};
    CHECK_THROWS_WITH_AS(plan_unit(specs, ranks, {.alignment_elems = alignment}), doctest::Contains(text),
                         pleat::shape_error);
  };
  fails("pleat[F03]: parameter w has an extent of -1", {.name = "w", .shape = {-1}});
  fails("pleat[F03]: parameter w has a granule of 0 rows and 1 copies", {.name = "w", .granule = Granule::rows(0)});
  fails("pleat[F03]: parameter w has a granule of 1 rows and 0 copies", {.name = "w", .copies = 0});
  fails("pleat[F03]: a unit over 0 ranks with an alignment of 8 elements and experts_local=0", {.name = "w"}, 0);
  fails("pleat[F03]: a unit over 2 ranks with an alignment of 0", {.name = "w"}, 2, 0);
  CHECK_THROWS_WITH_AS(plan_unit(one, 2, {.experts_local = -1}),
                       doctest::Contains("pleat[F03]: a unit over 2 ranks with an alignment of 128 elements and "
                                         "experts_local=-1"),
                       pleat::shape_error);
  fails("pleat[F04]: parameter w (number 1 of its unit) is tied to number 1",
        {.name = "w", .shape = {2}, .tied_to = 1});
  fails("pleat[F04]: parameter w (number 1 of its unit) is tied to number 0",
        {.name = "w", .shape = {3}, .tied_to = 0});
  fails("pleat[F04]: parameter w (number 1 of its unit) is tied to number -7",
        {.name = "w", .shape = {2}, .tied_to = -7});
  fails("pleat[F03]: parameter w has a granule of kind 9 and optimizer 0; valid kinds: element rows matrix whole",
        {.name = "w", .granule = {static_cast<Granule::Kind>(9)}});
  fails("and optimizer 4; ", {.name = "w", .optimizer = static_cast<pleat::fsdp::Optimizer>(4)});
}

TEST_CASE("sizes that would overflow are errors with the bound") {
  const auto fails = [](const char* text, std::vector<std::int64_t> shape, const LayoutOptions& options = {}) {
    const ParamSpec spec{.name = "w", .shape = std::move(shape)};
    CHECK_THROWS_WITH_AS(plan_unit({&spec, 1}, 2, options), doctest::Contains(text), pleat::shape_error);
  };
  constexpr std::int64_t one = 1;
  fails("pleat[F03]: parameter w would have 4294967296 x 4294967296 elements; a unit has at most 72057594037927936",
        {one << 32, one << 32});
  fails("pleat[F03]: parameter w would have 3037000500 x 3037000500", {3037000500, 3037000500});
  fails("pleat[F03]: parameter w would have 1 x 4611686018427387904", {one << 62});
  fails("pleat[F03]: parameter w would have 1 x 4611686018427387904", {one << 62, 0});
  fails("pleat[F03]: a unit of experts would have 1073741824 x 1073741824", {one << 30}, {.experts_local = one << 30});
  fails("pleat[F03]: a unit over 2 ranks with an alignment of 128 elements and experts_local=17592186044416", {1},
        {.experts_local = one << 44});
  fails("pleat[F03]: a unit of aligned shards would have", {1}, {.alignment_elems = one << 56});
  fails("pleat[F03]: a unit over 2 ranks with an alignment of 144115188075855872", {1}, {.alignment_elems = one << 57});
  const std::int64_t far[] = {0, 1, one << 60};
  fails("pleat[F03]: a unit of these boundaries would have", {1}, {.boundaries = far});
  const ParamSpec largest{.name = "w", .shape = {one << 28, one << 28}, .granule = Granule::rows(one << 60)};
  CHECK(plan_unit({&largest, 1}, 1).total_elems() == one << 56);
}

TEST_CASE("every layout: each element has one owner, segments are aligned, no boundary cuts a granule") {
  for (unsigned seed = 0; seed < 300; ++seed) {
    CAPTURE(seed);
    std::mt19937 random(seed);
    const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
    const std::int64_t alignment = 1 + below(16);
    const int ranks = 1 + below(9);
    const std::int64_t experts = below(3) == 0 ? 1 + below(6) : 0;
    std::vector<ParamSpec> specs(static_cast<std::size_t>(1 + below(6)));
    for (std::size_t i = 0; i < specs.size(); ++i) {
      ParamSpec& spec = specs[i];
      for (int axis = below(4); axis > 0; --axis) spec.shape.push_back(below(9));
      const std::array<Granule, 5> granules{Granule::element(), Granule::row(), Granule::rows(1 + below(4)),
                                            Granule::matrix(), Granule::whole()};
      spec.granule = granules[static_cast<std::size_t>(below(5))].or_else_rows();
      spec.frozen = below(5) == 0;
      if (i > 0 && below(5) == 0) {
        spec.tied_to = below(static_cast<int>(i));
        spec.shape = specs[static_cast<std::size_t>(spec.tied_to)].shape;
      }
    }
    UnitLayout unit;
    try {
      unit = plan_unit(specs, ranks, {.experts_local = experts, .alignment_elems = alignment});
    } catch (const pleat::shape_error&) {
      continue;  // a row larger than a share
    }
    CHECK(unit.total_elems() % (alignment * ranks) == 0);
    CHECK(std::is_sorted(unit.boundaries.begin(), unit.boundaries.end()));

    // Every element of every parameter with storage is held once, by the shard whose range its place is in.
    std::map<std::pair<int, std::int64_t>, std::int64_t> place_of;
    std::set<std::int64_t> places;
    std::int64_t trainable = 0;
    for (int r = 0; r < ranks; ++r) {
      const std::vector<Piece> pieces = unit.pieces(r);
      std::int64_t last = 0;
      for (const Piece& piece : pieces) {
        CHECK(piece.elems > 0);
        CHECK(piece.shard_begin >= last);
        last = piece.shard_begin + piece.elems;
        for (std::int64_t i = 0; i < piece.elems; ++i) {
          const std::int64_t place = unit.shard_begin(r) + piece.shard_begin + i;
          CHECK(place_of.emplace(std::pair{piece.param, piece.param_begin + i}, place).second);
          CHECK(places.insert(place).second);
        }
      }
      CHECK(last <= unit.shard_elems(r));
      std::int64_t trained_here = 0;
      for (const Piece& piece : pieces) {
        const bool is_frozen = unit.place(piece.param).spec.frozen;
        int ranges = 0;  // that hold the piece
        for (const Range& range : trainable_ranges(unit, pieces)) {
          ranges += range.begin < piece.shard_begin + piece.elems && piece.shard_begin < range.begin + range.elems;
        }
        CHECK(ranges == (is_frozen ? 0 : 1));
        if (!is_frozen) trained_here += piece.elems;
      }
      trainable += trained_here;
    }
    std::size_t storage = 0;
    std::int64_t expected_trainable = 0;
    for (int p = 0; p < static_cast<int>(specs.size()); ++p) {
      const ParamPlace& place = unit.place(p);
      if (place.spec.tied_to >= 0) continue;
      CHECK(place.offset % alignment == 0);
      storage += static_cast<std::size_t>(place.elems * unit.block_count());
      if (!place.spec.frozen) expected_trainable += place.elems * unit.block_count();
      for (std::int64_t i = 0; i < place.elems * unit.block_count(); ++i) {
        const std::int64_t expert = i / place.elems;
        CHECK(place_of.at({p, i}) == place.offset + expert * unit.expert_stride + i % place.elems);
      }
      for (const std::int64_t boundary : unit.boundaries) {
        for (std::int64_t e = 0; e < unit.block_count(); ++e) {
          const std::int64_t inside = boundary - place.offset - e * unit.expert_stride;
          if (inside > 0 && inside < place.elems) CHECK(inside % place.granule_elems == 0);
        }
      }
    }
    CHECK(place_of.size() == storage);
    CHECK(trainable == expected_trainable);
  }
}

}  // namespace
