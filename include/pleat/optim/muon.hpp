// Muon on shards: pieces of matrices travel to their owners, are orthogonalized there once, and travel back.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include <pleat/comm/group_comm.hpp>
#include <pleat/comm/memory.hpp>
#include <pleat/core/streams.hpp>
#include <pleat/optim/muon_plan.hpp>

namespace pleat::inline v0::optim {

/// Muon over the shards of one rank; made by `bind`.
///
/// Matrices that one rank holds whole stay there. Of the others, a rank sends what it holds to their owners and gets
/// the results back: per step and rank (elements held of matrices that others own + elements of own matrices that
/// others hold) * size of the product's dtype, in and out; at most 2 * shard elements in all when shards are equal and
/// work is balanced. Replicas do the same work on the same bits. The result has the bits of Muon on whole parameters.
template <executor Executor, communicator Comm>
class Muon {
 public:
  using stream_type = typename Executor::stream_type;

  /// See `bind`.
  Muon(const MuonPlan& plan, Executor executor, const GroupComm<Comm>& dense, const GroupComm<Comm>& expert,
       std::span<const fsdp::ShardMemory> shards, Block scratch, Block persistent, stream_type s)
      : plan_(plan) {
    Carver persistent_memory(persistent), scratch_memory(scratch);
    memory_ = plan_.carve(persistent_memory);
    scratch_ = plan_.carve_scratch(scratch_memory);
    executor.zero(persistent.data, persistent_memory.used_bytes(), s);
    update_pieces_.resize(plan_.units.size());
    for (const MuonRound& round : plan_.rounds) add_round(round, round.kind == Param::dense ? dense : expert, shards);
    executor.copy(memory_.pieces, table_.data(), table_.size() * sizeof(MuonPiece), s);
    preload_leaves<leaf, optim_leaf<typename Executor::device_type>>();
    newton_schulz_.emplace(batches_, plan_.options, scratch_.work, s);
  }

  /// One step with learning rate `lr` on this rank's shards: momentum, masters and compute copies are updated, or left
  /// as they are where `result` (device memory) says so, as Adamw::step. Every rank of the groups calls; runs on `s`.
  void step(StepResult* result, LearningRate lr, stream_type s) {
    if (lr.is_in_memory()) optim_leaf<typename Executor::device_type>::check_rates(result, lr, lr, s);
    update(result, lr, s);
  }
  /// The same with a rate that has been looked at.
  void update(const StepResult* result, LearningRate lr, stream_type s) {
    const DType wire = plan_.options.product;
    for (const Round& round : rounds_) {
      const std::span pieces(memory_.pieces + round.first_piece, round.pieces);
      leaf::momentum(pieces, round.work_elems, types_, plan_.options, result, s);
      exchange(round, round.to_owners, round.from_holders, wire, s);
      for (std::size_t b = round.first_batch; b < round.past_batch; ++b) newton_schulz_->run(b, s);
      exchange(round, round.to_holders, round.from_owners, wire, s);
      leaf::update(pieces, round.work_elems, types_, plan_.options, lr, result, s);
    }
  }

  /// The momentum of what Muon updates of each unit's shard, for checkpoints: [max_state_elems] of the master's dtype.
  std::span<std::byte* const> momentum() const { return memory_.momentum; }
  const MuonPlan& plan() const { return plan_; }

 private:
  using leaf = muon_leaf<typename Executor::device_type>;

  struct Round {
    GroupComm<Comm> group;
    std::size_t first_piece = 0, pieces = 0;
    std::int64_t work_elems = 0;
    std::size_t first_batch = 0, past_batch = 0;
    std::vector<Send> to_owners = {}, to_holders = {};
    std::vector<Recv> from_holders = {}, from_owners = {};
  };

  static void exchange(const Round& round, std::span<const Send> tx, std::span<const Recv> rx, DType dtype,
                       stream_type s) {
    if (!tx.empty() || !rx.empty()) round.group.exchange(tx, rx, dtype, s);
  }

  /// Both sides walk the matrices in the order of the plan, so that messages between two ranks match.
  void add_round(const MuonRound& planned, const GroupComm<Comm>& group, std::span<const fsdp::ShardMemory> shards) {
    Round round{.group = group, .first_piece = table_.size(), .first_batch = batches_.size()};
    const std::size_t width = size_bytes(plan_.options.product);
    std::byte* owned_end = scratch_.owned;
    std::byte* sent_end = scratch_.sent;
    for (const MuonMatrix& matrix : planned.matrices) {
      const fsdp::UnitLayout& layout = plan_.units[static_cast<std::size_t>(matrix.unit)];
      std::byte* const whole = owned_end;
      if (matrix.owner == group.rank()) {
        owned_end += static_cast<std::size_t>(MatrixBatch::padded(matrix.elems())) * width;
      }
      detail::for_each_holder(matrix, layout, [&](int rank, const fsdp::Range& held) {
        const auto elems = static_cast<std::size_t>(held.elems);
        std::byte* const place = whole + static_cast<std::size_t>(held.begin) * width;
        if (rank != group.rank()) {
          if (matrix.owner != group.rank()) return;
          round.from_holders.push_back({place, elems, rank});
          round.to_holders.push_back({place, elems, rank});
          return;
        }
        const std::int64_t at = matrix.begin + held.begin - layout.shard_begin(rank);
        std::byte* exchanged = place;
        if (matrix.owner != rank) {
          exchanged = sent_end + static_cast<std::size_t>(at % 8) * width;
          sent_end += static_cast<std::size_t>(MuonPlan::sent_slot_elems(held.elems)) * width;
          round.to_owners.push_back({exchanged, elems, matrix.owner});
          round.from_owners.push_back({exchanged, elems, matrix.owner});
        }
        std::vector<fsdp::UpdatePiece>& places = update_pieces_[static_cast<std::size_t>(matrix.unit)];
        if (places.empty()) places = fsdp::update_pieces(layout, layout.pieces(rank), 1);
        add_piece(round, matrix, at, held.elems, shards[static_cast<std::size_t>(matrix.unit)], exchanged);
      });
    }
    add_batches(planned, group.rank());
    round.pieces = table_.size() - round.first_piece;
    round.past_batch = batches_.size();
    if (round.pieces != 0 || round.past_batch != round.first_batch) rounds_.push_back(std::move(round));
  }

  /// `at`: where in the shard it begins.
  void add_piece(Round& round, const MuonMatrix& matrix, std::int64_t at, std::int64_t elems,
                 const fsdp::ShardMemory& shard, std::byte* exchanged) {
    const auto u = static_cast<std::size_t>(matrix.unit);
    const auto in = [](void* base, DType dtype, std::int64_t from) {
      return static_cast<std::byte*>(base) + static_cast<std::size_t>(from) * size_bytes(dtype);
    };
    std::int64_t state = 0;
    for (const fsdp::UpdatePiece& piece : update_pieces_[u]) {
      if (piece.begin <= at && at < piece.begin + piece.elems) state = piece.state_begin + at - piece.begin;
    }
    const DType master = shard.master_dtype;
    types_ = {master, shard.compute_dtype, plan_.options.product};
    const std::int64_t begin = round.work_elems + ((at - round.work_elems) % 8 + 8) % 8;
    round.work_elems = begin + elems;
    table_.push_back({begin, elems, in(shard.master, master, at), in(shard.gradient, master, at),
                      in(memory_.momentum[u], master, state),
                      shard.compute == nullptr ? nullptr : in(shard.compute, shard.compute_dtype, at), exchanged,
                      matrix.scale(plan_.options.form), matrix.weight_decay});
  }

  void add_batches(const MuonRound& planned, int rank) {
    const std::vector<const MuonMatrix*> owned = detail::owned_by(planned, rank);
    std::byte* data = scratch_.owned;
    detail::for_each_batch(owned, [&](std::size_t first, std::size_t past) {
      const MatrixBatch batch{data, owned[first]->rows, owned[first]->cols, static_cast<std::int64_t>(past - first)};
      data += static_cast<std::size_t>(batch.count * batch.stride_elems()) * size_bytes(plan_.options.product);
      batches_.push_back(batch);
    });
  }

  MuonPlan plan_;
  MuonPlan::Persistent memory_;
  MuonPlan::Scratch scratch_;
  MuonTypes types_{};
  std::vector<std::vector<fsdp::UpdatePiece>> update_pieces_;  // [unit]
  std::vector<Round> rounds_;
  std::vector<MuonPiece> table_;  // copied to the device in the order of a stream
  std::vector<MatrixBatch> batches_;
  std::optional<newton_schulz_leaf<typename Executor::device_type>> newton_schulz_;
};

/// Binds a plan on every rank of the groups `dense` and `expert`, over which the planned units are sharded. `shards`
/// are this rank's, of the planned units in order, and stay where they are; `memory.scratch` is this operation's while
/// a step runs and in bind. `s`: the stream on which bind writes; the one of `step`, or one before it; it is waited
/// for, since the ranks of each group compare their plans. Errors: shape_error F05 when groups or shards are not those
/// of the plan, comm_error C36 on every rank when a rank has planned otherwise, T02; static T10.
template <executor Executor, communicator Comm, class Arena>
Muon<Executor, Comm> bind(const MuonPlan& plan, Executor executor, const GroupComm<Comm>& dense,
                          const GroupComm<Comm>& expert, std::span<const fsdp::ShardMemory> shards,
                          const Memory<Arena>& memory,
                          typename Executor::stream_type s = only_stream<typename Executor::stream_type>()) {
  for (const MuonRound& round : plan.rounds) {
    const int planned = plan.units[static_cast<std::size_t>(round.matrices.front().unit)].shard_count();
    const int size = (round.kind == Param::dense ? dense : expert).size();
    if (planned != size || shards.size() != plan.units.size()) {
      fail<shape_error>("pleat[F05]: Muon is planned for ", plan.units.size(), " units over ", planned,
                        " ranks and bound to ", shards.size(), " shards and a group of ", size,
                        "; plan_muon takes the units of the same plan");
    }
  }
  for (const Param kind : {Param::dense, Param::expert}) {
    agree_on("Muon", detail::agreement_of(plan), kind == Param::dense ? dense : expert, memory.scratch, s);
  }
  return {plan, executor, dense, expert, shards, memory.scratch, memory.persistent, s};
}

}  // namespace pleat::inline v0::optim
