// What a Sharder refuses: calls that do not fit, and ranks that plan or call differently.
#include <pleat/fsdp/sharder.hpp>

#include <array>
#include <functional>
#include <tuple>

#include <doctest/doctest.h>

#include <pleat/comm.hpp>
#include <pleat/fsdp.hpp>

#include "steps_run.hpp"

namespace {

using namespace sharder_steps;

template <class F>
void check_refused(const char* text, F f) {
  CAPTURE(text);
  CHECK_THROWS_WITH_AS(f(), doctest::Contains(text), shape_error);
}
TEST_CASE("calls that do not fit are errors with the values") {
  std::vector<fsdp::UnitSpec> units = vectors(3, 4);
  units.push_back({.name = "frozen", .params = {{.name = "table", .shape = {3}, .frozen = true}}});
  with_sharder(2, units, {.prefetch = 0}, dense_world, [&](Sharder& op, ThreadComm&) {
    const std::vector<float> w(4, 1);
    for (int u = 0; u < 3; ++u) op.load(u, 0, w, {});
    op.load(3, 0, std::vector<float>(3), {});

    check_refused("pleat[F07]: load of parameter w of unit unit 1 got f32 [5] on host; it must be f32 [4]",
                  [&] { op.load(1, 0, std::vector<float>(5), {}); });
    check_refused("pleat[F07]", [&] { op.load(1, 0, TensorRef(w.data(), {2, 2}), {}); });
    std::vector<double> wide(4);
    check_refused("pleat[T07]: load of parameter w of unit unit 1 got f32 [4] on host, which has no data",
                  [&] { op.load(1, 0, TensorRef(nullptr, DType::f32, {4}), {}); });
    check_refused("pleat[T07]", [&] { op.export_master(1, 0, TensorRef(nullptr, DType::f32, {4}), {}); });
    check_refused("pleat[F07]: export_master into a tensor of f64; it must be of f32",
                  [&] { op.export_master(0, 0, wide, {}); });

    op.begin(std::array{0, 1});
    check_refused("pleat[F09]: use 0 is of unit unit 1, but the order given to begin() has unit 0",
                  [&] { op.acquire(1, {}); });
    op.acquire(0, {});
    check_refused("pleat[F10]: unit unit 1 has no slot: all 1 of its kind are held", [&] { op.acquire(1, {}); });
    check_refused("pleat[F10]: weights changed while unit unit 0 is held", [&] { op.weights_changed({}); });
    op.release(0, {});
    check_refused("pleat[F10]: unit unit 0 is released, but nobody holds it", [&] { op.release(0, {}); });
    check_refused("pleat[F09]: use 2 is of unit unit 1, but the order given to begin() has ended",
                  [&] { op.acquire(1, {}); });

    check_refused("pleat[F11]: parameter table of unit frozen is frozen and has no gradient; write only where",
                  [&] { std::ignore = op.gradient(3, {}).write(0); });
    check_refused("pleat[F11]", [&] { op.export_gradient(3, 0, std::vector<float>(3), {}); });
    op.gradient(0, {});
    op.gradient(1, {});
    check_refused("pleat[F12]: the gradients of unit unit 2 have no buffer: all 2 of its kind are being written",
                  [&] { op.gradient(2, {}); });
    op.reduce(0, {});
    op.gradient(2, {});

    check_refused("pleat[F13]: there is no unit 4; units are 0 to 3", [&] { op.acquire(4, {}); });
    check_refused("pleat[F13]: unit unit 0 has no parameter 1; its parameters are 0 to 0",
                  [&] { op.load(0, 1, w, {}); });
    check_refused("pleat[F13]", [&] { op.begin(std::array{0, -1}); });
    op.begin({});
    const fsdp::UnitView view = op.acquire(0, {});
    check_refused("pleat[F13]: unit unit 0 has no parameter 99; its parameters are 0 to 0", [&] { view[99]; });
    check_refused("pleat[F13]", [&] { view[-1]; });
    check_refused("pleat[F13]: unit unit 0 has no local expert 1; valid: 0 to 0", [&] { view.expert(0, 1); });
    op.release(0, {});
    auto gradients = op.gradient(1, {});
    check_refused("pleat[F13]: unit unit 1 has no parameter 99", [&] { std::ignore = gradients.write(99); });
    check_refused("pleat[F13]: unit unit 1 has no parameter -1", [&] { std::ignore = gradients.add_to(-1); });
    check_refused("pleat[F13]: unit unit 1 has no local expert 99", [&] { std::ignore = gradients.write(0, 99); });
    check_refused("pleat[F13]", [&] { std::ignore = gradients.write(1, 0); });
  });

  const std::vector<fsdp::UnitSpec> mixed{
      {.name = "a", .params = {{.name = "w", .shape = {3}}, {.name = "table", .shape = {3}, .frozen = true}}}};
  with_sharder(1, mixed, {}, dense_world, [&](Sharder& op, ThreadComm&) {
    check_refused("pleat[F11]: parameter table of unit a is frozen",
                  [&] { std::ignore = op.gradient(0, {}).write(1); });
  });
}

TEST_CASE("F21: a step does not end with gradients that were asked for and not reduced, on any rank") {
  for (const Transport transport : transports) {
    for (const int ranks : {1, 2}) {
      with_sharder(ranks, vectors(3, 4), {.transport = transport}, dense_world, [&](Sharder& op, ThreadComm&) {
        const std::vector<float> twos(4, 2), sum(4, static_cast<float>(2 * ranks));
        const char* const text = "pleat[F21]: the step ends, but the gradients of unit unit 1 were not reduced";
        write(op, 0, twos);
        op.reduce(0, {});
        write(op, 1, twos);
        check_refused(text, [&] { op.finish_gradients({}); });
        op.reduce(1, {});
        op.finish_gradients({});  // what was refused has changed nothing
        CHECK(gradient_of<float>(op, 0, 4) == sum);
        CHECK(gradient_of<float>(op, 1, 4) == sum);

        op.gradient(1, {});  // not written: a rank without tokens is told what the others are told
        check_refused(text, [&] { op.finish_gradients({}); });
        write(op, 1, twos);
        op.discard_gradients();
        op.finish_gradients({});
        CHECK(gradient_of<float>(op, 1, 4) == std::vector<float>(4));
        write(op, 1, twos);
        op.reduce(1, {});
        op.finish_gradients({});
        CHECK(gradient_of<float>(op, 1, 4) == sum);
      });
    }
  }
}

TEST_CASE("F21: a view of gradients ends with their reduce, or when they are discarded") {
  const char* const text = "pleat[F21]: the gradients of unit unit 0 were reduced or discarded after this view";
  for (const int ranks : {1, 2}) {
    with_sharder(ranks, vectors(1, 4), {}, dense_world, [&](Sharder& op, ThreadComm&) {
      const auto is_refused = [&](fsdp::GradientView<HostExecutor> kept) {
        check_refused(text, [&] { std::ignore = kept.write(0); });
        check_refused(text, [&] { std::ignore = kept.write(0, 0); });
        check_refused(text, [&] { std::ignore = kept.add_to(0); });
      };
      const auto first = op.gradient(0, {}), same = op.gradient(0, {});
      write(op, 0, std::vector<float>(4, 2));
      op.reduce(0, {});
      is_refused(first);
      is_refused(same);
      write(op, 0, std::vector<float>(4, 3));
      is_refused(first);  // although a later view of the unit is open
      const auto second = op.gradient(0, {});
      op.discard_gradients();
      is_refused(second);
      write(op, 0, std::vector<float>(4, 5));
      op.reduce(0, {});
      op.finish_gradients({});
      CHECK(gradient_of<float>(op, 0, 4) == std::vector<float>(4, static_cast<float>(5 * ranks)));
    });
  }
}

TEST_CASE("what no rank can load is refused by all, also by those that hold nothing of it") {
  with_sharder(2, vectors(1, 3), {}, dense_world, [&](Sharder& op, ThreadComm&) {
    const std::vector<std::int32_t> whole(3);
    check_refused("pleat[T01]: dtype i32 is not supported here; valid dtypes: f64 f32 bf16",
                  [&] { op.load(0, 0, whole, {}); });
    check_refused("pleat[T01]",
                  [&] { op.load(0, 0, TensorRef(const_cast<std::int32_t*>(whole.data()), DType::f16, {3}), {}); });
  });
}

TEST_CASE("ranks that use units in different orders never take one for another: they end at the deadline") {
  for (const bool reduces : {false, true}) {
    const auto f = [&](ThreadComm& world) {
      const auto groups = dense_world(world);
      const fsdp::Plan plan = fsdp::plan(vectors(2, 6), groups.sizes(), {.transport = Transport::peer});
      const HostBuffer persistent(plan.footprint().persistent);
      HostArena arena(GroupComm<ThreadComm>(world), plan.footprint().symmetric);
      Sharder op = fsdp::bind(plan, HostExecutor{}, groups,
                              Memory<HostArena>{.persistent = persistent.block(), .arena = &arena});
      for (int u = 0; u < 2; ++u) op.load(u, 0, std::vector<float>(6, static_cast<float>(u)), {});
      for (int use = 0; use < 2; ++use) {
        const int u = world.rank() == 0 ? use : 1 - use;
        if (reduces) {
          op.reduce(u, {});
          continue;
        }
        const fsdp::UnitView view = op.acquire(u, {});
        if (view[0].as<float>()[0] != static_cast<float>(u)) throw std::runtime_error("the weights of another unit");
        op.release(u, {});
      }
    };
    CHECK_THROWS_WITH_AS(run_ranks(2, f, {.deadline = std::chrono::milliseconds(200)}), doctest::Contains("pleat[C04]"),
                         comm_error);
  }
}

TEST_CASE("F20: with check_order, calls that differ are told on every rank, by both transports") {
  for (const Transport transport : transports) {
    for (const auto& [reduces, text] :
         {std::pair{false, "pleat[F20]: rank 1 gathers unit unit 1, rank 0 gathers unit unit 0; use units in the same"},
          {true, "pleat[F20]: rank 2 sums unit unit 1, rank 0 sums unit unit 0"}}) {
      with_sharder(3, vectors(2, 6), {.transport = transport, .prefetch = 0, .check_order = true}, dense_world,
                   [&, reduces = reduces, text = text](Sharder& op, ThreadComm& world) {
                     for (int u = 0; u < 2; ++u) {
                       op.acquire(u, {});
                       op.reduce(u, {});
                       op.release(u, {});
                     }
                     op.finish_gradients({});
                     op.weights_changed({});
                     CHECK_THROWS_WITH_AS(reduces ? op.reduce(world.rank() == 2, {})
                                                  : static_cast<void>(op.acquire(world.rank() == 1, {})),
                                          doctest::Contains(text), comm_error);
                   });
    }
  }
}

TEST_CASE("C36: ranks that have planned differently are told so at bind, by both transports") {
  for (const Transport transport : transports) {
    const auto refused = [&](const char* text, std::vector<fsdp::UnitSpec> units, fsdp::Options options) {
      run_ranks(2, [&](ThreadComm& world) {
        const auto groups = dense_world(world);
        const fsdp::Plan plan = world.rank() == 0
                                    ? fsdp::plan(vectors(3, 1000), groups.sizes(), {.transport = transport})
                                    : fsdp::plan(units, groups.sizes(), options);
        const HostBuffer persistent(1 << 20);
        HostArena arena(GroupComm<ThreadComm>(world), 1 << 20);
        CHECK_THROWS_WITH_AS(fsdp::bind(plan, HostExecutor{}, groups,
                                        Memory<HostArena>{.persistent = persistent.block(), .arena = &arena}),
                             doctest::Contains(text), comm_error);
      });
    };
    const fsdp::Options same{.transport = transport};
    const auto with = [&](auto set) {
      fsdp::Options options = same;
      set(options);
      return options;
    };
    refused("pleat[C36]: rank 1 binds sharded parameters with elements=3840, hash of units=", vectors(3, 1200), same);
    refused("pleat[C36]: rank 1 binds sharded parameters with units=2, elements=2048", vectors(2, 1000), same);
    refused("with prefetch=2, rank 0 with prefetch=1; plan alike on every rank of {0, 1}", vectors(3, 1000),
            with([](auto& o) { o.prefetch = 2; }));
    refused("dtype of parameters=", vectors(3, 1000), with([](auto& o) { o.compute = DType::bf16; }));
    refused("dtype of parameters=bf16, dtype of gradients=bf16", vectors(3, 1000), with([](auto& o) {
              o.compute = DType::bf16;
              o.gradient = DType::bf16;
            }));
    refused("with transport=", vectors(3, 1000), with([&](auto& o) {
              o.transport = transport == Transport::peer ? Transport::collective : Transport::peer;
            }));
    auto frozen = vectors(3, 1000);
    frozen[1].params[0].frozen = true;
    refused("with hash of units=", frozen, same);
  }
}

TEST_CASE("groups and memory that do not fit are errors with the values") {
  const auto units = vectors(1, 4);
  const HostBuffer persistent(1 << 16);
  const Memory<HostArena> memory{.persistent = persistent.block(), .arena = nullptr};
  check_refused(
      "pleat[F05]: the plan is for shard groups of 2 (dense) and 1 (expert) ranks and 1 replicas; the groups have 1",
      [&] { fsdp::bind(fsdp::plan(units, {.dense = 2}), HostExecutor{}, Groups{}, memory); });
  run_ranks(2, [&](ThreadComm& world) {
    CHECK_THROWS_WITH_AS(
        fsdp::bind(fsdp::plan(units, {.dense = 2}, {.transport = Transport::peer}), HostExecutor{}, dense_world(world),
                   memory),
        doctest::Contains("pleat[C29]: sharded parameters planned for 2 ranks needs a group of 2 and an arena that "
                          "reaches it; the group is {0, 1}, the arena is null"),
        comm_error);
  });
}

}  // namespace
