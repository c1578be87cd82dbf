// Ring attention refuses what cannot be, with the same error on every rank.
#include <pleat/attention/ring.hpp>

#include <mutex>
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

TEST_CASE("A05: a group of another size, peer transport without an arena that reaches the group") {
  ring::Plan peer = small_plan();
  peer.transport = Transport::peer;
  const auto bind = [](const ring::Plan& plan, GroupComm<ThreadComm> group, HostArena* arena) {
    HostBuffer scratch(plan.footprint().scratch);
    ring::bind(plan, HostExecutor{}, group, Memory<HostArena>{scratch.block(), {}, {}, arena});
  };
  expect_error<shape_error>("pleat[A05]: a plan for cp=2 was bound to a group of 3 ranks",
                            [&] { run_ranks(3, [&](ThreadComm& world) { bind(small_plan(), world, nullptr); }); });
  expect_error<shape_error>("pleat[A05]: a plan with peer transport needs an arena that reaches the cp group {0, 1}",
                            [&] { run_ranks(2, [&](ThreadComm& world) { bind(peer, world, nullptr); }); });
  expect_error<shape_error>("pleat[A05]: a plan with peer transport", [&] {
    run_ranks(2, [&](ThreadComm& world) {
      HostArena own(GroupComm<ThreadComm>(world.rank()), 1 << 20);
      bind(peer, world, &own);
    });
  });
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
