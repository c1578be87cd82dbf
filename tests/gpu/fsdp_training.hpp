// Sharded training of one rank, the same source for host and device: all that it sees, as bytes to compare.
#pragma once

#include <cstring>
#include <memory>
#include <optional>

#include <pleat/comm/mesh_comms.hpp>
#include <pleat/fsdp/sharder.hpp>

#include <pleat/comm/thread_arena.hpp>
#include <pleat/core/host/leaf.hpp>

#include <conformance/host_threads.hpp>
#include <conformance/site.hpp>
#include <unit/fsdp/odd_model.hpp>

namespace templates_testing {

using namespace pleat;
using conformance::Bytes;
using fsdp_testing::choice;
using fsdp_testing::drawn;

/// The backend whose bits others must have.
struct HostRanks : conformance::HostThreads {
  using arena_type = HostArena;
};

struct Training {
  fsdp_testing::RunConfig config;
  DType compute = DType::f32;
  DType gradient = DType::f32;
  bool uneven = false;  // shards that grow with the rank
  std::int64_t seed = 0;
  int reduce_ctas = fsdp::Options{}.reduce_ctas;
  /// All steps have the gradients of the first, gathered units stay unseen, and a backend with graphs replays what it
  /// captured of the second step.
  bool replays = false;

  DType master() const { return accumulator(compute); }
  int source_of(int step) const { return replays ? 0 : step; }
};

inline std::vector<fsdp::UnitSpec> model_of(const Training& t, const fsdp::GroupSizes& sizes) {
  auto units = fsdp_testing::odd_model(t.config);
  for (fsdp::UnitSpec& unit : units) {
    if (!t.uneven) break;
    const std::int64_t ranks = sizes.of(unit.kind);
    const std::int64_t total =
        fsdp::plan_unit(unit.params, sizes.of(unit.kind),
                        {.experts_local = unit.experts_local, .alignment_elems = t.config.alignment_elems})
            .total_elems();
    for (std::int64_t r = 0; r <= ranks; ++r) unit.boundaries.push_back(total * r * r / (ranks * ranks));
  }
  return units;
}

/// Numbers that kernels read, written on the host and uploaded at once.
class Inputs {
 public:
  /// Returns where `elems` numbers of `value(i)` will stand.
  template <class Value>
  std::size_t add(DType dtype, std::int64_t elems, Value value) {
    const std::size_t at = (data_.size() + 127) / 128 * 128;
    data_.resize(at + static_cast<std::size_t>(elems) * size_bytes(dtype));
    dispatch_dtype(FloatTypes{}, dtype, [&](auto type) {
      using T = typename decltype(type)::type;
      for (std::int64_t i = 0; i < elems; ++i) {
        const T number = static_cast<T>(value(i));
        std::memcpy(data_.data() + at + static_cast<std::size_t>(i) * sizeof(T), &number, sizeof(T));
      }
    });
    return at;
  }
  const Bytes& data() const { return data_; }

 private:
  Bytes data_;
};

/// Trains as `t` says on this rank of `world`; all ranks call. Everything is enqueued without a look at the device but
/// for one wait per step. Returns the gathered units before and after their backward pass, masters and gradients at the
/// end of each step, and the pieces for optimizers. `make_executor(world rank, streams)`.
template <class Backend, class MakeExecutor>
class TrainingRank {
  using Comm = typename Backend::comm_type;
  using Arena = typename Backend::arena_type;
  using Buffer = typename Backend::Buffer;
  using Stream = typename Comm::stream_type;
  using Streams = fsdp::ShardStreams<Stream>;
  using Executor = std::invoke_result_t<MakeExecutor, int, const Streams&>;
  using Sharder = fsdp::Sharder<Executor, Comm, Arena>;
  using leaf = core_leaf<typename Comm::device_type>;

 public:
  TrainingRank(const Training& t, Comm& world, MakeExecutor make_executor)
      : t_(t),
        world_(world),
        mesh_(RuntimeMesh::fold({.world = t.config.ranks, .ep = t.config.ep, .replicas = t.config.replicas})),
        comms_(mesh_, world),
        groups_(fsdp::groups_of(comms_)),
        plan_(fsdp::plan(model_of(t, groups_.sizes()), groups_.sizes(),
                         {.compute = t.compute,
                          .gradient = t.gradient,
                          .transport = t.config.transport,
                          .prefetch = t.config.prefetch,
                          .alignment_elems = t.config.alignment_elems,
                          .reduce_ctas = t.reduce_ctas})),
        streams_{compute_.get(), gather_.get(), reduce_.get(), own_.get()},
        executor_(make_executor(world.rank(), streams_)) {}

  Bytes run() {
    for (int u = 0; u < units(); ++u) order_.push_back(u);
    for (int u = units() - 1; u >= 0; --u) order_.push_back(u);
    draw_inputs();
    Buffer inputs(drawn_.data().size());
    inputs.upload(drawn_.data().data());
    inputs_ = inputs.block().data;
    Buffer log(log_bytes());
    log_ = log.block().data;

    const Buffer persistent(plan_.footprint().persistent),
        poison(std::max<std::size_t>(1, plan_.footprint().symmetric));
    std::optional<Arena> arena;
    if (plan_.transport == Transport::peer) {
      arena.emplace(comms_.world(), plan_.footprint().symmetric);
      auto window = arena->open(comms_.world().ranks(), 0, 0);
      executor_.copy(window.base(window.rank()), poison.block().data, plan_.footprint().symmetric, streams_.compute);
    }
    world_.barrier(streams_.compute);
    world_.wait(streams_.compute);
    {
      Sharder op = fsdp::bind(plan_, executor_, groups_,
                              Memory<Arena>{.persistent = persistent.block(), .arena = arena ? &*arena : nullptr},
                              streams_.compute);
      train(op);
      record_pieces(op);
      wait_for_all();
      world_.barrier(streams_.compute);  // nobody takes its window away from a peer
      wait_for_all();
    }
    Bytes seen(log_used_);
    Bytes all(log.block().size_bytes);
    log.download(all.data());
    std::copy_n(all.begin(), log_used_, seen.begin());
    append_pieces(seen, all);
    return seen;
  }

 private:
  int units() const { return static_cast<int>(plan_.layouts.size()); }
  const fsdp::UnitLayout& layout(int u) const { return plan_.layouts[static_cast<std::size_t>(u)]; }
  int params(int u) const { return static_cast<int>(layout(u).params.size()); }
  std::int64_t elems(int u, int p) const { return layout(u).place(p).elems * layout(u).block_count(); }
  std::size_t unit_bytes(int u) const {
    return static_cast<std::size_t>(layout(u).total_elems()) * size_bytes(plan_.compute);
  }
  static std::size_t rounded(std::size_t bytes) { return (bytes + 127) / 128 * 128; }
  void delay(Stream s) const {
    if constexpr (requires { executor_.delay(s); }) executor_.delay(s);
  }
  void wait_for_all() {
    world_.wait(streams_.compute);
    world_.wait(streams_.gather);
    world_.wait(streams_.reduce);
  }

  void draw_inputs() {
    for (int u = 0; u < units(); ++u) {
      const int owner = layout(u).experts_local != 0 ? coordinate(mesh_, world_.rank()).ep : -1;
      for (int p = 0; p < params(u); ++p) {
        weights_.push_back(drawn_.add(plan_.master, elems(u, p), [&](std::int64_t i) {
          return drawn({t_.seed, 1, owner, u, layout(u).storage_of(p), i});
        }));
      }
    }
    for (int step = 0; step < t_.config.steps; ++step) {
      for (int micro = 0; micro < t_.config.micro_batches; ++micro) {
        for (int u = 0; u < units(); ++u) {
          terms_.push_back(drawn_.add(plan_.gradient, 2 * layout(u).total_elems(), [&](std::int64_t i) {
            return static_cast<float>(drawn({t_.seed, 2, world_.rank(), t_.source_of(step), micro, u, i}));
          }));
        }
      }
    }
  }
  std::size_t log_bytes() const {
    std::size_t bytes = 0;
    for (const int u : order_) bytes += 2 * rounded(unit_bytes(u));
    bytes *= static_cast<std::size_t>(t_.config.micro_batches);
    std::size_t pieces = 0;
    for (int u = 0; u < units(); ++u) {
      for (int p = 0; p < params(u); ++p) {
        bytes += 2 * rounded(static_cast<std::size_t>(elems(u, p)) * size_bytes(plan_.master));
      }
      pieces += rounded(static_cast<std::size_t>(params(u) * layout(u).block_count()) * sizeof(fsdp::UpdatePiece));
    }
    return bytes * static_cast<std::size_t>(t_.config.steps) + pieces;
  }
  std::byte* take_log(std::size_t bytes) { return log_ + std::exchange(log_used_, log_used_ + rounded(bytes)); }

  void train(Sharder& op) {
    std::size_t weight = 0;
    for (int u = 0; u < units(); ++u) {
      for (int p = 0; p < params(u); ++p) op.load(u, p, full(u, p, inputs_ + weights_[weight++]), streams_);
    }
    for (int step = 0; step < t_.config.steps; ++step) {
      step > 0 && t_.replays ? replay_passes(op) : enqueue_passes(op, step);
      for (int u = 0; u < units(); ++u) {
        for (int p = 0; p < params(u); ++p) {
          const std::size_t bytes = static_cast<std::size_t>(elems(u, p)) * size_bytes(plan_.master);
          op.export_master(u, p, full(u, p, take_log(bytes)), streams_);
          if (!layout(u).place(p).spec.frozen) op.export_gradient(u, p, full(u, p, take_log(bytes)), streams_);
        }
      }
      update(op);
      wait_for_all();
    }
  }
  void enqueue_passes(Sharder& op, int step) {
    for (int micro = 0; micro < t_.config.micro_batches; ++micro) {
      op.begin(order_);
      for (std::size_t use = 0; use < order_.size(); ++use) {
        const int u = order_[use];
        const fsdp::UnitView view = op.acquire(u, streams_);
        record(view, u);
        if (use >= order_.size() / 2 && layout(u).trains()) {
          write_gradients(op, step, micro, u);
          op.reduce(u, streams_);
        }
        record(view, u);
        op.release(u, streams_);
      }
    }
    op.finish_gradients(streams_);
  }
  void replay_passes(Sharder& op) {
    const auto alone = [&] {
      op.fork(streams_);
      enqueue_passes(op, 1);
      op.weights_changed(streams_);
      op.join(streams_);
    };
    if constexpr (requires { typename Backend::Graph; }) {
      if (!graph_) {
        op.join(streams_);
        graph_ = std::make_shared<typename Backend::Graph>(streams_.compute, alone);
        op.fork(streams_);
      }
      std::static_pointer_cast<typename Backend::Graph>(graph_)->launch(streams_.compute);
    } else {
      op.join(streams_);
      alone();
    }
  }
  /// The whole unit, padding and all: it is what the shards hold.
  void record(const fsdp::UnitView& view, int u) {
    if (t_.replays) return;
    executor_.copy(take_log(unit_bytes(u)), view[0].data(), unit_bytes(u), streams_.compute);
  }
  TensorRef full(int u, int p, std::byte* data) const {
    TensorRef tensor(data, plan_.master, {}, {device_kind<typename Comm::device_type>, 0});
    const std::vector<std::int64_t> shape = layout(u).full_shape(p);
    for (std::size_t axis = 0; axis < shape.size(); ++axis) {
      tensor.push_extent(shape[axis], fsdp::elems_of(std::span(shape).subspan(axis + 1)));
    }
    return tensor;
  }

  /// Each parameter is written in one of the ways there are; the last rank has no tokens in every other micro-batch.
  void write_gradients(Sharder& op, int step, int micro, int u) {
    if (world_.rank() == t_.config.ranks - 1 && micro % 2 == 0) return;
    auto gradient = op.gradient(u, streams_);
    const std::byte* terms =
        inputs_ + terms_[static_cast<std::size_t>((step * t_.config.micro_batches + micro) * units() + u)];
    const std::size_t width = size_bytes(plan_.gradient);
    for (int p = 0; p < params(u); ++p) {
      const fsdp::ParamPlace& place = layout(u).place(p);
      if (place.spec.frozen) continue;
      const auto put_block = [&](const TensorRef& tensor, std::int64_t e, bool accumulates, int write) {
        const auto from =
            static_cast<std::size_t>(write * layout(u).total_elems() + place.offset + e * layout(u).expert_stride);
        put(tensor.data(), terms + from * width, place.elems, accumulates);
      };
      const auto put_all = [&](const TensorRef& tensor, bool accumulates, int write) {
        for (std::int64_t e = 0; e < layout(u).block_count(); ++e) {
          const std::int64_t at = layout(u).experts_local != 0 ? e * tensor.stride(0) : 0;
          const TensorRef block(static_cast<std::byte*>(tensor.data()) + static_cast<std::size_t>(at) * width,
                                tensor.dtype(), {});
          put_block(block, e, accumulates, write);
        }
      };
      switch (choice({t_.seed, 3, world_.rank(), t_.source_of(step), micro, u, p}, 5)) {
        case 0:
          break;
        case 1: {
          const auto [tensor, accumulates] = gradient.write(p);
          put_all(tensor, accumulates, 0);
          const auto [again, accumulates_again] = gradient.write(p);
          put_all(again, accumulates_again, 1);
          break;
        }
        case 2: {
          const auto [tensor, accumulates] = gradient.write(p);
          put_all(tensor, accumulates, 0);
          break;
        }
        case 3:
          put_all(gradient.add_to(p), true, 0);
          break;
        default:
          for (std::int64_t e = 0; e < layout(u).block_count(); ++e) {
            if (choice({t_.seed, 4, world_.rank(), t_.source_of(step), micro, u, p, e}, 2) != 0) continue;
            const auto [tensor, accumulates] = gradient.write(p, e);
            put_block(tensor, e, accumulates, 0);
          }
      }
    }
  }
  void put(void* to, const std::byte* term, std::int64_t elems, bool accumulates) const {
    delay(streams_.compute);
    const auto n = static_cast<std::size_t>(elems);
    const void* const parts[] = {term};
    if (accumulates) return leaf::sum_ranks(to, plan_.gradient, parts, plan_.gradient, n, true, streams_.compute);
    executor_.copy(to, term, n * size_bytes(plan_.gradient), streams_.compute);
  }

  /// Adds the gradient: exact on every device.
  void update(Sharder& op) const {
    for (int u = 0; u < units(); ++u) {
      const fsdp::ShardMemory& shard = op.shards()[static_cast<std::size_t>(u)];
      if (shard.gradient == nullptr) continue;
      const int rank = groups_.of(plan_.kinds[static_cast<std::size_t>(u)]).gather.rank();
      for (const fsdp::UpdatePiece& piece : fsdp::update_pieces(layout(u), layout(u).pieces(rank), 1)) {
        const auto at = [&](void* data, DType dtype) {
          return static_cast<std::byte*>(data) + static_cast<std::size_t>(piece.begin) * size_bytes(dtype);
        };
        const auto n = static_cast<std::size_t>(piece.elems);
        const void* const gradient[] = {at(shard.gradient, shard.master_dtype)};
        std::byte* const master = at(shard.master, shard.master_dtype);
        delay(streams_.compute);
        leaf::sum_ranks(master, shard.master_dtype, gradient, shard.master_dtype, n, true, streams_.compute);
        if (shard.compute == nullptr) continue;
        leaf::cast_copy(at(shard.compute, shard.compute_dtype), shard.compute_dtype, master, shard.master_dtype, n,
                        streams_.compute);
      }
    }
    op.weights_changed(streams_);
  }

  void record_pieces(const Sharder& op) {
    pieces_at_ = log_used_;
    for (const fsdp::ShardMemory& shard : op.shards()) {
      const std::size_t bytes = static_cast<std::size_t>(shard.piece_count) * sizeof(fsdp::UpdatePiece);
      executor_.copy(log_ + pieces_at_ + piece_count_ * sizeof(fsdp::UpdatePiece), shard.pieces, bytes,
                     streams_.compute);
      piece_count_ += static_cast<std::size_t>(shard.piece_count);
    }
  }
  /// Field by field: between them there is padding.
  void append_pieces(Bytes& seen, const Bytes& all) const {
    for (std::size_t i = 0; i < piece_count_; ++i) {
      fsdp::UpdatePiece piece;
      std::memcpy(&piece, all.data() + pieces_at_ + i * sizeof piece, sizeof piece);
      const double fields[] = {static_cast<double>(piece.begin), static_cast<double>(piece.elems), piece.norm_weight,
                               piece.weight_decay ? 1.0 : 0.0};
      const auto* bytes = reinterpret_cast<const std::byte*>(fields);
      seen.insert(seen.end(), bytes, bytes + sizeof fields);
    }
  }

  const Training& t_;
  Comm& world_;
  RuntimeMesh mesh_;
  MeshComms<RuntimeMesh, Comm> comms_;
  fsdp::Groups<Comm> groups_;
  fsdp::Plan plan_;
  typename Backend::Stream compute_, gather_, reduce_, own_;
  Streams streams_;
  Executor executor_;
  std::vector<int> order_;
  Inputs drawn_;
  std::vector<std::size_t> weights_;  // [unit, param]: where in the inputs
  std::vector<std::size_t> terms_;    // [step, micro-batch, unit]
  std::byte* inputs_ = nullptr;
  std::byte* log_ = nullptr;
  std::size_t log_used_ = 0, pieces_at_ = 0, piece_count_ = 0;
  std::shared_ptr<void> graph_;  // a Backend::Graph, where there is one
};

}  // namespace templates_testing
