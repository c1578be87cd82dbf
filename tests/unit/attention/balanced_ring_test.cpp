// The ring on balanced splits: as one rank, by both transports, with a split per packing.
#include <pleat/attention/ring.hpp>

#include <doctest/doctest.h>

#include "unit/attention/expect_error.hpp"
#include "unit/attention/ring_checks.hpp"

namespace {

using namespace pleat;
using oracle::Outputs;
using oracle::Problem;
using ring_run::Bound;
using ring_run::Boundaries;
using ring_run::check_ring;
using ring_run::packed;
using ring_run::transports;

TEST_CASE("balanced documents of any length equal one rank") {
  const Boundaries cases[] = {{9, 7, 8, 12, 8, 12}, {2, 1, 0, 13}, {7}, {1, 1, 1, 40, 1}, {0, 0, 1, 0}, {64, 64},
                              {70, 3, 1, 9, 2}};
  for (const int cp : {1, 2, 3, 4, 8}) {
    for (const Boundaries& lengths : cases) {
      Problem p = packed(lengths, cp);
      p.batch = 1 + cp % 2;
      for (const bool causal : {true, false}) {
        p.causal = causal;
        check_ring<double>(p, cp, ring::Layout::balanced);
      }
    }
  }
}

TEST_CASE("one dense sequence may be balanced too, of any length") {
  for (const int cp : {2, 3, 8})
    check_ring<double>({.batch = 2, .tokens = 61, .q_heads = 2}, cp, ring::Layout::balanced);
}

TEST_CASE("a plan balances skewed documents by itself, and says so") {
  const std::vector<std::int64_t> skewed{0, 100, 107, 114, 121, 128};
  const ring::Shape shape{.tokens = 128, .qk_dim = 8, .v_dim = 8, .cu_seqlens = skewed};
  const ring::Plan plan = ring::plan(4, shape);
  CHECK(std::string(message_of(plan).c_str()) == "ring cp=4 causal balanced collective deterministic");
  const double balanced = imbalance(pairs_of_ranks(plan.spans, skewed, true));
  CHECK(balanced < 1.1);
  const ring::Plan zigzag = ring::plan(4, shape, {.layout = ring::Layout::zigzag});
  CHECK(imbalance(pairs_of_ranks(zigzag.spans, skewed, true)) > 1.2);
  CHECK(ring::plan(4, shape, {.causal = false}).layout == ring::Layout::contiguous);
  Problem p = packed({100, 7, 7, 7, 7});
  check_ring<double>(p, 4);
}

TEST_CASE("a packing with a split of its own, on an operation that was planned for another") {
  const int cp = 3;
  const std::int64_t tokens = 48;
  const Boundaries cu_seqlens{0, 30, 33, 33, 40, 47};
  const Problem p{.tokens = tokens, .cu_seqlens = cu_seqlens};
  const oracle::Inputs in = oracle::draw(p, std::random_device{}(), ring_run::as_stored<double>);
  const Outputs want = oracle::solve(p, in);
  for (const Transport transport : transports) {
    const ring::Plan plan =
        ring::plan(cp, {.tokens = tokens, .qk_dim = 8, .v_dim = 8, .dtype = DType::f64, .cu_seqlens = {0, 20, 41, 48}},
                   {.transport = transport, .layout = ring::Layout::balanced});
    const std::vector<TokenSpans> split = ring::layout_spans(ring::Layout::balanced, tokens, cp, cu_seqlens, true);
    CHECK(split != plan.spans);
    run_ranks(cp, [&](ThreadComm& world) {
      const TokenSpans& mine = split[static_cast<std::size_t>(world.rank())];
      const auto part = [&](const std::vector<double>& global) {
        std::vector<double> local;
        for (std::int64_t row = 0; row < mine.tokens(); ++row) {
          const auto first = global.begin() + mine.position(row) * 8;
          local.insert(local.end(), first, first + 8);
        }
        return local;
      };
      std::vector<double> q = part(in.q), k = part(in.k), v = part(in.v), dout = part(in.dout);
      std::vector<double> out(q.size(), std::nan("")), dq(out), dk(out), dv(out);
      const auto tensor = [&](std::vector<double>& data) { return TensorRef(data.data(), {1, mine.tokens(), 1, 8}); };
      Bound bound(plan, world);
      const HostBuffer lse(plan.footprint().saved, 0xff);
      const ring::Work work = plan.documents(cu_seqlens, split);
      const HostBuffer staging(work.placed_bytes(), 0xff), placed(work.placed_bytes(), 0xff);
      ring::Saved saved(lse.block());
      bound.op.forward({}, bound.op.place(work, staging.block(), placed.block(), {}), tensor(q), tensor(k), tensor(v),
                       tensor(out), saved);
      bound.op.backward({}, tensor(dout), saved, tensor(dq), tensor(dk), tensor(dv));
      if (oracle::relative_max(out, part(want.out)) > 1e-12 || oracle::relative_max(dq, part(want.dq)) > 1e-12 ||
          oracle::relative_max(dk, part(want.dk)) > 1e-12 || oracle::relative_max(dv, part(want.dv)) > 1e-12) {
        throw std::runtime_error("a packing with a split of its own got wrong results");
      }
    });
  }
}

TEST_CASE("A12: a split that gives a rank another number of tokens") {
  const ring::Plan plan = ring::plan(2, {.tokens = 32, .qk_dim = 8, .v_dim = 8});
  const Boundaries one{0, 32};
  CHECK_NOTHROW(plan.documents(one, ring::layout_spans(ring::Layout::balanced, 32, 2, one, true)));
  for (const std::vector<TokenSpans>& wrong :
       {ring::layout_spans(ring::Layout::zigzag, 32, 4), std::vector{TokenSpans({0, 15}), TokenSpans({15, 32})}}) {
    expect_error<shape_error>("pleat[A12]: a split over", [&] { plan.documents(one, wrong); });
  }
}

}  // namespace
