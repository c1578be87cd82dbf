// Relayout on host ranks: every token lands where the other split wants it, and the way back is the inverse.
#include <pleat/attention/layout.hpp>
#include <pleat/attention/relayout.hpp>
#include <pleat/comm.hpp>
#include <pleat/core/host/buffer.hpp>
#include <pleat/core/host/executor.hpp>

#include <cmath>
#include <numeric>
#include <random>

#include <doctest/doctest.h>

#include "unit/attention/expect_error.hpp"

namespace {

using namespace pleat;
using Split = std::vector<TokenSpans>;

/// What a token of the sequence holds in batch entry b and place i of its row.
double value_of(std::int64_t b, std::int64_t token, std::int64_t i) {
  return static_cast<double>((b * 1000 + token) * 100 + i);
}

/// A rank's [batch, tokens, 3, 2] with `pad` elements behind each row, all NaN at first.
struct Local {
  Local(std::int64_t batch_entries, const TokenSpans& mine, std::int64_t pad)
      : batch(batch_entries),
        spans(mine),
        pitch(6 + pad),
        data(static_cast<std::size_t>(batch * spans.tokens() * pitch), std::nan("")) {}
  TensorRef view() {
    TensorRef t(data.data(), DType::f64, {});
    t.push_extent(batch, spans.tokens() * pitch);
    t.push_extent(spans.tokens(), pitch);
    t.push_extent(3, 2);
    t.push_extent(2, 1);
    return t;
  }
  template <class F>
  void each(F f) {
    for (std::int64_t b = 0; b < batch; ++b) {
      for (std::int64_t row = 0; row < spans.tokens(); ++row) {
        for (std::int64_t i = 0; i < pitch; ++i) {
          f(data[static_cast<std::size_t>((b * spans.tokens() + row) * pitch + i)], b, spans.position(row), i);
        }
      }
    }
  }
  void fill() {
    each([](double& x, std::int64_t b, std::int64_t token, std::int64_t i) { x = i < 6 ? value_of(b, token, i) : x; });
  }
  void check() {
    each([](const double& x, std::int64_t b, std::int64_t token, std::int64_t i) {
      if (i < 6 ? x != value_of(b, token, i) : !std::isnan(x)) throw std::runtime_error("a token went astray");
    });
  }
  std::int64_t batch;
  TokenSpans spans;
  std::int64_t pitch;
  std::vector<double> data;
};

void check_relayout(const Split& from, const Split& to, std::int64_t batch) {
  const relayout::Plan plan = relayout::plan(from, to, {.batch = batch, .row_elems = 6, .dtype = DType::f64});
  run_ranks(plan.ranks(), [&](ThreadComm& world) {
    const auto self = static_cast<std::size_t>(world.rank());
    const HostBuffer scratch(plan.footprint().scratch, 0xff);
    auto op = relayout::bind(plan, HostExecutor(), GroupComm<ThreadComm>(world), scratch.block());
    for (int call = 0; call < 2; ++call) {
      Local before(batch, from[self], 1), after(batch, to[self], 0), again(batch, from[self], 2);
      before.fill();
      op.forward({}, before.view(), after.view());
      after.check();
      op.backward({}, after.view(), again.view());
      again.check();
    }
  });
}

TEST_CASE("from every split to every other and back, any length, ranks without a token included") {
  const unsigned seed = std::random_device{}();
  CAPTURE(seed);
  std::mt19937 generator(seed);
  for (const int cp : {1, 2, 3, 4, 8}) {
    for (const std::int64_t tokens : {std::int64_t{0}, std::int64_t{1}, std::int64_t{3}, std::int64_t{7},
                                      std::int64_t{16} * cp, std::int64_t{61}}) {
      CAPTURE(cp);
      CAPTURE(tokens);
      std::vector<std::int64_t> cu_seqlens{0};
      while (cu_seqlens.size() < 6)
        cu_seqlens.push_back(std::min(tokens, cu_seqlens.back() + static_cast<std::int64_t>(generator() % 30)));
      const Split splits[] = {ring::layout_spans(ring::Layout::zigzag, tokens, cp),
                              ring::layout_spans(ring::Layout::contiguous, tokens, cp),
                              ring::layout_spans(ring::Layout::balanced, tokens, cp, cu_seqlens, true)};
      for (const Split& from : splits) {
        for (const Split& to : splits) check_relayout(from, to, 1 + tokens % 2);
      }
      check_relayout(splits[0], splits[1], 0);
    }
  }
}

TEST_CASE("token ids, [batch, tokens], move as any other rows") {
  const Split from = ring::layout_spans(ring::Layout::zigzag, 12, 3),
              to = ring::layout_spans(ring::Layout::contiguous, 12, 3);
  const relayout::Plan plan = relayout::plan(from, to, {.batch = 2, .dtype = DType::i32});
  run_ranks(3, [&](ThreadComm& world) {
    const TokenSpans& mine = from[static_cast<std::size_t>(world.rank())];
    std::vector<std::int32_t> ids, moved(8, -1);
    for (int b = 0; b < 2; ++b) {
      for (std::int64_t i = 0; i < 4; ++i) ids.push_back(static_cast<std::int32_t>(100 * b + mine.position(i)));
    }
    const HostBuffer scratch(plan.footprint().scratch, 0xff);
    auto op = relayout::bind(plan, HostExecutor(), GroupComm<ThreadComm>(world), scratch.block());
    op.forward({}, TensorRef(ids.data(), {2, 4}), TensorRef(moved.data(), {2, 4}));
    for (std::int32_t i = 0; i < 4; ++i) {
      const std::int32_t token = 4 * world.rank() + i;
      if (moved[static_cast<std::size_t>(i)] != token || moved[static_cast<std::size_t>(4 + i)] != 100 + token)
        throw std::runtime_error("a token id went astray");
    }
  });
}

TEST_CASE("only what changes its rank travels") {
  const Split zigzag = ring::layout_spans(ring::Layout::zigzag, 16, 2),
              contiguous = ring::layout_spans(ring::Layout::contiguous, 16, 2);
  const relayout::Plan plan = relayout::plan(zigzag, contiguous, {.batch = 3, .row_elems = 5, .dtype = DType::bf16});
  CHECK(plan.moves(0, 0).rows == 4);  // of 8; ranks hold chunks 0 3 and 1 2
  CHECK(plan.moves(0, 1).rows == 4);
  CHECK(plan.moves(1, 0).from_rows == std::vector{TokenSpan{0, 4}});
  CHECK(plan.moves(1, 0).to_rows == std::vector{TokenSpan{4, 8}});
  CHECK(plan.footprint().scratch == 2 * 128);  // 4 rows of 3 * 5 elements of 2 bytes, sent and received
  CHECK(relayout::plan(zigzag, zigzag, {.row_elems = 5}).footprint().scratch == 0);
}

TEST_CASE("A15: splits of other tokens or over other ranks") {
  const Split two = ring::layout_spans(ring::Layout::zigzag, 16, 2);
  const Split twice{TokenSpans({0, 8}), TokenSpans({0, 8})};
  for (const Split& wrong : {Split{}, ring::layout_spans(ring::Layout::zigzag, 16, 4),
                             ring::layout_spans(ring::Layout::zigzag, 12, 2), twice}) {
    expect_error<shape_error>("pleat[A15]: a relayout from 2 ranks with 16 tokens",
                              [&] { relayout::plan(two, wrong, {}); });
  }
  expect_error<shape_error>("pleat[A15]", [&] { relayout::plan(twice, two, {}); });
  expect_error<shape_error>("pleat[A02]: batch=-1", [&] { relayout::plan(two, two, {.batch = -1}); });
}

TEST_CASE("A05, A04, T07, T12, T02: a group, tensors or memory that do not fit the plan") {
  const Split from = ring::layout_spans(ring::Layout::zigzag, 16, 2),
              to = ring::layout_spans(ring::Layout::contiguous, 16, 2);
  const relayout::Plan plan = relayout::plan(from, to, {.row_elems = 4});
  const auto expect_call = [&](const std::string& start, const TensorRef& in, const TensorRef& out) {
    expect_error<shape_error>(start, [&] {
      run_ranks(2, [&](ThreadComm& world) {
        const HostBuffer scratch(plan.footprint().scratch);
        relayout::bind(plan, HostExecutor(), GroupComm<ThreadComm>(world), scratch.block()).forward({}, in, out);
      });
    });
  };
  std::vector<float> data(32), other(32);
  const TensorRef rows(data.data(), {1, 8, 4}), halves(other.data(), {1, 8, 2, 2});
  expect_call("pleat[T07]: in is f32 [1, 4, 4]", TensorRef(data.data(), {1, 4, 4}), halves);
  expect_call("pleat[T07]: out is f32 [1, 8, 3]", rows, TensorRef(data.data(), {1, 8, 3}));
  expect_call("pleat[T07]: a relayout of f32 [1, 8, 4]", rows, halves);
  expect_call("pleat[T12]: out is f32 [1, 8, 4] on host, which may only be read", rows,
              TensorRef(static_cast<const float*>(other.data()), {1, 8, 4}));
  TensorRef flat(other.data(), DType::f32, {1});
  flat.push_extent(8, 0);
  flat.push_extent(4, 1);
  expect_call("pleat[A04]: axis 1 of out has stride 0", rows, flat);
  expect_error<shape_error>("pleat[A05]: a plan for cp=2 was bound to a group of 3 ranks", [&] {
    run_ranks(3, [&](ThreadComm& world) { relayout::bind(plan, HostExecutor(), GroupComm<ThreadComm>(world), {}); });
  });
  expect_error<shape_error>("pleat[T02]", [&] {
    run_ranks(2, [&](ThreadComm& world) {
      const HostBuffer scratch(plan.footprint().scratch - 1);
      relayout::bind(plan, HostExecutor(), GroupComm<ThreadComm>(world), scratch.block());
    });
  });
}

}  // namespace
