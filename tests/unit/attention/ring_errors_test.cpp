// Ring attention refuses what cannot be, with the same error on every rank.
#include <pleat/attention/ring.hpp>

#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "unit/attention/expect_error.hpp"
#include "unit/attention/ring_run.hpp"

namespace {

using namespace pleat;
using ring_run::Bound;

/// Tensors of one rank of a small plan, and calls that can be spoiled one by one.
struct Call {
  explicit Call(const ring::Plan& plan, int rank)
      : tokens(plan.local_tokens(rank)),
        dim(plan.shape.qk_dim),
        data(static_cast<std::size_t>(tokens * dim), 0.5f),
        other(data),
        lse(plan.footprint().saved, 0xff),
        saved(lse.block()) {}
  TensorRef in() { return TensorRef(data.data(), {1, tokens, 1, dim}); }
  TensorRef result() { return TensorRef(other.data(), {1, tokens, 1, dim}); }
  TensorRef strided(std::int64_t token_stride, std::int64_t dim_stride) {
    TensorRef t(data.data(), DType::f32, {});
    t.push_extent(1, 0);
    t.push_extent(tokens, token_stride);
    t.push_extent(1, 0);
    t.push_extent(dim, dim_stride);
    return t;
  }
  std::int64_t tokens, dim;
  std::vector<float> data, other;
  HostBuffer lse;
  ring::Saved saved;
};

/// `spoil(op, call)` throws on every rank the error that starts with `start`.
template <class Error, class Spoil>
void expect_on_every_rank(const std::string& start, const ring::Plan& plan, Spoil spoil) {
  int seen = 0;
  std::mutex mutex;
  expect_error<Error>(start, [&] {
    run_ranks(plan.cp, [&](ThreadComm& world) {
      try {
        Bound bound(plan, world);
        Call call(plan, world.rank());
        spoil(bound.op, call);
      } catch (const Error& e) {
        const std::lock_guard lock(mutex);
        seen += std::string(e.what()).find(start) == 0;
        throw;
      }
    });
  });
  CHECK(seen == plan.cp);
}
ring::Plan small_plan(std::int64_t dim = 4) {
  return ring::plan(
      2, {.tokens = 8, .qk_dim = static_cast<int>(dim), .v_dim = static_cast<int>(dim), .dtype = DType::f32});
}

TEST_CASE("A01, A02, A03: a plan that cannot be is the same error on every rank") {
  const auto expect_everywhere = [](const std::string& start, const ring::Shape& shape) {
    expect_error<shape_error>(start, [&] { run_ranks(3, [&](ThreadComm&) { ring::plan(3, shape); }); });
  };
  expect_everywhere("pleat[A01]", {.tokens = 12, .q_heads = 4, .kv_heads = 3, .qk_dim = 8, .v_dim = 8});
  expect_everywhere("pleat[A02]", {.tokens = -12, .qk_dim = 8, .v_dim = 8});
  expect_everywhere("pleat[A03]", {.tokens = 12, .qk_dim = 8, .v_dim = 8, .cu_seqlens = {0, 13}});
}

TEST_CASE("A04: a last axis that is not contiguous, an output that overlaps itself") {  // TE#1539
  expect_on_every_rank<shape_error>(
      "pleat[A04]: the last axis of q has stride 4", small_plan(), [](auto& op, Call& call) {
        op.forward({}, call.strided(1, 4), call.in(), call.in(), call.result(), call.saved);
      });
  expect_on_every_rank<shape_error>(
      "pleat[A04]: the last axis of dout has stride 0", small_plan(), [](auto& op, Call& call) {
        op.forward({}, call.in(), call.in(), call.in(), call.result(), call.saved);
        op.backward({}, call.strided(0, 0), call.saved, call.result(), call.result(), call.result());
      });
  expect_on_every_rank<shape_error>("pleat[A04]: axis 1 of out has stride 0", small_plan(), [](auto& op, Call& call) {
    op.forward({}, call.in(), call.in(), call.in(), call.strided(0, 1), call.saved);
  });
}

TEST_CASE("a dout that is expanded over tokens is right") {  // TE#1539
  const ring::Plan plan = small_plan();
  run_ranks(2, [&](ThreadComm& world) {
    Bound bound(plan, world);
    Call call(plan, world.rank());
    for (std::size_t i = 0; i < call.data.size(); ++i)
      call.data[i] = static_cast<float>(i % 7) + static_cast<float>(world.rank());
    std::vector<float> one_row{1, 2, 3, 4}, rows, out(call.data.size());
    for (std::int64_t row = 0; row < call.tokens; ++row) rows.insert(rows.end(), one_row.begin(), one_row.end());
    TensorRef expanded(one_row.data(), DType::f32, {1});
    expanded.push_extent(call.tokens, 0);
    expanded.push_extent(1, 4);
    expanded.push_extent(4, 1);
    const TensorRef full(rows.data(), {1, call.tokens, 1, 4}), outs(out.data(), {1, call.tokens, 1, 4});
    std::vector<float> gradients[2][3];
    for (int i : {0, 1}) {
      for (auto& gradient : gradients[i]) gradient.assign(call.data.size(), std::nanf(""));
      const auto tensor = [&](int which) { return TensorRef(gradients[i][which].data(), {1, call.tokens, 1, 4}); };
      bound.op.forward({}, call.in(), call.in(), call.in(), outs, call.saved);
      bound.op.backward({}, i == 0 ? full : expanded, call.saved, tensor(0), tensor(1), tensor(2));
    }
    for (int which : {0, 1, 2}) {
      if (gradients[0][which] != gradients[1][which]) throw std::runtime_error("an expanded dout gave other gradients");
    }
  });
}

TEST_CASE("T07: a tensor of the wrong extents or dtype") {
  expect_on_every_rank<shape_error>("pleat[T07]: v is", small_plan(), [](auto& op, Call& call) {
    op.forward({}, call.in(), call.in(), std::vector<float>(16), call.result(), call.saved);
  });
}

TEST_CASE("T12: an output that may only be read") {
  const auto constant = [](const TensorRef& t) {
    return TensorRef(static_cast<const float*>(t.data()), {1, t.extent(1), 1, 4});
  };
  expect_on_every_rank<shape_error>(
      "pleat[T12]: out is f32 [1, 4, 1, 4] on host, which may only be read", small_plan(), [&](auto& op, Call& call) {
        op.forward({}, constant(call.in()), constant(call.in()), call.in(), constant(call.result()), call.saved);
      });
  expect_on_every_rank<shape_error>("pleat[T12]: dv is f32 [1, 4, 1, 4]", small_plan(), [&](auto& op, Call& call) {
    op.forward({}, constant(call.in()), call.in(), call.in(), call.result(), call.saved);
    op.backward({}, constant(call.in()), call.saved, call.result(), call.result(), constant(call.result()));
  });
}

TEST_CASE("T07: a tensor without data") {
  expect_on_every_rank<shape_error>("pleat[T07]: k is f32 [1, 4, 1, 4] on host, which has no data", small_plan(),
                                    [](auto& op, Call& call) {
                                      op.forward({}, call.in(), TensorRef(static_cast<float*>(nullptr), {1, 4, 1, 4}),
                                                 call.in(), call.result(), call.saved);
                                    });
  expect_on_every_rank<shape_error>("pleat[T07]: dout is", small_plan(), [](auto& op, Call& call) {
    op.forward({}, call.in(), call.in(), call.in(), call.result(), call.saved);
    op.backward({}, TensorRef(static_cast<float*>(nullptr), {1, 4, 1, 4}), call.saved, call.result(), call.result(),
                call.result());
  });
}

TEST_CASE("C36: ranks that have planned differently are told so at bind, by both transports") {
  const ring::Shape shape{.tokens = 16, .q_heads = 2, .kv_heads = 2, .qk_dim = 4, .v_dim = 4, .dtype = DType::f32};
  const auto expect = [&](const std::string& theirs, const std::string& first, auto change) {
    for (const Transport transport : {Transport::collective, Transport::peer}) {
      std::string text;
      try {
        run_ranks(3, [&](ThreadComm& world) {
          ring::Shape mine = shape;
          mine.cu_seqlens = {0, 5, 16};
          ring::Options options{.transport = transport, .layout = ring::Layout::zigzag};
          if (world.rank() == 1) change(mine, options);
          Bound bound(ring::plan(3, mine, options), world);
        });
      } catch (const comm_error& e) {
        text = e.what();
      }
      CAPTURE(text);
      CHECK(text.find("pleat[C36]: rank 1 binds ring attention with " + theirs) == 0);
      CHECK(text.find(", rank 0 with " + first) != std::string::npos);
      CHECK(text.find("; plan alike on every rank of {0, 1, 2}") != std::string::npos);
    }
  };
  expect("tokens=19, ", "tokens=16, ", [](auto& s, auto&) { s.tokens = 19; });
  expect("kv_heads=1, ", "kv_heads=2; ", [](auto& s, auto&) { s.kv_heads = 1; });
  expect("dtype=f64, ", "dtype=f32; ", [](auto& s, auto&) { s.dtype = DType::f64; });
  expect("causal=false, ", "causal=true; ", [](auto&, auto& o) { o.causal = false; });
  expect("scale=0.25, ", "scale=0.5; ", [](auto&, auto& o) { o.scale = 0.25; });
  expect("layout=balanced, hash", "layout=zigzag, hash", [](auto&, auto& o) { o.layout = ring::Layout::balanced; });
  expect("documents=1, hash", "documents=2, hash", [](auto& s, auto&) { s.cu_seqlens = {0, 16}; });
  expect("hash of documents and split=", "hash of documents and split=", [](auto& s, auto&) {
    s.cu_seqlens = {0, 6, 16};
  });
}

TEST_CASE("C36: another operation, or a split over ranks that have it otherwise") {
  expect_error<comm_error>(
      "pleat[C36]: rank 1 binds a, rank 0 b; bind the same operations in the same order on every rank of {0, 1}", [] {
        run_ranks(2, [](ThreadComm& world) {
          const HostBuffer scratch(agreement_bytes(2), 0xff);
          agree_on(world.rank() == 1 ? "a" : "b", std::array{PlanField{"x", 1}}, GroupComm<ThreadComm>(world),
                   scratch.block(), {});
        });
      });
  CHECK(agreement_bytes(1) == 0);
  CHECK_NOTHROW(agree_on("alone", std::array{PlanField{"x", 1}}, GroupComm<ThreadComm>(), {}, {}));
  CHECK(PlanHash().add(1).add(2).value() != PlanHash().add(2).add(1).value());
  CHECK(PlanHash().add_all(std::vector{0, 0}).value() != PlanHash().add_all(std::vector{0}).value());
}

TEST_CASE("C36: documents of a step are compared where the plan asks for it") {
  ring::Options options{.layout = ring::Layout::zigzag, .compares_documents = true};
  const auto place = [&](bool alike) {
    const ring::Plan plan = ring::plan(2, {.tokens = 16, .qk_dim = 4, .v_dim = 4}, options);
    run_ranks(2, [&](ThreadComm& world) {
      Bound bound(plan, world);
      const std::vector<std::int64_t> cu_seqlens{0, alike ? 3 : 3 + world.rank(), 16};
      const ring::Work work = plan.documents(cu_seqlens);
      const HostBuffer staging(work.placed_bytes()), memory(work.placed_bytes());
      bound.op.place(work, staging.block(), memory.block(), {});
    });
  };
  CHECK_NOTHROW(place(true));
  expect_error<comm_error>("pleat[C36]: rank 1 binds documents of ring attention with hash", [&] { place(false); });
  options.compares_documents = false;
  CHECK_NOTHROW(place(false));
}

TEST_CASE("A05, C29: a group of another size, peer transport without an arena that reaches the group") {
  ring::Plan peer = small_plan();
  peer.transport = Transport::peer;
  const auto bind = [](const ring::Plan& plan, GroupComm<ThreadComm> group, HostArena* arena) {
    HostBuffer scratch(plan.footprint().scratch);
    ring::bind(plan, HostExecutor{}, group, Memory<HostArena>{scratch.block(), {}, {}, arena});
  };
  expect_error<shape_error>("pleat[A05]: a plan for cp=2 was bound to a group of 3 ranks",
                            [&] { run_ranks(3, [&](ThreadComm& world) { bind(small_plan(), world, nullptr); }); });
  expect_error<comm_error>(
      "pleat[C29]: ring attention planned for 2 ranks needs a group of 2 and an arena that reaches",
      [&] { run_ranks(2, [&](ThreadComm& world) { bind(peer, world, nullptr); }); });
  expect_error<comm_error>("pleat[C29]: ring attention", [&] {
    run_ranks(2, [&](ThreadComm& world) {
      HostArena own(GroupComm<ThreadComm>(world.rank()), 1 << 20);
      bind(peer, world, &own);
    });
  });
}

TEST_CASE("a ring that moves bytes by exchanges is bound without an arena, one by peer transport is not: C29") {
  const auto run = [](const ring::Plan& plan) {
    run_ranks(2, [&](ThreadComm& world) {
      const Footprint need = plan.footprint();
      HostBuffer scratch(need.scratch), persistent(need.persistent), pinned(need.pinned_host);
      auto op = ring::bind(plan, HostExecutor{}, GroupComm<ThreadComm>(world),
                           Memory<>{scratch.block(), persistent.block(), pinned.block()});
      Call call(plan, world.rank());
      op.forward({}, call.in(), call.in(), call.in(), call.result(), call.saved);
      op.backward({}, call.in(), call.saved, call.result(), call.result(), call.result());
    });
  };
  CHECK_NOTHROW(run(small_plan()));
  ring::Plan peer = small_plan();
  peer.transport = Transport::peer;
  expect_error<comm_error>("pleat[C29]: ring attention planned with Transport::peer was bound without an arena",
                           [&] { run(peer); });
}

TEST_CASE("A06: a head dim the kernel does not take, on every rank") {
  expect_on_every_rank<shape_error>("pleat[A06]: qk_dim=1100", small_plan(1100), [](auto& op, Call& call) {
    op.forward({}, call.in(), call.in(), call.in(), call.result(), call.saved);
    op.backward({}, call.in(), call.saved, call.result(), call.result(), call.result());
  });
}

TEST_CASE("A07: backward without a forward of the same operation") {
  expect_on_every_rank<shape_error>("pleat[A07]", small_plan(), [](auto& op, Call& call) {
    op.backward({}, call.in(), call.saved, call.result(), call.result(), call.result());
  });
}

TEST_CASE("A07: a Saved of an operation that is gone, wherever the next one lies") {
  for (int i = 0; i < 10; ++i) {
    expect_error<shape_error>("pleat[A07]", [] {
      run_ranks(2, [&](ThreadComm& world) {
        const ring::Plan plan = small_plan();
        Call call(plan, world.rank());
        std::optional<Bound> bound(std::in_place, plan, world);
        bound->op.forward({}, call.in(), call.in(), call.in(), call.result(), call.saved);
        bound.reset();
        bound.emplace(plan, world);
        bound->op.backward({}, call.in(), call.saved, call.result(), call.result(), call.result());
      });
    });
  }
}

TEST_CASE("A21: a Saved whose memory a later forward has overwritten") {
  const auto forward = [](auto& op, Call& call, ring::Saved& saved) {
    op.forward({}, call.in(), call.in(), call.in(), call.result(), saved);
  };
  const auto backward = [](auto& op, Call& call, const ring::Saved& saved) {
    std::vector<float> gradients(call.data.size());
    const TensorRef t(gradients.data(), {1, call.tokens, 1, call.dim});
    op.backward({}, call.in(), saved, t, t, t);
  };
  expect_on_every_rank<shape_error>("pleat[A21]", small_plan(), [&](auto& op, Call& call) {
    ring::Saved second(call.lse.block());
    forward(op, call, call.saved);
    forward(op, call, second);
    backward(op, call, second);
    backward(op, call, call.saved);
  });
  run_ranks(2, [&](ThreadComm& world) {  // memory of its own each, and one filled anew
    const ring::Plan plan = small_plan();
    Bound bound(plan, world);
    Call call(plan, world.rank());
    const HostBuffer memory(plan.footprint().saved);
    ring::Saved second(memory.block());
    for (int i = 0; i < 100; ++i) {
      forward(bound.op, call, call.saved);
      forward(bound.op, call, second);
      backward(bound.op, call, call.saved);
      backward(bound.op, call, second);
    }
    backward(bound.op, call, bound.op.restore(call.lse.block(), call.in(), call.in(), call.in(), call.result()));
  });
}

TEST_CASE("A20: a ring that was moved from; the one it was moved to goes on") {
  for (const bool forward : {true, false}) {
    expect_on_every_rank<shape_error>(
        "pleat[A20]: a ring is used after it was moved from", small_plan(), [&](auto& op, Call& call) {
          auto moved = std::move(op);
          moved.forward({}, call.in(), call.in(), call.in(), call.result(), call.saved);
          if (forward) {
            op.forward({}, call.in(), call.in(), call.in(), call.result(), call.saved);
          } else {
            op.backward({}, call.in(), call.saved, call.result(), call.result(), call.result());
          }
        });
  }
}

TEST_CASE("A08: work of another number of ranks") {
  const auto place = [](auto& op, const ring::Work& work) {
    const HostBuffer staging(work.placed_bytes()), memory(work.placed_bytes());
    op.place(work, staging.block(), memory.block(), {});
  };
  expect_on_every_rank<shape_error>("pleat[A08]: work for 3 ranks", small_plan(), [&](auto& op, Call&) {
    place(op, ring::plan(3, {.tokens = 12, .qk_dim = 4, .v_dim = 4}).work);
  });
  expect_on_every_rank<shape_error>("pleat[A08]: work for 0 ranks", small_plan(),
                                    [&](auto& op, Call&) { place(op, ring::Work()); });
}

TEST_CASE("T02: a block whose address is no multiple of 128") {
  expect_on_every_rank<shape_error>("pleat[T02]: a block of 256 bytes begins 1 bytes past a multiple of 128",
                                    small_plan(), [](auto& op, Call& call) {
                                      const HostBuffer memory(512);
                                      ring::Saved saved(Block{memory.data() + 1, 256});
                                      op.forward({}, call.in(), call.in(), call.in(), call.result(), saved);
                                    });
}

TEST_CASE("a block of memory that is too small is refused") {
  const ring::Plan plan = small_plan();
  const Footprint need = plan.footprint();
  const auto run_with = [&](const Footprint& given) {
    run_ranks(2, [&](ThreadComm& world) {
      HostBuffer scratch(given.scratch), persistent(given.persistent), pinned(given.pinned_host);
      HostArena arena(world, 0);
      auto op = ring::bind(plan, HostExecutor{}, GroupComm<ThreadComm>(world),
                           Memory<HostArena>{scratch.block(), persistent.block(), pinned.block(), &arena});
      Call call(plan, world.rank());
      op.forward({}, call.in(), call.in(), call.in(), call.result(), call.saved);
      op.backward({}, call.in(), call.saved, call.result(), call.result(), call.result());
    });
  };
  CHECK_NOTHROW(run_with(need));
  for (std::size_t Footprint::*part : {&Footprint::scratch, &Footprint::persistent, &Footprint::pinned_host}) {
    Footprint given = need;
    given.*part -= 1;
    expect_error<shape_error>("pleat[T02]", [&] { run_with(given); });
  }
}

}  // namespace
