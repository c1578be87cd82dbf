// The executor: training steps over ranks against the same model on one rank, in float64; failures; streams.
#include <doctest/doctest.h>
#include <array>
#include <chrono>
#include <deque>
#include <map>
#include <random>
#include <stdexcept>
#include <string>

#include <pleat/comm/run_ranks.hpp>
#include <pleat/comm/thread_arena.hpp>
#include <pleat/core/host/buffer.hpp>
#include <pleat/pipeline.hpp>

#include "stages.hpp"

using namespace pipeline_testing;

TEST_CASE("loss and every gradient are those of one rank") {
  const unsigned seed = std::random_device{}();
  CAPTURE(seed);
  for (const int ranks : {1, 2, 3, 4, 8}) {
    for (const Kind kind : all_kinds) {
      for (const int extra : {0, 3}) {
        const int micro_batches = 2 * ranks + extra;
        const Schedule schedule = make_schedule(kind, ranks, micro_batches);
        CAPTURE(name_of(kind));
        CAPTURE(ranks);
        const int stages = schedule.placement.stages();
        const std::vector<std::int64_t> even(static_cast<std::size_t>(micro_batches), 3);
        const Problem p(stages, extra == 0 ? even : ragged(micro_batches, seed), seed);
        std::vector<std::int64_t> shorter = p.rows;
        for (std::int64_t& rows : shorter) rows -= rows / 3;
        const Problem again(stages, shorter, seed + 1);
        const std::vector<Result> got = run_on_ranks<Stages>(schedule, p, &again);
        check_same(got[0], on_one_rank(p));
        check_same(got[1], on_one_rank(again));
      }
    }
  }
}

TEST_CASE("rows that are longer here and shorter there find other places in the same memory") {
  const Schedule schedule = make_schedule(Kind::dualpipe_v, 2, 4);
  const Problem p(4, {64, 64, 64, 64}, 1), again(4, {1, 65, 1, 1}, 2);
  check_same(run_on_ranks<Stages>(schedule, p, &again)[1], on_one_rank(again));
}

TEST_CASE("fewer micro-batches than ranks, where a schedule takes them") {
  for (const Kind kind : {Kind::one_f_one_b, Kind::one_f_one_b_pairs, Kind::zb_v}) {
    const Schedule schedule = make_schedule(kind, 4, 2);
    const Problem p(schedule.placement.stages(), {4, 7}, 3);
    check_same(run_on_ranks<Stages>(schedule, p)[0], on_one_rank(p));
  }
}

TEST_CASE("a model gets the pairs of DualPipeV") {
  const Schedule schedule = make_schedule(Kind::dualpipe_v, 3, 7);
  const Problem p(6, ragged(7, 5), 5);
  check_same(run_on_ranks<PairedStages>(schedule, p)[0], on_one_rank(p));
  std::vector<int> pairs(3);
  pleat::run_ranks(3, [&](pleat::ThreadComm& world) {
    const Plan planned = plan(schedule, {hidden, DType::f64, p.rows});
    const pleat::HostBuffer scratch(planned.footprint().scratch);
    PairedStages model(p, 6);
    bind(planned, pleat::HostExecutor(), pleat::GroupComm(world), scratch_of(scratch)).run({}, model);
    pairs[static_cast<std::size_t>(world.rank())] = model.pairs;
  });
  for (std::size_t r = 0; r < 3; ++r) {
    const Order& ops = schedule.programs[r].ops;
    CHECK(pairs[r] > 0);
    CHECK(pairs[r] ==
          std::count_if(ops.begin(), ops.end(), [](const Op& op) { return op.kind == OpKind::overlapped; }));
  }
}

TEST_CASE("an observer sees each op, in order") {
  const Schedule schedule = make_schedule(Kind::zb_v, 1, 2);
  const Problem p(2, {1, 2}, 1);
  struct {
    std::vector<int> seen;
    void before(int op, pleat::HostStream) { seen.push_back(op); }
    void after(int op, pleat::HostStream) { CHECK(seen.back() == op); }
  } observer;
  pleat::ThreadComm world = pleat::single_rank();
  const Plan planned = plan(schedule, {hidden, DType::f64, p.rows});
  const pleat::HostBuffer scratch(planned.footprint().scratch);
  Stages model(p, 2);
  bind(planned, pleat::HostExecutor(), pleat::GroupComm(world), scratch_of(scratch)).run({}, model, observer);
  CHECK(observer.seen.size() == schedule.programs[0].ops.size());
  CHECK(observer.seen.back() == static_cast<int>(observer.seen.size()) - 1);
}

namespace {
struct FailingStages : Stages {
  using Stages::Stages;
  template <class Stream>
  void forward(Stream s, const ForwardCall& f) {
    if (f.stage == 2 && f.micro_batch == 3) throw std::runtime_error("a layer broke");
    Stages::forward(s, f);
  }
};
}  // namespace

TEST_CASE("a rank that fails ends the step on every rank") {
  for (const Kind kind : all_kinds) {
    const Schedule schedule = make_schedule(kind, 4, 8);
    const Problem p(schedule.placement.stages(), std::vector<std::int64_t>(8, 2), 1);
    CHECK_THROWS_WITH_AS(run_on_ranks<FailingStages>(schedule, p), doctest::Contains("a layer broke"),
                         pleat::rank_error);
  }
}

TEST_CASE("what a plan does not fit is refused, on every rank alike") {
  using doctest::Contains;
  const Schedule schedule = make_schedule(Kind::one_f_one_b, 2, 2);
  CHECK_THROWS_WITH(plan(schedule, {hidden, DType::f64, {1}}), Contains("pleat[P04]: rows of 1 micro-batches"));
  CHECK_THROWS_WITH(plan(schedule, {hidden, DType::f64, {1, -1}}), Contains("[P04]"));
  CHECK_THROWS_WITH(plan(schedule, {0, DType::f64, {1, 1}}), Contains("pleat[P04]: hidden=0"));
  const Problem p(2, {8, 8}, 1), longer(2, {8, 99}, 1);
  CHECK_THROWS_WITH_AS(run_on_ranks<Stages>(schedule, p, &longer), Contains("pleat[P08]: tensors between stages need"),
                       pleat::shape_error);
  pleat::ThreadComm alone = pleat::single_rank();
  CHECK_THROWS_WITH(bind(plan(schedule, {hidden, DType::f64, {8, 8}}), pleat::HostExecutor(), pleat::GroupComm(alone),
                         scratch_of({})),
                    Contains("pleat[P03]: a schedule of 2 ranks was bound to a pp group of 1"));
}

TEST_CASE("sizes that no memory has are refused, in a plan and in a step") {
  using doctest::Contains;
  constexpr std::int64_t huge = std::int64_t{1} << 62;
  const Schedule schedule = make_schedule(Kind::zb_v, 2, 4);
  CHECK_THROWS_WITH_AS(plan(schedule, {huge, DType::f32, {1, 1, 1, 1}}), Contains("pleat[P04]: rows=1 of hidden=46116"),
                       pleat::shape_error);
  CHECK_THROWS_WITH(plan(schedule, {4, DType::f32, {1, huge, 1, 1}}), Contains("pleat[P04]: rows=4611686018427387904"));
  const std::int64_t many = std::int64_t{1} << 28;  // in sum only
  CHECK_THROWS_WITH(plan(schedule, {many, DType::f64, {many, many, many, many}}), Contains("[P04]"));
  CHECK_THROWS_WITH(plan(schedule, {4, static_cast<DType>(77), {1, 1, 1, 1}}),
                    Contains("pleat[T01]: a pipeline of elements of dtype number 77; valid dtypes: f64"));
  // What is large and possible is counted.
  CHECK(plan(schedule, {many, DType::f64, {0, 0, 0, many / 32}}).footprint().scratch >= std::size_t{1} << 54);

  const Problem p(2, {3, 3}, 1);
  const Schedule alone = make_schedule(Kind::zb_v, 1, 2);
  pleat::ThreadComm world = pleat::single_rank();
  const Plan planned = plan(alone, {hidden, DType::f64, p.rows});
  const pleat::HostBuffer scratch(planned.footprint().scratch);
  auto op = bind(planned, pleat::HostExecutor(), pleat::GroupComm(world), scratch_of(scratch));
  Stages model(p, 2);
  CHECK_THROWS_WITH(op.run({}, std::vector<std::int64_t>{huge, 3}, model), Contains("[P04]"));
  CHECK_THROWS_WITH(op.run({}, std::vector<std::int64_t>{3000, 3}, model), Contains("[P08]"));
  op.run({}, model);  // nothing had begun
  check_same(model.result, on_one_rank(p));
}

TEST_CASE("C36: ranks that have planned other pipelines are told so at bind") {
  const auto refused = [](const std::string& text, const Plan& theirs) {
    const Plan ours = plan(make_schedule(Kind::zb_v, 2, 4), {hidden, DType::f32, {3, 3, 3, 3}});
    std::array<std::string, 2> texts;
    pleat::run_ranks(2, [&](pleat::ThreadComm& world) {
      const Plan& mine = world.rank() == 0 ? ours : theirs;
      const pleat::HostBuffer scratch(mine.footprint().scratch);
      try {
        bind(mine, pleat::HostExecutor(), pleat::GroupComm(world), scratch_of(scratch));
      } catch (const pleat::comm_error& e) {
        texts[static_cast<std::size_t>(world.rank())] = e.what();
      }
    });
    CHECK(texts[0].find(text) == 0);
    CHECK(texts[1] == texts[0]);
  };
  const Schedule same = make_schedule(Kind::zb_v, 2, 4);
  const std::vector<std::int64_t> rows(4, 3);
  refused("pleat[C36]: rank 1 binds pipeline dualpipev, rank 0 pipeline zb-v; bind the same",
          plan(make_schedule(Kind::dualpipe_v, 2, 4), {hidden, DType::f32, rows}));
  refused("pleat[C36]: rank 1 binds pipeline zb-v with micro-batches=5, hash of ops=",
          plan(make_schedule(Kind::zb_v, 2, 5), {hidden, DType::f32, {3, 3, 3, 3, 3}}));
  refused("pleat[C36]: rank 1 binds pipeline zb-v with hidden=6, rank 0 with hidden=5; plan alike on every rank of {0,",
          plan(same, {hidden + 1, DType::f32, rows}));
  refused("pleat[C36]: rank 1 binds pipeline zb-v with dtype=i32, rank 0 with dtype=f32",
          plan(same, {hidden, DType::i32, rows}));
  refused("pleat[C36]: rank 1 binds pipeline zb-v with hash of rows=", plan(same, {hidden, DType::f32, {3, 3, 0, 3}}));
  Schedule other = same;  // an order of the caller's own under the same name
  std::swap(other.programs[0].ops.end()[-1], other.programs[0].ops.end()[-3]);
  refused("pleat[C36]: rank 1 binds pipeline zb-v with hash of ops=", {other, {hidden, DType::f32, rows}, 0});
  other = same;
  other.programs[0].batches.back().before -= 1;
  refused("pleat[C36]: rank 1 binds pipeline zb-v with hash of transfers=", {other, {hidden, DType::f32, rows}, 0});
}

TEST_CASE("P11: after a step that failed no other runs, until the ranks bind anew") {
  const Schedule schedule = make_schedule(Kind::one_f_one_b, 2, 4);
  const Problem p(2, {2, 2, 2, 2}, 1);
  struct Failing : Stages {
    using Stages::Stages;
    int passes = 0;
    void forward(pleat::HostStream s, const ForwardCall& f) { count(), Stages::forward(s, f); }
    void backward(pleat::HostStream s, const BackwardCall& b) { count(), Stages::backward(s, b); }
    void count() {
      if (++passes == 4) throw std::runtime_error("a layer broke");  // on both ranks; neither waits for the other
    }
  };
  std::array<Result, 2> results;
  pleat::run_ranks(2,
                   [&](pleat::ThreadComm& world) {
                     const Plan planned = plan(schedule, {hidden, DType::f64, p.rows});
                     const pleat::HostBuffer scratch(planned.footprint().scratch);
                     auto op = bind(planned, pleat::HostExecutor(), pleat::GroupComm(world), scratch_of(scratch));
                     Failing failing(p, 2);
                     CHECK_THROWS_WITH(op.run({}, failing), "a layer broke");
                     Stages model(p, 2);
                     const auto text = doctest::Contains("pleat[P11]: a step of this pipeline has failed");
                     CHECK_THROWS_WITH_AS(op.run({}, model), text, pleat::comm_error);
                     CHECK_THROWS_WITH_AS(op.run({}, p.rows, model), text, pleat::comm_error);
                     auto moved = std::move(op);
                     CHECK_THROWS_WITH_AS(moved.run({}, model), text, pleat::comm_error);
                     pleat::ThreadComm fresh = world.split(0, world.rank());
                     moved = bind(planned, pleat::HostExecutor(), pleat::GroupComm(fresh), scratch_of(scratch));
                     moved.run({}, model);
                     results[static_cast<std::size_t>(world.rank())] = model.result;
                   },
                   {.deadline = std::chrono::seconds(20)});
  Result all;
  for (const Result& rank : results) merge(all, rank);
  check_same(all, on_one_rank(p));
}

TEST_CASE("P12: a pipeline that was moved from is refused, and may be assigned to") {
  const Problem p(1, {2}, 1);
  pleat::ThreadComm world = pleat::single_rank();
  const Plan planned = plan(make_schedule(Kind::one_f_one_b, 1, 1), {hidden, DType::f64, p.rows});
  const pleat::HostBuffer scratch(planned.footprint().scratch);
  auto op = bind(planned, pleat::HostExecutor(), pleat::GroupComm(world), scratch_of(scratch));
  auto moved = std::move(op);
  Stages model(p, 1);
  const auto text = doctest::Contains("pleat[P12]: a pipeline is used after it was moved from");
  CHECK_THROWS_WITH_AS(op.run({}, model), text, pleat::shape_error);
  CHECK_THROWS_WITH_AS(op.run({}, p.rows, model), text, pleat::shape_error);
  CHECK_THROWS_WITH_AS(op.plan(), text, pleat::shape_error);
  op = std::move(moved);
  op.run({}, model);
  check_same(model.result, on_one_rank(p));
}

namespace {
/// Point-to-point batches of ranks that one thread plays on deferred streams, by rendezvous: a send reads its tensor
/// when the receiver takes it, and the sender's stream goes on only then.
class DeferredMail : public testing_support::DeferredComm {
 public:
  struct Post {
    const std::byte* data;
    std::size_t bytes;
    std::shared_ptr<int> untaken;
  };
  using Lanes = std::map<std::pair<int, int>, std::deque<Post>>;  // by (from, to)

  DeferredMail(Lanes& lanes, int rank, int size) : DeferredComm(rank, size), lanes_(&lanes) {}
  DeferredMail split(int, int) { pleat::fail<pleat::comm_error>("no split"); }
  void exchange(std::span<const pleat::Send> tx, std::span<const pleat::Recv> rx, DType dtype, DeferredStream s) {
    auto untaken = std::make_shared<int>(static_cast<int>(tx.size()));
    s.run([=, lanes = lanes_, me = rank(), sends = std::vector(tx.begin(), tx.end())] {
      for (const pleat::Send& send : sends) {
        (*lanes)[{me, send.peer}].push_back(
            {static_cast<const std::byte*>(send.data), send.elems * size_bytes(dtype), untaken});
      }
    });
    for (const pleat::Recv& r : rx) {
      s.enqueue([=, lanes = lanes_, me = rank()] {
        std::deque<Post>& lane = (*lanes)[{r.peer, me}];
        if (lane.empty()) return false;
        REQUIRE(lane.front().bytes == r.elems * size_bytes(dtype));
        std::copy_n(lane.front().data, lane.front().bytes, static_cast<std::byte*>(r.data));
        --*lane.front().untaken;
        lane.pop_front();
        return true;
      });
    }
    s.enqueue([untaken] { return *untaken == 0; });
  }

 private:
  Lanes* lanes_;
};
static_assert(pleat::communicator<DeferredMail>);
}  // namespace

TEST_CASE("streams are ordered: any timing of compute and transfers gives the same") {
  const unsigned seed = std::random_device{}();
  CAPTURE(seed);
  std::mt19937 random(seed);
  for (const Kind kind : all_kinds) {
    for (int repeat = 0; repeat < 8; ++repeat) {
      constexpr int ranks = 4;
      const int micro_batches = 8 + static_cast<int>(random() % 4);
      const Schedule schedule = make_schedule(kind, ranks, micro_batches);
      const Problem p(schedule.placement.stages(), ragged(micro_batches, random()), random());
      testing_support::DeferredWorld device(ranks, 0);
      DeferredMail::Lanes lanes;
      std::deque<DeferredMail> comms;
      std::deque<Stages> models;
      std::deque<pleat::HostBuffer> scratches;
      std::deque<Pipeline<testing_support::DeferredExecutor, DeferredMail>> ops;
      for (int r = 0; r < ranks; ++r) {
        const Plan planned = plan(schedule, {hidden, DType::f64, p.rows});
        scratches.emplace_back(planned.footprint().scratch, static_cast<unsigned char>(0xff));
        ops.push_back(bind(planned, testing_support::DeferredExecutor(),
                           pleat::GroupComm(comms.emplace_back(lanes, r, ranks)), scratch_of(scratches.back()),
                           DeferredStream()));
        models.emplace_back(p, schedule.placement.stages());
        const DeferredStream compute = device.make_stream();
        ops.back().run({compute, device.make_stream()}, models.back());
        std::byte* const first = scratches.back().data();  // what follows on compute may use the scratch
        compute.run([first, bytes = scratches.back().size_bytes()] { std::fill_n(first, bytes, std::byte{0xff}); });
      }
      device.run(random);
      Result all;
      for (const Stages& model : models) merge(all, model.result);
      check_same(all, on_one_rank(p));
    }
  }
}
