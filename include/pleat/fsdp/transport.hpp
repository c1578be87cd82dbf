// How the shards of one group become whole units and back: by pushes and pulls on peer memory, or by collectives.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include <pleat/comm/peer_window.hpp>
#include <pleat/core/executor.hpp>
#include <pleat/fsdp/plan.hpp>

namespace pleat::inline v0::fsdp {

/// Moves the units of one kind, which are called by their numbers in the plan, among the ranks of its shard group.
/// Every rank makes the same calls in the same order, except for `await_gather` and `await_released`, which follow
/// their gather and release wherever the rank needs them.
template <executor Executor>
class UnitTransport {
 public:
  using stream_type = typename Executor::stream_type;

  virtual ~UnitTransport() = default;
  /// This rank's buffers of whole units.
  const UnitBuffers& buffers() const { return buffers_; }

  /// Puts the ranks' shards into everybody's slot; this rank's is `shard`. The caller has ordered both streams after
  /// the last use of its slot and the writing of its shard. What stays on this rank moves on `own`; `s` comes after it.
  virtual void gather(int slot, int unit, const void* shard, stream_type s, stream_type own) = 0;
  /// What follows on `s` sees the peers' shards of the unit in the slot. Once per gather.
  virtual void await_gather(int slot, int unit, stream_type s) = 0;
  /// This rank has written the gradients of the unit in its gradient unit, by work on `s`.
  virtual void ready(int gradient_unit, int unit, stream_type s) = 0;
  /// The ranks' terms of this rank's gradient shard, in rank order: one pointer each, valid on `s` until `release`.
  /// After `ready`, which the caller has ordered `s` after.
  virtual std::span<const void* const> terms(int gradient_unit, int unit, stream_type s) = 0;
  /// Its sum is done on `s`.
  virtual void release(int gradient_unit, stream_type s) = 0;
  /// What follows on `s` may write the gradient unit: no peer reads it any more. Once per release.
  virtual void await_released(int gradient_unit, stream_type s) = 0;

 protected:
  /// `plan` is borrowed.
  UnitTransport(const Plan& plan, UnitBuffers buffers, int ranks)
      : plan_(&plan), buffers_(std::move(buffers)), terms_(static_cast<std::size_t>(ranks)) {}

  const UnitLayout& layout(int unit) const { return plan_->layouts[static_cast<std::size_t>(unit)]; }
  std::byte* slot(int i) const { return buffers_.slots[static_cast<std::size_t>(i)]; }
  std::byte* gradient_unit(int i) const { return buffers_.gradients[static_cast<std::size_t>(i)]; }
  std::size_t compute_bytes(std::int64_t elems) const {
    return static_cast<std::size_t>(elems) * size_bytes(plan_->compute);
  }
  std::size_t gradient_bytes(std::int64_t elems) const {
    return static_cast<std::size_t>(elems) * size_bytes(plan_->gradient);
  }

  const Plan* plan_;
  UnitBuffers buffers_;
  std::vector<const void*> terms_;
};

/// Copies and signals: a gather pushes this rank's shard into each peer's slot, a sum reads its terms from the peers'
/// gradient units. Each slot has the credits free and full, each gradient unit ready and released. Full and ready have
/// a channel per unit: ranks that use units in different orders wait for each other until the deadline and never take
/// one unit for another.
template <executor Executor, peer_access Peers>
class PeerTransport final : public UnitTransport<Executor> {
  using base = UnitTransport<Executor>;

 public:
  using stream_type = typename base::stream_type;

  PeerTransport(const Plan& plan, Param kind, Executor executor, Peers peers)
      : base(plan, carve(plan, kind, peers), peers.size()),
        executor_(executor),
        peers_(std::move(peers)),
        kind_(plan.of(kind)),
        copied_(executor_.make_event()) {}

  void gather(int slot, int unit, const void* shard, stream_type s, stream_type own) override {
    const int rank = peers_.rank();
    const UnitLayout& layout = this->layout(unit);
    const std::size_t bytes = this->compute_bytes(layout.shard_elems(rank));
    std::byte* const mine = this->slot(slot) + this->compute_bytes(layout.shard_begin(rank));
    // Not behind the push before, so that a peer that is ready for the next one finds its credit.
    pleat::detail::signal_peers(peers_, free_channel(slot), own);
    executor_.copy(mine, shard, bytes, own);
    executor_.record(copied_, own);
    pleat::detail::for_each_peer(peers_, [&](int peer) {
      peers_.await(peer, free_channel(slot), s);
      executor_.copy(at_peer(peer, mine), shard, bytes, s);
      peers_.signal(peer, full_channel(slot, unit), s);
    });
    executor_.wait(s, copied_);
  }
  void await_gather(int slot, int unit, stream_type s) override {
    pleat::detail::await_peers(peers_, full_channel(slot, unit), s);
  }
  void ready(int gradient_unit, int unit, stream_type s) override {
    pleat::detail::signal_peers(peers_, ready_channel(gradient_unit, unit), s);
  }
  std::span<const void* const> terms(int gradient_unit, int unit, stream_type s) override {
    pleat::detail::await_peers(peers_, ready_channel(gradient_unit, unit), s);
    const std::byte* const mine =
        this->gradient_unit(gradient_unit) + this->gradient_bytes(this->layout(unit).shard_begin(peers_.rank()));
    for (int r = 0; r < peers_.size(); ++r) this->terms_[static_cast<std::size_t>(r)] = at_peer(r, mine);
    return this->terms_;
  }
  void release(int gradient_unit, stream_type s) override {
    pleat::detail::signal_peers(peers_, released_channel(gradient_unit), s);
  }
  void await_released(int gradient_unit, stream_type s) override {
    pleat::detail::await_peers(peers_, released_channel(gradient_unit), s);
  }

 private:
  static UnitBuffers carve(const Plan& plan, Param kind, const Peers& peers) {
    Carver window(Block{peers.base(peers.rank()), plan.window_bytes(kind)});
    return plan.carve_units(window, kind);
  }
  /// The place in the peer's window of what is at `mine` in this rank's.
  std::byte* at_peer(int peer, const std::byte* mine) const {
    return peers_.base(peer) + (mine - peers_.base(peers_.rank()));
  }
  /// Of each slot, then of each gradient unit: the channel that gives it away, and those of the units in it.
  int free_channel(int slot) const { return slot * (1 + kind_.units); }
  int full_channel(int slot, int unit) const { return free_channel(slot) + 1 + number(unit); }
  int released_channel(int gradient_unit) const { return free_channel(kind_.slots + gradient_unit); }
  int ready_channel(int gradient_unit, int unit) const { return full_channel(kind_.slots + gradient_unit, unit); }
  int number(int unit) const { return this->plan_->numbers[static_cast<std::size_t>(unit)]; }

  Executor executor_;
  Peers peers_;
  KindPlan kind_;
  typename Executor::event_type copied_;
};

/// All-gather, and all-to-all into `workspace` before a local sum. Gathers and sums have communicators of their own, so
/// that they can run at the same time.
template <executor Executor, communicator Comm>
class CollectiveTransport final : public UnitTransport<Executor> {
  using base = UnitTransport<Executor>;

 public:
  using stream_type = typename base::stream_type;

  CollectiveTransport(const Plan& plan, UnitBuffers buffers, GroupComm<Comm> gather, GroupComm<Comm> reduce,
                      std::byte* workspace)
      : base(plan, std::move(buffers), gather.size()),
        gather_(gather),
        reduce_(reduce),
        workspace_(workspace),
        counts_(static_cast<std::size_t>(gather.size())),
        mine_(counts_.size()) {}

  void gather(int slot, int unit, const void* shard, stream_type s, stream_type) override {
    gather_.all_gather_v(shard, this->slot(slot), shard_counts(this->layout(unit)), this->plan_->compute, s);
  }
  void await_gather(int, int, stream_type) override {}
  void ready(int, int, stream_type) override {}
  std::span<const void* const> terms(int gradient_unit, int unit, stream_type s) override {
    const std::byte* const whole = this->gradient_unit(gradient_unit);
    if (reduce_.size() == 1) {
      this->terms_[0] = whole;
      return this->terms_;
    }
    const std::int64_t elems = this->layout(unit).shard_elems(reduce_.rank());
    std::fill(mine_.begin(), mine_.end(), static_cast<std::size_t>(elems));
    reduce_.all_to_all_v(whole, shard_counts(this->layout(unit)), workspace_, mine_, this->plan_->gradient, s);
    for (std::size_t r = 0; r < mine_.size(); ++r) this->terms_[r] = workspace_ + r * this->gradient_bytes(elems);
    return this->terms_;
  }
  void release(int, stream_type) override {}
  void await_released(int, stream_type) override {}

 private:
  Counts shard_counts(const UnitLayout& unit) {
    for (std::size_t r = 0; r < counts_.size(); ++r) {
      counts_[r] = static_cast<std::size_t>(unit.shard_elems(static_cast<int>(r)));
    }
    return counts_;
  }

  GroupComm<Comm> gather_;
  GroupComm<Comm> reduce_;
  std::byte* workspace_;
  std::vector<std::size_t> counts_;
  std::vector<std::size_t> mine_;
};

}  // namespace pleat::inline v0::fsdp
