// The proof of signal_protocol.hpp: its classes drive the streams of a few ranks, and every interleaving of their steps
// is explored, with graphs that are captured once and replayed, with late ranks, and with a failure in every state. The
// variants that were thought of and are wrong must be found.
#include <functional>
#include <vector>

#include <doctest/doctest.h>

#include "unit/comm/signal_model.hpp"

namespace {

using namespace signal_model;

// The uses. Each records one round of all ranks.

/// The other ranks, from the next on.
std::vector<int> peers_of(const Model& model, int rank) {
  std::vector<int> peers;
  for (int i = 1; i < model.ranks(); ++i) peers.push_back((rank + i) % model.ranks());
  return peers;
}
constexpr int free_channel(int slot) {
  return 2 * slot;
}
constexpr int full_channel(int slot) {
  return 2 * slot + 1;
}

/// The ring: a slot starts free, and its credit rests with the writer between rounds and between graphs.
void ring_bind(Model& model, int slots) {
  for (int r = 0; r < model.ranks(); ++r) {
    for (int slot = 0; slot < slots; ++slot) {
      model.signal(r, (r + model.ranks() - 1) % model.ranks(), free_channel(slot), 0);
    }
  }
}
void ring_round(Model& model, int slot, bool awaits_free = true) {
  for (int r = 0; r < model.ranks(); ++r) {
    const int next = (r + 1) % model.ranks(), last = (r + model.ranks() - 1) % model.ranks();
    if (awaits_free) model.await(next, r, free_channel(slot), 0);
    model.write(r, r, next, slot, 0);
    model.signal(r, next, full_channel(slot), 0);
    model.await(last, r, full_channel(slot), 1);
    model.read(r, last, r, slot, 1);
    model.signal(r, last, free_channel(slot), 1);
  }
}
/// A gather: all push to all; no credit rests between rounds.
void gather_round(Model& model, int slot) {
  for (int r = 0; r < model.ranks(); ++r) {
    for (const int peer : peers_of(model, r)) model.signal(r, peer, free_channel(slot), 0);
    for (const int peer : peers_of(model, r)) {
      model.await(peer, r, free_channel(slot), 0);
      model.write(r, r, peer, slot, 0);
      model.signal(r, peer, full_channel(slot), 0);
    }
    for (const int peer : peers_of(model, r)) {
      model.await(peer, r, full_channel(slot), 0);
      model.read(r, peer, r, slot, 0);
    }
  }
}
/// Everybody writes to everybody between two barriers and reads after the second.
void barrier_round(Model& model, bool through_one_flag = false) {
  const auto barrier = [&](int rank, int channel) {
    ModelPeers peers{&model, rank};
    if (!through_one_flag) return pleat::peer_barrier(peers, channel, 0);
    for (const int peer : peers_of(model, rank)) peers.signal(peer, channel, 0);
    for (const int peer : peers_of(model, rank)) peers.await(peer, channel, 0);
  };
  for (int r = 0; r < model.ranks(); ++r) {
    for (const int peer : peers_of(model, r)) model.write(r, r, peer, 0, 0);
    barrier(r, 0);
    for (const int peer : peers_of(model, r)) model.read(r, peer, r, 0, 0);
    barrier(r, through_one_flag ? 0 : 2);
  }
}

/// Calls, replays of a graph captured after them, a call, more replays, and a second graph: `round(model, i)` is a
/// call, and `rounds` of them make a graph.
void calls_and_replays(Model& model, int rounds, const std::function<void(Model&, int)>& round) {
  const auto several = [&](int first, int count) {
    return [&round, first, count](Model& m) {
      for (int i = first; i < first + count; ++i) round(m, i);
    };
  };
  several(0, 1)(model);
  const Model::Graph graph = model.capture(several(1, rounds));
  model.replay(graph, 2);
  several(1 + rounds, 1)(model);
  model.replay(graph);
  model.replay(model.capture(several(0, 1)));
}

Model ring(int ranks, int slots, int streams, int rounds, Variant variant = Variant::none) {
  Model model(ranks, 2 * slots, streams, variant);
  ring_bind(model, slots);
  calls_and_replays(model, rounds, [&](Model& m, int i) { ring_round(m, i % slots); });
  return model;
}
/// Only replays of one graph, after the bind.
Model replayed_ring(int ranks, int slots, int rounds, int replays, Variant variant = Variant::none, int streams = 1,
                    bool awaits_free = true) {
  Model model(ranks, 2 * slots, streams, variant);
  ring_bind(model, slots);
  model.replay(model.capture([&](Model& m) {
    for (int i = 0; i < rounds; ++i) ring_round(m, i % slots, awaits_free);
  }),
               replays);
  return model;
}
Model replayed_barrier(int ranks, int rounds, int replays, bool through_one_flag) {
  Model model(ranks, 4);
  model.replay(model.capture([&](Model& m) {
    for (int i = 0; i < rounds; ++i) barrier_round(m, through_one_flag);
  }),
               replays);
  return model;
}

TEST_CASE("a flag counts until its first capture, then holds a credit") {
  SignalWriter writer;
  SignalWaiter waiter;
  for (std::uint64_t k = 1; k < 4; ++k) {
    CHECK(writer.next() == k);
    const SignalWait wait = waiter.next(false);
    CHECK(wait.at_least == k);
    CHECK_FALSE(wait.takes);
    CHECK(waiter.count() == k);
  }
  const std::uint64_t resting = writer.next();  // the credit that the first captured await takes
  for (const bool is_captured : {true, true, false}) {
    const SignalWait wait = waiter.next(is_captured);
    CHECK(wait.takes);
    CHECK(pleat::ends_wait(resting, wait.at_least));
    CHECK_FALSE(pleat::ends_wait(resting - 1, wait.at_least));
    CHECK_FALSE(pleat::ends_wait(signal_value::taken, wait.at_least));
    CHECK(pleat::ends_wait(writer.next(), wait.at_least));
    CHECK(waiter.count() == 3);
    CHECK(waiter.holds_credit());
  }
}

TEST_CASE("the compare of streams is cyclic and signed") {
  CHECK(pleat::ends_wait(5, 5));
  CHECK(pleat::ends_wait(6, 5));
  CHECK_FALSE(pleat::ends_wait(4, 5));
  CHECK(pleat::ends_wait(2, ~std::uint64_t{0} - 2));
  CHECK_FALSE(pleat::ends_wait(~std::uint64_t{0}, 1));
  CHECK(pleat::ends_wait(signal_value::released, std::uint64_t{1} << 61));
}

TEST_CASE("flags of an arena: each its own word, at the same place on every rank") {
  constexpr FlagLayout layout{3};
  static_assert(layout.bytes(4) == 4 * 3 * 8);
  std::vector<bool> used(layout.words(4));
  for (int channel = 0; channel < 4; ++channel) {
    for (int source = 0; source < 3; ++source) {
      REQUIRE(layout.word(source, channel) < used.size());
      CHECK_FALSE(used[layout.word(source, channel)]);
      used[layout.word(source, channel)] = true;
    }
    CHECK(layout.word(2, channel) < layout.words(channel + 1));  // a prefix of the area holds the channels so far
  }
}

TEST_CASE("credits pass every interleaving of calls and replays") {
  std::size_t states = 0;
  for (const int ranks : {2, 3}) {
    for (const int slots : {1, 2}) {
      for (const int rounds : {1, 2, 3}) {
        CAPTURE(ranks);
        CAPTURE(slots);
        CAPTURE(rounds);
        const Found found = explored(ring(ranks, slots, 1, rounds));
        CHECK(found.is_right());
        states += found.states;
      }
    }
  }
  CHECK(explored(ring(2, 1, 2, 1)).is_right());  // writes and reads on two streams
  CHECK(explored(replayed_ring(2, 2, 3, 3, Variant::none, 2)).is_right());
  CHECK(states > 10000);  // it did explore
}

TEST_CASE("gathers and barriers pass every interleaving of calls and replays") {
  for (const int rounds : {1, 2}) {
    Model gather(2, 4);
    calls_and_replays(gather, rounds, [](Model& m, int i) { gather_round(m, i % 2); });
    CHECK(explored(gather).is_right());
    Model barrier(2, 4);
    calls_and_replays(barrier, rounds, [](Model& m, int) { barrier_round(m); });
    CHECK(explored(barrier).is_right());
  }
  Model gather(3, 2);
  gather.replay(gather.capture([](Model& m) { gather_round(m, 0); }), 2);
  CHECK(explored(gather).is_right());
  CHECK(explored(replayed_barrier(3, 1, 2, false)).is_right());
}

TEST_CASE("outside graphs a flag counts: a barrier through one flag is right, and so are several signals at once") {
  Model barrier(2, 1);
  for (int i = 0; i < 3; ++i) barrier_round(barrier, true);
  CHECK(explored(barrier).is_right());
  Model ahead(2, 1);
  for (int i = 0; i < 3; ++i) ahead.signal(0, 1, 0, 0);
  for (int i = 0; i < 3; ++i) ahead.await(0, 1, 0, 0);
  CHECK(explored(ahead).is_right());
}

TEST_CASE("in a graph, a barrier through one flag loses a signal and deadlocks") {
  for (const int ranks : {2, 3}) {
    CHECK(explored(replayed_barrier(ranks, 1, ranks == 2 ? 3 : 1, true)).deadlock);
  }
}

TEST_CASE("a writer that does not await its credit overwrites") {
  const Found found = explored(replayed_ring(2, 1, 1, 3, Variant::none, 2, false));
  CHECK(found.overwrite);
  CHECK(found.wrong_content);
}

TEST_CASE("a flag that is taken after the answer wipes out the next signal") {
  const Found found = explored(replayed_ring(2, 1, 1, 3, Variant::takes_late));
  CHECK(found.deadlock);
}

TEST_CASE("counts that are baked into a graph let its second replay pass at once") {
  const Found found = explored(replayed_ring(2, 1, 1, 3, Variant::counts_in_graphs));
  CHECK((found.overwrite && found.wrong_content));
}

TEST_CASE("two words in turn deadlock where a graph has an odd number of signals") {
  const auto two_words = [](int rounds) {
    Model model(2, 2, 1, Variant::two_words);
    model.replay(model.capture([](Model& m) { ring_bind(m, 1); }));
    model.replay(model.capture([&](Model& m) {
      for (int i = 0; i < rounds; ++i) ring_round(m, 0);
    }),
                 3);
    return explored(model);
  };
  CHECK(two_words(2).is_right());
  CHECK(two_words(1).deadlock);
  CHECK(two_words(3).deadlock);
}

TEST_CASE("whenever a rank fails, releases end all waits of the others") {
  const World world{.fails = true};
  CHECK(explored(ring(2, 1, 1, 1), world).is_right());
  CHECK(explored(replayed_ring(2, 1, 1, 2, Variant::none, 2), world).is_right());
  CHECK(explored(replayed_ring(3, 1, 1, 1), world).is_right());
  CHECK(explored(replayed_barrier(2, 1, 2, false), world).is_right());
  Model calls(3, 2);
  ring_bind(calls, 1);
  ring_round(calls, 0);
  CHECK(explored(calls, world).is_right());
}

TEST_CASE("a release that writes ~0 ends no wait") {
  CHECK(explored(replayed_ring(2, 1, 1, 1), {.fails = true, .release = ~std::uint64_t{0}}).hangs_after_failure);
  Model calls(2, 2);
  ring_bind(calls, 1);
  ring_round(calls, 0);
  CHECK(explored(calls, {.fails = true, .release = ~std::uint64_t{0}}).hangs_after_failure);
}

TEST_CASE("one release is not enough: graphs take it, and live peers write over it") {
  CHECK(explored(replayed_ring(2, 1, 1, 3), {.fails = true, .releases_once = true}).hangs_after_failure);
}

}  // namespace
