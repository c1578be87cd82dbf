// What a step of the Sharder counts: gathers, facts of others' faults.
#include <pleat/fsdp/sharder.hpp>

#include <array>
#include <bit>
#include <functional>
#include <random>
#include <tuple>

#include <doctest/doctest.h>

#include <pleat/comm.hpp>
#include <pleat/fsdp.hpp>

#include "support/json.hpp"

#include "steps_run.hpp"

namespace {

using namespace sharder_steps;
using testing_support::Json;

TEST_CASE("the last prefetch + 1 units of forward are not gathered again for backward") {
  const int layers = 5;
  for (const Transport transport : transports) {
    for (const int prefetch : {0, 1, 2}) {
      with_sharder(2, vectors(layers, 7), {.transport = transport, .prefetch = prefetch}, dense_world,
                   [&](Sharder& op, ThreadComm&) {
                     const std::vector<float> w(7, 1);
                     for (int u = 0; u < layers; ++u) op.load(u, 0, w, {});
                     std::vector<int> order{0, 1, 2, 3, 4, 4, 3, 2, 1, 0};
                     std::int64_t expected = 0;
                     for (int step = 0; step < 2; ++step) {
                       op.begin(order);
                       for (const int u : order) {
                         op.acquire(u, {});
                         op.release(u, {});
                       }
                       op.weights_changed({});
                       expected += 2 * layers - (prefetch + 1);
                       if (op.gathers() != expected) fail<error>(op.gathers(), " gathers instead of ", expected);
                     }
                   });
    }
  }
}

TEST_CASE("a prefetch that the next order does not use is awaited before its slot serves again") {
  with_sharder(3, vectors(4, 6), {.transport = Transport::peer, .prefetch = 1}, dense_world,
               [&](Sharder& op, ThreadComm&) {
                 for (int u = 0; u < 4; ++u) op.load(u, 0, std::vector<float>(6, static_cast<float>(u)), {});
                 for (int round = 0; round < 20; ++round) {
                   for (const std::array<int, 2> order : {std::array{0, 1}, {2, 3}, {1, 0}, {3, 1}}) {
                     op.begin(order);
                     const fsdp::UnitView view = op.acquire(order[0], {});  // fetches order[1], which nobody acquires
                     for (int i = 0; i < 6; ++i) {
                       if (view[0].as<float>()[i] != static_cast<float>(order[0])) fail<error>("a stale slot");
                     }
                     op.release(order[0], {});
                     if (round % 3 == 0) op.weights_changed({});
                   }
                 }
               });
}

TEST_CASE("a unit is gathered without an order, and may be held twice") {
  with_sharder(2, vectors(3, 4), {.prefetch = 1}, dense_world, [&](Sharder& op, ThreadComm&) {
    for (int u = 0; u < 3; ++u) op.load(u, 0, std::vector<double>(4, u), {});
    for (const int u : {2, 0, 2, 1}) {
      const fsdp::UnitView first = op.acquire(u, {});
      const fsdp::UnitView second = op.acquire(u, {});
      op.release(u, {});
      if (second[0].data() != first[0].data() || first[0].as<float>()[3] != static_cast<float>(u)) {
        fail<error>("wrong view");
      }
      op.release(u, {});
    }
    if (op.gathers() != 3) fail<error>(op.gathers(), " gathers");
  });
}

TEST_CASE("a rank alone uses its shard where it lies, and writes its gradients there") {
  with_sharder(1, vectors(3, 4), {.transport = Transport::peer}, dense_world, [&](Sharder& op, ThreadComm&) {
    op.load(0, 0, std::vector<float>{1, 2, 3, 4}, {});
    op.begin(std::array{0, 1, 0});
    CHECK(op.acquire(0, {})[0].data() == op.shards()[0].master);
    op.release(0, {});
    CHECK(op.gathers() == 0);
    for (const float sum : {1.0F, 3.0F}) {  // two micro-batches
      const auto [tensor, accumulates] = op.gradient(0, {}).write(0);
      CHECK(tensor.data() == op.shards()[0].gradient);
      CHECK(accumulates == (sum == 3));
      std::fill_n(tensor.as<float>(), 4, sum);
      op.reduce(0, {});
      CHECK(static_cast<const float*>(op.shards()[0].gradient)[3] == sum);
    }
    op.finish_gradients({});
    CHECK(gradient_of<float>(op, 0, 4) == std::vector<float>(4, 3));
    CHECK(gradient_of<float>(op, 1, 4) == std::vector<float>(4));
    CHECK(!op.gradient(0, {}).write(0).accumulate);  // the next step
    op.discard_gradients();

    // A micro-batch that writes nothing leaves the sum as it is, one that is discarded nothing of it.
    for (const bool discards : {true, false}) {
      write(op, 0, std::vector<float>(4, 5));
      op.reduce(0, {});
      op.reduce(0, {});
      CHECK(op.gradient(0, {}).add_to(0).as<float>()[3] == 5);
      if (discards) op.discard_gradients();
    }
    for (int u = 0; u < 3; ++u) op.gradient(u, {});  // as many as are wanted are written at one time
    for (int u = 0; u < 3; ++u) op.reduce(u, {});
    op.finish_gradients({});
    CHECK(gradient_of<float>(op, 0, 4) == std::vector<float>(4, 5));
    CHECK(gradient_of<float>(op, 1, 4) == std::vector<float>(4));
  });
}

TEST_CASE("a discarded batch may have had gradients on one rank alone; the next step takes the same units everywhere") {
  for (const Transport transport : transports) {
    with_sharder(2, vectors(2, 256), {.transport = transport}, dense_world, [&](Sharder& op, ThreadComm& world) {
      for (int step = 0; step < 3; ++step) {
        const int taken = step % 2;  // of the two gradient units
        for (int u = 0; u < taken; ++u) op.reduce(u, {});
        if (world.rank() == step % 2) write(op, taken, std::vector<float>(256, 100));
        op.discard_gradients();
        for (const int u : {1, 0}) {
          write(op, u, std::vector<float>(256, static_cast<float>(1 + world.rank() + u)));
          op.reduce(u, {});
        }
        op.finish_gradients({});
        for (int u = 0; u < 2; ++u) {
          if (gradient_of<float>(op, u, 256) != std::vector<float>(256, static_cast<float>(3 + 2 * u))) {
            fail<error>("a sum is wrong");
          }
        }
      }
    });
  }
}

TEST_CASE("facts: two replicas of two shards, two micro-batches") {
  const Json fact = Json::facts("fsdp.json")["hsdp"];
  const auto size = static_cast<std::int64_t>(fact["P"].integer());
  for (const Transport transport : transports) {
    run_ranks(4, [&](ThreadComm& world) {
      const MeshComms comms(FoldedMesh<1, 4, 1, 1, 2>{}, world, std::array{Lane::main, Lane::gather, Lane::reduce});
      const auto groups = fsdp::groups_of(comms);
      const fsdp::Plan plan = fsdp::plan(vectors(1, size), groups.sizes(),
                                         {.compute = DType::f64, .transport = transport, .alignment_elems = 1});
      const HostBuffer persistent(plan.footprint().persistent, 0xff);
      HostArena arena(GroupComm<ThreadComm>(world), plan.footprint().symmetric);
      Sharder op = fsdp::bind(plan, HostExecutor{}, groups,
                              Memory<HostArena>{.persistent = persistent.block(), .arena = &arena});
      const auto replica = static_cast<std::size_t>(world.rank() / 2),
                 shard = static_cast<std::size_t>(world.rank() % 2);
      for (std::size_t micro = 0; micro < 2; ++micro) {
        write(op, 0, fact["grads"][replica][shard][micro].numbers());
        op.reduce(0, {});
      }
      op.finish_gradients({});
      const auto* mine = static_cast<const double*>(op.shards()[0].gradient);
      const std::vector<double> held(mine, mine + op.shards()[0].elems);
      if (held != fact["expected_by_shard"][shard].numbers()) fail<error>("the shard's sum is wrong");
      if (gradient_of<double>(op, 0, 4) != fact["expected_sum"].numbers()) fail<error>("the sum is wrong");
    });
  }
}

TEST_CASE("facts: a group of one adds micro-batches 1, 2, 3, 4 to 1, 3, 6, 10") {
  const Json fact = Json::facts("fsdp.json")["dp1_accumulate"];
  for (const Transport transport : transports) {
    with_sharder(1, vectors(1, 1), {.transport = transport}, dense_world, [&](Sharder& op, ThreadComm&) {
      for (std::size_t micro = 0; micro < 4; ++micro) {
        write(op, 0, std::vector<float>{static_cast<float>(fact["g"][micro].number())});
        op.reduce(0, {});
        CHECK(*static_cast<const float*>(op.shards()[0].gradient) == fact["expected"][micro].number());
      }
      op.finish_gradients({});
      write(op, 0, std::vector<float>{5});
      op.reduce(0, {});  // of the next step: replaces
      CHECK(*static_cast<const float*>(op.shards()[0].gradient) == 5);
    });
  }
}

TEST_CASE("facts: bfloat16 terms are added in float, over ranks and over micro-batches") {
  const Json fact = Json::facts("fsdp.json")["precision"];
  const Json ring = fact["ring_bf16_256_plus_ones"];
  const fsdp::Options options{.compute = DType::bf16, .gradient = DType::bf16};
  with_sharder(8, vectors(1, 1), options, dense_world, [&](Sharder& op, ThreadComm& world) {
    const double mine = ring["ranks"][static_cast<std::size_t>(world.rank())].number();
    write(op, 0, std::vector<bfloat16>{bfloat16(static_cast<float>(mine))});
    op.reduce(0, {});
    op.finish_gradients({});
    const float sum = gradient_of<float>(op, 0, 1)[0];
    if (sum != ring["exact"].number()) fail<error>("not exact in float");
    if (bfloat16(sum) != ring["fp32_accum_then_bf16"].number()) fail<error>("rounded otherwise");
  });
  with_sharder(1, vectors(1, 1), options, dense_world, [&](Sharder& op, ThreadComm&) {
    const auto accumulated = [&](int count, float value) {
      for (int micro = 0; micro < count; ++micro) {
        write(op, 0, std::vector<bfloat16>{bfloat16(value)});
        op.reduce(0, {});
      }
      op.finish_gradients({});
      return gradient_of<float>(op, 0, 1)[0];
    };
    CHECK(accumulated(512, 1) == fact["bf16_accumulate_512_ones"]["fp32"].number());
    CHECK(accumulated(1000, 1e-3F) ==
          doctest::Approx(fact["bf16_accumulate_1000x1e-3"]["fp32"].number()).epsilon(1e-4));
  });
}

TEST_CASE("facts: an expert's gradient is the plain sum over its shard group, whatever the ep degree") {
  const Json fact = Json::facts("fsdp.json")["ep_grad_scale"];
  for (const int ep : {1, 2, 4}) {
    run_ranks(4, [&](ThreadComm& world) {
      const MeshComms comms(RuntimeMesh::fold({.world = 4, .ep = ep}), world,
                            std::array{Lane::main, Lane::gather, Lane::reduce});
      const auto groups = fsdp::groups_of(comms);
      const std::int64_t local_experts = 4 / ep;
      const std::vector<fsdp::UnitSpec> units{{.name = "experts",
                                               .kind = Param::expert,
                                               .experts_local = local_experts,
                                               .params = {{.name = "w", .shape = {}}}}};
      const fsdp::Plan plan = fsdp::plan(units, groups.sizes());
      const HostBuffer persistent(plan.footprint().persistent, 0xff);
      Sharder op = fsdp::bind(plan, HostExecutor{}, groups,
                              Memory<HostArena>{.persistent = persistent.block(), .arena = nullptr});
      // All tokens go to expert 0, on the ep ranks 0: each has those of its ep group, x = 1, 2, 3, 4.
      const auto ep_group = comms.get<Axis::ep>().ranks();
      if (coordinate(comms.mesh(), world.rank()).ep == 0) {
        float sum = 0;
        for (const int r : ep_group) sum += static_cast<float>(r + 1);
        const auto [tensor, accumulate] = op.gradient(0, {}).write(0, 0);
        *tensor.as<float>() = sum;
      }
      op.reduce(0, {});
      op.finish_gradients({});
      const double expected =
          coordinate(comms.mesh(), world.rank()).ep == 0 ? fact["expected_plain_sum_over_expt_dp"].number() : 0.0;
      std::vector<float> gradient(static_cast<std::size_t>(local_experts));
      op.export_gradient(0, 0, TensorRef(gradient.data(), {local_experts}), {});
      if (gradient[0] != expected) fail<error>("a sum of ", static_cast<int>(gradient[0]));
      for (std::size_t e = 1; e < gradient.size(); ++e) {
        if (gradient[e] != 0) fail<error>("an expert without tokens has a gradient");
      }
    });
  }
}

TEST_CASE("shards by ceil-chunks: 10 rows over 4 ranks, 6 elements over 4, 18 rows over 8 with two empty shards") {
  struct Case {
    int ranks;
    std::int64_t rows, columns;
  };
  for (const Transport transport : transports) {
    for (const auto& [ranks, rows, columns] : {Case{4, 10, 3}, {4, 6, 1}, {8, 18, 7}, {3, 7, 2}, {8, 3, 2}}) {
      const std::int64_t chunk = (rows + ranks - 1) / ranks;
      std::vector<std::int64_t> boundaries;
      for (int r = 0; r <= ranks; ++r) boundaries.push_back(std::min(rows, r * chunk) * columns);
      std::vector<float> values(static_cast<std::size_t>(rows * columns));
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i + 1);
      with_sharder(
          ranks,
          {{.name = "unit", .params = {{.name = "w", .shape = {rows * columns}}}, .boundaries = std::move(boundaries)}},
          {.transport = transport, .alignment_elems = 1}, dense_world, [&](Sharder& op, ThreadComm& world) {
            op.load(0, 0, values, {});
            const fsdp::UnitView view = op.acquire(0, {});
            std::vector<float> mine = values, sum = values, exported(values.size());
            for (std::size_t i = 0; i < values.size(); ++i) {
              if (view[0].as<float>()[i] != values[i]) fail<error>("gathered element ", i, " is wrong");
              mine[i] += static_cast<float>(world.rank());
              sum[i] = values[i] * static_cast<float>(world.size()) +
                       static_cast<float>(world.size() * (world.size() - 1) / 2);
            }
            write(op, 0, mine);
            op.reduce(0, {});
            op.finish_gradients({});
            op.export_master(0, 0, exported, {});
            if (exported != values) fail<error>("saved and loaded values differ");
            if (gradient_of<float>(op, 0, values.size()) != sum) fail<error>("a sum is wrong");
          });
    }
  }
}

TEST_CASE("frozen and unused parameters: gathered; zero or no gradient at all") {
  const std::vector<fsdp::UnitSpec> units{
      {.name = "a", .params = {{.name = "w", .shape = {3}}, {.name = "table", .shape = {3}, .frozen = true}}},
      {.name = "b", .params = {{.name = "table", .shape = {3}, .frozen = true}}}};
  with_sharder(2, units, {}, dense_world, [&](Sharder& op, ThreadComm&) {
    const std::vector<float> values{1, 2, 3};
    for (const auto& [u, p] : {std::pair{0, 0}, {0, 1}, {1, 0}}) op.load(u, p, values, {});
    if (op.acquire(1, {})[0].as<float>()[2] != 3) fail<error>("not gathered");
    op.reduce(1, {});  // nothing to do
    if (op.shards()[1].gradient != nullptr || op.shards()[1].piece_count != 0)
      fail<error>("a gradient of a frozen unit");
    write(op, 0, std::vector<float>{7, 7, 7});
    op.reduce(0, {});
    op.finish_gradients({});
    if (gradient_of<float>(op, 0, 3) != std::vector<float>{14, 14, 14}) fail<error>("wrong sum");
    op.finish_gradients({});  // a step in which nothing was reduced
    if (gradient_of<float>(op, 0, 3) != std::vector<float>{0, 0, 0}) fail<error>("a gradient was left over");
  });
}

TEST_CASE("what is exported on one mesh and loaded on another has the same bits, whatever the padding") {
  const auto units_of = [](std::int64_t experts) {
    return std::vector<fsdp::UnitSpec>{
        {.name = "dense",
         .params = {{.name = "w", .shape = {13, 7}, .granule = fsdp::Granule::row()},
                    {.name = "b", .shape = {5}},
                    {.name = "s", .shape = {}},
                    {.name = "table", .shape = {3, 3}, .frozen = true}}},
        {.name = "experts",
         .kind = Param::expert,
         .experts_local = experts,
         .params = {{.name = "up", .shape = {5, 3}}, {.name = "down", .shape = {3, 5}}}}};
  };
  using Values = std::vector<std::vector<std::vector<float>>>;  // [unit][param]
  // Loads `values` on one mesh; returns what its ranks export after a gather, which all of them see alike.
  const auto carried = [&](int ranks, std::int64_t alignment, Transport transport, const Values& values) {
    Values out = values;
    run_ranks(ranks, [&](ThreadComm& world) {
      const MeshComms comms(RuntimeMesh::fold({.world = ranks}), world,
                            std::array{Lane::main, Lane::gather, Lane::reduce});
      const auto groups = fsdp::groups_of(comms);
      const fsdp::Plan plan =
          fsdp::plan(units_of(3), groups.sizes(), {.transport = transport, .alignment_elems = alignment});
      const HostBuffer persistent(plan.footprint().persistent, 0xff);
      HostArena arena(GroupComm<ThreadComm>(world), plan.footprint().symmetric);
      Sharder op = fsdp::bind(plan, HostExecutor{}, groups,
                              Memory<HostArena>{.persistent = persistent.block(), .arena = &arena});
      for (int u = 0; u < 2; ++u) {
        const auto& unit = values[static_cast<std::size_t>(u)];
        for (int p = 0; p < static_cast<int>(unit.size()); ++p) {
          auto full = unit[static_cast<std::size_t>(p)];
          op.load(u, p, op.full(u, p, full.data(), DType::f32), {});
          std::fill(full.begin(), full.end(), -1.0F);
          op.export_master(u, p, op.full(u, p, full.data(), DType::f32), {});
          if (world.rank() == ranks - 1) out[static_cast<std::size_t>(u)][static_cast<std::size_t>(p)] = full;
        }
      }
    });
    return out;
  };
  std::mt19937 random(std::random_device{}());
  const auto drawn = [&](std::size_t elems) {
    std::vector<float> values(elems);
    for (float& value : values) value = std::bit_cast<float>(static_cast<std::uint32_t>(random() % 0x7f000000u));
    return values;
  };
  const Values values{{drawn(91), drawn(5), drawn(1), drawn(9)}, {drawn(45), drawn(45)}};
  Values carries = values;
  for (const auto& [ranks, alignment] : {std::pair{2, 128}, {3, 8}, {5, 1}, {1, 4}, {8, 3}}) {
    for (const Transport transport : transports) carries = carried(ranks, alignment, transport, carries);
    CHECK(carries == values);
  }
}

}  // namespace
