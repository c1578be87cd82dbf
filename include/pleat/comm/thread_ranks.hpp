// ThreadRanks: ranks that are threads of somebody else, such as a framework's; run_ranks has threads of its own.
#pragma once

#include <chrono>
#include <memory>
#include <numeric>
#include <vector>

#include <pleat/comm/thread_comm.hpp>

namespace pleat::inline v0 {

/// A world whose ranks are threads that exist: each asks for its communicator once and keeps it. Outlives none of them.
/// `Comm` is a BasicThreadComm. A rank that fails says so by `fail`; nobody else notices before the deadline.
template <class Comm = BasicThreadComm<HostExecutor>>
class ThreadRanks {
 public:
  /// `deadline`: how long a rank waits for a peer (C04). Errors: comm_error C01 for fewer than one rank.
  explicit ThreadRanks(int ranks, std::chrono::milliseconds deadline = std::chrono::seconds(120)) {
    if (ranks < 1) pleat::fail<comm_error>("pleat[C01]: a world of ", ranks, " ranks; at least 1 is needed");
    std::vector<int> all(static_cast<std::size_t>(ranks));
    std::iota(all.begin(), all.end(), 0);
    world_ = std::make_shared<detail::ThreadWorld>(ranks, deadline);
    group_ = std::make_shared<typename Comm::group_type>(world_, all);
  }

  int size() const { return world_->ranks(); }
  /// The communicator of `rank`, by the thread that is that rank. Errors: mesh_error M04.
  Comm comm(int rank) const {
    if (rank < 0 || rank >= size()) {
      pleat::fail<mesh_error>("pleat[M04]: rank ", rank, " of threads that are ranks 0 to ", size() - 1);
    }
    return Comm(group_, rank);
  }
  /// Ends the waits of all ranks with a comm_error C02 that names `rank` and `why`, now and from now on.
  void fail(int rank, const char* why) const { world_->fail(rank, why); }

 private:
  std::shared_ptr<detail::ThreadWorld> world_;
  std::shared_ptr<typename Comm::group_type> group_;
};

}  // namespace pleat::inline v0
