// Sharder: parameters sharded over the ranks of a mesh, gathered for use, their gradients summed into shards.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include <pleat/comm/mesh_comms.hpp>
#include <pleat/fsdp/agreement.hpp>
#include <pleat/fsdp/gatherer.hpp>
#include <pleat/fsdp/order_check.hpp>
#include <pleat/fsdp/reducer.hpp>
#include <pleat/tensor/tensor_traits.hpp>

namespace pleat::inline v0::fsdp {

/// The groups of one rank. Gathers and sums have communicators of their own, so that they can run at the same time.
template <communicator Comm>
struct Groups {
  struct Lanes {
    GroupComm<Comm> gather;
    GroupComm<Comm> reduce;
    explicit Lanes(GroupComm<Comm> both = GroupComm<Comm>()) : gather(both), reduce(both) {}
    Lanes(GroupComm<Comm> gathers, GroupComm<Comm> sums) : gather(gathers), reduce(sums) {}
  };
  Lanes dense = Lanes();
  Lanes expert = Lanes();
  GroupComm<Comm> replica = GroupComm<Comm>();

  /// The groups of dense units, or of experts'.
  const Lanes& of(Param kind) const { return kind == Param::dense ? dense : expert; }
  /// What `plan` needs to know of the groups.
  GroupSizes sizes() const { return {dense.gather.size(), expert.gather.size(), replica.size()}; }
};

/// The groups of a mesh, whose communicators were made with the lanes gather and reduce.
template <class Mesh, communicator Comm>
Groups<Comm> groups_of(const MeshComms<Mesh, Comm>& comms) {
  const auto lanes = [&](Param kind) {
    return typename Groups<Comm>::Lanes(comms.shard(kind, Lane::gather), comms.shard(kind, Lane::reduce));
  };
  return {lanes(Param::dense), lanes(Param::expert), comms.replica(Lane::reduce)};
}

/// The sharded parameters of a model: one operation over all its units, dense and expert. Made by `bind`.
///
/// A step, on every rank alike, for each micro-batch:
///
///     op.begin(order);                                 // the unit of each acquire that follows
///     UnitView w = op.acquire(unit, streams);          // forward and backward; w[param] is a tensor
///     auto [dw, accumulate] = op.gradient(unit, streams).write(param);   // backward: where a kernel puts its gradient
///     op.reduce(unit, streams);
///     op.release(unit, streams);
///
/// with `ShardStreams{compute, gather, reduce}`. A kernel must obey `accumulate`, which says whether it overwrites what
/// is there or adds to it, or take `add_to(param)` where it only adds: see GradientTarget. Then `finish_gradients`, an
/// optimizer on `shards()`, and `weights_changed`.
///
/// All ranks of a group make the same calls in the same order, a rank without tokens too (it need not call `gradient`
/// when the others reduce their units in the order of their first `gradient`). Streams are the caller's; pleat orders
/// them among each other by events and by the credits of slots and gradient units. `compute` may be another one from
/// call to call, as for micro-batches on lanes of their own: after `finish_gradients` the compute stream comes after
/// the gradients of all lanes, and after their uses of units that were released before; a step on another lane comes
/// after what the compute stream of `finish_gradients` has read of the sums. A stream on which gradients were opened
/// lives until their `reduce`, that of `finish_gradients` until `weights_changed` or the next step's first `reduce`.
/// One that was moved from may be assigned to and destroyed; all else is F22.
template <executor Executor, communicator Comm, class Arena>
class Sharder {
 public:
  using stream_type = typename Executor::stream_type;
  using streams_type = ShardStreams<stream_type>;

  /// See `bind`.
  Sharder(const Plan& plan, Executor executor, const Groups<Comm>& groups, const Memory<Arena>& memory, stream_type s)
      : groups_(groups),
        state_(make_state(plan, executor, groups, memory, s)),
        gatherer_(*state_),
        reducer_(*state_, groups.replica) {}

  /// The units of the acquires that follow, in order; the prefetch looks ahead in it. Replaces what is left of an
  /// earlier order. Without one nothing is fetched ahead. Errors: F13.
  void begin(std::span<const int> order) { gatherer().begin(order); }

  /// The unit's parameters, whole, in the compute dtype, valid in the order of the compute stream until `release`. May
  /// be nested. Gathers the unit unless a slot still holds it (so the last prefetch + 1 units of a forward pass are not
  /// gathered again for backward), and the units of the next uses. Moves (ranks - 1) shards in and out per gather; in a
  /// group of one the view is of the shard itself, and nothing is gathered. Errors: shape_error F09 when the order says
  /// another unit, F10 when all slots are held, F13.
  UnitView acquire(int unit, const streams_type& streams) { return gatherer().acquire(unit, streams); }
  /// Ends a use: its slot may be overwritten once the compute stream is here. Errors: F10 when it is not held, F13.
  void release(int unit, const streams_type& streams) { gatherer().release(unit, streams); }

  /// The unit's gradients of this micro-batch, to be written in the order of the compute stream until `reduce`; the
  /// same ones when called again before that. `reduce` must follow before the step ends, also where nothing was
  /// written. Of a frozen unit nothing can be written. Errors: shape_error F12 when the gradient units of its kind are
  /// all being written, which those that lie in shards do not take; F13.
  GradientView<Executor> gradient(int unit, const streams_type& streams) { return reducer().gradient(unit, streams); }
  /// Adds the sum over the shard group, in rank order, to this rank's gradient shard (the first of a step replaces it).
  /// A plain sum in the master's dtype: no divide, frozen parameters stay out, and padding is of no meaning. Parameters
  /// that nobody wrote count as zero. Moves (ranks - 1) shards in and out. In a group of one whose gradients have the
  /// master's dtype there is nothing to do: they are written in the shard itself, where `accumulate` says from a step's
  /// second micro-batch on that kernels add. What is added as one term per micro-batch (a product with beta = 1) gives
  /// the bits of a sum of its own. Best called as soon as the unit's gradients are written: what of its backward pass
  /// is enqueued after it runs beside the sum. Errors: F13.
  void reduce(int unit, const streams_type& streams) {
    reducer().reduce(unit, streams, gatherer_.order().has_ended() ? plan().last_reduce_ctas : plan().reduce_ctas);
  }
  /// After the last micro-batch: adds the replicas' shards in rank order, the same bits on each; the compute stream
  /// then sees the sums. Units that were not reduced have zero gradients. The next `reduce` begins a new step. Errors:
  /// shape_error F21, before anything is done, when `gradient` of a unit was not followed by its `reduce`.
  void finish_gradients(const streams_type& streams) {
    reducer().finish(streams);
    gatherer_.await_uses(streams.compute);
  }

  /// Drops the gradients of the step so far, those being written and those summed: what follows begins a new step, on
  /// every rank alike, whichever of them had called `gradient`. For a trainer that leaves a batch out. Records events
  /// on the streams of open gradients and enqueues nothing else.
  void discard_gradients() { reducer().discard(); }

  /// This rank's shard of each unit, for optimizers; the memory is this operation's.
  std::span<const ShardMemory> shards() const { return state().shards; }
  /// Says that the compute stream has written the shards: units are gathered anew. Errors: F10 when one is held.
  void weights_changed(const streams_type& streams) {
    gatherer().weights_changed(streams.compute);
    reducer_.end_reads();
  }
  /// Whether the shards may be written, as `weights_changed` will ask afterwards. Errors: F10 when a unit is held.
  void check_released() const {
    state();
    gatherer_.check_released();
  }

  /// Begins work that stands alone, such as a graph that captures whole steps: `gather` and `reduce` come after
  /// `compute`, and no call waits for anything before. Begin with `join` outside of the graph, then
  ///
  ///     cudaStreamBeginCapture(streams.compute, cudaStreamCaptureModeThreadLocal);
  ///     op.fork(streams);
  ///     ... steps, each up to its weights_changed ...
  ///     op.join(streams);
  ///     cudaStreamEndCapture(streams.compute, &graph);
  ///
  /// after a step without a graph, which connects and loads what is needed. All ranks replay alike. Not with
  /// CUDA_DEVICE_MAX_CONNECTIONS=1: the branches of a graph would enter the one hardware queue in any order. `fork`
  /// once more before calls without a graph. Errors: F17 when something is in flight, or where ranks meet on the host
  /// (threads that share GPUs): no graph can hold that; F10 when a unit is held.
  void fork(const streams_type& streams) {
    if constexpr (device_kind<typename Executor::device_type> == DeviceKind::cuda) {
      if (plan().transport == Transport::peer ? !is_capturable<peers_type> : !is_capturable<Comm>) {
        fail<shape_error>("pleat[F17]: fork over ", name_of(plan().transport),
                          " transport of ranks that meet on the host, which no graph holds; take ranks with a GPU each "
                          "(NcclComm, NcclArena), or go without a graph");
      }
    }
    gatherer().fork(streams);
    reducer_.fork(streams);
  }
  /// `compute` comes after all that this operation has under way, here and for peers.
  void join(const streams_type& streams) {
    gatherer().join(streams);
    reducer_.join(streams);
  }

  /// Sets a parameter from the full tensor [shape...] or [experts_local, shape...], contiguous, of f64, f32 or bf16 and
  /// the same on every rank; each keeps its shard. No communication. Errors, on every rank alike: shape_error F07 for
  /// another shape, T01 for another dtype, T07 without data, F10, F13.
  template <class T>
  void load(int unit, int param, const T& tensor, const streams_type& streams) {
    state().check_param(unit, param);
    const TensorRef full = as_tensor(tensor, device);
    check_full("load", unit, param, full);
    dispatch_dtype(FloatTypes{}, full.dtype(), [](auto) {});
    gatherer_.await_uses(streams.compute);
    const ShardMemory& shard = state_->shard(unit);
    const int storage = state_->layout(unit).storage_of(param);
    for (const Piece& piece : state_->held(unit)) {
      if (piece.param != storage) continue;
      const auto elems = static_cast<std::size_t>(piece.elems);
      const void* const from = at(full.data(), full.dtype(), piece.param_begin);
      void* const master = at(shard.master, shard.master_dtype, piece.shard_begin);
      leaf::cast_copy(master, shard.master_dtype, from, full.dtype(), elems, streams.compute);
      if (shard.compute == nullptr) continue;
      leaf::cast_copy(at(shard.compute, shard.compute_dtype, piece.shard_begin), shard.compute_dtype, master,
                      shard.master_dtype, elems, streams.compute);
    }
    weights_changed(streams);
  }

  /// Gathers a parameter's master, or its gradient as `finish_gradients` left it, into `tensor` [shape...] or
  /// [experts_local, shape...], contiguous, of the master's dtype; the compute stream sees it. Every rank of the shard
  /// group calls. For checks, not for steps. Errors: shape_error F07, T07, F11 for the gradient of a frozen parameter,
  /// F13.
  template <class T>
  void export_master(int unit, int param, const T& tensor, const streams_type& streams) {
    state().check_param(unit, param);
    export_full("export_master", unit, param, state_->shard(unit).master, as_tensor(tensor, device), streams);
  }
  template <class T>
  void export_gradient(int unit, int param, const T& tensor, const streams_type& streams) {
    state().check_param(unit, param);
    const ParamPlace& place = state_->layout(unit).place(param);
    if (place.spec.frozen) {
      fail<shape_error>("pleat[F11]: parameter ", place.spec.name, " of unit ", state_->name(unit),
                        " is frozen and has no gradient to export");
    }
    export_full("export_gradient", unit, param, state_->shard(unit).gradient, as_tensor(tensor, device), streams);
  }

  /// A tensor of all of a parameter, contiguous: what `load` and the exports take. Errors: F13.
  TensorRef full(int unit, int param, void* data, DType dtype) const {
    state().check_param(unit, param);
    const std::vector<std::int64_t> shape = state_->layout(unit).full_shape(param);
    TensorRef tensor(data, dtype, {}, state_->device());
    for (std::size_t axis = 0; axis < shape.size(); ++axis) {
      tensor.push_extent(shape[axis], elems_of(std::span(shape).subspan(axis + 1)));
    }
    return tensor;
  }

  const Plan& plan() const { return state().plan; }
  const Groups<Comm>& groups() const { return groups_; }
  /// Gathers issued so far.
  std::int64_t gathers() const {
    state();
    return gatherer_.gathers();
  }

 private:
  using State = ShardState<Executor>;
  using leaf = core_leaf<typename Executor::device_type>;
  static constexpr KnownDevice<typename Executor::device_type> device{};
  using peers_type = pleat::detail::peers_of<Arena>;

  /// Whether calls only enqueue.
  template <class T>
  static constexpr bool is_capturable = requires {
    requires T::is_capturable;
  };

  /// What calls work with. Errors: shape_error F22 on an operation that was moved from.
  const State& state() const {
    if (state_ == nullptr) {
      fail<shape_error>("pleat[F22]: sharded parameters are used after they were moved from; use what holds them now");
    }
    return *state_;
  }
  Gatherer<Executor>& gatherer() {
    state();
    return gatherer_;
  }
  Reducer<Executor, Comm>& reducer() {
    state();
    return reducer_;
  }

  static std::unique_ptr<State> make_state(const Plan& plan, Executor executor, const Groups<Comm>& groups,
                                           const Memory<Arena>& memory, stream_type s) {
    preload_leaves<leaf>();
    auto state = std::make_unique<State>(plan, executor);
    Carver persistent(memory.persistent);
    for (std::size_t u = 0; u < plan.layouts.size(); ++u) {
      const UnitLayout& layout = plan.layouts[u];
      const int rank = groups.of(plan.kinds[u]).gather.rank();
      const ShardBuffers shard = plan.carve_shard(persistent, layout);
      state->pieces.push_back(layout.pieces(rank));
      state->update_pieces.push_back(update_pieces(layout, state->pieces.back(), plan.sizes.replicas));
      const std::vector<UpdatePiece>& pieces = state->update_pieces.back();
      executor.copy(shard.pieces, pieces.data(), pieces.size() * sizeof(UpdatePiece), s);
      state->shards.push_back({shard.master, shard.gradient, shard.compute, plan.master, plan.compute,
                               layout.shard_elems(rank), shard.pieces, static_cast<std::int64_t>(pieces.size())});
    }
    state->workspace = persistent.take_bytes(plan.workspace_bytes());
    auto* const order_words = persistent.take<std::int64_t>(plan.order_words());
    for (const Param kind : {Param::dense, Param::expert}) {
      if (plan.of(kind).units == 0) continue;
      auto& transport = state->transports[static_cast<std::size_t>(kind)];
      if (plan.uses_peers(kind)) {
        using Peer = PeerTransport<Executor, peers_type>;
        transport = std::make_unique<Peer>(
            state->plan, kind, executor,
            pleat::detail::open_window("sharded parameters", plan.of(kind).ranks, groups.of(kind).gather, memory,
                                       plan.window_bytes(kind), plan.channels(kind)));
      } else {
        transport = std::make_unique<CollectiveTransport<Executor, Comm>>(
            state->plan, plan.carve_units(persistent, kind), groups.of(kind).gather, groups.of(kind).reduce,
            state->workspace);
      }
      if (plan.check_order && plan.of(kind).ranks > 1) {
        transport = std::make_unique<CheckedTransport<Executor, Comm>>(state->plan, std::move(transport), executor,
                                                                       groups.of(kind).gather, order_words);
      }
    }
    return state;
  }

  template <class Pointer>
  static auto* at(Pointer* data, DType dtype, std::int64_t elems) {
    using Byte = std::conditional_t<std::is_const_v<Pointer>, const std::byte, std::byte>;
    return static_cast<Byte*>(data) + static_cast<std::size_t>(elems) * size_bytes(dtype);
  }
  void check_full(const char* call, int unit, int param, const TensorRef& tensor) const {
    const TensorRef wanted = full(unit, param, nullptr, tensor.dtype());
    bool fits =
        tensor.rank() == wanted.rank() && tensor.is_contiguous() && tensor.device().kind == wanted.device().kind;
    for (int axis = 0; fits && axis < wanted.rank(); ++axis) fits = tensor.extent(axis) == wanted.extent(axis);
    if (!fits) {
      fail<shape_error>("pleat[F07]: ", call, " of parameter ", state_->layout(unit).place(param).spec.name,
                        " of unit ", state_->name(unit), " got ", tensor, "; it must be ", wanted, " and contiguous");
    }
    if (tensor.data() == nullptr && tensor.elems() != 0) {
      fail<shape_error>("pleat[T07]: ", call, " of parameter ", state_->layout(unit).place(param).spec.name,
                        " of unit ", state_->name(unit), " got ", tensor, ", which has no data");
    }
  }

  /// Puts this rank's pieces where they belong, then gathers in place: in rank order, they are the parameter.
  void export_full(const char* call, int unit, int param, const void* shard, const TensorRef& out,
                   const streams_type& streams) {
    check_full(call, unit, param, out);
    const DType master = state_->plan.master;
    if (out.dtype() != master) {
      fail<shape_error>("pleat[F07]: ", call, " into a tensor of ", out.dtype(), "; it must be of ", master);
    }
    const UnitLayout& layout = state_->layout(unit);
    const GroupComm<Comm>& group = groups_.of(state_->kind(unit)).reduce;
    const int storage = layout.storage_of(param);
    std::vector<std::size_t> counts(static_cast<std::size_t>(group.size()));
    for (int r = 0; r < group.size(); ++r) {
      for (const Piece& piece : layout.pieces(r)) {
        if (piece.param == storage) counts[static_cast<std::size_t>(r)] += static_cast<std::size_t>(piece.elems);
      }
    }
    auto event = state_->executor.make_event();
    state_->executor.record(event, streams.compute);
    state_->executor.wait(streams.reduce, event);
    std::int64_t first = 0;
    for (int r = 0; r < group.rank(); ++r) first += static_cast<std::int64_t>(counts[static_cast<std::size_t>(r)]);
    for (const Piece& piece : state_->held(unit)) {
      if (piece.param != storage) continue;
      const std::size_t bytes = static_cast<std::size_t>(piece.elems) * size_bytes(master);
      state_->executor.copy(at(out.data(), master, piece.param_begin), at(shard, master, piece.shard_begin), bytes,
                            streams.reduce);
    }
    group.all_gather_v(at(out.data(), master, first), out.data(), counts, master, streams.reduce);
    state_->executor.record(event, streams.reduce);
    state_->executor.wait(streams.compute, event);
  }

  Groups<Comm> groups_;
  std::unique_ptr<State> state_;
  Gatherer<Executor> gatherer_;
  Reducer<Executor, Comm> reducer_;
};

/// Binds a plan on every rank of the groups. `memory.persistent` has footprint().persistent bytes and is borrowed as
/// long as the operation lives, like the communicators; `memory.arena` gives the windows of the peer path and may be
/// null off it. Masters hold nothing until each parameter is loaded. `s`: the stream on which bind writes; give the
/// compute stream of the calls, or order it after `s`; it is waited for, since the ranks of each group compare their
/// plans. Errors: shape_error F05 when the groups have other sizes than the plan, comm_error C36 on every rank when a
/// rank has planned otherwise, C29 without an arena that reaches the groups on the peer path; those of the arena;
/// static T10 without a stream where there are several.
template <executor Executor, communicator Comm, class Arena>
Sharder<Executor, Comm, Arena> bind(const Plan& plan, Executor executor, const Groups<Comm>& groups,
                                    const Memory<Arena>& memory,
                                    typename Executor::stream_type s = only_stream<typename Executor::stream_type>()) {
  const GroupSizes sizes = groups.sizes();
  if (sizes.dense != plan.sizes.dense || sizes.expert != plan.sizes.expert || sizes.replicas != plan.sizes.replicas) {
    fail<shape_error>("pleat[F05]: the plan is for shard groups of ", plan.sizes.dense, " (dense) and ",
                      plan.sizes.expert, " (expert) ranks and ", plan.sizes.replicas, " replicas; the groups have ",
                      sizes.dense, ", ", sizes.expert, " and ", sizes.replicas, "; plan with groups.sizes()");
  }
  const auto agreement = detail::agreement_of(plan);
  const auto agree = [&](const GroupComm<Comm>& group) {
    agree_on("sharded parameters", agreement, group, memory.persistent, s);
  };
  agree(groups.dense.gather);
  agree(groups.expert.gather);
  agree(groups.replica);
  return {plan, executor, groups, memory, s};
}

}  // namespace pleat::inline v0::fsdp
