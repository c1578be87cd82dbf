// The sharded parameters of a rank's stages: gathered for the time of a use, initialized, set and read as a whole.
#pragma once

#include <algorithm>
#include <limits>
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

  static pleat::fsdp::Plan plan(const Options& o, const Groups<Comm>& groups, const RankUnits& units) {
    pleat::fsdp::Options sharding;
    sharding.compute = pleat::dtype_of<T>;
    sharding.transport = o.transport;
    sharding.prefetch = o.prefetch;
    // Products of experts take all multiprocessors, and wait until a sum gives its own back: it had better be short.
    sharding.reduce_ctas = 64;
    return pleat::fsdp::plan(units.specs, groups.shards.sizes(), sharding);
  }

  /// Collective over the shard groups. Parameters have their initial values, which do not depend on the mesh.
  template <class Ops>
  Parameters(const pleat::fsdp::Plan& plan, const RankUnits& units, const Options& o, const Groups<Comm>& groups,
             const Backend& backend, Ops& ops, const pleat::Memory<Arena>& memory)
      : backend_(&backend),
        world_(groups.world),
        units_(units.specs),
        experts_local_(o.model.experts / groups.mesh.ep),
        first_expert_(groups.me.ep * experts_local_),
        shards_(pleat::fsdp::bind(plan, Executor{}, groups.shards, memory, backend.compute(0))) {
    initialize(ops, o);
  }

  const std::vector<pleat::fsdp::UnitSpec>& units() const { return units_; }
  const pleat::fsdp::Plan& plan() const { return shards_.plan(); }
  int first_expert() const { return first_expert_; }
  int experts_local() const { return experts_local_; }
  std::span<const pleat::fsdp::ShardMemory> shards() const { return shards_.shards(); }

  /// Of what exports go through; none until the first.
  std::int64_t staging_bytes() const { return static_cast<std::int64_t>(staging_.size_bytes()); }

  void begin(std::span<const int> order) { shards_.begin(order); }
  /// Gathers a unit for the time of `use(view)`, whose work is on the compute stream of `lane`.
  template <class F>
  void with_unit(int lane, int unit, F use) {
    use(shards_.acquire(unit, streams(lane)));
    shards_.release(unit, streams(lane));
  }
  /// Sums the gradients that `write(gradient)` enqueues on the compute stream of `lane`.
  template <class F>
  void with_gradient(int lane, int unit, F write) {
    Gradient gradient = shards_.gradient(unit, streams(lane));
    write(gradient);
    shards_.reduce(unit, streams(lane));
  }
  void finish_gradients() { shards_.finish_gradients(streams(0)); }
  void changed() { shards_.weights_changed(streams(0)); }

  /// Elements of a parameter as the calls below see it: all local experts of an expert's.
  std::int64_t elems(int unit, int param) const {
    const pleat::fsdp::ParamSpec& spec = spec_of(unit, param);
    std::int64_t product = std::max<std::int64_t>(units_[static_cast<std::size_t>(unit)].experts_local, 1);
    for (const std::int64_t extent : spec.shape) product *= extent;
    return product;
  }
  /// Sets a parameter from all its values [elems], on the host.
  void load(int unit, int param, const A* values) {
    A* const staged = staging();
    Executor{}.copy(staged, values, bytes(unit, param), stream());
    shards_.load(unit, param, whole(unit, param, staged), streams(0));
    world_.wait(stream());
  }
  /// The whole parameter, or its gradient after `finish_gradients`, in `out` [elems] on the host. Collective over its
  /// shard group.
  void export_parameter(int unit, int param, A* out) {
    shards_.export_master(unit, param, whole(unit, param, staging()), streams(0));
    read_staging(unit, param, out);
  }
  void export_gradient(int unit, int param, A* out) {
    shards_.export_gradient(unit, param, whole(unit, param, staging()), streams(0));
    read_staging(unit, param, out);
  }

 private:
  pleat::fsdp::ShardStreams<Stream> streams(int lane) const {
    return {backend_->compute(lane), backend_->gather(), backend_->reduce()};
  }
  Stream stream() const { return backend_->compute(0); }

  /// Each rank makes the elements of its own shards.
  template <class Ops>
  void initialize(Ops& ops, const Options& o) {
    for (std::size_t u = 0; u < units_.size(); ++u) {
      const pleat::fsdp::UnitSpec& spec = units_[u];
      const pleat::fsdp::UnitLayout& layout = plan().layouts[u];
      const pleat::fsdp::ShardMemory& shard = shards()[u];
      for (const pleat::fsdp::Piece& piece : layout.pieces(shards_.groups().of(spec.kind).gather.rank())) {
        const std::int64_t one = layout.place(piece.param).elems;
        const std::int64_t expert = piece.param_begin / one;  // a piece is of one expert
        const std::string name =
            parameter_name(spec, piece.param, spec.experts_local == 0 ? -1 : first_expert_ + static_cast<int>(expert));
        const bool is_norm = layout.place(piece.param).spec.shape.size() == 1;
        A* const master = static_cast<A*>(shard.master) + piece.shard_begin;
        Initial initial = initial_of(name, is_norm, o.seed);
        if (o.perturb) initial.perturbation = std::numeric_limits<A>::epsilon();
        ops.initialize(master, initial, piece.param_begin - expert * one, piece.elems, stream());
        if (shard.compute == nullptr) continue;
        pleat::core_leaf<typename Backend::Device>::cast_copy(static_cast<T*>(shard.compute) + piece.shard_begin,
                                                              pleat::dtype_of<T>, master, pleat::dtype_of<A>,
                                                              static_cast<std::size_t>(piece.elems), stream());
      }
    }
    changed();
  }

  const pleat::fsdp::ParamSpec& spec_of(int unit, int param) const {
    return units_[static_cast<std::size_t>(unit)].params[static_cast<std::size_t>(param)];
  }
  std::size_t bytes(int unit, int param) const { return static_cast<std::size_t>(elems(unit, param)) * sizeof(A); }
  pleat::TensorRef whole(int unit, int param, A* data) const {
    return shards_.full(unit, param, data, pleat::dtype_of<A>);
  }
  /// Device memory for the largest parameter, made when a check first asks for one.
  A* staging() {
    if (staging_.size_bytes() == 0) {
      std::size_t most = 0;
      for (int u = 0; u < static_cast<int>(units_.size()); ++u) {
        for (int p = 0; p < static_cast<int>(units_[static_cast<std::size_t>(u)].params.size()); ++p) {
          most = std::max(most, bytes(u, p));
        }
      }
      staging_ = typename Backend::Buffer(most);
    }
    return reinterpret_cast<A*>(staging_.data());
  }
  void read_staging(int unit, int param, A* out) {
    Executor{}.copy(out, staging(), bytes(unit, param), stream());
    world_.wait(stream());
  }

  const Backend* backend_;
  pleat::GroupComm<Comm> world_;
  std::vector<pleat::fsdp::UnitSpec> units_;
  int experts_local_;
  int first_expert_;
  pleat::fsdp::Sharder<Executor, Comm, Arena> shards_;
  typename Backend::Buffer staging_;
};

}  // namespace train_moe
