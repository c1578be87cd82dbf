// Latents in the ring (MLA): blocks travel compressed, are expanded where they arrive, and only the gradient of the
// latent comes back. Against float64 on one rank, the expansion's weights included.
#include <pleat/attention/ring.hpp>

#include <doctest/doctest.h>

#include "unit/attention/counting_executor.hpp"
#include "unit/attention/expect_error.hpp"
#include "unit/attention/latents.hpp"
#include "unit/attention/ring_checks.hpp"

namespace {

using namespace pleat;
using latents::HostExpander;
using latents::LatentInputs;
using latents::LatentOutputs;
using latents::Widths;
using oracle::Problem;
using ring_run::Boundaries;
using ring_run::transports;

/// On `cp` ranks, all memory NaN at first. The latent and its gradient are views with padding behind each row. Weight
/// gradients are summed over ranks in their order.
template <class T>
LatentOutputs run(const Widths& w, const Problem& p, const LatentInputs& in, int cp, Transport transport,
                  std::optional<ring::Layout> layout, int calls) {
  const ring::Plan plan = ring::plan(cp,
                                     {.batch = p.batch,
                                      .tokens = p.tokens,
                                      .q_heads = p.q_heads,
                                      .kv_heads = p.kv_heads,
                                      .qk_dim = p.qk_dim,
                                      .v_dim = p.v_dim,
                                      .latent_dim = w.latent(),
                                      .dtype = dtype_of<T>,
                                      .cu_seqlens = p.cu_seqlens},
                                     {.causal = p.causal, .transport = transport, .layout = layout});
  const double nan = std::nan("");
  LatentOutputs all{std::vector<double>(in.dout.size(), nan), std::vector<double>(in.q.size(), nan),
                    std::vector<double>(in.latent.size(), nan), std::vector<double>(in.weights.size())};
  std::vector<std::vector<accumulator_t<T>>> weight_gradients(static_cast<std::size_t>(cp));
  run_ranks(cp, [&](ThreadComm& world) {
    const TokenSpans& mine = plan.spans[static_cast<std::size_t>(world.rank())];
    const auto rows = static_cast<std::size_t>(p.batch * mine.tokens());
    ring_run::Bound bound(plan, world);
    const HostBuffer lse(plan.footprint().saved, 0xff);
    HostExpander<T> expander(w, p.kv_heads, in.weights);

    const auto poisoned = [&](int dim) {
      return std::vector<T>(rows * static_cast<std::size_t>(dim), ring_run::rounded<T>(nan));
    };
    auto q = poisoned(p.q_heads * p.qk_dim), dq = q, out = poisoned(p.q_heads * p.v_dim), dout = out,
         latent = poisoned(w.latent() + 2), dlatent = latent;
    const auto heads = [&](std::vector<T>& data, int dim) {
      return TensorRef(data.data(), {p.batch, mine.tokens(), p.q_heads, dim});
    };
    const auto compressed = [&](std::vector<T>& data) {
      TensorRef t(data.data(), dtype_of<T>, {});
      t.push_extent(p.batch, mine.tokens() * (w.latent() + 2));
      t.push_extent(mine.tokens(), w.latent() + 2);
      t.push_extent(w.latent(), 1);
      return t;
    };
    const auto each = [&](std::vector<T>& local, auto& global, int pitch, int dim, auto f) {
      for (std::int64_t b = 0; b < p.batch; ++b) {
        for (std::int64_t row = 0; row < mine.tokens(); ++row) {
          for (int i = 0; i < dim; ++i) {
            f(local[static_cast<std::size_t>((b * mine.tokens() + row) * pitch + i)],
              global[p.row(b, mine.position(row), 1, 0) * static_cast<std::size_t>(dim) + static_cast<std::size_t>(i)]);
          }
        }
      }
    };
    const auto load = [](T& local, double global) { local = ring_run::rounded<T>(global); };
    const auto store = [](const T& local, double& global) { global = static_cast<double>(local); };
    each(q, in.q, p.q_heads * p.qk_dim, p.q_heads * p.qk_dim, load);
    each(dout, in.dout, p.q_heads * p.v_dim, p.q_heads * p.v_dim, load);
    each(latent, in.latent, w.latent() + 2, w.latent(), load);
    for (int call = 0; call < calls; ++call) {
      expander = HostExpander<T>(w, p.kv_heads, in.weights);
      ring::Saved saved(lse.block());
      bound.op.forward_latent({}, expander, heads(q, p.qk_dim), compressed(latent), heads(out, p.v_dim), saved);
      if (transport == Transport::collective) std::memset(bound.scratch.data(), 0xff, bound.scratch.size_bytes());
      bound.op.backward_latent({}, expander, heads(dout, p.v_dim), saved, heads(dq, p.qk_dim), compressed(dlatent));
    }
    each(out, all.out, p.q_heads * p.v_dim, p.q_heads * p.v_dim, store);
    each(dq, all.dq, p.q_heads * p.qk_dim, p.q_heads * p.qk_dim, store);
    each(dlatent, all.dlatent, w.latent() + 2, w.latent(), store);
    weight_gradients[static_cast<std::size_t>(world.rank())] = expander.gradients();
    for (std::size_t i = 0; i < dlatent.size(); ++i) {
      const bool is_padding = i % static_cast<std::size_t>(w.latent() + 2) >= static_cast<std::size_t>(w.latent());
      if (is_padding && !std::isnan(static_cast<double>(dlatent[i]))) throw std::runtime_error("padding was written");
    }
  });
  for (const auto& part : weight_gradients) {
    for (std::size_t i = 0; i < part.size(); ++i) all.dweights[i] += static_cast<double>(part[i]);
  }
  return all;
}

template <class T>
void check_latents(Problem p, int cp, std::optional<ring::Layout> layout = {}) {
  const Widths w;
  p = latents::problem_of(w, p);
  const unsigned seed = std::random_device{}();
  CAPTURE(seed);
  CAPTURE(cp);
  CAPTURE(p.tokens);
  CAPTURE(p.causal);
  const LatentInputs in = latents::draw<T>(w, p, seed);
  const LatentOutputs hops = run<T>(w, p, in, cp, Transport::collective, layout, 1);
  CHECK(hops == run<T>(w, p, in, cp, Transport::peer, layout, 2));
  const LatentOutputs want = latents::solve(w, p, in);
  const double tolerance = ring_run::tolerance<T>;
  for (const auto part : {&LatentOutputs::out, &LatentOutputs::dq, &LatentOutputs::dlatent, &LatentOutputs::dweights}) {
    CHECK(oracle::relative_l2(hops.*part, want.*part) <= tolerance);
    CHECK(oracle::relative_max(hops.*part, want.*part) <= 2 * tolerance);
  }
}

TEST_CASE("latents: out and gradients of queries, latents and weights, cp x mask x heads") {
  for (const int cp : {1, 2, 3, 4, 8}) {
    for (const bool causal : {true, false}) {
      check_latents<double>({.batch = 2, .tokens = 4 * cp, .q_heads = 3, .kv_heads = 3, .causal = causal}, cp);
      check_latents<double>({.tokens = 6 * cp, .q_heads = 4, .kv_heads = 2, .causal = causal}, cp);
    }
    check_latents<float>({.batch = 2, .tokens = 4 * cp, .q_heads = 2, .kv_heads = 2}, cp);
  }
}

TEST_CASE("latents of packed documents, balanced and zigzag, of any length") {
  for (const int cp : {2, 3, 4, 8}) {
    for (const Boundaries& lengths :
         {Boundaries{9, 7, 8, 12, 8, 12}, Boundaries{2, 1, 0, 13}, Boundaries{1, 40, 1, 1}}) {
      for (const ring::Layout layout : {ring::Layout::balanced, ring::Layout::zigzag}) {
        Problem p = ring_run::packed(lengths, 3);
        p.batch = 1 + cp % 2;
        check_latents<double>(p, cp, layout);
      }
    }
  }
}

TEST_CASE("what travels is the latent: bytes of a forward and a backward pass by copies") {
  const Widths w;
  for (const int latent_dim : {0, w.latent()}) {
    for (const ring::Layout layout : {ring::Layout::zigzag, ring::Layout::balanced}) {
      const int cp = 4;
      const ring::Plan plan = ring::plan(cp,
                                         {.batch = 2,
                                          .tokens = 96,
                                          .q_heads = 2,
                                          .kv_heads = 2,
                                          .qk_dim = w.qk_dim(),
                                          .v_dim = w.v_dim,
                                          .latent_dim = latent_dim,
                                          .cu_seqlens = {0, 50, 53, 61, 90}},
                                         {.transport = Transport::peer, .layout = layout});
      run_ranks(cp, [&](ThreadComm& world) {
        const int rank = world.rank();
        const HostBuffer scratch(plan.footprint().scratch), persistent(plan.footprint().persistent),
            pinned(plan.footprint().pinned_host), lse(plan.footprint().saved);
        HostArena arena(world, plan.footprint().symmetric);
        const counting::CountingExecutor executor;
        auto op = ring::bind(plan, executor, GroupComm<ThreadComm>(world),
                             Memory<HostArena>{scratch.block(), persistent.block(), pinned.block(), &arena});
        const std::int64_t tokens = plan.local_tokens(rank);
        std::vector<float> q(static_cast<std::size_t>(2 * tokens * 64), 0.25f), result(q);
        const auto tensor = [&](std::vector<float>& data, int dim) {
          return TensorRef(data.data(), {2, tokens, 2, dim});
        };
        const auto latent = [&](std::vector<float>& data) { return TensorRef(data.data(), {2, tokens, w.latent()}); };
        HostExpander<float> expander(w, 2, std::vector<double>(HostExpander<float>::weight_count(w, 2), 0.1));
        std::vector<float> out(q), dq(q), dk(q), dv(q);
        ring::Saved saved(lse.block());
        executor.reset();
        if (latent_dim > 0) {
          op.forward_latent({}, expander, tensor(q, w.qk_dim()), latent(q), tensor(out, w.v_dim), saved);
        } else {
          op.forward({}, tensor(q, w.qk_dim()), tensor(q, w.qk_dim()), tensor(q, w.v_dim), tensor(out, w.v_dim), saved);
        }
        std::int64_t keys = 0, sums = 0;  // rows that this rank sends
        for (int step = 1; step < cp; ++step) {
          keys += plan.work.travelling_rows(plan.work.reader(rank, step), step);
          sums += plan.work.summed_keys(plan.work.owner(rank, step), step).rows();
        }
        const std::int64_t row_bytes = 2 * 4 * (latent_dim > 0 ? latent_dim : 2 * (w.qk_dim() + w.v_dim));
        if (executor.copied_bytes() != keys * row_bytes) throw std::runtime_error("forward moved other bytes");
        executor.reset();
        if (latent_dim > 0) {
          op.backward_latent({}, expander, tensor(q, w.v_dim), saved, tensor(dq, w.qk_dim()), latent(dk));
        } else {
          op.backward({}, tensor(q, w.v_dim), saved, tensor(dq, w.qk_dim()), tensor(dk, w.qk_dim()),
                      tensor(dv, w.v_dim));
        }
        if (executor.copied_bytes() != (keys + sums) * row_bytes)
          throw std::runtime_error("backward moved other bytes");
      });
    }
  }
}

TEST_CASE("scratch holds one expanded block, and slots hold latents") {
  const ring::Shape shape{
      .tokens = 1024, .q_heads = 16, .kv_heads = 16, .qk_dim = 192, .v_dim = 128, .dtype = DType::bf16};
  ring::Shape compressed = shape;
  compressed.latent_dim = 576;
  const ring::Options options{.transport = Transport::peer};
  const Footprint plain = ring::plan(4, shape, options).footprint(),
                  latent = ring::plan(4, compressed, options).footprint();
  const std::size_t tokens = 256;
  CHECK(plain.symmetric == tokens * 2 * 16 * 320 * (2 + 4));
  CHECK(latent.symmetric == tokens * 2 * 576 * (2 + 4));
  CHECK(latent.scratch - plain.scratch == tokens * (16 * 320 * 2 + 576 * 4));  // expanded, and a smaller own part
}

TEST_CASE("A16: calls for keys and values on a plan of latents, and the other way round; A02: a negative latent_dim") {
  const Widths w;
  const auto expect_call = [&](const std::string& start, int latent_dim) {
    const ring::Plan plan = ring::plan(
        2, {.tokens = 8, .qk_dim = w.qk_dim(), .v_dim = w.v_dim, .latent_dim = latent_dim, .dtype = DType::f64});
    for (const bool forward : {true, false}) {
      expect_error<shape_error>(start, [&] {
        run_ranks(2, [&](ThreadComm& world) {
          ring_run::Bound bound(plan, world);
          std::vector<double> data(4 * 16);
          const TensorRef q(data.data(), {1, 4, 1, w.qk_dim()}), v(data.data(), {1, 4, 1, w.v_dim}),
              latent(data.data(), {1, 4, w.latent()});
          HostExpander<double> expander(w, 1, std::vector<double>(HostExpander<double>::weight_count(w, 1)));
          ring::Saved saved;
          if (latent_dim > 0 && forward) bound.op.forward({}, q, q, v, v, saved);
          if (latent_dim > 0 && !forward) bound.op.backward({}, v, saved, q, q, v);
          if (latent_dim == 0 && forward) bound.op.forward_latent({}, expander, q, latent, v, saved);
          if (latent_dim == 0 && !forward) bound.op.backward_latent({}, expander, v, saved, q, latent);
        });
      });
    }
  };
  expect_call("pleat[A16]: a plan with latent_dim=9 moves latents", w.latent());
  expect_call("pleat[A16]: a plan with latent_dim=0 moves keys and values", 0);
  expect_error<shape_error>("pleat[A02]",
                            [] { ring::plan(2, {.tokens = 8, .qk_dim = 8, .v_dim = 8, .latent_dim = -1}); });
}

}  // namespace
