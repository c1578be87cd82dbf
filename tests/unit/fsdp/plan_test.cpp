// Plans of sharded parameters: slots, memory, sizes of a mesh's groups, and what cannot be planned.
#include <pleat/fsdp/plan.hpp>

#include <limits>
#include <string>

#include <doctest/doctest.h>

#include <pleat/mesh.hpp>

namespace {

using namespace pleat;

/// One vector parameter of `elems` elements per unit.
std::vector<fsdp::UnitSpec> vectors(int count, std::int64_t elems) {
  return std::vector<fsdp::UnitSpec>(static_cast<std::size_t>(count),
                                     {.name = "dense", .params = {{.name = "w", .shape = {elems}}}});
}

TEST_CASE("slots and gradient units are as many as neighbouring units need") {
  std::vector<fsdp::UnitSpec> units = vectors(2, 8);
  for (int layer = 0; layer < 3; ++layer) {
    units.push_back(
        {.name = "experts", .kind = Param::expert, .experts_local = 2, .params = {{.name = "w", .shape = {4}}}});
    units.push_back(vectors(1, 8)[0]);
  }
  const fsdp::Plan one = fsdp::plan(units, {.dense = 4, .expert = 2}, {.prefetch = 1});
  CHECK(one.of(Param::dense).slots == 2);
  CHECK(one.of(Param::expert).slots == 1);
  CHECK(one.of(Param::dense).gradient_units == 2);
  CHECK(one.of(Param::expert).gradient_units == 1);
  const fsdp::Plan three = fsdp::plan(units, {.dense = 4, .expert = 2}, {.prefetch = 3});
  CHECK(three.of(Param::dense).slots == 3);
  CHECK(three.of(Param::expert).slots == 2);
  CHECK(three.of(Param::expert).ranks == 2);
  const fsdp::Plan all = fsdp::plan(units, {.dense = 4, .expert = 2}, {.prefetch = std::numeric_limits<int>::max()});
  CHECK(all.of(Param::dense).slots == 5);
  CHECK(all.of(Param::expert).slots == 3);
}

TEST_CASE("a rank alone has no slots, gradient units or window: it uses its shards where they lie") {
  std::vector<fsdp::UnitSpec> units = vectors(2, 8);
  units.push_back(
      {.name = "experts", .kind = Param::expert, .experts_local = 2, .params = {{.name = "w", .shape = {4}}}});
  const fsdp::Plan plan = fsdp::plan(units, {.dense = 2, .expert = 1}, {.transport = Transport::peer});
  CHECK(plan.of(Param::dense).slots == 2);
  CHECK(plan.of(Param::dense).gradient_units == 2);
  CHECK(plan.of(Param::expert).slots == 0);
  CHECK(plan.of(Param::expert).gradient_units == 0);
  CHECK(plan.window_bytes(Param::expert) == 0);
  CHECK(plan.channels(Param::expert) == 0);
  const Footprint alone = fsdp::plan(units, {}, {.transport = Transport::peer}).footprint();
  const std::size_t pieces = 128;  // a table of one piece per unit, or of one per expert, padded
  CHECK(alone == Footprint{.persistent = 2 * 128 * 8 + 2 * 128 * 8 + 3 * pieces});
  // Gradients that are narrower than masters are converted on their way to the shard.
  const fsdp::Plan narrow = fsdp::plan(units, {}, {.compute = DType::bf16, .gradient = DType::bf16});
  CHECK(narrow.of(Param::dense).gradient_units == 2);
  CHECK(narrow.of(Param::expert).gradient_units == 1);
}

TEST_CASE("memory: shards, slots and gradient units, and what sums work in off the peer path") {
  const auto units = vectors(5, 1024);
  const auto footprint = [&](fsdp::Options options, const fsdp::GroupSizes& sizes) {
    return fsdp::plan(units, sizes, options).footprint();
  };
  const std::size_t pieces = 128;  // a table of one piece per unit, padded
  const std::size_t shards = 5 * (256 * 4 + 256 * 4 + pieces);
  const std::size_t whole = 2 * 1024 * 4 + 2 * 1024 * 4;  // two slots, two gradient units
  CHECK(footprint({.transport = Transport::peer}, {.dense = 4}) ==
        Footprint{.symmetric = whole, .persistent = shards, .channels = 24});
  CHECK(footprint({}, {.dense = 4}) == Footprint{.persistent = shards + whole + 4 * 256 * 4});
  const std::size_t copies = 5 * 256 * 2;
  CHECK(footprint({.compute = DType::bf16, .gradient = DType::bf16, .transport = Transport::peer}, {.dense = 4}) ==
        Footprint{.symmetric = whole / 2, .persistent = shards + copies, .channels = 24});
}

TEST_CASE("the sizes of a mesh's groups") {
  constexpr auto sizes = fsdp::group_sizes(FoldedMesh<2, 4, 4, 2, 2>{});
  static_assert(sizes.dense == 8 && sizes.expert == 4 && sizes.replicas == 2);
  CHECK(fsdp::group_sizes(RuntimeMesh::fold({.world = 32, .pp = 2, .cp = 4, .ep = 2})).dense == 16);
}

TEST_CASE("a plan says what it chose") {
  const fsdp::Plan plan = fsdp::plan(vectors(3, 1000), {.dense = 4, .replicas = 2},
                                     {.compute = DType::bf16, .transport = Transport::peer, .prefetch = 2});
  CHECK(std::string(message_of(plan).c_str()) ==
        "fsdp peer compute=bf16 gradient=f32 master=f32 prefetch=2 replicas=2 reduce_ctas=8 last=16 dense: ranks=4 "
        "slots=3x1024 gradients=2x1024");
}

template <class F>
void check_error(const char* text, F f) {
  CAPTURE(text);
  CHECK_THROWS_WITH_AS(f(), doctest::Contains(text), shape_error);
}

TEST_CASE("options that cannot be are errors with the values") {
  const auto units = vectors(1, 4);
  check_error("pleat[F08]: groups of 1 (dense) and 1 (expert) ranks, 0 replicas, a prefetch of 1, 8 reduce_ctas",
              [&] { fsdp::plan(units, {.replicas = 0}); });
  check_error("pleat[F08]: groups of -1 (dense)", [&] { fsdp::plan({}, {.dense = -1}); });
  check_error("1 replicas, a prefetch of -1", [&] { fsdp::plan(units, {}, {.prefetch = -1}); });
  check_error("pleat[F08]: there is no transport 9; valid: collective peer",
              [&] { fsdp::plan(units, {}, {.transport = static_cast<Transport>(9)}); });
  check_error("pleat[F08]: unit dense is of kind 3; valid: dense expert", [&] {
    auto odd = units;
    odd[0].kind = static_cast<Param>(3);
    fsdp::plan(odd, {});
  });
  check_error("pleat[F03]: a kind of equal units would have 36028797018963968 x 3 elements",
              [&] { fsdp::plan(vectors(3, std::int64_t{1} << 55), {}); });
  check_error("-2 reduce_ctas and 16 last_reduce_ctas; ", [&] { fsdp::plan(units, {}, {.reduce_ctas = -2}); });
  check_error("pleat[F08]: parameters cannot be computed with in i32",
              [&] { fsdp::plan(units, {}, {.compute = DType::i32}); });
  CHECK_THROWS_WITH_AS(fsdp::plan(units, {}, {.gradient = DType::bf16}),
                       "pleat[F08]: gradients of f32 parameters cannot be in bf16; valid dtypes: f32", shape_error);
  CHECK_THROWS_WITH_AS(fsdp::plan(units, {}, {.compute = DType::bf16, .gradient = DType::f64}),
                       "pleat[F08]: gradients of bf16 parameters cannot be in f64; valid dtypes: f32 bf16",
                       shape_error);
}

TEST_CASE("only expert units have experts") {
  const std::vector<fsdp::UnitSpec> units{
      {.name = "layer", .experts_local = 2, .params = {{.name = "w", .shape = {4}}}}};
  CHECK_THROWS_WITH_AS(fsdp::plan(units, {}),
                       doctest::Contains("pleat[F03]: unit layer is dense and has experts_local=2"), shape_error);
}

}  // namespace
