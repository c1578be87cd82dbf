// The whole layer over every small group against one rank in float64, with both transports.
#include <pleat/moe/layer.hpp>

#include <deque>
#include <string>

#include "layer_problem.hpp"

#include <doctest/doctest.h>

namespace {

using namespace moe_testing;

/// Unequal numbers of tokens, 0 among them where there is more than one rank.
std::vector<std::int64_t> uneven_tokens(int ranks) {
  const std::int64_t tokens[] = {7, 0, 13, 1, 5, 0, 2, 9};
  return {tokens, tokens + ranks};
}

template <class T>
void check_grid() {
  for (const int ranks : {1, 2, 3, 4, 5, 8}) {
    for (const int k : {1, 2, 4, 8}) {
      CAPTURE(ranks);
      CAPTURE(k);
      const Sizes sizes{.hidden = 12, .inner = 10, .experts = ranks * (ranks < 4 ? 4 : 2), .k = k};
      if (k > sizes.experts) continue;
      const Problem<T> problem(sizes, uneven_tokens(ranks), static_cast<unsigned>(ranks * 100 + k));
      const Answer<T> peer = run(problem, {.transport = Transport::peer});
      CHECK(worst(peer, solve(problem)) < tolerance<T>());
      CHECK(run(problem, {.transport = Transport::collective}) == peer);
      CHECK(run(problem, {.transport = Transport::peer, .row_alignment = 1}) == peer);
      for (const moe::SendBy send_by : {moe::SendBy::stores, moe::SendBy::copies}) {
        CHECK(run(problem, {.send_by = send_by}) == peer);
      }
    }
  }
}

TEST_CASE("forward and backward equal one rank: f64") {
  check_grid<double>();
}
TEST_CASE("forward and backward equal one rank: f32") {
  check_grid<float>();
}
TEST_CASE("forward and backward equal one rank: bf16") {
  check_grid<bfloat16>();
}

TEST_CASE("every token to experts 0 and 1 of 8 on 4 ranks: all ranks finish, other experts get gradient 0") {
  Problem<double> problem({.experts = 8, .k = 2}, {6, 3, 0, 9}, 5);
  for (std::int64_t t = 0; t < problem.total(); ++t) {
    problem.logit(t, 0) += 50;
    problem.logit(t, 1) += 50;
  }
  problem.choose();
  const Answer<double> answer = run(problem, {});
  CHECK(worst(answer, solve(problem)) < tolerance<double>());
  const auto others = static_cast<std::ptrdiff_t>(2 * problem.sizes.inner * problem.sizes.hidden);
  for (const auto* gradient : {&answer.dgate, &answer.dup, &answer.ddown}) {
    CHECK(std::all_of(gradient->begin() + others, gradient->end(), [](double d) { return d == 0; }));
  }
}

TEST_CASE("given ids: unrouted ones take no part, forward and backward") {
  Problem<double> problem({.experts = 6, .k = 3}, {5, 8, 2}, 9);
  std::mt19937 random(2);
  for (std::int32_t& id : problem.ids) {
    if (random() % 3 == 0) id = random() % 2 == 0 ? -1 : 6;
  }
  std::fill_n(problem.ids.begin() + 6, 3, -1);
  const Answer<double> answer = run(problem, {}, true);
  CHECK(worst(answer, solve(problem)) < tolerance<double>());
  for (std::int64_t h = 0; h < problem.sizes.hidden; ++h) {
    CHECK(answer.y[static_cast<std::size_t>(2 * problem.sizes.hidden + h)] == 0);
    CHECK(answer.dx[static_cast<std::size_t>(2 * problem.sizes.hidden + h)] == 0);
  }
  for (int e = 0; e < 6; ++e) CHECK(answer.dlogits[static_cast<std::size_t>(2 * 6 + e)] == 0);
}

TEST_CASE("the same tokens give the same weight gradients for ep 1, 2 and 4") {
  // Four ranks; for ep < 4 the gradients of the expert_dp replicas are summed, without any divisor.
  const Sizes sizes{.experts = 8, .k = 2};
  const Problem<double> whole(sizes, {3, 7, 0, 4}, 21);
  const Answer<double> expected = solve(whole);
  for (const int ep : {1, 2, 4}) {
    Answer<double> sum;
    for (int first = 0; first < 4; first += ep) {
      Problem<double> part = whole;
      part.tokens.assign(whole.tokens.begin() + first, whole.tokens.begin() + first + ep);
      const auto cut = [&](auto& values, std::int64_t cols) {
        const auto begin = values.begin() + whole.first_token(first) * cols;
        values.assign(begin, begin + part.total() * cols);
      };
      cut(part.x, sizes.hidden);
      cut(part.dy, sizes.hidden);
      cut(part.logits, sizes.experts);
      cut(part.ids, sizes.k);
      const Answer<double> answer = run(part, {.max_tokens = 7});
      const auto add = [](std::vector<double>& to, const std::vector<double>& from) {
        to.resize(from.size());
        for (std::size_t i = 0; i < from.size(); ++i) to[i] += from[i];
      };
      add(sum.dgate, answer.dgate);
      add(sum.dup, answer.dup);
      add(sum.ddown, answer.ddown);
    }
    CHECK(relative(sum.dgate, expected.dgate) < 1e-13);
    CHECK(relative(sum.dup, expected.dup) < 1e-13);
    CHECK(relative(sum.ddown, expected.ddown) < 1e-13);
  }
}

TEST_CASE("workspaces full of 0xff and of zeros give the same bits after two steps, accumulation included") {
  const Problem<float> problem({.experts = 8, .k = 4}, {6, 0, 11, 3}, 13);
  for (const Transport transport : {Transport::peer, Transport::collective}) {
    const Answer<float> clean = run(problem, {.transport = transport, .fill = 0, .steps = 2});
    CHECK(run(problem, {.transport = transport, .fill = 0xff, .steps = 2}) == clean);
    Answer<double> expected = solve(problem);
    for (auto* gradient : {&expected.dgate, &expected.dup, &expected.ddown}) {
      for (double& d : *gradient) d *= 2;
    }
    CHECK(worst(clean, expected) < tolerance<float>());
  }
}

TEST_CASE("random delays change no bit, with either transport") {
  const Problem<bfloat16> problem({.experts = 10, .k = 4}, {6, 0, 11, 3, 4}, 17);
  const Answer<bfloat16> expected = run(problem, {.steps = 2});
  for (int i = 0; i < 10; ++i) {
    CHECK(run<bfloat16, testing_support::JitterExecutor>(problem, {.transport = Transport::peer, .steps = 2}) ==
          expected);
    CHECK(run<bfloat16, testing_support::JitterExecutor>(problem, {.transport = Transport::collective, .steps = 2}) ==
          expected);
  }
}

TEST_CASE("two live micro-batches keep apart") {
  const Sizes sizes{.experts = 4, .k = 2};
  const Problem<double> problems[] = {{sizes, {5, 2}, 1}, {sizes, {1, 6}, 2}};
  const Answer<double> expected[] = {solve(problems[0]), solve(problems[1])};
  run_ranks(2, [&](ThreadComm& world) {
    const GroupComm<ThreadComm> ep(world);
    const moe::LayerPlan plan =
        moe::plan(2, moe::LayerShape{6, sizes.hidden, sizes.inner, sizes.experts, sizes.k, DType::f64},
                  {.dispatch = {.transport = Transport::peer}});
    const Footprint need = plan.footprint();
    const HostBuffer scratch(need.scratch, 0xff), persistent(need.persistent, 0xff), first(need.saved, 0xff),
        second(need.saved, 0xff);
    HostArena arena(ep, need.symmetric);
    auto layer =
        moe::bind(plan, HostExecutor{}, ep, Memory<HostArena>{scratch.block(), persistent.block(), {}, &arena});
    moe::LayerSaved saved[] = {{plan, first.block()}, {plan, second.block()}};
    const auto rows = [&](const Problem<double>& p, const std::vector<double>& all, std::int64_t cols) {
      return TensorRef(all.data() + p.first_token(world.rank()) * cols,
                       {p.tokens[static_cast<std::size_t>(world.rank())], cols});
    };
    const auto matrices = [&](const std::vector<double>& gate, const std::vector<double>& up,
                              const std::vector<double>& down) {
      const std::int64_t stride = sizes.inner * sizes.hidden, at = world.rank() * 2 * stride;
      return moe::ExpertMatrices{moe::expert_matrix(gate.data() + at, 2, sizes.inner, sizes.hidden, stride),
                                 moe::expert_matrix(up.data() + at, 2, sizes.inner, sizes.hidden, stride),
                                 moe::expert_matrix(down.data() + at, 2, sizes.hidden, sizes.inner, stride)};
    };
    for (int i = 0; i < 2; ++i) {
      const auto& p = problems[i];
      const std::vector<double> y(p.x.size());
      layer.forward({}, rows(p, p.x, sizes.hidden), rows(p, p.logits, sizes.experts), matrices(p.gate, p.up, p.down),
                    saved[i], rows(p, y, sizes.hidden));
    }
    for (int i = 0; i < 2; ++i) {
      const auto& p = problems[i];
      const std::vector<double> dx(p.x.size()), dlogits(p.logits.size()), dgate(p.gate), dup(p.up), ddown(p.down);
      layer.backward({}, rows(p, p.dy, sizes.hidden), rows(p, p.logits, sizes.experts), matrices(p.gate, p.up, p.down),
                     TensorRef{}, saved[i], rows(p, dx, sizes.hidden), rows(p, dlogits, sizes.experts),
                     matrices(dgate, dup, ddown), false);
      const auto own = [&](const std::vector<double>& all, std::int64_t per_rank) {
        return std::vector<double>(all.begin() + world.rank() * per_rank, all.begin() + (world.rank() + 1) * per_rank);
      };
      const std::int64_t elems = 2 * sizes.inner * sizes.hidden;
      CHECK(relative(own(dgate, elems), own(expected[i].dgate, elems)) < 1e-13);
      CHECK(relative(own(ddown, elems), own(expected[i].ddown, elems)) < 1e-13);
    }
  });
}

TEST_CASE("too many tokens on one rank end in the same error on every rank, backward included") {
  const Problem<double> problem({.experts = 4, .k = 2}, {3, 9}, 1);
  for (const Transport transport : {Transport::peer, Transport::collective}) {
    try {
      run(problem, {.transport = transport, .max_tokens = 8});
      FAIL("no error");
    } catch (const shape_error& e) {  // what all ranks threw alike
      CHECK(std::string(e.what()).find("pleat[E08]: rank 1 of the ep group {0, 1} had 9 tokens") == 0);
    }
  }
}

/// Layers of one plan with an arena on one rank, which is far smaller than the worst routing.
struct ArenaRank {
  static moe::LayerPlan plan_of(const Sizes& sizes, Transport transport, std::int64_t arena_rows) {
    return moe::plan(
        2, moe::LayerShape{8, sizes.hidden, sizes.inner, sizes.experts, sizes.k, DType::f64},
        {.dispatch = {
             .transport = transport, .row_alignment = 4, .overflow = moe::Overflow::error, .arena_rows = arena_rows}});
  }
  ArenaRank(ThreadComm& world, const moe::LayerPlan& layer_plan, int layers)
      : rank(world.rank()),
        plan(layer_plan),
        need(plan.footprint()),
        scratch(need.scratch, 0xff),
        persistent(need.persistent, 0xff),
        pinned(need.pinned_host, 0xff),
        arena_memory(moe::LayerArena::bytes(plan), 0xff),
        symmetric(world, need.symmetric),
        layer(moe::bind(plan, HostExecutor{}, GroupComm<ThreadComm>(world),
                        Memory<HostArena>{scratch.block(), persistent.block(), pinned.block(), &symmetric})),
        arena(plan, HostExecutor{}, arena_memory.block()) {
    for (int i = 0; i < layers; ++i) {
      memory.emplace_back(need.saved, static_cast<unsigned char>(0xff));
      saved.emplace_back(plan, memory.back().block(), arena);
    }
  }
  TensorRef rows(const Problem<double>& p, const std::vector<double>& all, std::int64_t cols) const {
    return {const_cast<double*>(all.data()) + p.first_token(rank) * cols,
            {p.tokens[static_cast<std::size_t>(rank)], cols}};
  }
  moe::ExpertMatrices matrices(const Sizes& sizes, const std::vector<double>& gate, const std::vector<double>& up,
                               const std::vector<double>& down) const {
    const std::int64_t local = plan.dispatch.experts_local(), stride = sizes.inner * sizes.hidden,
                       at = rank * local * stride;
    return {moe::expert_matrix(gate.data() + at, local, sizes.inner, sizes.hidden, stride),
            moe::expert_matrix(up.data() + at, local, sizes.inner, sizes.hidden, stride),
            moe::expert_matrix(down.data() + at, local, sizes.hidden, sizes.inner, stride)};
  }
  void forward(const Problem<double>& p, std::size_t i, const Answer<double>& a) {
    layer.forward({}, rows(p, p.x, p.sizes.hidden), rows(p, p.logits, p.sizes.experts),
                  matrices(p.sizes, p.gate, p.up, p.down), saved[i], rows(p, a.y, p.sizes.hidden));
  }
  void backward(const Problem<double>& p, std::size_t i, const Answer<double>& a) {
    layer.backward({}, rows(p, p.dy, p.sizes.hidden), rows(p, p.logits, p.sizes.experts),
                   matrices(p.sizes, p.gate, p.up, p.down), TensorRef{}, saved[i], rows(p, a.dx, p.sizes.hidden),
                   rows(p, a.dlogits, p.sizes.experts), matrices(p.sizes, a.dgate, a.dup, a.ddown), false);
  }
  const std::int64_t* offsets(std::size_t i) const { return saved[i].dispatch.record.offsets; }
  std::int64_t end(std::size_t i) const { return offsets(i)[plan.dispatch.experts_local()]; }

  int rank;
  moe::LayerPlan plan;
  Footprint need;
  HostBuffer scratch, persistent, pinned, arena_memory;
  HostArena symmetric;
  moe::Layer<HostExecutor, ThreadComm, HostArena> layer;
  moe::LayerArena arena;
  std::deque<HostBuffer> memory;
  std::deque<moe::LayerSaved> saved;
};

TEST_CASE("layers share an arena of rows: each takes what comes and gives it back in backward") {
  const Sizes sizes{.experts = 4, .k = 2};
  std::vector<Problem<double>> problems;
  std::vector<Answer<double>> expected;
  const std::vector<std::int64_t> tokens[] = {{6, 3}, {0, 0}, {1, 8}, {7, 2}};
  for (unsigned i = 0; i < 4; ++i) {
    problems.emplace_back(sizes, tokens[i], i + 1);
    expected.push_back(solve(problems.back()));
  }
  for (const Transport transport : {Transport::peer, Transport::collective}) {
    const moe::LayerPlan plan = ArenaRank::plan_of(sizes, transport, 80);
    CHECK(plan.footprint().saved + moe::LayerArena::bytes(plan) / 4 <
          moe::plan(2, moe::LayerShape{8, sizes.hidden, sizes.inner, sizes.experts, sizes.k, DType::f64},
                    {.dispatch = {.transport = transport, .row_alignment = 4}})
              .footprint()
              .saved);
    std::vector<Answer<double>> answers = expected;
    for (Answer<double>& a : answers) {
      for (auto* values : {&a.y, &a.dx, &a.dlogits, &a.dgate, &a.dup, &a.ddown}) {
        std::fill(values->begin(), values->end(), std::nan(""));
      }
    }
    run_ranks(2, [&](ThreadComm& world) {
      ArenaRank r(world, plan, 4);
      for (int step = 0; step < 2; ++step) {
        for (std::size_t i = 0; i < 4; ++i) {
          r.forward(problems[i], i, answers[i]);
          CHECK(r.offsets(i)[0] == (i == 0 ? 0 : r.end(i - 1)));
          CHECK(*r.arena.rows.used_rows == r.end(i));
        }
        CHECK(r.arena.rows.holders() == 4);
        for (std::size_t i = 4; i-- > 0;) r.backward(problems[i], i, answers[i]);
        CHECK(*r.arena.rows.used_rows == 0);
        CHECK(r.arena.rows.holders() == 0);
      }
      // a forward pass that is done again, as for recomputation, and one that nothing follows
      for (int i = 0; i < 3; ++i) r.forward(problems[0], 0, answers[0]);
      CHECK(r.offsets(0)[0] == 0);
      r.layer.release({}, r.saved[0]);
      CHECK(*r.arena.rows.used_rows == 0);
      r.layer.check({});
    });
    for (std::size_t i = 0; i < 4; ++i) CHECK(worst(answers[i], expected[i]) < 1e-13);
  }
}

TEST_CASE("an arena without room is the same error on every rank, and the order of releases is checked") {
  const Sizes sizes{.experts = 4, .k = 2};
  const Problem<double> problem(sizes, {8, 6}, 3);
  for (const Transport transport : {Transport::peer, Transport::collective}) {
    std::vector<std::string> texts(2);
    run_ranks(2, [&](ThreadComm& world) {
      const moe::LayerPlan plan = ArenaRank::plan_of(sizes, transport, 44);
      const Answer<double> out = solve(problem);
      ArenaRank r(world, plan, 3);
      r.forward(problem, 0, out);
      CHECK_NOTHROW(r.layer.check({}));
      r.forward(problem, 1, out);
      CHECK(r.end(1) <= 44);
      r.forward(problem, 2, out);
      CHECK(r.end(2) <= 44);
      for (std::size_t i = 3; i-- > 0;) r.backward(problem, i, out);
      CHECK(*r.arena.rows.used_rows == 0);
      try {
        r.layer.check({});
      } catch (const shape_error& e) {
        texts[static_cast<std::size_t>(world.rank())] = e.what();
      }
      r.forward(problem, 0, out);
      r.forward(problem, 1, out);
      CHECK_THROWS_WITH_AS(
          r.layer.release({}, r.saved[0]),
          "pleat[E17]: rows of forward call 0 of an arena are released while 2 calls hold rows; the last "
          "one comes first, and each once",
          shape_error);
      CHECK_THROWS_WITH_AS(moe::LayerSaved(plan, r.memory[0].block()), doctest::Contains("pleat[E17]"), shape_error);
      r.arena.clear(HostExecutor{}, {});
      CHECK(*r.arena.rows.used_rows == 0);
    });
    CHECK(texts[0] == texts[1]);
    CHECK(texts[0].find("pleat[E10]: rank ") == 0);
    CHECK(texts[0].find(" rows more than its arena has left, or than max_rows=32; plan with") != std::string::npos);
  }
  CHECK_THROWS_WITH_AS(ArenaRank::plan_of(sizes, Transport::peer, 42), doctest::Contains("pleat[E12]: arena_rows=42"),
                       shape_error);
}

TEST_CASE("ranks that plan different layers all hear which, when they bind") {
  const moe::LayerShape shape{8, 8, 6, 8, 2};
  struct Case {
    const char* there;
    const char* here;
    moe::LayerShape shape;
    moe::LayerOptions options;
  };
  const Case cases[] = {{"max_tokens=16", "max_tokens=8", {16, 8, 6, 8, 2}, {}},
                        {"hidden=16", "hidden=8", {8, 16, 6, 8, 2}, {}},
                        {"k=3", "k=2", {8, 8, 6, 8, 3}, {}},
                        {"experts=16", "experts=8", {8, 8, 6, 16, 2}, {}},
                        {"dtype=f64", "dtype=f32", {8, 8, 6, 8, 2, DType::f64}, {}},
                        {"inner=7", "inner=6", {8, 8, 7, 8, 2}, {}},
                        {"scale=2.5", "scale=1", shape, {.router = {.scale = 2.5}}},
                        {"transport=peer", "transport=collective", shape, {.dispatch = {.transport = Transport::peer}}},
                        {"overflow=drop_lowest, max_rows=4",
                         "overflow=worst_case, max_rows=0",
                         shape,
                         {.dispatch = {.overflow = moe::Overflow::drop_lowest, .max_rows = 4}}}};
  for (const Case& c : cases) {
    std::vector<std::string> texts(3);
    run_ranks(3, [&](ThreadComm& world) {
      ThreadComm pair = world.split(world.rank() / 2, world.rank());  // ranks 0 and 1; rank 2 stays alone
      const GroupComm<ThreadComm> ep(pair, GroupShape{}.append(1, pair.size()).of(0));
      if (world.rank() == 2) return;
      const moe::LayerPlan plan = world.rank() == 0 ? moe::plan(2, shape) : moe::plan(2, c.shape, c.options);
      const Footprint need = plan.footprint();
      const HostBuffer scratch(need.scratch), persistent(need.persistent), pinned(need.pinned_host + 1);
      HostArena arena(ep, std::max<std::size_t>(need.symmetric, 1 << 16));
      try {
        moe::bind(plan, HostExecutor{}, ep,
                  Memory<HostArena>{scratch.block(), persistent.block(), pinned.block(), &arena});
      } catch (const comm_error& e) {
        texts[static_cast<std::size_t>(world.rank())] = e.what();
      }
    });
    CAPTURE(c.there);
    CHECK(texts[0] == texts[1]);
    CHECK(texts[0].find(std::string("pleat[C36]: rank 1 binds moe ")) == 0);
    CHECK(texts[0].find(std::string(" with ") + c.there + ", rank 0 with " + c.here + "; plan alike") !=
          std::string::npos);
  }
}

TEST_CASE("the layer names what is wrong: sizes, a saved state of other shapes, logits of other tokens") {
  constexpr std::int64_t huge = std::int64_t{1} << 61;
  for (const moe::LayerShape& shape : {moe::LayerShape{8, 8, huge, 8, 2}, moe::LayerShape{8, huge, 6, 8, 2},
                                       moe::LayerShape{8, std::int64_t{1} << 40, std::int64_t{1} << 40, 8, 2}}) {
    CHECK_THROWS_WITH_AS(moe::plan(2, shape), doctest::Contains("pleat[E07]"), shape_error);
  }
  const moe::LayerPlan plan = moe::plan(1, moe::LayerShape{4, 4, 6, 2, 1}),
                       wide = moe::plan(1, moe::LayerShape{4, 4, 7, 2, 1});
  const Footprint need = plan.footprint();
  const HostBuffer scratch(need.scratch), persistent(need.persistent), pinned(need.pinned_host), memory(need.saved),
      wide_memory(wide.footprint().saved);
  auto layer = moe::bind(plan, HostExecutor{}, GroupComm<ThreadComm>(),
                         Memory<>{scratch.block(), persistent.block(), pinned.block()});
  moe::LayerSaved saved(plan, memory.block()), other(wide, wide_memory.block());
  std::vector<float> rows(16), logits(8), matrix(48), gradients(48);
  const auto all = [](std::vector<float>& m) {
    return moe::ExpertMatrices{moe::expert_matrix(m.data(), 2, 6, 4, 24), moe::expert_matrix(m.data(), 2, 6, 4, 24),
                               moe::expert_matrix(m.data(), 2, 4, 6, 24)};
  };
  const TensorRef x(rows.data(), {4, 4}), l(logits.data(), {4, 2});
  const auto forward = [&](moe::LayerSaved& state, const TensorRef& router) {
    layer.forward({}, x, router, all(matrix), state, x);
  };
  CHECK_THROWS_WITH_AS(forward(other, l), doctest::Contains("pleat[E15]: a saved state for the shape"), shape_error);
  CHECK_THROWS_WITH_AS(forward(saved, TensorRef(logits.data(), {3, 2})),
                       "pleat[T07]: logits is f32 [3, 2] on host; it must be f32 [4, 2] on host", shape_error);
  CHECK_THROWS_WITH_AS(layer.backward({}, x, l, all(matrix), TensorRef{}, saved, x, l, all(gradients), false),
                       doctest::Contains("pleat[E16]: combine_backward was given a saved state"), shape_error);
  CHECK_THROWS_WITH_AS(layer.forward({}, TensorRef(nullptr, DType::f32, {4, 4}), l, all(matrix), saved, x),
                       "pleat[T07]: x is f32 [4, 4] on host, and has no data", shape_error);
  CHECK_THROWS_WITH_AS(
      layer.forward({}, x, l, moe::ExpertMatrices{all(matrix).gate, {nullptr, DType::f32, {2, 6, 4}}, {}}, saved, x),
      doctest::Contains("pleat[T07]: weights.up is f32 [2, 6, 4] on host, and has no data"), shape_error);
  const moe::ExpertSaved fresh(plan.experts, memory.block());
  CHECK_THROWS_WITH_AS(fresh.expect_filled(plan.experts.shape), doctest::Contains("pleat[E16]"), shape_error);
}

TEST_CASE("the layer's footprint holds its parts") {
  const moe::LayerPlan plan =
      moe::plan(4, moe::LayerShape{32, 16, 24, 8, 2, DType::bf16}, {.dispatch = {.transport = Transport::peer}});
  const Footprint layer = plan.footprint(), dispatch = plan.dispatch.footprint(), experts = plan.experts.footprint();
  CHECK(layer.symmetric == dispatch.symmetric);
  CHECK(layer.persistent == dispatch.persistent);
  CHECK(layer.saved >= dispatch.saved + experts.saved + 32 * (2 * 4 + 2 * 4 + 8 * 4));
  CHECK(layer.scratch >= experts.scratch);
  CHECK(layer.scratch < experts.scratch + dispatch.saved);
}

}  // namespace
