// The ring's schedule as data: for every timing of streams and ranks, no wait hangs and no memory is used too early.
#include <pleat/attention/ring.hpp>
#include <pleat/core/host/buffer.hpp>

#include <doctest/doctest.h>

#include "unit/attention/stream_model.hpp"

namespace {

using namespace stream_model;

/// One rank's tensors; the user writes and reads them on the compute stream.
struct RankMemory {
  explicit RankMemory(const ring::Plan& plan)
      : tensors(7 * tensor_bytes(plan)),
        scratch(plan.footprint().scratch),
        persistent(plan.footprint().persistent),
        pinned(plan.footprint().pinned_host),
        arena(plan.footprint().symmetric),
        lse(plan.footprint().saved) {}
  static std::size_t tensor_bytes(const ring::Plan& plan) {
    return static_cast<std::size_t>(plan.max_local_tokens() * plan.shape.q_heads * plan.shape.qk_dim * 4);
  }
  HostBuffer tensors, scratch, persistent, pinned, arena, lse;
};

enum class Streaming { two_streams, program_order };

/// What is wrong with `calls` forward and backward pairs, one after the other with no wait between them.
std::string problem_of(int cp, std::int64_t tokens, std::vector<std::int64_t> cu_seqlens, bool causal,
                       Transport transport, Streaming streaming, std::optional<ring::Layout> layout = {},
                       ring::Launches launches = ring::Launches::per_step, int calls = 3) {
  const ring::Plan plan = ring::plan(
      cp, {.tokens = tokens, .q_heads = 2, .kv_heads = 2, .qk_dim = 4, .v_dim = 4, .cu_seqlens = std::move(cu_seqlens)},
      {.causal = causal, .transport = transport, .layout = layout, .launches = launches});
  History history;
  std::vector<RankMemory> memory;
  std::vector<std::byte*> bases;
  for (int rank = 0; rank < cp; ++rank) bases.push_back(memory.emplace_back(plan).arena.data());

  for (int rank = 0; rank < cp; ++rank) {
    RankMemory& mine = memory[static_cast<std::size_t>(rank)];
    const ModelStream compute{&history, 2 * rank};
    const Streams<ModelStream> s{compute,
                                 streaming == Streaming::two_streams ? ModelStream{&history, 2 * rank + 1} : compute};
    ModelArena arena{rank, bases};
    ModelComm comm(rank, cp);
    auto op = ring::bind(plan, ModelExecutor{}, GroupComm<ModelComm>(comm),
                         Memory<ModelArena>{mine.scratch.block(), mine.persistent.block(), mine.pinned.block(), &arena},
                         compute);
    std::vector<TensorRef> t;  // q k v out dout dq dk; dv takes the place of out
    for (std::size_t i = 0; i < 7; ++i) {
      t.emplace_back(mine.tensors.data() + i * RankMemory::tensor_bytes(plan), DType::f32,
                     std::initializer_list<std::int64_t>{1, plan.local_tokens(rank), 2, 4},
                     Device{DeviceKind::cuda, 0});
    }
    const auto user = [&](std::initializer_list<int> which, bool writes) {
      const int node = compute.add();
      for (const int i : which) history.touch(node, t[static_cast<std::size_t>(i)], writes, "the user's own work");
    };
    for (int call = 0; call < calls; ++call) {
      ring::Saved saved(mine.lse.block());
      user({0, 1, 2, 3, 4, 5, 6}, true);
      for (int again = 0; again < 2; ++again) op.forward(s, t[0], t[1], t[2], t[3], saved);  // recomputation
      const int other = compute.add();  // another operation shares the scratch
      history.touch(other, other, mine.scratch.data(), mine.scratch.size_bytes(), true, "another operation");
      user({3}, false);
      op.backward(s, t[4], saved, t[5], t[6], t[3]);
      user({3, 5, 6}, false);
      user({0, 1, 2, 3, 4, 5, 6}, true);
    }
  }
  return history.check();
}

void check_sound(Transport transport, ring::Launches launches = ring::Launches::per_step) {
  for (int cp = 1; cp <= 8; ++cp) {
    for (const Streaming streaming : {Streaming::two_streams, Streaming::program_order}) {
      CAPTURE(cp);
      CAPTURE(static_cast<int>(streaming));
      CHECK(problem_of(cp, 4 * cp, {}, true, transport, streaming, {}, launches) == "");
      CHECK(problem_of(cp, 3 * cp + 1, {}, false, transport, streaming, {}, launches) == "");
      for (const ring::Layout layout : {ring::Layout::zigzag, ring::Layout::balanced})
        CHECK(problem_of(cp, 29, {0, 2, 19, 19, 21, 27}, true, transport, streaming, layout, launches) == "");
      CHECK(problem_of(cp, 3, {0, 3}, true, transport, streaming, {}, launches) == "");
    }
  }
}
TEST_CASE("collective transport: sends match receives, no deadlock, no race, for 1 to 8 ranks") {  // nccl#2130
  check_sound(Transport::collective);
}
TEST_CASE("peer transport: every wait is answered, no deadlock, no race, for 1 to 8 ranks") {
  check_sound(Transport::peer);
}
TEST_CASE("one launch: blocks that all come at once, awaited by the stream or by the kernel, for 1 to 8 ranks") {
  check_sound(Transport::peer, ring::Launches::one);
}

TEST_CASE("the model notices a race, an unanswered wait, a deadlock and a message without a receive") {
  const ModelExecutor executor;
  std::byte memory[8];
  for (const bool waits : {true, false}) {
    History history;
    const ModelStream a{&history, 0}, b{&history, 1};
    ModelEvent event;
    executor.zero(memory, 8, a);
    executor.record(event, a);
    if (waits) executor.wait(b, event);
    executor.zero(memory + 7, 1, b);
    CHECK(history.check() == (waits ? "" : "a race between a zeroing and a zeroing"));
  }
  ModelPeers first(0, {memory, memory}), second(1, {memory, memory});
  {
    History history;
    first.await(1, 0, {&history, 0});
    second.signal(0, 1, {&history, 1});
    CHECK(history.check() == "an await that no signal answers");
  }
  {
    History history;
    first.await(1, 0, {&history, 0});
    first.signal(1, 0, {&history, 0});
    second.await(0, 0, {&history, 1});
    second.signal(0, 0, {&history, 1});
    CHECK(history.check() == "a deadlock: work that waits for itself");
  }
  {
    History history;
    ModelComm comm(0, 2);
    const Send message{memory, 8, 1};
    comm.exchange({&message, 1}, {}, DType::u8, {&history, 0});
    CHECK(history.check() == "sends and receives that do not match");
  }
}

}  // namespace
