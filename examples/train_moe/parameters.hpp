// The sharded parameters of the model: gathered for the time of a use, initialized, set and read as a whole.
#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include "groups.hpp"
#include "options.hpp"
#include "units.hpp"

namespace train_moe {

template <class Backend, class T>
class Parameters {
 public:
  using A = pleat::accumulator_t<T>;
  using Comm = typename Backend::Comm;
  using Executor = typename Backend::Executor;
  using Arena = typename Backend::Arena;
  using Stream = typename Backend::Stream;
  using Gradient = pleat::fsdp::GradientView<Executor>;

  struct Plan {
    std::vector<pleat::fsdp::UnitSpec> units;
    pleat::fsdp::Plan shards;
    pleat::Footprint footprint() const { return shards.footprint(); }
  };
  static Plan plan(const Options& o, const Groups<Comm>& groups) {
    std::vector<pleat::fsdp::UnitSpec> units = make_units(o.model, o.model.experts / groups.mesh.ep);
    pleat::fsdp::Options sharding;
    sharding.compute = pleat::dtype_of<T>;
    sharding.transport = o.transport;
    sharding.prefetch = o.prefetch;
    auto shards = pleat::fsdp::plan(units, groups.shards.sizes(), sharding);
    return {std::move(units), std::move(shards)};
  }

  /// Collective over the shard groups. Parameters have their initial values, which do not depend on the mesh.
  Parameters(const Plan& plan, const Options& o, const Groups<Comm>& groups, const pleat::Memory<Arena>& memory,
             Stream s)
      : units_(plan.units),
        experts_local_(o.model.experts / groups.mesh.ep),
        first_expert_(groups.me.ep * experts_local_),
        streams_{s, s, s},
        shards_(pleat::fsdp::bind(plan.shards, Executor{}, groups.shards, memory)) {
    initialize(o.seed);
  }

  const std::vector<pleat::fsdp::UnitSpec>& units() const { return units_; }
  int first_expert() const { return first_expert_; }
  int experts_local() const { return experts_local_; }
  std::span<const pleat::fsdp::ShardMemory> shards() const { return shards_.shards(); }

  void begin(std::span<const int> order) { shards_.begin(order); }
  /// Gathers a unit for the time of `use(view)`.
  template <class F>
  void with_unit(int unit, F use) {
    use(shards_.acquire(unit, streams_));
    shards_.release(unit, streams_);
  }
  Gradient gradient(int unit) { return shards_.gradient(unit, streams_); }
  void reduce(int unit) { shards_.reduce(unit, streams_); }
  void finish_gradients() { shards_.finish_gradients(streams_); }
  void changed() { shards_.weights_changed(streams_); }

  /// Elements of a parameter as the calls below see it: all local experts of an expert's.
  std::int64_t elems(int unit, int param) const {
    const pleat::fsdp::ParamSpec& spec = spec_of(unit, param);
    std::int64_t product = std::max<std::int64_t>(units_[static_cast<std::size_t>(unit)].experts_local, 1);
    for (const std::int64_t extent : spec.shape) product *= extent;
    return product;
  }
  /// Sets a parameter from all its values [elems].
  void load(int unit, int param, const A* values) {
    shards_.load(unit, param, whole(unit, param, const_cast<A*>(values)), streams_);
  }
  /// The whole parameter, or its gradient after `finish_gradients`, in `out` [elems]. Collective over its shard group.
  void export_parameter(int unit, int param, A* out) {
    shards_.export_master(unit, param, whole(unit, param, out), streams_);
  }
  void export_gradient(int unit, int param, A* out) {
    shards_.export_gradient(unit, param, whole(unit, param, out), streams_);
  }

 private:
  void initialize(std::uint64_t seed) {
    for (int unit = 0; unit < static_cast<int>(units_.size()); ++unit) {
      const pleat::fsdp::UnitSpec& spec = units_[static_cast<std::size_t>(unit)];
      for (int param = 0; param < static_cast<int>(spec.params.size()); ++param) {
        const bool is_norm = spec_of(unit, param).shape.size() == 1;
        const int parts = spec.kind == pleat::Param::expert ? experts_local_ : 1;
        std::vector<A> values;
        for (int part = 0; part < parts; ++part) {
          const int expert = spec.kind == pleat::Param::expert ? first_expert_ + part : -1;
          const auto initial =
              initial_values(parameter_name(spec, param, expert), is_norm, elems(unit, param) / parts, seed);
          values.insert(values.end(), initial.begin(), initial.end());
        }
        load(unit, param, values.data());
      }
    }
  }

  const pleat::fsdp::ParamSpec& spec_of(int unit, int param) const {
    return units_[static_cast<std::size_t>(unit)].params[static_cast<std::size_t>(param)];
  }
  pleat::TensorRef whole(int unit, int param, A* data) const {
    return shards_.full(unit, param, data, pleat::dtype_of<A>);
  }

  std::vector<pleat::fsdp::UnitSpec> units_;
  int experts_local_;
  int first_expert_;
  pleat::fsdp::ShardStreams<Stream> streams_;
  pleat::fsdp::Sharder<Executor, Comm, Arena> shards_;
};

}  // namespace train_moe
