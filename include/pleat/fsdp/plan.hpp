// The plan of sharded parameters: the layout of every unit, how many slots there are, and what memory that takes.
#pragma once

#include <array>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <pleat/comm/ordered_sum.hpp>
#include <pleat/comm/peer_access.hpp>
#include <pleat/comm/plan_digest.hpp>
#include <pleat/core/carve.hpp>
#include <pleat/core/dtype.hpp>
#include <pleat/core/footprint.hpp>
#include <pleat/fsdp/layout.hpp>
#include <pleat/mesh/concept.hpp>

namespace pleat::inline v0::fsdp {

/// Parameters that are gathered and reduced together, usually a layer's dense ones or its experts.
struct UnitSpec {
  std::string name = {};
  /// Which shard group the unit belongs to.
  Param kind = Param::dense;
  /// As in LayoutOptions: 0 for dense units.
  std::int64_t experts_local = 0;
  std::vector<ParamSpec> params = {};
  /// As in LayoutOptions; empty for the equal split.
  std::vector<std::int64_t> boundaries = {};
};

/// Sizes of the groups: ranks that share the shards of dense and of expert parameters, and replicas of each shard.
struct GroupSizes {
  int dense = 1;
  int expert = 1;
  int replicas = 1;
  constexpr int of(Param kind) const { return kind == Param::dense ? dense : expert; }
};

/// The sizes of a mesh's groups.
template <folded_mesh Mesh>
constexpr GroupSizes group_sizes(const Mesh& mesh) {
  return {shard_group_shape(mesh, Param::dense).size(), shard_group_shape(mesh, Param::expert).size(), mesh.replicas};
}

/// What a caller may choose of sharded parameters; all ranks choose alike.
struct Options {
  /// What is gathered, and what the units' views are of. Masters and gradient shards are accumulator(compute).
  DType compute = DType::f32;
  /// What units of gradients are written in and travel in: accumulator(compute), the default, or `compute`.
  std::optional<DType> gradient = {};
  Transport transport = Transport::collective;
  /// How many uses ahead of the current one a unit is gathered.
  int prefetch = 1;
  std::int64_t alignment_elems = 128;
  /// Multiprocessors that a sum of gradients takes at most, beside what computes; 0: as many as are free. 8 read 290 of
  /// an NVLink's 450 GB/s; where transfers bound the step, 16 hold their own against the gathers. Products that are
  /// made for what sums leave (128 of 132 for 4) keep their pace beside them.
  int reduce_ctas = 8;
  /// The same for sums after the last use of an order: nothing of the pass is left that they could be beside.
  int last_reduce_ctas = 16;
  /// Whether ranks compare each gather and each sum before it: one that uses units in another order is an error (F20)
  /// and not a wait until the deadline or, by collectives, the values of another unit. For finding faults: each call
  /// waits for the ranks. Not in graphs.
  bool check_order = false;
};

/// What the units of one kind share: their group's size and the buffers that hold whole units.
struct KindPlan {
  int ranks = 1;
  int units = 0;
  /// 0 where one rank holds whole units: they are used where they lie.
  int slots = 0;
  /// 0 where they are written in shards: see Plan::writes_shards.
  int gradient_units = 0;
  std::int64_t unit_elems = 0;   // of the largest unit
  std::int64_t shard_elems = 0;  // of the largest shard
};

/// Whole units in one block: gathered parameters and gradients of one kind.
struct UnitBuffers {
  std::vector<std::byte*> slots;
  std::vector<std::byte*> gradients;
};

/// A unit's shard on one rank. Without trainable parameters there is no gradient; `compute` is null when masters are
/// gathered as they are.
struct ShardBuffers {
  std::byte* master;
  std::byte* compute;
  std::byte* gradient;
  UpdatePiece* pieces;
};

/// What every rank of a mesh computes alike: layouts, dtypes, slots. A value without pointers.
struct Plan {
  std::vector<std::string> names;
  std::vector<Param> kinds;
  std::vector<int> numbers;  // [unit]: among those of its kind
  std::vector<UnitLayout> layouts;
  GroupSizes sizes;
  DType compute = DType::f32;
  DType gradient = DType::f32;
  DType master = DType::f32;
  Transport transport = Transport::collective;
  int prefetch = 1;
  int reduce_ctas = 0;
  int last_reduce_ctas = 0;
  bool check_order = false;
  std::array<KindPlan, 2> per_kind;

  /// The part of dense units, or of experts'.
  const KindPlan& of(Param kind) const { return per_kind[static_cast<std::size_t>(kind)]; }
  /// Whether units of the kind move through windows: a rank alone has no peer.
  bool uses_peers(Param kind) const { return transport == Transport::peer && of(kind).ranks > 1; }

  /// Whether gradients of the kind are written in their shards, and added to those of the micro-batches before: a rank
  /// alone has no other's to sum, and here none to convert.
  bool writes_shards(Param kind) const { return of(kind).ranks == 1 && gradient == master; }

  /// Cuts the buffers for whole units of a kind, and a rank's shard of a unit, out of memory.
  UnitBuffers carve_units(Carver& memory, Param kind) const {
    UnitBuffers buffers;
    const auto elems = static_cast<std::size_t>(of(kind).unit_elems);
    for (int i = 0; i < of(kind).slots; ++i) buffers.slots.push_back(memory.take_bytes(elems * size_bytes(compute)));
    for (int i = 0; i < of(kind).gradient_units; ++i) {
      buffers.gradients.push_back(memory.take_bytes(elems * size_bytes(gradient)));
    }
    return buffers;
  }
  ShardBuffers carve_shard(Carver& memory, const UnitLayout& unit) const {
    const auto elems = static_cast<std::size_t>(unit.max_shard_elems());
    ShardBuffers shard{};
    shard.master = memory.take_bytes(elems * size_bytes(master));
    if (compute != master) shard.compute = memory.take_bytes(elems * size_bytes(compute));
    if (!unit.trains()) return shard;
    shard.gradient = memory.take_bytes(elems * size_bytes(master));
    shard.pieces = memory.take<UpdatePiece>(static_cast<std::size_t>(unit.block_count()) * unit.params.size());
    return shard;
  }
  /// Bytes of the symmetric window of a kind's group; 0 off the peer path.
  std::size_t window_bytes(Param kind) const {
    if (!uses_peers(kind)) return 0;
    Carver memory;
    carve_units(memory, kind);
    return memory.used_bytes();
  }
  /// Channels of its signals: of each slot and each gradient unit one to give it away, and one for each unit that may
  /// be in it (PeerTransport).
  int channels(Param kind) const {
    return uses_peers(kind) ? (of(kind).slots + of(kind).gradient_units) * (1 + of(kind).units) : 0;
  }
  /// Bytes that sums work in, on the reduce stream.
  std::size_t workspace_bytes() const {
    std::size_t bytes = 0;
    for (const KindPlan& kind : per_kind) {
      const auto shard = static_cast<std::size_t>(kind.shard_elems);
      const bool receives = transport == Transport::collective && kind.ranks > 1;
      const std::size_t summed = receives ? reduce_scatter_scratch_bytes(shard, kind.ranks, gradient) : 0;
      const std::size_t replicas = sizes.replicas > 1 ? all_reduce_scratch_bytes(shard, sizes.replicas, master) : 0;
      bytes = std::max({bytes, summed, replicas});
    }
    return bytes;
  }
  /// Words by which ranks compare their calls; none in groups of one.
  std::size_t order_words() const {
    return check_order ? static_cast<std::size_t>(std::max(sizes.dense, sizes.expert)) : 0;
  }
  /// The largest of any rank: shards may differ in size.
  Footprint footprint() const {
    Carver persistent;
    for (const UnitLayout& unit : layouts) carve_shard(persistent, unit);
    persistent.take_bytes(workspace_bytes());
    persistent.take<std::int64_t>(order_words());
    std::size_t symmetric = 0;
    int channels_of_all = 0;
    for (const Param kind : {Param::dense, Param::expert}) {
      if (!uses_peers(kind)) carve_units(persistent, kind);
      symmetric += window_bytes(kind);
      channels_of_all += channels(kind);
    }
    const int most_ranks = std::max({sizes.dense, sizes.expert, sizes.replicas});
    const std::size_t bytes = std::max(persistent.used_bytes(), agreement_bytes(most_ranks));  // at bind only
    return {.symmetric = symmetric, .persistent = bytes, .channels = channels_of_all};
  }
};

/// The choices of a plan, as one line of a log.
inline void append_to(Message& message, const Plan& p) {
  message.append("fsdp ").append(name_of(p.transport)).append(" compute=").append(name_of(p.compute));
  message.append(" gradient=").append(name_of(p.gradient)).append(" master=").append(name_of(p.master));
  message.append(" prefetch=").append(p.prefetch).append(" replicas=").append(p.sizes.replicas);
  message.append(" reduce_ctas=").append(p.reduce_ctas).append(" last=").append(p.last_reduce_ctas);
  for (const Param param : {Param::dense, Param::expert}) {
    const KindPlan& kind = p.of(param);
    if (kind.units == 0) continue;
    message.append(param == Param::dense ? " dense:" : " expert:").append(" ranks=").append(kind.ranks);
    message.append(" slots=").append(kind.slots).append("x").append(kind.unit_elems);
    message.append(" gradients=").append(kind.gradient_units).append("x").append(kind.unit_elems);
  }
}

namespace detail {
/// How many units of a kind there are at most in `window` consecutive ones.
inline int most_in_window(std::span<const UnitSpec> units, Param kind, std::size_t window) {
  int most = 0;
  for (std::size_t first = 0; first < units.size(); ++first) {
    int count = 0;
    for (std::size_t u = first; u < units.size() && u < first + window; ++u) {
      count += units[u].kind == kind;
    }
    most = std::max(most, count);
  }
  return most;
}
}  // namespace detail

/// Plans `units`, given in the order of the forward pass. A kind has as many slots as any prefetch + 1 consecutive
/// units hold of it, and as many gradient units as any two consecutive ones do; in a group of one no slots, and no
/// gradient units but for gradients of another dtype than the master's. Pure.
/// Errors: shape_error F08 for sizes or options that cannot be, F03 when all units of a kind would be larger than
/// max_unit_elems; those of plan_unit.
inline Plan plan(std::span<const UnitSpec> units, const GroupSizes& sizes, const Options& options = {}) {
  Plan made;
  made.sizes = sizes;
  made.compute = options.compute;
  made.master = accumulator(options.compute);
  made.gradient = options.gradient.value_or(made.master);
  made.transport = options.transport;
  made.prefetch = options.prefetch;
  made.reduce_ctas = options.reduce_ctas;
  made.last_reduce_ctas = options.last_reduce_ctas;
  made.check_order = options.check_order;
  if (sizes.dense < 1 || sizes.expert < 1 || sizes.replicas < 1 || options.prefetch < 0 || options.reduce_ctas < 0 ||
      options.last_reduce_ctas < 0) {
    fail<shape_error>("pleat[F08]: groups of ", sizes.dense, " (dense) and ", sizes.expert, " (expert) ranks, ",
                      sizes.replicas, " replicas, a prefetch of ", options.prefetch, ", ", options.reduce_ctas,
                      " reduce_ctas and ", options.last_reduce_ctas,
                      " last_reduce_ctas; ranks and replicas are 1 or more, the others 0 or more");
  }
  if (options.transport > Transport::peer) {
    fail<shape_error>("pleat[F08]: there is no transport ", static_cast<int>(options.transport),
                      "; valid: collective peer");
  }
  const DType compute = options.compute;
  if (compute != DType::f64 && compute != DType::f32 && compute != DType::bf16) {
    fail<shape_error>("pleat[F08]: parameters cannot be computed with in ", compute, "; valid dtypes: f64 f32 bf16");
  }
  if (made.gradient != made.master && made.gradient != compute) {
    fail<shape_error>("pleat[F08]: gradients of ", compute, " parameters cannot be in ", made.gradient,
                      "; valid dtypes: ", made.master, made.master == compute ? "" : " ",
                      made.master == compute ? "" : name_of(compute));
  }
  for (const UnitSpec& unit : units) {
    if (unit.kind > Param::expert) {
      fail<shape_error>("pleat[F08]: unit ", unit.name, " is of kind ", static_cast<int>(unit.kind),
                        "; valid: dense expert");
    }
    if (unit.kind == Param::dense && unit.experts_local != 0) {
      fail<shape_error>("pleat[F03]: unit ", unit.name, " is dense and has experts_local=", unit.experts_local,
                        "; make it of kind expert, or leave the experts out");
    }
    made.names.push_back(unit.name);
    made.kinds.push_back(unit.kind);
    made.layouts.push_back(plan_unit(unit.params, sizes.of(unit.kind),
                                     {.experts_local = unit.experts_local,
                                      .alignment_elems = options.alignment_elems,
                                      .boundaries = unit.boundaries}));
    const UnitLayout& layout = made.layouts.back();
    KindPlan& kind = made.per_kind[static_cast<std::size_t>(unit.kind)];
    made.numbers.push_back(kind.units++);
    kind.unit_elems = std::max(kind.unit_elems, layout.total_elems());
    kind.shard_elems = std::max(kind.shard_elems, layout.max_shard_elems());
  }
  for (const Param kind : {Param::dense, Param::expert}) {
    KindPlan& of_kind = made.per_kind[static_cast<std::size_t>(kind)];
    of_kind.ranks = sizes.of(kind);
    if (of_kind.ranks > 1) {
      of_kind.slots = detail::most_in_window(units, kind, std::size_t{1} + static_cast<std::size_t>(options.prefetch));
    }
    detail::checked_elems("a kind of equal units", of_kind.unit_elems, of_kind.units);
    detail::checked_elems("a sum over equal shards", of_kind.shard_elems, of_kind.ranks);
    if (!made.writes_shards(kind)) of_kind.gradient_units = detail::most_in_window(units, kind, 2);
  }
  return made;
}

}  // namespace pleat::inline v0::fsdp
