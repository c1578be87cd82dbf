// Rendezvous: how the threads of a group meet for one collective call and look at each other's arguments.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include <pleat/comm/communicator.hpp>
#include <pleat/comm/thread_world.hpp>

namespace pleat::inline v0::detail {

/// The arguments of one rank's collective call.
struct Call {
  const char* operation = "";
  DType dtype = DType::u8;
  std::size_t elems = 0;
  int root = 0;
  const void* in = nullptr;
  void* out = nullptr;
  Counts send{};
  Counts recv{};
  int count_lists = 0;     // 0: none; 1: recv; 2: send and recv
  bool must_agree = true;  // split's color and key differ by design
};

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
      disagreement_ = find_disagreement();
      begin_generation();
    } else {
      world_->wait(
          *place_, lock, world_ranks_[me], [&] { return generation_ != mine; }, [&](auto visit) { for_each_absent(visit); },
          call.operation, " of ", size(), " ranks");
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

  template <class... Parts>
  Message wrong(std::size_t rank, const Parts&... parts) const {
    return message_of("pleat[C05]: rank ", world_ranks_[rank], " calls ", calls_[rank].operation, parts...);
  }
  template <class... Parts>
  Message differs(std::size_t rank, const Parts&... parts) const {
    return wrong(rank, ", rank ", world_ranks_[0], " calls ", calls_[0].operation, parts...);
  }
  Message miscounts(std::size_t rank, Counts counts) const {
    return wrong(rank, "; it gives ", counts.size(), " counts for ", calls_.size(), " ranks");
  }
  /// The first way in which the calls do not fit together, or an empty text.
  Message find_disagreement() const {
    const Call& first = calls_[0];
    for (std::size_t r = 0; r < calls_.size(); ++r) {
      const Call& call = calls_[r];
      // Literals with equal text may have different addresses.
      if (std::string_view(call.operation) != first.operation) return differs(r, "; all ranks must call the same");
      if (!call.must_agree) continue;
      if (call.dtype != first.dtype) return differs(r, "; dtypes ", call.dtype, " and ", first.dtype, " must agree");
      if (call.elems != first.elems) return differs(r, "; elems ", call.elems, " and ", first.elems, " must agree");
      if (call.root != first.root) return differs(r, "; roots ", call.root, " and ", first.root, " must agree");
      if (call.root < 0 || call.root >= size()) return wrong(r, "; root ", call.root, " is not in 0 to ", size() - 1);
      if (call.count_lists >= 1 && call.recv.size() != calls_.size()) return miscounts(r, call.recv);
      if (call.count_lists == 2 && call.send.size() != calls_.size()) return miscounts(r, call.send);
    }
    for (std::size_t r = 0; r < calls_.size(); ++r) {
      for (std::size_t p = 0; p < calls_[r].recv.size(); ++p) {
        // all_gather_v has no send counts: all give the same list. all_to_all_v: what p sends me is what I receive.
        const std::size_t expected = calls_[r].recv[p];
        const bool is_gather = first.count_lists == 1;
        const std::size_t given = is_gather ? first.recv[p] : calls_[p].send[r];
        if (expected == given) continue;
        const Message text = wrong(r, "; it expects ", expected, " elements of rank ", world_ranks_[p], ", ");
        return is_gather ? message_of(text, "rank ", world_ranks_[0], " expects ", given)
                         : message_of(text, "which sends ", given);
      }
    }
    return {};
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
