// Nothing is allocated in a hot path: after the first step the calls of sharded parameters and optimizers, ring
// attention and mixture of experts do without, on both transports.
#include <pleat/attention.hpp>
#include <pleat/comm.hpp>
#include <pleat/fsdp.hpp>
#include <pleat/moe.hpp>
#include <pleat/optim.hpp>

#include <vector>

#include <doctest/doctest.h>

#include "support/allocation_counter.hpp"

namespace {

using namespace pleat;

/// Calls `step` thrice on each rank and counts what the last two allocate.
template <class Step>
void check_steps(const char* what, Transport transport, Step step) {
  step();
  for (int again = 0; again < 2; ++again) {
    const std::int64_t count = testing_support::allocations_of(step);
    if (count != 0) fail<error>(what, " over ", name_of(transport), " transport allocates ", count, " times in a step");
  }
}

constexpr Transport transports[] = {Transport::collective, Transport::peer};

TEST_CASE("sharded parameters, the norm of a step and optimizers") {
  for (const Transport transport : transports) {
    run_ranks(4, [&](ThreadComm& world) {
      const MeshComms comms(RuntimeMesh::fold({.world = 4, .replicas = 2}), world);
      const auto groups = fsdp::groups_of(comms);
      const std::vector<fsdp::UnitSpec> units(
          3, {.name = "unit",
              .params = {{.name = "w", .shape = {7, 5}, .optimizer = fsdp::Optimizer::muon},
                         {.name = "b", .shape = {9}},
                         {.name = "table", .shape = {3}, .frozen = true}}});
      const fsdp::Plan plan = fsdp::plan(units, groups.sizes(), {.compute = DType::bf16, .transport = transport});
      const auto optimizer_plan = optim::plan_optimizer(plan.layouts, plan.kinds, plan.master);
      const auto norm_plan = optim::plan_step_norm(world.size());
      const HostBuffer persistent(plan.footprint().persistent), state(optimizer_plan.footprint().persistent),
          scratch(optimizer_plan.footprint().scratch), totals(norm_plan.footprint().persistent);
      HostArena arena(comms.world(), plan.footprint().symmetric);
      auto op = fsdp::bind(plan, HostExecutor{}, groups,
                           Memory<HostArena>{.persistent = persistent.block(), .arena = &arena});
      auto optimizer = optim::bind(optimizer_plan, HostExecutor{}, groups.dense.reduce, groups.expert.reduce,
                                   op.shards(), Memory<>{scratch.block(), state.block()});
      auto norm = optim::bind(norm_plan, HostExecutor{}, comms.world(), Memory<>{.persistent = totals.block()});
      const std::vector<float> values(35, 0.5F);
      for (int u = 0; u < 3; ++u) op.load(u, 0, TensorRef(values.data(), {7, 5}), {});
      const std::vector<int> order{0, 1, 2, 2, 1, 0};
      check_steps("fsdp", transport, [&] {
        for (int micro = 0; micro < 2; ++micro) {
          op.begin(order);
          for (std::size_t use = 0; use < order.size(); ++use) {
            const int u = order[use];
            const fsdp::UnitView weights = op.acquire(u, {});
            if (use >= order.size() / 2) {
              auto gradient = op.gradient(u, {});
              const auto [tensor, accumulates] = gradient.write(0);
              std::fill_n(tensor.as<float>(), tensor.elems(), weights[0].as<bfloat16>()[0]);
              gradient.add_to(1).as<float>()[0] += 1;
              op.reduce(u, {});
            }
            op.release(u, {});
          }
        }
        op.finish_gradients({});
        norm.sums()->tokens = 1;
        optimizer.step(norm.run(op.shards(), 1, {}), {.adamw = 1e-3, .muon = 1e-2}, {});
        op.weights_changed({});
      });
    });
  }
}

TEST_CASE("ring attention") {
  constexpr std::pair<Transport, ring::Launches> ways[] = {{Transport::collective, ring::Launches::per_step},
                                                           {Transport::peer, ring::Launches::per_step},
                                                           {Transport::peer, ring::Launches::one}};
  for (const auto& [transport, launches] : ways) {
    const ring::Plan plan = ring::plan(3, {.tokens = 24, .q_heads = 2, .kv_heads = 2, .qk_dim = 4, .v_dim = 4},
                                       {.transport = transport, .launches = launches});
    run_ranks(3, [&](ThreadComm& world) {
      const GroupComm<ThreadComm> group(world);
      const Footprint need = plan.footprint();
      const HostBuffer scratch(need.scratch), kept(need.saved), persistent(need.persistent), pinned(need.pinned_host);
      HostArena arena(group, need.symmetric);
      auto op = ring::bind(plan, HostExecutor{}, group,
                           Memory<HostArena>{scratch.block(), persistent.block(), pinned.block(), &arena});
      const std::int64_t tokens = plan.spans[static_cast<std::size_t>(world.rank())].tokens();
      std::vector<float> data[8];
      const auto tensor = [&](int which) {
        data[which].resize(static_cast<std::size_t>(tokens) * 2 * 4);
        return TensorRef(data[which].data(), {std::int64_t{1}, tokens, std::int64_t{2}, std::int64_t{4}});
      };
      const TensorRef q = tensor(0), k = tensor(1), v = tensor(2), out = tensor(3), dout = tensor(4), dq = tensor(5),
                      dk = tensor(6), dv = tensor(7);
      check_steps("ring attention", plan.transport, [&] {
        ring::Saved saved(kept.block());
        op.forward({}, q, k, v, out, saved);
        op.backward({}, dout, saved, dq, dk, dv);
      });
    });
  }
}

TEST_CASE("mixture of experts") {
  for (const Transport transport : transports) {
    run_ranks(2, [&](ThreadComm& world) {
      const GroupComm<ThreadComm> ep(world);
      const std::int64_t tokens = 6, hidden = 8, inner = 4, experts = 4;
      const moe::LayerPlan plan = moe::plan(2, moe::LayerShape{tokens, hidden, inner, experts, 2, DType::f32},
                                            {.dispatch = {.transport = transport}});
      const Footprint need = plan.footprint();
      const HostBuffer scratch(need.scratch), kept(need.saved), persistent(need.persistent), pinned(need.pinned_host);
      HostArena arena(ep, need.symmetric);
      auto layer = moe::bind(plan, HostExecutor{}, ep,
                             Memory<HostArena>{scratch.block(), persistent.block(), pinned.block(), &arena});
      moe::LayerSaved saved(plan, kept.block());
      std::vector<std::vector<float>> memory;
      const auto rows = [&](std::int64_t cols) {
        auto& values = memory.emplace_back(static_cast<std::size_t>(tokens * cols));
        for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i * 7 % 5);
        return TensorRef(values.data(), {tokens, cols});
      };
      const auto matrices = [&] {
        const auto matrix = [&](std::int64_t out, std::int64_t in) {
          return moe::expert_matrix(memory.emplace_back(static_cast<std::size_t>(2 * out * in)).data(), 2, out, in,
                                    out * in);
        };
        return moe::ExpertMatrices{matrix(inner, hidden), matrix(inner, hidden), matrix(hidden, inner)};
      };
      const TensorRef x = rows(hidden), logits = rows(experts), y = rows(hidden), dx = rows(hidden),
                      dlogits = rows(experts);
      const moe::ExpertMatrices weights = matrices(), dweights = matrices();
      check_steps("mixture of experts", transport, [&] {
        layer.forward({}, x, logits, weights, saved, y);
        layer.backward({}, y, logits, weights, TensorRef{}, saved, dx, dlogits, dweights, false);
      });
    });
  }
}

}  // namespace
