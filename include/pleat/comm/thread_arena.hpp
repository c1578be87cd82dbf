// The symmetric arena of ranks that are threads: memory that they share, signals that their streams pass; HostArena is
// the host's.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <pleat/comm/group_comm.hpp>
#include <pleat/comm/peer_access.hpp>
#include <pleat/comm/run_ranks.hpp>
#include <pleat/comm/thread_comm.hpp>
#include <pleat/comm/window_log.hpp>
#include <pleat/core/host/buffer.hpp>

namespace pleat::inline v0 {

namespace detail {
/// A queue that allocates only to grow.
template <class T>
class Fifo {
 public:
  bool empty() const { return count_ == 0; }
  T& front() { return *items_[first_]; }
  void push(T item) {
    if (count_ == items_.size()) reserve(2 * count_ + 2);
    items_[(first_ + count_++) % items_.size()] = std::move(item);
  }
  T pop() {
    T item = *std::exchange(items_[first_], std::nullopt);
    first_ = (first_ + 1) % items_.size();
    --count_;
    return item;
  }
  void reserve(std::size_t count) {
    if (count <= items_.size()) return;
    std::vector<std::optional<T>> items(count);
    for (std::size_t i = 0; i < count_; ++i) items[i] = std::move(items_[(first_ + i) % items_.size()]);
    items_.swap(items);
    first_ = 0;
  }

 private:
  std::vector<std::optional<T>> items_;
  std::size_t first_ = 0, count_ = 0;
};

/// What the ranks of an arena share: a block each, and the signals each has received and not yet awaited.
template <executor Executor, class Buffer>
struct ThreadArenaState {
  using event_type = typename Executor::event_type;
  struct Source {
    std::vector<Fifo<event_type>> signals;  // [channel]; an event per signal, recorded by the source
    std::vector<event_type> spare;          // awaited ones, for the source's next signals

    /// A signal may come before its receiver has opened the window, so both make the channels. Credits keep at most two
    /// signals of a channel under way.
    void make_channels(std::size_t count) {
      if (count <= signals.size()) return;
      signals.resize(count);
      for (auto& channel : signals) channel.reserve(2);
      spare.reserve(2 * count);
    }
  };
  struct Inbox {
    std::shared_ptr<WaitingPlace> place;
    std::vector<Source> sources;
  };

  ThreadArenaState(std::shared_ptr<ThreadWorld> shared_world, std::vector<int> ranks)
      : world(std::move(shared_world)),
        world_ranks(std::move(ranks)),
        blocks(world_ranks.size()),
        inboxes(blocks.size()) {
    for (Inbox& inbox : inboxes) {
      inbox.place = world->make_place();
      inbox.sources.resize(inboxes.size());
    }
  }

  std::shared_ptr<ThreadWorld> world;
  std::vector<int> world_ranks;
  std::vector<Buffer> blocks;  // each made by its rank, on its device
  std::vector<Inbox> inboxes;
};
}  // namespace detail

/// A group's window on a thread arena; see peer_access.hpp. A signal is an event of the source's stream; `await` blocks
/// the thread until its peer has issued it, with the run's deadline and failure rules, then the stream waits for the
/// event.
template <executor Executor, class Buffer>
class BasicThreadPeers {
 public:
  using device_type = typename Executor::device_type;
  using stream_type = typename Executor::stream_type;
  using State = detail::ThreadArenaState<Executor, Buffer>;

  BasicThreadPeers() = default;
  // A copy would take signals that are awaited once.
  BasicThreadPeers(BasicThreadPeers&&) noexcept = default;
  BasicThreadPeers& operator=(BasicThreadPeers&&) noexcept = default;
  BasicThreadPeers(std::shared_ptr<State> arena, std::vector<int> members, int rank, detail::WindowLog::Place place,
                   int channels)
      : arena_(std::move(arena)),
        members_(std::move(members)),
        awaited_(members_.size(), std::vector<std::uint64_t>(static_cast<std::size_t>(channels))),
        rank_(rank),
        channels_(channels),
        place_(place) {}

  /// What errors call the operation that the window is for; a string literal.
  void name(const char* operation) { name_ = operation; }

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return static_cast<int>(members_.size()); }
  std::byte* base(int peer) const {
    detail::check_peer("base", peer, size());
    return arena_->blocks[member(peer)].data() + place_.offset_bytes;
  }

  void signal(int peer, int channel, stream_type s = {}) {
    detail::check_signal("signal", peer, size(), channel, channels_);
    auto& inbox = arena_->inboxes[member(peer)];
    std::optional<typename Executor::event_type> event;
    {
      const std::lock_guard lock(inbox.place->mutex);
      auto& spare = inbox.sources[member(rank_)].spare;
      if (!spare.empty()) {
        event.emplace(std::move(spare.back()));
        spare.pop_back();
      }
    }
    if (!event) event.emplace(executor_.make_event());
    executor_.record(*event, s);
    {
      const std::lock_guard lock(inbox.place->mutex);
      signals(inbox, rank_, channel).push(std::move(*event));
    }
    inbox.place->changed.notify_all();
  }

  /// Errors: comm_error C02, C03, C04 when the signal does not come, with the name of the operation that awaits it.
  void await(int peer, int channel, stream_type s = {}) {
    detail::check_signal("await", peer, size(), channel, channels_);
    auto& inbox = arena_->inboxes[member(rank_)];
    const std::uint64_t number = ++awaited_[static_cast<std::size_t>(peer)][static_cast<std::size_t>(channel)];
    const int source = world_rank(peer);
    const bool is_named = name_[0] != '\0';
    arena_->world->enter(world_rank(rank_), is_named ? name_ : "await");
    std::unique_lock lock(inbox.place->mutex);
    arena_->world->wait(
        *inbox.place, lock, world_rank(rank_), [&] { return !signals(inbox, peer, channel).empty(); },
        [&](auto visit) { visit(source); }, name_, is_named ? ": " : "", "await of signal ", number, " on channel ",
        channel, " from rank ", source);
    auto& queue = signals(inbox, peer, channel);
    executor_.wait(s, queue.front());
    inbox.sources[member(peer)].spare.push_back(queue.pop());
  }

 private:
  std::size_t member(int peer) const { return static_cast<std::size_t>(members_[static_cast<std::size_t>(peer)]); }
  int world_rank(int peer) const { return arena_->world_ranks[member(peer)]; }
  auto& signals(typename State::Inbox& inbox, int source, int channel) const {
    auto& from = inbox.sources[member(source)];
    from.make_channels(static_cast<std::size_t>(place_.first_channel + channels_));
    return from.signals[static_cast<std::size_t>(place_.first_channel + channel)];
  }

  std::shared_ptr<State> arena_;
  std::vector<int> members_;                         // ranks of the arena
  std::vector<std::vector<std::uint64_t>> awaited_;  // [peer][channel], for the texts of errors
  int rank_ = 0, channels_ = 0;
  detail::WindowLog::Place place_ = {};
  const char* name_ = "";
  [[no_unique_address]] Executor executor_;
};

/// One block per rank of `stage`, all of the largest size any rank asks for.
template <executor Executor, class Buffer>
class BasicThreadArena {
 public:
  using Comm = BasicThreadComm<Executor>;
  using Peers = BasicThreadPeers<Executor, Buffer>;
  using State = detail::ThreadArenaState<Executor, Buffer>;

  // A copy would hand out the same bytes twice.
  BasicThreadArena(BasicThreadArena&&) noexcept = default;
  BasicThreadArena& operator=(BasicThreadArena&&) noexcept = default;

  /// Collective over `stage`. Size the arena by the sum of `footprint().symmetric` of all operations bound to it, and
  /// `channels` by that of `footprint().channels`. Errors: comm_error C08 for channels below 0.
  BasicThreadArena(GroupComm<Comm> stage, std::size_t bytes, int channels = default_channels)
      : ranks_(stage.ranks()), rank_(stage.rank()) {
    detail::ArenaSize size{bytes, channels};
    detail::check_channels(channels);
    if (stage.comm() == nullptr) {
      auto world = std::make_shared<detail::ThreadWorld>(ranks_[0] + 1, RunOptions{}.deadline);
      state_ = std::make_shared<State>(std::move(world), std::vector<int>{ranks_[0]});
      state_->blocks[0] = Buffer(bytes);
      log_ = detail::WindowLog(size);
      return;
    }
    Comm& comm = *stage.comm();
    const auto mine = std::make_shared<detail::ArenaSize>(size);
    for (int r = 0; r < comm.size(); ++r) size.take(*comm.share("arena", mine, r));
    std::shared_ptr<State> made;
    if (rank_ == 0) made = std::make_shared<State>(comm.world(), comm.world_ranks());
    state_ = comm.share("arena", made, 0);
    state_->blocks[static_cast<std::size_t>(rank_)] = Buffer(size.bytes);
    log_ = detail::WindowLog(size);
    comm.share("arena", made, 0);  // nobody opens a window before all blocks are there
  }

  /// Whether the group (world ranks) lies in this arena: threads map all of each other's memory.
  bool reachable(const Group& group) const {
    for (const int rank : group) {
      if (!ranks_.contains(rank)) return false;
    }
    return true;
  }

  /// The window of my group `group` (world ranks): the next `bytes` of the arena and `channels` channels. Errors:
  /// comm_error C07 when the group is not reachable, C08 when the arena is used up, C34.
  [[nodiscard]] Peers open(const Group& group, std::size_t bytes, int channels) {
    detail::check_not_moved_from(state_ != nullptr);
    if (!reachable(group) || !group.contains(ranks_[rank_])) {
      fail<comm_error>("pleat[C07]: group ", group, " of rank ", ranks_[rank_], " is not inside the arena of ranks ",
                       ranks_);
    }
    const auto place = log_.add(bytes, channels);
    std::vector<int> members;
    for (const int rank : group) members.push_back(ranks_.index_of(rank));
    return Peers(state_, std::move(members), group.index_of(ranks_[rank_]), place, channels);
  }

  /// Collective over `stage`, the ranks of this arena; after the last bind: whether all ranks have opened the same
  /// windows. Errors, on all ranks alike: comm_error C32; C34.
  void seal(const GroupComm<Comm>& stage) const {
    detail::check_not_moved_from(state_ != nullptr);
    log_.check(ranks_, [&](const auto& mine) {
      std::vector<std::remove_cvref_t<decltype(mine)>> all{mine};
      if (stage.comm() == nullptr) return all;
      all.clear();
      const auto shared = std::make_shared<std::remove_cvref_t<decltype(mine)>>(mine);
      for (int r = 0; r < stage.size(); ++r) all.push_back(*stage.comm()->share("seal", shared, r));
      return all;
    });
  }

 private:
  Group ranks_;
  int rank_;
  std::shared_ptr<State> state_;  // null when moved from
  detail::WindowLog log_;
};

/// Ranks that are threads on host memory.
using HostPeers = BasicThreadPeers<HostExecutor, HostBuffer>;
using HostArena = BasicThreadArena<HostExecutor, HostBuffer>;
static_assert(peer_access<HostPeers>);
static_assert(symmetric_arena<HostArena>);

}  // namespace pleat::inline v0
