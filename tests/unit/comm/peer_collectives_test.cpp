// Collectives on peer-mapped memory: the bits of the thread communicator's, whatever the delays; credits that a graph
// may capture; a result stays as it is until it is released.
#include <pleat/comm/peer_collectives.hpp>
#include <pleat/comm/run_ranks.hpp>
#include <pleat/comm/thread_arena.hpp>

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include <doctest/doctest.h>

#include <conformance/site.hpp>
#include <support/credit_discipline.hpp>
#include <support/jitter.hpp>
#include <support/watchdog.hpp>

namespace {

using namespace pleat;
using conformance::Bytes;
using conformance::pattern;
using conformance::require;
using testing_support::jitter;
using testing_support::JitterExecutor;
using HostStreams = Streams<HostStream>;

constexpr TransferTable small_table{.stores = {{{16, 2}, {64, 3}}}, .beside_bytes = 256};

/// What MappedStores does, on host memory: one channel tells of stores, the other of results given back.
class FakeStores {
 public:
  static constexpr bool exist = true;
  static constexpr int channels(int) { return 2; }
  static constexpr std::size_t persistent_bytes(int ranks, int ctas) { return static_cast<std::size_t>(ranks * ctas); }

  FakeStores(HostPeers& peers, int first_channel, int ctas, Block persistent, std::chrono::milliseconds, HostStream)
      : peers_(&peers), full_(first_channel), free_(first_channel + 1) {
    require(ctas == 3, "CTAs of the plan");
    require(persistent.size_bytes == persistent_bytes(peers.size(), ctas), "memory of the plan");
  }
  void move(const std::byte* in, std::size_t stride_bytes, std::size_t bytes, std::byte* own, int released, int ctas,
            HostStream s) {
    require(ctas == (bytes <= 16 ? 2 : 3), "CTAs of the step");
    const auto at = [&](int peer) { return peers_->base(peer) + (own - peers_->base(peers_->rank())); };
    for (int i = 1; i < peers_->size(); ++i) {
      const int peer = (peers_->rank() + i) % peers_->size();
      for (int k = 0; k < released; ++k) peers_->signal(peer, free_, s);
    }
    for (int i = 0; i < peers_->size(); ++i) {
      const auto peer = static_cast<std::size_t>((peers_->rank() + i) % peers_->size());
      const std::byte* const from = in + peer * stride_bytes;
      if (i != 0) peers_->await(static_cast<int>(peer), free_, s);
      jitter();
      if (from != at(static_cast<int>(peer))) HostExecutor{}.copy(at(static_cast<int>(peer)), from, bytes, {});
      if (i != 0) peers_->signal(static_cast<int>(peer), full_, s);
    }
    for (int i = 1; i < peers_->size(); ++i) peers_->await((peers_->rank() + i) % peers_->size(), full_, s);
  }
  void check(HostStream) const {}

 private:
  HostPeers* peers_;
  int full_, free_;
};

template <class Stores>
struct Bound {
  Bound(GroupComm<ThreadComm> comm, std::size_t block_bytes)
      : plan(plan_peer_collectives<Stores>(comm.size(), block_bytes, small_table)),
        arena(comm, plan.footprint().symmetric),
        persistent(plan.footprint().persistent),
        op(bind<Stores>(plan, JitterExecutor{}, comm,
                        Memory<HostArena>{.persistent = persistent.block(), .arena = &arena})) {}

  PeerCollectivesPlan plan;
  HostArena arena;
  HostBuffer persistent;
  PeerCollectives<JitterExecutor, HostPeers, Stores> op;
};

/// A call of all ranks, and what the thread communicator makes of it.
struct Call {
  enum class Kind { to_all, gather, gather_in_place } kind;
  DType dtype;
  std::size_t elems;
  Bytes in, expected;
  std::size_t bytes() const { return elems * size_bytes(dtype); }
};
/// Calls of many sizes in a random order that all ranks share.
std::vector<Call> random_calls(ThreadComm& world, unsigned seed) {
  const auto n = static_cast<std::size_t>(world.size());
  constexpr DType dtypes[] = {DType::u8, DType::bf16, DType::f32};
  constexpr std::size_t sizes[] = {0, 1, 3, 16, 17, 64, 65, 127, 1000};
  std::mt19937 random(seed);
  std::vector<Call> calls(100);
  for (Call& call : calls) {
    call.kind = static_cast<Call::Kind>(random() % 3);
    call.dtype = dtypes[random() % 3];
    call.elems = sizes[random() % 9];
    call.in = pattern(call.bytes() * (call.kind == Call::Kind::to_all ? n : 1), world.rank(), 0, random());
    call.expected.resize(n * call.bytes());
    if (call.kind == Call::Kind::to_all) {
      world.all_to_all(call.in.data(), call.expected.data(), call.elems, call.dtype);
    } else {
      world.all_gather(call.in.data(), call.expected.data(), call.elems, call.dtype);
    }
  }
  return calls;
}

/// Nothing but the calls themselves holds the ranks together. `lag` results stay in use, and are looked at as late as
/// possible.
template <class Stores>
void many_calls(ThreadComm& world, std::size_t lag, unsigned seed) {
  const std::vector<Call> calls = random_calls(world, seed);
  Bound<Stores> bound(GroupComm<ThreadComm>(world), 4000);
  std::vector<const std::byte*> results;
  std::size_t released = 0;
  const auto look = [&](std::size_t i) {
    const Call& call = calls[i];
    require(call.bytes() == 0 || std::memcmp(results[i], call.expected.data(), call.expected.size()) == 0, "call ", i,
            " of blocks of ", call.bytes(), " bytes");
  };
  for (const Call& call : calls) {
    jitter();
    Bytes in = call.in;
    if (call.kind == Call::Kind::to_all) {
      results.push_back(bound.op.all_to_all(in.data(), call.elems, call.dtype, {}));
    } else {
      std::byte* from = in.data();
      if (call.kind == Call::Kind::gather_in_place) {
        from = bound.op.own_block(call.elems, call.dtype);
        if (call.bytes() != 0) std::memcpy(from, in.data(), call.bytes());
      }
      results.push_back(bound.op.all_gather(from, call.elems, call.dtype, {}));
    }
    std::fill(in.begin(), in.end(), std::byte{0xee});  // nobody reads it any more
    look(results.size() - 1);
    while (results.size() - released > lag) {
      jitter();
      look(released++);
      bound.op.release({});
    }
  }
  bound.op.check_stores({});
}

TEST_CASE("the bits of the thread communicator") {
  const RunOptions options{.deadline = std::chrono::seconds(10)};
  for (const int ranks : conformance::sizes) {
    const testing_support::Watchdog watchdog("peer collectives");
    const auto seed = static_cast<unsigned>(ranks);
    for (const std::size_t lag : {0, 1}) {
      run_ranks(
          ranks, [&](ThreadComm& world) { many_calls<NoStores>(world, lag, 11 * seed); }, options);
      run_ranks(
          ranks, [&](ThreadComm& world) { many_calls<FakeStores>(world, lag, 13 * seed); }, options);
    }
  }
}

TEST_CASE("the plan records what the table says, and prints it") {
  const PeerCollectivesPlan copies = plan_peer_collectives(4, 1000, small_table);
  CHECK(copies.store_bytes == 0);
  CHECK(copies.channels() == 4);
  CHECK(copies.footprint() == Footprint{.symmetric = 2 * 4096, .channels = 4});  // 4000 bytes, rounded up
  const PeerCollectivesPlan both = plan_peer_collectives<FakeStores>(4, 1000, small_table);
  CHECK(both.footprint() == Footprint{.symmetric = 2 * 4096 + 2 * 256, .persistent = 12, .channels = 6});
  CHECK(both.channels() == 6);
  const PeerCollectivesPlan stores = plan_peer_collectives<FakeStores>(4, 32, small_table);
  CHECK(stores.footprint() == Footprint{.symmetric = 2 * 128, .persistent = 12, .channels = 6});
  CHECK(stores.stores[1].up_to_bytes == 32);
  const PeerCollectivesPlan small = plan_peer_collectives<FakeStores>(4, 16, small_table);
  CHECK(small.footprint().persistent == 8);  // the CTAs of one step
  CHECK(ctas_of(both.stores, 0) == 2);
  CHECK(ctas_of(both.stores, 16) == 2);
  CHECK(ctas_of(both.stores, 17) == 3);
  CHECK(ctas_of(both.stores, 65) == 0);
  CHECK(plan_peer_collectives<FakeStores>(1, 32, small_table).store_bytes == 0);
  CHECK(std::string(message_of(both).c_str()) ==
        "peer collectives ranks=4 block_bytes=1000 stores=16:2,64:3 beside_bytes=256");
}

TEST_CASE("the credits may be captured in graphs") {
  const auto log = std::make_shared<testing_support::DisciplineLog>();
  const auto run = [&](ThreadComm& world) {
    const PeerCollectivesPlan plan = plan_peer_collectives(3, 64, small_table);
    testing_support::DisciplineArena arena(world, plan.footprint().symmetric, log, 3);
    auto op = bind(plan, JitterExecutor{}, GroupComm<ThreadComm>(world),
                   Memory<testing_support::DisciplineArena>{.arena = &arena});
    const Bytes in(3 * 64);
    for (int round = 0; round < 20; ++round) {
      (void)op.all_to_all(in.data(), 64, DType::u8, {});
      if (round > 0) op.release({});
    }
  };
  run_ranks(3, run, {.deadline = std::chrono::seconds(10)});
  CHECK(log->breaches() == "");
  CHECK(log->signals() == (2 + 20 + 19) * 3 * 2);  // both slots are free at bind; each result is full, then free
}

TEST_CASE("C29 and C30") {
  const GroupComm<ThreadComm> alone;
  HostArena arena(alone, 4096);
  const Memory<HostArena> memory{.arena = &arena};
  CHECK_THROWS_WITH_AS(
      bind(plan_peer_collectives(2, 8), HostExecutor{}, alone, memory),
      "pleat[C29]: peer collectives planned for 2 ranks needs a group of 2 and an arena that reaches it; the group is "
      "{0}, the arena reaches it; plan with the group's size, and with Transport::collective where there is no such "
      "arena",
      comm_error);
  CHECK_THROWS_AS(bind(plan_peer_collectives(1, 8), HostExecutor{}, alone, Memory<HostArena>{}), comm_error);
  auto op = bind(plan_peer_collectives(1, 8), HostExecutor{}, alone, memory);
  const float in[2] = {1, 2};
  CHECK_THROWS_WITH_AS(op.release({}), "pleat[C30]: release without a result; each all_gather and all_to_all gives one",
                       shape_error);
  CHECK_THROWS_WITH_AS(
      op.all_gather(in, 3, DType::f32, {}),
      "pleat[C30]: all_gather of blocks of 12 bytes with 0 results in use; at most 8 bytes are planned, "
      "and 1 results may be in use: release the oldest",
      shape_error);
  const std::byte* const first = op.all_gather(in, 2, DType::f32, {});
  const std::byte* const second = op.all_to_all(in, 2, DType::f32, {});
  CHECK(first != second);
  CHECK_THROWS_AS(op.all_gather(in, 1, DType::f32, {}), shape_error);
  CHECK_THROWS_AS(op.own_block(1, DType::f32), shape_error);
  op.release({});
  CHECK(op.own_block(2, DType::f32) == first);
  CHECK(op.all_gather(first, 2, DType::f32, {}) == first);
  CHECK(std::memcmp(first, in, sizeof in) == 0);
}

}  // namespace
