// Rendezvous: how the threads of a group meet for one collective call and look at each other's arguments.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include <pleat/comm/call_agreement.hpp>
#include <pleat/comm/thread_world.hpp>

namespace pleat::inline v0::detail {

/// One group of threads. A collective is `meet` (everybody's arguments are published and agree), reading peers' memory,
/// `part` (nobody reads mine any more). Between the two a rank must not throw: whoever met will part, so that `part`
/// needs no deadline and no rank frees memory that a peer still reads.
class Rendezvous {
 public:
  Rendezvous(std::shared_ptr<ThreadWorld> world, std::vector<int> world_ranks)
      : world_(std::move(world)),
        place_(world_->make_place()),
        world_ranks_(std::move(world_ranks)),
        calls_(world_ranks_.size()),
        is_here_(world_ranks_.size(), 0) {}

  int size() const { return static_cast<int>(world_ranks_.size()); }
  const std::vector<int>& world_ranks() const { return world_ranks_; }
  const std::shared_ptr<ThreadWorld>& world() const { return world_; }

  /// Publishes `call` and blocks until every rank of the group has published its own.
  /// Errors: comm_error C05 on every rank when the calls do not agree; C02, C03, C04 as `ThreadWorld::wait`.
  void meet(int rank, const Call& call) {
    const auto me = static_cast<std::size_t>(rank);
    world_->enter(world_ranks_[me], call.operation);
    std::unique_lock lock(place_->mutex);
    // A rank that gave up in here is counted but gone: nobody may meet it, read its memory or wait for it to part.
    world_->require_no_failure(world_ranks_[me], call.operation);
    calls_[me] = call;
    is_here_[me] = 1;
    const std::uint64_t mine = generation_;
    if (++arrived_ == size()) {
      disagreement_ = Calls{calls_, world_ranks_}.disagreement();
      begin_generation();
    } else {
      world_->wait(
          *place_, lock, world_ranks_[me], [&] { return generation_ != mine; },
          [&](auto visit) { for_each_absent(visit); }, call.operation, " of ", size(), " ranks");
    }
    if (disagreement_.size() != 0) throw comm_error(disagreement_);
  }

  /// Blocks until every rank that met has come here.
  void part() {
    std::unique_lock lock(place_->mutex);
    const std::uint64_t mine = generation_;
    if (++arrived_ == size()) {
      begin_generation();
    } else {
      place_->changed.wait(lock, [&] { return generation_ != mine; });
    }
  }

  const Call& call(int rank) const { return calls_[static_cast<std::size_t>(rank)]; }

 private:
  void begin_generation() {
    arrived_ = 0;
    std::fill(is_here_.begin(), is_here_.end(), 0);
    ++generation_;
    place_->changed.notify_all();
  }
  template <class Visit>
  void for_each_absent(Visit visit) const {
    for (std::size_t r = 0; r < is_here_.size(); ++r) {
      if (!is_here_[r]) visit(world_ranks_[r]);
    }
  }

  const std::shared_ptr<ThreadWorld> world_;
  const std::shared_ptr<WaitingPlace> place_;
  const std::vector<int> world_ranks_;
  std::vector<Call> calls_;
  std::vector<char> is_here_;
  Message disagreement_;
  int arrived_ = 0;
  std::uint64_t generation_ = 0;
};

}  // namespace pleat::inline v0::detail
