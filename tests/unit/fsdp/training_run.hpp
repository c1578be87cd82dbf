// Sharded training over a mesh, checked bit for bit: what each rank sees and keeps against one rank's arithmetic.
#pragma once

#include <cstring>
#include <optional>
#include <random>
#include <vector>

#include <doctest/doctest.h>

#include <pleat/comm.hpp>
#include <pleat/fsdp.hpp>

#include "support/jitter.hpp"
#include "unit/fsdp/odd_model.hpp"

namespace fsdp_testing {

/// Calls f(index of the element in [experts, shape...], its address) for a strided view.
template <class T, class F>
void for_each_element(const TensorRef& tensor, bool expert_axis, F f) {
  const std::int64_t blocks = expert_axis ? tensor.extent(0) : 1;
  const std::int64_t elems = blocks == 0 ? 0 : tensor.elems() / blocks;
  for (std::int64_t e = 0; e < blocks; ++e) {
    T* const block = tensor.as<T>() + (expert_axis ? e * tensor.stride(0) : 0);
    for (std::int64_t i = 0; i < elems; ++i) f(e * elems + i, block + i);
  }
}

/// Compute type T, gradient units of G, sums in A; ranks run on a device with random delays when `Executor` is
/// Jitter's.
template <class T, class G, class Executor>
class TrainingRun {
  using A = accumulator_t<T>;
  using Sharder = fsdp::Sharder<Executor, ThreadComm, HostArena>;
  using Values = std::vector<std::vector<std::vector<A>>>;  // [unit][param][element]

 public:
  TrainingRun(const RunConfig& config, std::int64_t seed)
      : config_(config),
        seed_(seed),
        mesh_(RuntimeMesh::fold({.world = config.ranks, .ep = config.ep, .replicas = config.replicas})),
        model_(odd_model(config)) {}

  void run() {
    run_ranks(config_.ranks, [&](ThreadComm& world) { on_rank(world); });
  }

 private:
  void on_rank(ThreadComm& world) {
    const MeshComms comms(mesh_, world, std::array{Lane::main, Lane::gather, Lane::reduce});
    const auto groups = fsdp::groups_of(comms);
    const fsdp::Plan plan = fsdp::plan(model_, groups.sizes(),
                                       {.compute = dtype_of<T>,
                                        .gradient = dtype_of<G>,
                                        .transport = config_.transport,
                                        .prefetch = config_.prefetch,
                                        .alignment_elems = config_.alignment_elems});
    const HostBuffer persistent(plan.footprint().persistent, 0xff);
    HostArena arena(GroupComm<ThreadComm>(world), plan.footprint().symmetric);
    auto window = arena.open(comms.world().ranks(), 0, 0);
    if (plan.footprint().symmetric != 0) {
      std::memset(window.base(window.rank()), 0xff, plan.footprint().symmetric);
    }
    world.barrier();
    auto op =
        fsdp::bind(plan, Executor{}, groups, Memory<HostArena>{.persistent = persistent.block(), .arena = &arena});

    const Rank rank{world.rank(), coordinate(mesh_, world.rank()).ep};
    Values weights = initial(plan, rank);
    for (int u = 0; u < units(plan); ++u) {
      for (int p = 0; p < params(plan, u); ++p) op.load(u, p, full(plan, u, p, weights), {});
    }
    std::vector<int> order;
    for (int u = 0; u < units(plan); ++u) order.push_back(u);
    for (int u = units(plan) - 1; u >= 0; --u) order.push_back(u);

    for (int step = 0; step < config_.steps; ++step) {
      for (int micro = 0; micro < config_.micro_batches; ++micro) {
        op.begin(order);
        for (std::size_t use = 0; use < order.size(); ++use) {
          const int u = order[use];
          const fsdp::UnitView view = op.acquire(u, {});
          check_view(plan, u, view, weights);
          if (use >= order.size() / 2 && plan.layouts[static_cast<std::size_t>(u)].trains()) {
            write_gradients(op, rank, step, micro, u);
            op.reduce(u, {});
          }
          testing_support::jitter();
          check_view(plan, u, view, weights);
          op.release(u, {});
        }
      }
      op.finish_gradients({});
      const Values gradients = expected_gradients(plan, rank, step);
      check_exports(op, weights, gradients);
      update(op, plan, weights, gradients);
    }
  }

  struct Rank {
    int world;
    int ep;
  };
  static int units(const fsdp::Plan& plan) { return static_cast<int>(plan.layouts.size()); }
  static int params(const fsdp::Plan& plan, int u) {
    return static_cast<int>(plan.layouts[static_cast<std::size_t>(u)].params.size());
  }
  static const fsdp::ParamPlace& place(const fsdp::Plan& plan, int u, int p) {
    return plan.layouts[static_cast<std::size_t>(u)].place(p);
  }
  static int storage(const fsdp::Plan& plan, int u, int p) {
    return plan.layouts[static_cast<std::size_t>(u)].storage_of(p);
  }
  static bool has_experts(const fsdp::Plan& plan, int u) {
    return plan.layouts[static_cast<std::size_t>(u)].experts_local != 0;
  }
  static std::size_t elems(const fsdp::Plan& plan, int u, int p) {
    return static_cast<std::size_t>(place(plan, u, p).elems * plan.layouts[static_cast<std::size_t>(u)].block_count());
  }
  static std::vector<A>& of(Values& values, int u, int p) {
    return values[static_cast<std::size_t>(u)][static_cast<std::size_t>(p)];
  }
  static const std::vector<A>& of(const Values& values, int u, int p) {
    return values[static_cast<std::size_t>(u)][static_cast<std::size_t>(p)];
  }
  static Values zeros(const fsdp::Plan& plan) {
    Values values(static_cast<std::size_t>(units(plan)));
    for (int u = 0; u < units(plan); ++u) {
      for (int p = 0; p < params(plan, u); ++p) values[static_cast<std::size_t>(u)].emplace_back(elems(plan, u, p));
    }
    return values;
  }
  static TensorRef full(const fsdp::Plan& plan, int u, int p, const Values& values) {
    TensorRef tensor(const_cast<A*>(of(values, u, p).data()), dtype_of<A>, {});
    const std::vector<std::int64_t> shape = plan.layouts[static_cast<std::size_t>(u)].full_shape(p);
    for (std::size_t axis = 0; axis < shape.size(); ++axis) {
      tensor.push_extent(shape[axis], fsdp::elems_of(std::span(shape).subspan(axis + 1)));
    }
    return tensor;
  }

  /// The experts of an ep rank are its own; everything else is everybody's.
  Values initial(const fsdp::Plan& plan, const Rank& rank) const {
    Values values = zeros(plan);
    for (int u = 0; u < units(plan); ++u) {
      const int owner = has_experts(plan, u) ? rank.ep : -1;
      for (int p = 0; p < params(plan, u); ++p) {
        auto& param = of(values, u, p);
        for (std::size_t i = 0; i < param.size(); ++i) {
          param[i] = static_cast<A>(drawn({seed_, 1, owner, u, storage(plan, u, p), static_cast<std::int64_t>(i)}));
        }
      }
    }
    return values;
  }

  void check_view(const fsdp::Plan& plan, int u, const fsdp::UnitView& view, const Values& weights) const {
    for (int p = 0; p < params(plan, u); ++p) {
      std::size_t wrong = 0;
      for_each_element<T>(view[p], has_experts(plan, u), [&](std::int64_t i, const T* value) {
        const T expected = static_cast<T>(of(weights, u, p)[static_cast<std::size_t>(i)]);
        wrong += std::memcmp(value, &expected, sizeof(T)) != 0;
      });
      if (wrong != 0) fail<error>("unit ", u, " parameter ", p, ": ", wrong, " gathered elements are wrong");
    }
  }

  /// What rank `world_rank` does for a parameter in a micro-batch: how often it writes, per expert or as a whole.
  enum class Writes { none, once, twice, adds, some_experts };
  Writes writes(int world_rank, int step, int micro, int u, int p) const {
    if (idle(world_rank, micro)) return Writes::none;
    return static_cast<Writes>(choice({seed_, 2, world_rank, step, micro, u, p}, 5));
  }
  /// The last rank has no tokens in every other micro-batch.
  bool idle(int world_rank, int micro) const { return world_rank == config_.ranks - 1 && micro % 2 == 0; }
  bool writes_expert(int world_rank, int step, int micro, int u, int p, std::int64_t e) const {
    return choice({seed_, 3, world_rank, step, micro, u, p, e}, 2) == 0;
  }
  G term(int world_rank, int step, int micro, int u, int p, std::int64_t i, int write) const {
    return static_cast<G>(static_cast<float>(drawn({seed_, 4, world_rank, step, micro, u, p, i, write})));
  }
  static G sum(G a, G b) { return static_cast<G>(static_cast<accumulator_t<G>>(a) + static_cast<accumulator_t<G>>(b)); }

  void write_gradients(Sharder& op, const Rank& rank, int step, int micro, int u) {
    if (idle(rank.world, micro)) return;
    auto gradient = op.gradient(u, {});
    const fsdp::Plan& plan = op.plan();
    const bool expert_axis = has_experts(plan, u);
    for (int p = 0; p < params(plan, u); ++p) {
      if (place(plan, u, p).spec.frozen) continue;
      const auto put = [&](const TensorRef& tensor, bool accumulate, bool axis, std::int64_t first, int write) {
        for_each_element<G>(tensor, axis, [&](std::int64_t i, G* to) {
          const G value = term(rank.world, step, micro, u, p, first + i, write);
          *to = accumulate ? sum(*to, value) : value;
        });
      };
      switch (writes(rank.world, step, micro, u, p)) {
        case Writes::none:
          break;
        case Writes::twice: {
          const auto [tensor, accumulate] = gradient.write(p);
          put(tensor, accumulate, expert_axis, 0, 0);
          const auto [again, accumulates_again] = op.gradient(u, {}).write(p);
          if (!accumulates_again) fail<error>("a second write does not accumulate");
          put(again, true, expert_axis, 0, 1);
          break;
        }
        case Writes::once: {
          const auto [tensor, accumulate] = gradient.write(p);
          put(tensor, accumulate, expert_axis, 0, 0);
          break;
        }
        case Writes::adds:
          put(gradient.add_to(p), true, expert_axis, 0, 0);
          break;
        case Writes::some_experts:
          for (std::int64_t e = 0; e < plan.layouts[static_cast<std::size_t>(u)].block_count(); ++e) {
            if (!writes_expert(rank.world, step, micro, u, p, e)) continue;
            const auto [tensor, accumulate] = gradient.write(p, e);
            put(tensor, accumulate, false, e * place(plan, u, p).elems, 0);
          }
      }
    }
  }
  /// A rank's gradient of one element of storage `s`: all parameters that share it, in the order of their writes, added
  /// to what is there `before`.
  G rank_gradient(const fsdp::Plan& plan, int world_rank, int step, int micro, int u, int s, std::int64_t i,
                  std::optional<G> before = {}) const {
    G total = before.value_or(G{});
    const std::int64_t expert = i / std::max<std::int64_t>(place(plan, u, s).elems, 1);
    bool any = before.has_value();
    const auto add = [&](G value) {
      total = any ? sum(total, value) : value;
      any = true;
    };
    for (int p = 0; p < params(plan, u); ++p) {
      if (storage(plan, u, p) != s) continue;
      switch (writes(world_rank, step, micro, u, p)) {
        case Writes::none:
          break;
        case Writes::twice:
          add(term(world_rank, step, micro, u, p, i, 0));
          add(term(world_rank, step, micro, u, p, i, 1));
          break;
        case Writes::adds:
          add(sum(G{}, term(world_rank, step, micro, u, p, i, 0)));
          break;
        case Writes::once:
          add(term(world_rank, step, micro, u, p, i, 0));
          break;
        case Writes::some_experts:
          if (writes_expert(world_rank, step, micro, u, p, expert)) add(term(world_rank, step, micro, u, p, i, 0));
      }
    }
    return total;
  }

  /// One rank's arithmetic: per replica micro-batch after micro-batch of sums in rank order, or of writes where a rank
  /// is alone, then the replicas in order.
  Values expected_gradients(const fsdp::Plan& plan, const Rank& rank, int step) const {
    using Sum = std::common_type_t<A, accumulator_t<G>>;
    Values values = zeros(plan);
    for (int u = 0; u < units(plan); ++u) {
      for (int p = 0; p < params(plan, u); ++p) {
        if (place(plan, u, p).spec.frozen) continue;
        auto& gradient = of(values, u, p);
        for (std::size_t i = 0; i < gradient.size(); ++i) {
          for (const int replica : replica_group(mesh_, rank.world)) {
            A shard = 0;
            const Param kind = plan.kinds[static_cast<std::size_t>(u)];
            const auto of_rank = [&](int r, int micro, std::optional<G> before = {}) {
              return rank_gradient(plan, r, step, micro, u, storage(plan, u, p), static_cast<std::int64_t>(i), before);
            };
            for (int micro = 0; micro < config_.micro_batches; ++micro) {
              const auto group = shard_group(mesh_, kind, replica);
              if (plan.writes_shards(kind)) {
                const auto before = micro == 0 ? std::nullopt : std::optional(static_cast<G>(shard));
                shard = static_cast<A>(of_rank(group[0], micro, before));
                continue;
              }
              Sum total = 0;
              for (const int r : group) total += static_cast<Sum>(of_rank(r, micro));
              shard = static_cast<A>(static_cast<Sum>(shard) + total);
            }
            gradient[i] += shard;
          }
        }
      }
    }
    return values;
  }

  void check_exports(Sharder& op, const Values& weights, const Values& gradients) const {
    const fsdp::Plan& plan = op.plan();
    Values exported = zeros(plan);
    for (int u = 0; u < units(plan); ++u) {
      for (int p = 0; p < params(plan, u); ++p) {
        op.export_master(u, p, full(plan, u, p, exported), {});
        if (of(exported, u, p) != of(weights, u, p)) fail<error>("unit ", u, " parameter ", p, ": the master is wrong");
        if (place(plan, u, p).spec.frozen) continue;
        op.export_gradient(u, p, full(plan, u, p, exported), {});
        if (of(exported, u, p) != of(gradients, u, p))
          fail<error>("unit ", u, " parameter ", p, ": the gradient is wrong");
      }
    }
  }

  /// A plain step on shards, and the same on whole parameters.
  void update(Sharder& op, const fsdp::Plan& plan, Values& weights, const Values& gradients) const {
    for (const fsdp::ShardMemory& shard : op.shards()) {
      for (std::int64_t k = 0; k < shard.piece_count; ++k) {
        const fsdp::UpdatePiece& piece = shard.pieces[k];
        for (std::int64_t i = piece.begin; i < piece.begin + piece.elems; ++i) {
          A& master = static_cast<A*>(shard.master)[i];
          master = updated(master, static_cast<const A*>(shard.gradient)[i]);
          if (shard.compute != nullptr) static_cast<T*>(shard.compute)[i] = static_cast<T>(master);
        }
      }
    }
    op.weights_changed({});
    for (int u = 0; u < units(plan); ++u) {
      for (int p = 0; p < params(plan, u); ++p) {
        if (place(plan, u, p).spec.frozen) continue;
        for (std::size_t i = 0; i < elems(plan, u, p); ++i) {
          A& weight = of(weights, u, p)[i];
          weight = updated(weight, of(gradients, u, p)[i]);
        }
      }
    }
  }
  static A updated(A weight, A gradient) {
    const A change = static_cast<A>(0.125) * gradient;
    return weight - change;
  }

  RunConfig config_;
  std::int64_t seed_;
  RuntimeMesh mesh_;
  std::vector<UnitSpec> model_;
};

}  // namespace fsdp_testing
