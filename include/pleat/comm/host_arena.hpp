// HostArena: the symmetric arena of host ranks, plain memory that the threads of a run share.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <pleat/comm/group_comm.hpp>
#include <pleat/comm/peer_access.hpp>
#include <pleat/comm/run_ranks.hpp>
#include <pleat/comm/thread_comm.hpp>
#include <pleat/core/host/buffer.hpp>

namespace pleat::inline v0 {

namespace detail {
/// What the ranks of an arena share: a block each, and counters of the signals each has received.
struct HostArenaState {
  struct Inbox {
    std::shared_ptr<WaitingPlace> place;
    std::vector<std::vector<std::uint64_t>> received;  // [source][channel]
  };

  HostArenaState(std::shared_ptr<ThreadWorld> shared_world, std::vector<int> ranks, std::size_t bytes)
      : world(std::move(shared_world)), world_ranks(std::move(ranks)), inboxes(world_ranks.size()) {
    for (Inbox& inbox : inboxes) {
      inbox.place = world->make_place();
      inbox.received.resize(inboxes.size());
      blocks.emplace_back(bytes);
    }
  }

  std::shared_ptr<ThreadWorld> world;
  std::vector<int> world_ranks;
  std::vector<HostBuffer> blocks;
  std::vector<Inbox> inboxes;
};
}  // namespace detail

/// A group's window on a HostArena; see peer_access.hpp. `await` blocks the thread, with the run's deadline and failure
/// rules.
class HostPeers {
 public:
  using device_type = host_device;
  using stream_type = HostStream;

  HostPeers() = default;
  // A copy would count its awaits on its own, and take signals twice.
  HostPeers(HostPeers&&) noexcept = default;
  HostPeers& operator=(HostPeers&&) noexcept = default;
  HostPeers(std::shared_ptr<detail::HostArenaState> arena, std::vector<int> members, int rank, std::size_t offset_bytes,
            int first_channel, int channels)
      : arena_(std::move(arena)),
        members_(std::move(members)),
        awaited_(members_.size(), std::vector<std::uint64_t>(static_cast<std::size_t>(channels))),
        rank_(rank),
        offset_bytes_(offset_bytes),
        first_channel_(static_cast<std::size_t>(first_channel)) {}

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return static_cast<int>(members_.size()); }
  std::byte* base(int peer) const { return arena_->blocks[member(peer)].data() + offset_bytes_; }

  void signal(int peer, int channel, HostStream = {}) {
    auto& inbox = arena_->inboxes[member(peer)];
    {
      const std::lock_guard lock(inbox.place->mutex);
      ++count(inbox, rank_, channel);
    }
    inbox.place->changed.notify_all();
  }

  /// Errors: comm_error C02, C03, C04 when the signal does not come.
  void await(int peer, int channel, HostStream = {}) {
    auto& inbox = arena_->inboxes[member(rank_)];
    const std::uint64_t wanted = ++awaited_[static_cast<std::size_t>(peer)][static_cast<std::size_t>(channel)];
    const int source = world_rank(peer);
    arena_->world->enter(world_rank(rank_), "await");
    std::unique_lock lock(inbox.place->mutex);
    arena_->world->wait(
        *inbox.place, lock, world_rank(rank_), [&] { return count(inbox, peer, channel) >= wanted; },
        [&] { return std::vector<int>{source}; }, "await of signal ", wanted, " on channel ", channel, " from rank ",
        source);
  }

 private:
  std::size_t member(int peer) const { return static_cast<std::size_t>(members_[static_cast<std::size_t>(peer)]); }
  int world_rank(int peer) const { return arena_->world_ranks[member(peer)]; }
  /// A signal may come before its receiver has opened the window, so counters appear when they are first used.
  std::uint64_t& count(detail::HostArenaState::Inbox& inbox, int source, int channel) const {
    auto& counters = inbox.received[member(source)];
    const std::size_t at = first_channel_ + static_cast<std::size_t>(channel);
    if (counters.size() <= at) counters.resize(at + 1);
    return counters[at];
  }

  std::shared_ptr<detail::HostArenaState> arena_;
  std::vector<int> members_;                         // ranks of the arena
  std::vector<std::vector<std::uint64_t>> awaited_;  // [peer][channel]
  int rank_ = 0;
  std::size_t offset_bytes_ = 0;
  std::size_t first_channel_ = 0;
};
static_assert(peer_access<HostPeers>);

/// One block of host memory per rank of `stage`, all of the largest size any rank asks for.
class HostArena {
 public:
  // A copy would hand out the same bytes twice.
  HostArena(HostArena&&) noexcept = default;
  HostArena& operator=(HostArena&&) noexcept = default;

  /// Collective over `stage`. Size the arena by the sum of `footprint().symmetric` of all operations bound to it.
  HostArena(GroupComm<ThreadComm> stage, std::size_t bytes) : ranks_(stage.ranks()), rank_(stage.rank()) {
    if (stage.comm() == nullptr) {
      auto world = std::make_shared<detail::ThreadWorld>(ranks_[0] + 1, RunOptions{}.deadline);
      state_ = std::make_shared<detail::HostArenaState>(std::move(world), std::vector<int>{ranks_[0]}, bytes);
      return;
    }
    std::vector<std::int64_t> wanted(static_cast<std::size_t>(stage.size()));
    const auto mine = static_cast<std::int64_t>(bytes);
    stage.all_gather(&mine, wanted.data(), 1, DType::i64, {});
    std::shared_ptr<detail::HostArenaState> made;
    if (rank_ == 0) {
      const auto largest = static_cast<std::size_t>(*std::max_element(wanted.begin(), wanted.end()));
      made = std::make_shared<detail::HostArenaState>(stage.comm()->world(), stage.comm()->world_ranks(), largest);
    }
    state_ = stage.comm()->share("arena", made, 0);
  }

  /// Whether the group (world ranks) lies in this arena: threads map all of each other's memory.
  bool reachable(const Group& group) const {
    for (const int rank : group) {
      if (!ranks_.contains(rank)) return false;
    }
    return true;
  }

  /// The window of my group `group` (world ranks): the next `bytes` of the arena and `channels` channels.
  /// Errors: comm_error C07 when the group is not reachable, C08 when the arena is used up.
  HostPeers open(const Group& group, std::size_t bytes, int channels) {
    if (!reachable(group) || !group.contains(ranks_[rank_])) {
      fail<comm_error>("pleat[C07]: group ", group, " of rank ", ranks_[rank_], " is not inside the arena of ranks ",
                       ranks_);
    }
    const std::size_t size_bytes = state_->blocks[0].size_bytes();
    if (used_bytes_ + bytes > size_bytes) {
      fail<comm_error>("pleat[C08]: the arena has ", size_bytes, " bytes, the operations bound to it so far need ",
                       used_bytes_ + bytes, "; size it by the sum of footprint().symmetric");
    }
    Carver windows;
    windows.take_bytes(used_bytes_ + bytes);
    const std::size_t offset = std::exchange(used_bytes_, windows.used_bytes());
    std::vector<int> members;
    for (const int rank : group) members.push_back(ranks_.index_of(rank));
    const int first_channel = std::exchange(used_channels_, used_channels_ + channels);
    return HostPeers(state_, std::move(members), group.index_of(ranks_[rank_]), offset, first_channel, channels);
  }

 private:
  Group ranks_;
  int rank_;
  std::shared_ptr<detail::HostArenaState> state_;
  std::size_t used_bytes_ = 0;
  int used_channels_ = 0;
};
static_assert(symmetric_arena<HostArena>);

}  // namespace pleat::inline v0
