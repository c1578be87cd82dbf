// MpiArena: the arena of ranks that do not map each other's memory; it reaches groups of one, the others use
// collectives.
#pragma once

#include <pleat/comm/thread_arena.hpp>
#include <pleat/mpi/comm.hpp>

namespace pleat::inline v0 {

/// Memory of this rank alone, for operations whose groups may be of one rank: a plan for more moves bytes by
/// collectives (`choose_transport`).
class MpiArena {
 public:
  /// As HostArena, without communication: sizes of ranks may differ. Errors: comm_error C08 for channels below 0.
  explicit MpiArena(const GroupComm<MpiComm>& stage, std::size_t bytes, int channels = default_channels)
      : own_(stage.ranks()[stage.rank()]), arena_(own_, bytes, channels) {}

  bool reachable(const Group& group) const { return arena_.reachable(group); }
  /// Errors: comm_error C07 for a group of more than this rank, C08 when the arena is used up, C34.
  [[nodiscard]] HostPeers open(const Group& group, std::size_t bytes, int channels) {
    return arena_.open(group, bytes, channels);
  }
  /// Nobody else sees the windows. Errors: comm_error C34.
  void seal(const GroupComm<MpiComm>&) const { arena_.seal(own_); }

 private:
  GroupComm<ThreadComm> own_;
  HostArena arena_;
};
static_assert(symmetric_arena<MpiArena>);

}  // namespace pleat::inline v0
