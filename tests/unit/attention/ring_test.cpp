// Ring attention over host ranks against one rank in float64: every output and gradient, both transports with equal
// bits.
#include <pleat/attention/ring.hpp>

#include <cstring>
#include <string>

#include <doctest/doctest.h>

#include "unit/attention/expect_error.hpp"
#include "unit/attention/ring_checks.hpp"

namespace {

using namespace pleat;
using oracle::Outputs;
using oracle::Problem;
using ring_run::Bound;
using ring_run::Boundaries;
using ring_run::check_close;
using ring_run::check_ring;
using ring_run::packed;
using ring_run::same_bits;
using ring_run::transports;

template <class T>
void check_grid() {
  for (const int cp : {1, 2, 3, 4, 5, 8}) {
    for (const bool causal : {true, false}) {
      check_ring<T>(
          {.batch = 2, .tokens = 6 * cp, .q_heads = 3, .kv_heads = 3, .qk_dim = 8, .v_dim = 8, .causal = causal}, cp);
      check_ring<T>(
          {.batch = 1, .tokens = 4 * cp, .q_heads = 4, .kv_heads = 2, .qk_dim = 12, .v_dim = 5, .causal = causal}, cp);
      check_ring<T>(
          {.batch = 2, .tokens = 2 * cp, .q_heads = 4, .kv_heads = 1, .qk_dim = 3, .v_dim = 9, .causal = causal}, cp);
    }
  }
}
TEST_CASE("dense, double: cp x mask x heads x dims") {
  check_grid<double>();
}
TEST_CASE("dense, float: cp x mask x heads x dims") {
  check_grid<float>();
}
TEST_CASE("dense, bfloat16 storage: cp x mask x heads x dims") {
  check_grid<bfloat16>();
}

TEST_CASE("both layouts serve both masks") {
  for (const int cp : {2, 3, 5}) {
    for (const bool causal : {true, false}) {
      const Problem p{.batch = 2, .tokens = 4 * cp, .q_heads = 2, .kv_heads = 1, .causal = causal};
      check_ring<double>(p, cp, ring::Layout::zigzag);
      check_ring<double>(p, cp, ring::Layout::contiguous);
    }
  }
}

TEST_CASE("bfloat16: the error does not grow with the ring") {
  const Problem p{.tokens = 256, .q_heads = 4, .kv_heads = 2, .qk_dim = 16, .v_dim = 16};
  const oracle::Inputs in = oracle::draw(p, 77, ring_run::as_stored<bfloat16>);
  const Outputs want = oracle::solve(p, in);
  const Outputs one = ring_run::run<bfloat16>(p, in, 1, {}), eight = ring_run::run<bfloat16>(p, in, 8, {});
  const auto check = [](const std::vector<double>& ring, const std::vector<double>& alone,
                        const std::vector<double>& exact) {
    CHECK(oracle::relative_l2(alone, exact) < 5e-3);
    CHECK(oracle::relative_l2(ring, exact) <= 1.05 * oracle::relative_l2(alone, exact));
  };
  check(eight.out, one.out, want.out);
  check(eight.dq, one.dq, want.dq);
  check(eight.dk, one.dk, want.dk);
  check(eight.dv, one.dv, want.dv);
}

TEST_CASE("8 query and 2 key-value heads, 192/128, cp2") {  // TE#2868
  check_ring<float>({.tokens = 12, .q_heads = 8, .kv_heads = 2, .qk_dim = 192, .v_dim = 128}, 2);
}

TEST_CASE("8 keys in 2 chunks: gradients by the global LSE and Delta, each step by its own keys") {
  // tt-metal#53205, diffusers#14265
  check_ring<double>({.tokens = 8, .q_heads = 1, .kv_heads = 1, .causal = false}, 2);
  check_ring<double>({.tokens = 8, .q_heads = 1, .kv_heads = 1}, 2);
}

TEST_CASE("length 113 with GQA on NaN-filled workspaces") {  // tilelang#2461
  check_ring<float>({.tokens = 113, .q_heads = 8, .kv_heads = 2, .cu_seqlens = {0, 113}}, 4);
}

TEST_CASE("sequences of 4 and 5 tokens, cp2: right, or M07 on every rank") {  // pytorch#141429
  for (const bool causal : {true, false}) check_ring<double>({.tokens = 4, .causal = causal}, 2);
  check_ring<double>({.tokens = 5, .causal = false}, 2);
  check_ring<double>({.tokens = 5, .cu_seqlens = {0, 5}}, 2);
  expect_error<mesh_error>("pleat[M07]: sequence=5", [] {
    run_ranks(2, [](ThreadComm&) { ring::plan(2, {.tokens = 5, .qk_dim = 8, .v_dim = 8}); });
  });
}

TEST_CASE("packed documents of any length equal one rank") {
  const std::pair<int, Boundaries> cases[] = {{2, {9, 7, 8, 12, 8, 12}},  // TE#2186
                                              {2, {20, 3, 8, 12, 8, 12}},
                                              {8, {2, 1, 0, 13}},  // SkyRL#1407
                                              {2, {7}},
                                              {3, {1, 1, 1, 40, 1}},
                                              {5, {3}},
                                              {8, {0, 0, 1, 0}},
                                              {4, {64, 64}}};
  for (const auto& [cp, lengths] : cases) {
    for (const bool causal : {true, false}) {
      Problem p = packed(lengths);
      p.causal = causal;
      check_ring<double>(p, cp);
      check_ring<float>(p, cp, ring::Layout::zigzag);
    }
  }
}

TEST_CASE("packed documents of log-normal lengths, also in a batch and with padding at the end") {
  std::mt19937 generator(std::random_device{}());
  std::lognormal_distribution<double> length(1.8, 1.2);
  for (const int cp : {2, 3, 4, 8}) {
    for (int trial = 0; trial < 3; ++trial) {
      Boundaries lengths;
      for (int document = 0; document < 12; ++document)
        lengths.push_back(static_cast<std::int64_t>(std::min(length(generator), 60.0)));
      Problem p = packed(lengths, trial * 5);
      p.batch = 1 + trial;
      p.causal = trial != 1;
      p.v_dim = 6;
      check_ring<double>(p, cp);
    }
  }
}

TEST_CASE("cp2, 7 tokens and one of padding: token 7 counts, a padding value of 200 does not leak") {  // TE#1930
  const Problem p{.tokens = 8, .q_heads = 2, .kv_heads = 1, .cu_seqlens = {0, 7}};
  oracle::Inputs in = oracle::draw(p, 12, ring_run::as_stored<double>);
  for (auto* values : {&in.q, &in.k, &in.v, &in.dout})
    std::fill(values->end() - static_cast<std::ptrdiff_t>(values->size()) / 8, values->end(), 200);
  for (const Transport transport : transports) {
    const Outputs got = ring_run::run<double>(p, in, 2, {.transport = transport});
    check_close(got, oracle::solve(p, in), 1e-12);
    CHECK(got.out[7 * 16] == 0);  // the row of padding
    CHECK(got.lse[7 * 2] == -std::numeric_limits<double>::infinity());
    in.v[6 * 8] += 1;  // token 7
    CHECK(ring_run::run<double>(p, in, 2, {.transport = transport}).out[6 * 16] != got.out[6 * 16]);
    in.v[6 * 8] -= 1;
  }
}

TEST_CASE("streams without a document, and without a token") {
  for (const int cp : {1, 2, 3}) {
    const Outputs got = check_ring<float>({.tokens = 9, .cu_seqlens = {0, 0, 0}}, cp);
    for (const double out : got.out) CHECK(out == 0);
    check_ring<float>({.tokens = 0, .cu_seqlens = {0}}, cp);
    check_ring<float>({.batch = 0, .tokens = 12}, cp);
  }
}

TEST_CASE("q = 0: LSE = ln of the number of keys, on every rank and step") {  // attention-gym#200
  const Problem p{.tokens = 24};
  oracle::Inputs in = oracle::draw(p, 13, ring_run::as_stored<double>);
  std::fill(in.q.begin(), in.q.end(), 0);
  const Outputs got = ring_run::run<double>(p, in, 3, {});
  for (std::size_t token = 0; token < 24; ++token) {
    CHECK(got.lse[token] == doctest::Approx(std::log(static_cast<double>(token + 1))).epsilon(1e-14));
  }
}

TEST_CASE("large logits far apart between blocks") {
  const Problem p{.tokens = 16, .q_heads = 1, .kv_heads = 1};
  oracle::Inputs in = oracle::draw(p, 14, ring_run::as_stored<double>);
  for (std::size_t i = 0; i < in.k.size(); ++i) in.k[i] *= i / 8 % 3 == 0 ? 100 : 0.01;
  check_close(ring_run::run<double>(p, in, 4, {}), oracle::solve(p, in), 1e-10);
}

TEST_CASE("random delays and repeated calls do not change a bit, on either transport") {
  for (const int cp : {2, 3, 4, 8}) {
    Problem p = packed({5, 17, 0, 9, 33, 4}, 3);
    p.batch = 2;
    const oracle::Inputs in = oracle::draw(p, 15, ring_run::as_stored<float>);
    const Outputs calm = ring_run::run<float>(p, in, cp, {});
    for (const Transport transport : transports) {
      for (unsigned seed = 1; seed <= 5; ++seed) {
        CHECK(same_bits(calm, ring_run::run<float>(p, in, cp,
                                                   {.transport = transport,
                                                    .seed = seed * 100,
                                                    .delays = true,
                                                    .calls = 1 + static_cast<int>(seed) % 3})));
      }
    }
  }
}

TEST_CASE("several cp groups side by side on one arena") {
  const Problem p{.tokens = 24, .q_heads = 2};
  const oracle::Inputs in = oracle::draw(p, 17, ring_run::as_stored<double>);
  for (const int cp : {1, 2, 3}) {
    for (const Transport transport : transports) {
      const ring_run::How how{.transport = transport, .seed = 9, .delays = true, .groups = 3, .calls = 2};
      check_close(ring_run::run<double>(p, in, cp, how), oracle::solve(p, in), 1e-12);
    }
  }
}

TEST_CASE("dq, dk and dv are sums in one fixed order: 16/2 heads, many runs") {  // FA#1839, #1596
  const Problem p{.tokens = 32, .q_heads = 16, .kv_heads = 2};
  const oracle::Inputs in = oracle::draw(p, 16, ring_run::as_stored<bfloat16>);
  const Outputs first = ring_run::run<bfloat16>(p, in, 4, {.transport = Transport::peer});
  CHECK(same_bits(first, ring_run::run<bfloat16>(p, in, 4, {.transport = Transport::peer, .calls = 50})));
  CHECK(same_bits(first, ring_run::run<bfloat16>(p, in, 4, {.calls = 50})));
}

TEST_CASE("two micro-batches live at once, each with a packing of its own") {
  const int cp = 3;
  const std::int64_t tokens = 20;
  for (const Transport transport : transports) {
    const ring::Plan plan =
        ring::plan(cp, {.tokens = tokens, .qk_dim = 8, .v_dim = 8, .dtype = DType::f64, .cu_seqlens = {0, tokens}},
                   {.transport = transport});
    const Boundaries packings[] = {{0, 3, 11, 20}, {0, 15, 15, 18}};
    run_ranks(cp, [&](ThreadComm& world) {
      const TokenSpans mine = plan.spans[static_cast<std::size_t>(world.rank())];
      const auto count = static_cast<std::size_t>(mine.tokens() * 8);
      Bound bound(plan, world);
      struct MicroBatch {
        std::vector<double> q, k, v, out, dout, dq, dk, dv;
        HostBuffer lse, staging, placed;
        ring::Work work;
        ring::Saved saved;
        Outputs want;
      } live[2];
      const auto tensor = [&](std::vector<double>& data) { return TensorRef(data.data(), {1, mine.tokens(), 1, 8}); };
      for (unsigned i : {0u, 1u}) {
        const Problem p{.tokens = tokens, .cu_seqlens = packings[i]};
        const oracle::Inputs in = oracle::draw(p, 20 + i, ring_run::as_stored<double>);
        MicroBatch& m = live[i];
        m.want = oracle::solve(p, in);
        for (std::int64_t row = 0; row < mine.tokens(); ++row) {
          const std::ptrdiff_t at = mine.position(row) * 8;
          m.q.insert(m.q.end(), in.q.begin() + at, in.q.begin() + at + 8);
          m.k.insert(m.k.end(), in.k.begin() + at, in.k.begin() + at + 8);
          m.v.insert(m.v.end(), in.v.begin() + at, in.v.begin() + at + 8);
          m.dout.insert(m.dout.end(), in.dout.begin() + at, in.dout.begin() + at + 8);
        }
        for (auto* result : {&m.out, &m.dq, &m.dk, &m.dv}) result->assign(count, std::nan(""));
        m.lse = HostBuffer(plan.footprint().saved, 0xff);
        m.saved = ring::Saved(m.lse.block());
        m.work = plan.documents(packings[i]);
        m.staging = HostBuffer(m.work.placed_bytes(), 0xff);
        m.placed = HostBuffer(m.work.placed_bytes(), 0xff);
        const ring::PlacedWork placed = bound.op.place(m.work, m.staging.block(), m.placed.block(), {});
        bound.op.forward({}, placed, tensor(m.q), tensor(m.k), tensor(m.v), tensor(m.out), m.saved);
      }
      for (MicroBatch& m : live)
        bound.op.backward({}, tensor(m.dout), m.saved, tensor(m.dq), tensor(m.dk), tensor(m.dv));
      for (MicroBatch& m : live) {
        const auto part = [&](const std::vector<double>& global) {
          std::vector<double> local;
          for (std::int64_t row = 0; row < mine.tokens(); ++row) {
            local.insert(local.end(), global.begin() + mine.position(row) * 8,
                         global.begin() + mine.position(row) * 8 + 8);
          }
          return local;
        };
        if (oracle::relative_max(m.out, part(m.want.out)) > 1e-12 ||
            oracle::relative_max(m.dq, part(m.want.dq)) > 1e-12 ||
            oracle::relative_max(m.dk, part(m.want.dk)) > 1e-12 ||
            oracle::relative_max(m.dv, part(m.want.dv)) > 1e-12) {
          throw std::runtime_error("a micro-batch got wrong results");
        }
      }
    });
  }
}

}  // namespace
