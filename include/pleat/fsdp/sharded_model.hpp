// ShardedModel: sharded parameters for a trainer that exists: one object with its memory, used where weights were.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>

#include <pleat/core/buffer.hpp>
#include <pleat/fsdp/sharder.hpp>

namespace pleat::inline v0::fsdp {

/// Whether peer access can move the shards of all groups of this rank.
template <communicator Comm, symmetric_arena Arena>
bool is_reachable(const Arena& arena, const Groups<Comm>& groups) {
  return arena.reachable(groups.dense.gather.ranks()) && arena.reachable(groups.expert.gather.ranks());
}

/// What a caller may choose of a ShardedModel; all ranks choose alike.
struct ModelOptions {
  DType compute = DType::bf16;
  std::optional<DType> gradient = {};
  /// Empty: peer access where the arena reaches every group on every rank, else collectives. A value forces either
  /// (C29).
  std::optional<Transport> transport = {};
  int prefetch = 1;
  int reduce_ctas = Options{}.reduce_ctas;
  int last_reduce_ctas = Options{}.last_reduce_ctas;
  /// See Options: for finding a rank that uses units in another order.
  bool check_order = false;
  /// Of the world, without pipeline: see RuntimeMesh::fold.
  int ep = 1;
  int replicas = 1;
};

/// The parameters of a model, sharded over all ranks of `world` (experts over those that share them), with the memory
/// and the communicators that this takes. Units are numbered in the order of the forward pass; a step uses them in that
/// order and then in reverse:
///
///     fsdp::ShardedModel<Comm, Arena> model(world, units, streams);       // every rank
///     model.load(unit, param, tensor);
///     model.begin_step();                                                 // each micro-batch
///     model.forward(unit, [&](UnitView weights) { ... });                 // units 0, 1, ...
///     model.backward(unit, [&](UnitView weights, auto& gradients) {
///       const auto [dw, accumulate] = gradients.write(param);             // the kernel must obey `accumulate`
///       ...
///     });
///     model.finish_step([&](const ShardMemory& shard, int unit) { ... }); // after the last: the optimizer on shards
///
/// All work is enqueued on the caller's streams; see Sharder, which this owns, for what its calls mean and throw. When
/// an `f` of forward or backward throws, its unit is released and the gradients of the step so far are dropped before
/// the exception goes on: a trainer that catches it on every rank begins the step anew. One that was moved from may be
/// assigned to and destroyed; all else is F22.
template <communicator Comm, symmetric_arena Arena>
class ShardedModel {
 public:
  using stream_type = typename Comm::stream_type;
  using executor_type = executor_for<typename Comm::device_type>;
  using sharder_type = Sharder<executor_type, Comm, Arena>;

  /// Collective over `world`, which must outlive the model. `streams` are borrowed; makes communicators, memory and,
  /// where peers are mapped, an arena. Errors: comm_error C36 on every rank when a rank has other units or options;
  /// those of RuntimeMesh::fold, `plan`, the arena and `bind`.
  ShardedModel(Comm& world, std::span<const UnitSpec> units, const ShardStreams<stream_type>& streams,
               const ModelOptions& options = {})
      : world_(agreed(world, units, streams.compute, options)),
        streams_(streams),
        comms_(RuntimeMesh::fold({.world = world.size(), .ep = options.ep, .replicas = options.replicas}), world),
        op_(make(units, options)) {
    if (arena_ != nullptr) arena_->seal(comms_.world());
    for (int u = 0; u < static_cast<int>(units.size()); ++u) order_.push_back(u);
    order_.insert(order_.end(), order_.rbegin(), order_.rend());
  }

  /// Sets a parameter from its full values: a tensor, see Sharder::load, or a pointer to as many contiguous elements
  /// in the device's memory.
  template <class T>
  void load(int unit, int param, const T& values) {
    if constexpr (std::is_pointer_v<T>) {
      using Element = std::remove_const_t<std::remove_pointer_t<T>>;
      op_.load(unit, param, op_.full(unit, param, const_cast<Element*>(values), dtype_of<Element>), streams_);
    } else {
      op_.load(unit, param, values, streams_);
    }
  }
  /// Before each pass over the units.
  void begin_step() { op_.begin(order_); }
  /// `f(weights)` enqueues work that reads the unit's weights.
  template <class F>
  void forward(int unit, F&& f) {
    const UnitView weights = op_.acquire(unit, streams_);
    use(unit, [&] { f(weights); });
  }
  /// `f(weights, gradients)` enqueues work that also writes gradients where, and how, `gradients.write(param)` says: a
  /// kernel that does not add where its `accumulate` is true gives wrong sums (see GradientTarget). It is called for
  /// frozen units too, through which dx flows back: `gradients.trains(param)` says what may be written.
  /// What `rest(weights)` enqueues, such as the unit's dx, runs beside the sum of the gradients that `f` has written.
  template <class F, class Rest>
  void backward(int unit, F&& f, Rest&& rest) {
    const UnitView weights = op_.acquire(unit, streams_);
    use(unit, [&] {
      GradientView<executor_type> gradients = op_.gradient(unit, streams_);
      f(weights, gradients);
      op_.reduce(unit, streams_);
      rest(weights);
    });
  }
  template <class F>
  void backward(int unit, F&& f) {
    backward(unit, std::forward<F>(f), [](const UnitView&) {});
  }
  /// `update(shard, unit)` enqueues, on the compute stream, the optimizer on the elements of this rank: it reads
  /// `shard.gradient` and writes `shard.master` and `shard.compute`. When it throws, units are gathered anew all the
  /// same, as some may have been written. Errors, before anything is done: shape_error F10 when a unit is held.
  template <class F>
  void finish_step(F&& update) {
    op_.check_released();
    op_.finish_gradients(streams_);
    try {
      int unit = 0;
      for (const ShardMemory& shard : op_.shards()) update(shard, unit++);
    } catch (...) {
      op_.weights_changed(streams_);
      throw;
    }
    op_.weights_changed(streams_);
  }
  /// Waits until this rank's work is done, with the communicator's deadline.
  void wait() {
    op_.join(streams_);
    world_->wait(streams_.compute);
  }

  /// The operation that it owns, for what the calls above do not do: other orders of uses, exports.
  sharder_type& sharder() { return op_; }
  const Plan& plan() const { return op_.plan(); }

 private:
  using Buffer = buffer_for<typename Comm::device_type>;

  /// The world, once its ranks have shown that they describe the same model: what follows is collective.
  static Comm* agreed(Comm& world, std::span<const UnitSpec> units, stream_type s, const ModelOptions& options) {
    const GroupComm<Comm> everybody(world);
    const Buffer scratch(agreement_bytes(world.size()));
    const int transport = options.transport ? static_cast<int>(*options.transport) : -1;
    agree_on("sharded model",
             std::array<PlanField, 5>{PlanField{"units", units.size()},
                                      PlanField{"hash of units", detail::hash_of(units)}, PlanField{"ep", options.ep},
                                      PlanField{"replicas", options.replicas}, PlanField{"transport", transport}},
             everybody, scratch.block(), s);
    return &world;
  }
  /// Ends the use of an acquired unit after `f`.
  template <class F>
  void use(int unit, F&& f) {
    try {
      f();
    } catch (...) {
      op_.discard_gradients();
      op_.release(unit, streams_);
      throw;
    }
    op_.release(unit, streams_);
  }
  sharder_type make(std::span<const UnitSpec> units, const ModelOptions& options) {
    const Groups<Comm> groups = groups_of(comms_);
    const auto planned = [&](Transport transport) {
      return fsdp::plan(units, groups.sizes(),
                        {.compute = options.compute,
                         .gradient = options.gradient,
                         .transport = transport,
                         .prefetch = options.prefetch,
                         .reduce_ctas = options.reduce_ctas,
                         .last_reduce_ctas = options.last_reduce_ctas,
                         .check_order = options.check_order});
    };
    Plan made = planned(options.transport.value_or(Transport::peer));
    if (made.transport == Transport::peer) {
      arena_ = make_arena(made.footprint());
      if (!options.transport && !on_all_ranks(is_reachable(*arena_, groups))) {
        arena_.reset();
        made = planned(Transport::collective);
      }
    }
    persistent_ = Buffer(made.footprint().persistent);
    return bind(made, executor_type(), groups, Memory<Arena>{.persistent = persistent_.block(), .arena = arena_.get()},
                streams_.compute);
  }
  /// With as many channels as units need, where an arena is told how many.
  std::unique_ptr<Arena> make_arena(const Footprint& needs) const {
    if constexpr (std::is_constructible_v<Arena, GroupComm<Comm>, std::size_t, int>) {
      return std::make_unique<Arena>(comms_.world(), needs.symmetric, needs.channels);
    } else {
      return std::make_unique<Arena>(comms_.world(), needs.symmetric);
    }
  }
  bool on_all_ranks(bool here) {
    const auto ranks = static_cast<std::size_t>(world_->size());
    const executor_type executor;
    const Buffer mine(1), all(ranks);
    const std::uint8_t value = here ? 1 : 0;
    std::vector<std::uint8_t> values(ranks);
    executor.copy(mine.block().data, &value, 1, streams_.compute);
    comms_.world().all_gather(mine.block().data, all.block().data, 1, DType::u8, streams_.compute);
    executor.copy(values.data(), all.block().data, ranks, streams_.compute);
    world_->wait(streams_.compute);
    return std::all_of(values.begin(), values.end(), [](std::uint8_t v) { return v == 1; });
  }

  Comm* world_;
  ShardStreams<stream_type> streams_;
  MeshComms<RuntimeMesh, Comm> comms_;
  std::unique_ptr<Arena> arena_;
  Buffer persistent_;
  sharder_type op_;
  std::vector<int> order_;
};

}  // namespace pleat::inline v0::fsdp
