// An arena that checks whether a schedule may be captured in a graph: on each flag, a source's next signal must be
// ordered after the await of its last (comm/signal_protocol.hpp). Vector clocks tell, whatever the timing of the run.
#pragma once

#include <pleat/comm/thread_arena.hpp>

#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <queue>
#include <string>
#include <vector>

namespace testing_support {

/// What the ranks of a run share: the clocks that signals carry, and the breaches found.
class DisciplineLog {
 public:
  using Clock = std::vector<std::uint64_t>;  // [rank]: how many events of that rank are known to have happened
  using Flag = std::array<int, 4>;           // window, source, receiver, channel

  void signalled(const Flag& flag, const Clock& clock) {
    const std::lock_guard lock(mutex_);
    carried_[flag].push(clock);
    ++signals_;
  }
  Clock awaited(const Flag& flag) {
    const std::lock_guard lock(mutex_);
    auto& clocks = carried_.at(flag);
    Clock clock = std::move(clocks.front());
    clocks.pop();
    return clock;
  }
  void breach(const Flag& flag) {
    const std::lock_guard lock(mutex_);
    ++breaches_["window " + std::to_string(flag[0]) + " channel " + std::to_string(flag[3])];
  }
  /// What schedules that claim a number of meetings are held to.
  int signals() const { return signals_; }
  /// The channels with breaches and how many; empty when there are none.
  std::string breaches() const {
    std::string text;
    for (const auto& [place, count] : breaches_) text += place + ": " + std::to_string(count) + "\n";
    return text;
  }

 private:
  std::mutex mutex_;
  std::map<Flag, std::queue<Clock>> carried_;
  std::map<std::string, int> breaches_;
  int signals_ = 0;  // of all ranks
};

/// A HostArena whose windows keep the log. One per rank, all on one log; ranks are those of the world.
class DisciplineArena {
 public:
  class Peers {
   public:
    using device_type = pleat::host_device;
    using stream_type = pleat::HostStream;

    Peers(pleat::HostPeers inner, std::shared_ptr<DisciplineLog> log, std::shared_ptr<DisciplineLog::Clock> clock,
          int window, std::vector<int> world_ranks)
        : inner_(std::move(inner)),
          log_(std::move(log)),
          clock_(std::move(clock)),
          window_(window),
          world_ranks_(std::move(world_ranks)) {}

    int rank() const noexcept { return inner_.rank(); }
    int size() const noexcept { return inner_.size(); }
    std::byte* base(int peer) const { return inner_.base(peer); }
    void signal(int peer, int channel, pleat::HostStream s) {
      ++now();
      log_->signalled({window_, world_rank(rank()), world_rank(peer), channel}, *clock_);
      inner_.signal(peer, channel, s);
    }
    void await(int peer, int channel, pleat::HostStream s) {
      inner_.await(peer, channel, s);
      const DisciplineLog::Flag flag = {window_, world_rank(peer), world_rank(rank()), channel};
      const DisciplineLog::Clock theirs = log_->awaited(flag);
      std::uint64_t& last = last_await_[flag];
      if (theirs[static_cast<std::size_t>(world_rank(rank()))] < last) log_->breach(flag);
      for (std::size_t r = 0; r < theirs.size(); ++r) (*clock_)[r] = std::max((*clock_)[r], theirs[r]);
      last = ++now();
    }

   private:
    int world_rank(int peer) const { return world_ranks_[static_cast<std::size_t>(peer)]; }
    std::uint64_t& now() { return (*clock_)[static_cast<std::size_t>(world_rank(rank()))]; }

    pleat::HostPeers inner_;
    std::shared_ptr<DisciplineLog> log_;
    std::shared_ptr<DisciplineLog::Clock> clock_;
    int window_;
    std::vector<int> world_ranks_;
    std::map<DisciplineLog::Flag, std::uint64_t> last_await_;
  };

  /// Collective over `stage`, as HostArena; `world_size` ranks are in the run.
  DisciplineArena(pleat::GroupComm<pleat::ThreadComm> stage, std::size_t bytes, std::shared_ptr<DisciplineLog> log,
                  int world_size)
      : inner_(stage, bytes),
        log_(std::move(log)),
        clock_(std::make_shared<DisciplineLog::Clock>(static_cast<std::size_t>(world_size))) {}

  bool reachable(const pleat::Group& group) const { return inner_.reachable(group); }
  Peers open(const pleat::Group& group, std::size_t bytes, int channels) {
    std::vector<int> world_ranks;
    for (const int rank : group) world_ranks.push_back(rank);
    return Peers(inner_.open(group, bytes, channels), log_, clock_, windows_++, std::move(world_ranks));
  }

 private:
  pleat::HostArena inner_;
  std::shared_ptr<DisciplineLog> log_;
  std::shared_ptr<DisciplineLog::Clock> clock_;  // this rank's, shared by its windows
  int windows_ = 0;
};
static_assert(pleat::symmetric_arena<DisciplineArena>);

}  // namespace testing_support
