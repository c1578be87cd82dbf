// Plans of dispatch: what they take and refuse, and what is bound and called with another.
#include <pleat/moe/dispatch.hpp>

#include <limits>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <pleat/comm.hpp>
#include <pleat/moe.hpp>

namespace {

using namespace pleat;
using moe::DispatchPlan;
using moe::DispatchShape;

TEST_CASE("rows and offsets are addressed in 64 bits") {
  const moe::DispatchPlan large = moe::plan(128, DispatchShape{16384, 7168, 256, 8, DType::bf16}, {Transport::peer});
  CHECK(large.capacity_rows() == 128LL * 16384 * 2 + 32);
  CHECK(large.capacity_rows() * large.shape.hidden > 0xffffffffLL);
  CHECK(large.footprint().symmetric > 60'000'000'000u);
  // 299,600 rows of 7168: the product passes 2^31 at row 299,594.
  std::byte start{};
  std::byte* base = &start;
  const std::int64_t first = 0;
  const moe::RowTable table{.base = &base, .first = &first, .format = large.format(moe::RowKind::result)};
  CHECK(reinterpret_cast<std::uintptr_t>(table.payload(0, 299599)) - reinterpret_cast<std::uintptr_t>(base) ==
        299599ull * 7168 * 2);
}

TEST_CASE("the footprint names what each transport needs") {
  const DispatchShape shape{32, 16, 8, 2, DType::bf16};
  const Footprint peer = moe::plan(4, shape, {Transport::peer}).footprint();
  const Footprint collective = moe::plan(4, shape, {Transport::collective}).footprint();
  CHECK(peer.scratch > 0);  // of the plan's counts
  CHECK(peer.pinned_host == 0);
  CHECK(peer.symmetric >= 4 * 32 * (16 * 2 + 16 * 2 + 2 * 4 + 2 * 8));
  CHECK(collective.symmetric == 0);
  CHECK(collective.scratch > peer.scratch + 4 * 32 * (16 * 2 + 2 * 8));
  CHECK(peer.saved == collective.saved);
  CHECK(peer.saved >= static_cast<std::size_t>(4 * 32 * 2 + 15 * 2) * 16 * 2);
}

TEST_CASE("errors name the values") {
  const auto text = [](auto f) {
    try {
      f();
    } catch (const error& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  CHECK(text([] {
          moe::plan(3, DispatchShape{4, 4, 8, 2});
        }) == "pleat[M06]: experts=8 is not divisible by ep=3; valid ep: 1 2 4 8, or experts: a multiple of 3");
  CHECK(text([] {
          moe::plan(2, DispatchShape{4, 4, 8, 9});
        }).find("pleat[E02]: k=9 distinct experts of experts=8 cannot be chosen; valid k: 1 .. 8") == 0);
  CHECK(text([] { moe::plan(0, DispatchShape{4, 4, 8, 2}); }) == "pleat[M06]: ep=0 must be at least 1");
  CHECK(text([] { moe::plan(2, DispatchShape{0, 4, 8, 2}); }).find("pleat[E07]: max_tokens=0") == 0);
  CHECK(text([] { moe::plan(2, DispatchShape{4, 4, 8, 2}, {.row_alignment = 0}); }).find("pleat[E07]") == 0);
  const moe::DispatchPlan plan = moe::plan(1, DispatchShape{4, 4, 8, 2}, {Transport::peer});
  const HostBuffer scratch(plan.footprint().scratch), persistent(plan.footprint().persistent);
  const Memory<HostArena> memory{.scratch = scratch.block(), .persistent = persistent.block()};
  CHECK(text([&] {
          moe::bind(plan, HostExecutor{}, GroupComm<ThreadComm>(), memory);
        }).find("pleat[C29]: moe dispatch planned for") == 0);
  CHECK(text([&] {
          moe::bind(moe::plan(2, DispatchShape{4, 4, 8, 2}), HostExecutor{}, GroupComm<ThreadComm>(), memory);
        }).find("pleat[E06]: the plan is for a group of 2 ranks") == 0);
  CHECK(text([&] { moe::DispatchSaved saved(plan, persistent.block()); }).find("pleat[T02]") == 0);
  CHECK(text([&] {
          moe::bind(plan, HostExecutor{}, GroupComm<ThreadComm>(), Memory<>{scratch.block(), persistent.block()});
        }).find("pleat[C29]: moe dispatch planned with Transport::peer was bound without an arena") == 0);
}

TEST_CASE("sizes whose products do not fit, dtypes and options that are no values are refused") {
  constexpr std::int64_t huge = std::int64_t{1} << 61, most = std::numeric_limits<std::int64_t>::max();
  const auto plan = [](const DispatchShape& shape, const moe::DispatchOptions& options = {}) {
    moe::plan(2, shape, options);
  };
  const DispatchShape shapes[] = {{8, huge, 8, 2},
                                  {8, most, 8, 2},
                                  {1 << 30, std::int64_t{1} << 40, 8, 2},
                                  {most, 8, 8, 2},
                                  {0x7fffffff, 8, 8, 2},
                                  {0x40000000, 1, 8, 1},

                                  {1, 1, 0x7ffffffe, 0x7ffffffe}};
  for (const DispatchShape& shape : shapes)
    CHECK_THROWS_WITH_AS(plan(shape), doctest::Contains("pleat[E07]"), shape_error);
  for (const std::int64_t alignment : {huge * 2, most, std::int64_t{1} << 52}) {
    CHECK_THROWS_WITH_AS(plan({8, 8, 8, 2}, {.row_alignment = alignment}), doctest::Contains("pleat[E07]"),
                         shape_error);
  }
  plan({8, 1 << 28, 8, 2}, {.row_alignment = 1 << 20});  // large, and possible
  CHECK_THROWS_WITH_AS(plan({8, 8, 8, 2, DType::i32}), "pleat[T01]: experts compute in f64, f32 or bf16, not in i32",
                       shape_error);
  for (const DType dtype : {DType::f16, static_cast<DType>(77)}) {
    CHECK_THROWS_WITH_AS(plan({8, 8, 8, 2, dtype}), doctest::Contains("pleat[T01]"), shape_error);
  }
  CHECK_THROWS_WITH_AS(plan({8, 8, 8, 2}, {.transport = static_cast<Transport>(9)}),
                       "pleat[E14]: transport=9 is no enumerator; valid: 0 .. 1", shape_error);
  CHECK_THROWS_WITH_AS(plan({8, 8, 8, 2}, {.overflow = static_cast<moe::Overflow>(9)}),
                       "pleat[E14]: overflow=9 is no enumerator; valid: 0 .. 2", shape_error);
  CHECK_THROWS_WITH_AS(plan({8, 8, 8, 2}, {.max_ctas = -5}),
                       "pleat[E14]: max_ctas=-5 must be a finite number, 0 or more", shape_error);
  CHECK_THROWS_WITH_AS(plan({8, 8, 0, 1}), "pleat[E02]: experts=0 must be at least 1", shape_error);
}

TEST_CASE("what sends rows is the table's choice unless the plan names it") {
  const auto chosen = [](int ranks, int k, const moe::DispatchOptions& options) {
    return moe::plan(ranks, DispatchShape{8, 4, 64, k}, options).options.send_by;
  };
  CHECK(chosen(2, 8, {.transport = Transport::peer}) == moe::SendBy::copies);
  CHECK(chosen(2, 4, {.transport = Transport::peer}) == moe::SendBy::stores);
  CHECK(chosen(4, 8, {.transport = Transport::peer}) == moe::SendBy::stores);
  CHECK(chosen(1, 8, {.transport = Transport::peer}) == moe::SendBy::stores);
  CHECK(chosen(2, 8, {.transport = Transport::collective}) == moe::SendBy::stores);
  CHECK(chosen(2, 8, {.transport = Transport::peer, .send_by = moe::SendBy::stores}) == moe::SendBy::stores);
  CHECK(chosen(8, 1, {.transport = Transport::peer, .send_by = moe::SendBy::copies}) == moe::SendBy::copies);
  CHECK_THROWS_WITH_AS(chosen(2, 8, {.send_by = moe::SendBy::copies}), doctest::Contains("pleat[E14]: send_by=copies"),
                       shape_error);
  CHECK_THROWS_WITH_AS(chosen(2, 8, {.send_by = static_cast<moe::SendBy>(3)}), doctest::Contains("pleat[E14]"),
                       shape_error);
  CHECK_THROWS_WITH_AS(chosen(2, 8, {.loopback = true}), doctest::Contains("pleat[E14]: loopback"), shape_error);
}

TEST_CASE("a saved state belongs to its plan, and follows the order of calls") {
  const moe::DispatchPlan plan = moe::plan(1, DispatchShape{8, 4, 8, 2}, {.row_alignment = 1}),
                          other = moe::plan(1, DispatchShape{2, 4, 8, 2}, {.row_alignment = 1});
  const HostBuffer scratch(plan.footprint().scratch), persistent(plan.footprint().persistent),
      pinned(plan.footprint().pinned_host), memory(plan.footprint().saved), small(other.footprint().saved);
  auto op = moe::bind(plan, HostExecutor{}, GroupComm<ThreadComm>(),
                      Memory<>{scratch.block(), persistent.block(), pinned.block()});  // collectives need no arena
  moe::DispatchSaved saved(plan, memory.block()), wrong(other, small.block());
  const std::vector<float> x(32, 1.f), weights(16, 1.f);
  std::vector<float> y(32);
  std::vector<std::int32_t> ids(16);
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int32_t>(i % 8);
  const auto dispatch = [&](moe::DispatchSaved& state) {
    return op.dispatch({}, TensorRef(x.data(), {8, 4}), TensorRef(ids.data(), {8, 2}),
                       TensorRef(weights.data(), {8, 2}), state);
  };
  const auto combine = [&](moe::DispatchSaved& state) {
    op.combine({}, op.rows(saved).rows, state, TensorRef(y.data(), {8, 4}));
  };
  CHECK_THROWS_WITH_AS(
      dispatch(wrong),
      "pleat[E15]: a saved state for the plan ranks=1 max_tokens=2 hidden=4 experts=8 k=2 dtype=f32 "
      "transport=collective send_by=stores row_alignment=1 overflow=worst_case max_rows=0 arena_rows=0 was given to an "
      "operation of the plan ranks=1 max_tokens=8 hidden=4 experts=8 k=2 dtype=f32 transport=collective "
      "send_by=stores row_alignment=1 overflow=worst_case max_rows=0 arena_rows=0; make it from the operation's plan",
      shape_error);
  CHECK_THROWS_WITH_AS(
      combine(saved),
      "pleat[E16]: combine was given a saved state that no dispatch has filled; run the forward pass of "
      "the micro-batch with it first",
      shape_error);
  CHECK_THROWS_WITH_AS(combine(wrong), doctest::Contains("pleat[E15]"), shape_error);
  dispatch(saved);
  combine(saved);
  CHECK(y == std::vector<float>(32, 2.f));
  const TensorRef in_place(y.data(), {8, 4});
  op.combine({}, op.rows(saved).rows, saved, in_place, in_place);  // y is its own residual
  CHECK(y == std::vector<float>(32, 4.f));
}

}  // namespace
