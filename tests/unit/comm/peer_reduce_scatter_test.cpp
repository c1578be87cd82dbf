// The reduce-scatter on peer-mapped memory: the bits of reduce_scatter_ordered, whatever the delays.
#include <pleat/comm/ordered_sum.hpp>
#include <pleat/comm/peer_reduce_scatter.hpp>
#include <pleat/comm/run_ranks.hpp>
#include <pleat/comm/thread_arena.hpp>

#include <cstring>
#include <span>
#include <vector>

#include <doctest/doctest.h>

#include <conformance/sums.hpp>
#include <support/credit_discipline.hpp>
#include <support/jitter.hpp>

namespace {

using namespace pleat;
using conformance::Bytes;
using conformance::require;
using testing_support::JitterExecutor;

constexpr TransferTable small_table{.sums = {{{40, 2}, {300, 3}}}};

/// What MappedSums does, on host memory.
class FakeSums {
 public:
  static constexpr bool exist = true;
  static constexpr int channels = 1;
  static constexpr std::size_t persistent_bytes(int ranks, int ctas) { return static_cast<std::size_t>(ranks * ctas); }

  FakeSums(HostPeers& peers, int channel, int ctas, Block persistent, std::chrono::milliseconds, HostStream)
      : peers_(&peers), channel_(channel) {
    require(ctas == 3, "CTAs of the plan");
    require(persistent.size_bytes == persistent_bytes(peers.size(), ctas), "memory of the plan");
  }
  void add(void* out, DType out_dtype, const std::byte* mine, DType wire, std::size_t elems, bool accumulate, int ctas,
           HostStream s) {
    require(ctas == (elems * size_bytes(wire) <= 40 ? 2 : 3), "CTAs of the step");
    std::vector<const void*> terms;
    for (int r = 0; r < peers_->size(); ++r) terms.push_back(peers_->base(r) + (mine - peers_->base(peers_->rank())));
    for (int i = 1; i < peers_->size(); ++i) peers_->signal((peers_->rank() + i) % peers_->size(), channel_, s);
    for (int i = 1; i < peers_->size(); ++i) peers_->await((peers_->rank() + i) % peers_->size(), channel_, s);
    core_leaf<testing_support::jitter_device>::sum_ranks(out, out_dtype, terms, wire, elems, accumulate, s);
  }
  void check(HostStream) const {}

 private:
  HostPeers* peers_;
  int channel_;
};

/// `ahead`: how many inputs are asked for before the one that is summed; 2: now one, now none.
template <class Wire, class Sums>
void many_sums(ThreadComm& world, int ahead) {
  const GroupComm<ThreadComm> comm(world);
  const auto n = static_cast<std::size_t>(world.size());
  constexpr std::size_t most = 301;
  const DType wire = dtype_of<Wire>;
  const PeerReduceScatterPlan plan = plan_peer_reduce_scatter<Sums>(world.size(), most, wire, small_table);
  HostArena arena(comm, plan.footprint().symmetric);
  const HostBuffer persistent(plan.footprint().persistent);
  auto op =
      bind<Sums>(plan, JitterExecutor{}, comm, Memory<HostArena>{.persistent = persistent.block(), .arena = &arena});
  const HostBuffer scratch(reduce_scatter_scratch_bytes(most, world.size(), wire), 0xff);
  constexpr std::size_t sizes[] = {most, 0, 1, 17, 300, 2};
  const auto elems_of = [&](int round) { return sizes[static_cast<std::size_t>(round) % 6]; };
  const auto terms_of = [&](int round) {
    return conformance::terms<Wire>(world.rank() + 10 * round, 0, n * elems_of(round));
  };
  constexpr int rounds = 40;
  const auto write = [&](int round) {
    const Bytes terms = terms_of(round);
    std::byte* const input = op.input({});
    if (!terms.empty()) std::memcpy(input, terms.data(), terms.size());
  };
  for (int round = 0, written = 0; round < rounds; ++round) {
    const int wanted = round + (ahead == 2 ? round / 3 % 2 : ahead);
    while (written <= wanted && written < rounds) write(written++);
    const std::size_t elems = elems_of(round);
    const Bytes terms = terms_of(round);
    std::vector<float> found(elems, 1.25f), expected = found;
    reduce_scatter_ordered(comm, terms.data(), wire, std::vector<std::size_t>(n, elems), expected.data(), DType::f32,
                           round % 2 == 1, scratch.block(), {});
    op.reduce_scatter(found.data(), DType::f32, elems, round % 2 == 1, {});
    require(elems == 0 || std::memcmp(found.data(), expected.data(), elems * sizeof(float)) == 0, "round ", round);
  }
}

TEST_CASE("the bits of reduce_scatter_ordered") {
  for (const int ranks : conformance::sizes) {
    const testing_support::Watchdog watchdog("peer reduce-scatter");
    for (const int ahead : {0, 1, 2}) {
      run_ranks(ranks, [=](ThreadComm& world) { many_sums<float, NoSums>(world, ahead); });
      run_ranks(ranks, [=](ThreadComm& world) { many_sums<bfloat16, FakeSums>(world, ahead); });
    }
  }
}

TEST_CASE("the signals of sums may be captured in graphs") {
  for (const int ahead : {0, 1}) {
    const auto log = std::make_shared<testing_support::DisciplineLog>();
    const auto run = [&](ThreadComm& world) {
      const PeerReduceScatterPlan plan{.ranks = 3, .block_elems = 4};
      testing_support::DisciplineArena arena(world, plan.footprint().symmetric, log, 3);
      auto op = bind(plan, JitterExecutor{}, GroupComm<ThreadComm>(world),
                     Memory<testing_support::DisciplineArena>{.arena = &arena});
      for (int i = 0; i < ahead; ++i) (void)op.input({});
      for (int round = 0; round < 20; ++round) {
        float out[4];
        std::memset(op.input({}), 0, 3 * sizeof out);
        op.reduce_scatter(out, DType::f32, 4, false, {});
      }
    };
    run_ranks(3, run, {.deadline = std::chrono::seconds(10)});
    CHECK(log->breaches() == "");
    // Ranks meet once per sum, and once more where an input is asked for ahead.
    CHECK(log->signals() == 20 * (1 + ahead) * 3 * 2);
  }
}

TEST_CASE("the plan of a reduce-scatter; C30 for calls out of order") {
  const PeerReduceScatterPlan plan{.ranks = 1, .block_elems = 40, .wire = DType::bf16};
  CHECK(plan.footprint() == Footprint{.symmetric = 2 * 128, .channels = 3});
  CHECK(std::string(message_of(plan).c_str()) == "peer reduce-scatter ranks=1 block_elems=40 wire=bf16 sums=");
  const PeerReduceScatterPlan kernels = plan_peer_reduce_scatter<FakeSums>(2, 40, DType::f32, small_table);
  CHECK(kernels.footprint() == Footprint{.symmetric = 2 * 384, .persistent = 6, .channels = 4});
  CHECK(kernels.channels() == plan.channels() + 1);
  CHECK(std::string(message_of(kernels).c_str()) ==
        "peer reduce-scatter ranks=2 block_elems=40 wire=f32 sums=40:2,160:3");
  CHECK(plan_peer_reduce_scatter<FakeSums>(1, 40, DType::f32, small_table).channels() == plan.channels());
  const GroupComm<ThreadComm> alone;
  HostArena arena(alone, 4096);
  auto op = bind(plan, HostExecutor{}, alone, Memory<HostArena>{.arena = &arena});
  float out[41] = {};
  CHECK_THROWS_WITH_AS(op.reduce_scatter(out, DType::f32, 1, false, {}),
                       "pleat[C30]: reduce_scatter of a peer reduce-scatter: write the terms to input() first",
                       shape_error);
  (void)op.input({});
  (void)op.input({});
  CHECK_THROWS_WITH_AS(op.input({}),
                       "pleat[C30]: input of a peer reduce-scatter: both inputs are given out; call reduce_scatter",
                       shape_error);
  CHECK_THROWS_WITH_AS(op.reduce_scatter(out, DType::f32, 41, false, {}),
                       "pleat[C30]: reduce_scatter of a peer reduce-scatter: more elements than planned", shape_error);
}

}  // namespace
