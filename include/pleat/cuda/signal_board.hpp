// SignalBoard: the flags that a rank receives its peers' signals in, and how its streams are freed when a peer fails.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include <pleat/comm/call_checks.hpp>
#include <pleat/comm/signal_protocol.hpp>
#include <pleat/comm/window_log.hpp>
#include <pleat/cuda/buffer.hpp>
#include <pleat/cuda/driver.hpp>
#include <pleat/cuda/side_context.hpp>
#include <pleat/cuda/stream.hpp>

namespace pleat::inline v0 {

/// One per rank and arena, shared by the arena and its windows; used by the rank's thread. See signal_protocol.hpp.
class SignalBoard {
 public:
  using Duration = std::chrono::milliseconds;

  /// `world_ranks[source]` names the arena's ranks in errors, `rank` is the own place among them. `flags`: this rank's
  /// flag area, on the device that is current now; zeroed on all ranks before anyone signals. Makes the release stream.
  /// Errors: C20.
  SignalBoard(const CudaDriver& driver, std::vector<int> world_ranks, int rank, Block flags)
      : driver_(driver),
        world_ranks_(std::move(world_ranks)),
        rank_(rank),
        flags_(flags),
        release_stream_(first_priority()),
        released_(flags.size_bytes),
        seen_(flags.size_bytes) {
    check_cuda(cudaGetDevice(&device_), "cudaGetDevice");
    std::fill_n(words(released_), flags.size_bytes / sizeof(std::uint64_t), signal_value::released);
  }
  SignalBoard(const SignalBoard&) = delete;
  SignalBoard& operator=(const SignalBoard&) = delete;

  /// The driver's calls; this rank; where flags lie; a flag in device memory; the receiver's side of it.
  const CudaDriver& driver() const { return driver_; }
  int rank() const { return rank_; }
  FlagLayout layout() const { return {static_cast<int>(world_ranks_.size())}; }
  std::uint64_t* flag(std::size_t word) const { return reinterpret_cast<std::uint64_t*>(flags_.data) + word; }
  SignalWaiter& waiter(std::size_t word) { return waiters_[word]; }

  /// Hands out the next `channels` channels; the first one's number. Every rank opens the same in the same order.
  /// Errors: comm_error C08 when there are no more.
  int open(int channels) {
    detail::check_channels(channels);
    const int first = windows_.empty() ? 0 : windows_.back().end;
    if (layout().bytes(first + channels) > flags_.size_bytes) {
      fail<comm_error>("pleat[C08]: the arena has ", flags_.size_bytes / layout().bytes(1),
                       " channels, the operations bound to it so far need ", first + channels,
                       "; size it by the sum of footprint().channels");
    }
    windows_.push_back({first, first + channels, ""});
    waiters_.resize(layout().words(first + channels));
    return first;
  }

  /// What errors call the window that begins with channel `first`; a string literal.
  void name(int first, const char* operation) {
    for (Window& window : windows_) {
      if (window.first == first) window.operation = operation;
    }
  }

  /// Ends what this rank's streams wait for now, so that they can be waited for; data are undefined from here on.
  /// Repeat it until they are idle. The copy engine does it, whatever occupies the multiprocessors; where the release
  /// stream stands in one queue with those that wait, a second context does.
  void release() noexcept {
    try {
      const CudaDeviceScope device(device_);
      const auto now = std::chrono::steady_clock::now();
      if (cudaStreamQuery(release_stream_) != cudaErrorNotReady) {
        (void)cudaMemcpyAsync(flags_.data, released_.data(), used_bytes(), cudaMemcpyHostToDevice, release_stream_);
        release_began_ = now;
      } else if (now - release_began_ > queue_limit) {
        side().write(flags_.data, released_.data(), used_bytes());
      }
    } catch (const error&) {  // no device any more, so nothing waits on it
    }
  }

  /// Blocks until the work on `s` is done. `check()` throws when someone has failed; it is called while waiting and at
  /// the end. After a failure or the deadline the stream's waits are released before the error is thrown.
  /// Errors: what `check` throws; comm_error C04 that names the signals not seen; C35, C20.
  template <class Check>
  void wait(cudaStream_t s, Duration deadline, Check check) {
    deadline = detail::checked_deadline(deadline);
    const CudaDeviceScope device(device_);
    const auto until = std::chrono::steady_clock::now() + deadline;
    try {
      for (Pause pause; !is_idle(s); pause()) {
        check();
        if (std::chrono::steady_clock::now() > until) {
          fail<comm_error>("pleat[C04]: rank ", world_rank(rank_), " waited ", deadline.count(), " ms on a stream",
                           not_seen());
        }
      }
      check();
    } catch (...) {
      release_until_idle(s);
      throw;
    }
  }

 private:
  struct Window {
    int first, end;  // channels
    const char* operation;
  };
  /// Time between two looks at a stream: none at first, since most waits are short.
  class Pause {
   public:
    void operator()() {
      if (++looks_ > 1000) std::this_thread::sleep_for(std::chrono::microseconds(20));
    }

   private:
    int looks_ = 0;
  };
  static constexpr Duration release_limit = std::chrono::seconds(2);
  static constexpr Duration queue_limit = std::chrono::milliseconds(50);  // a copy of flags takes microseconds

  /// Some flags: the first of them, and how many.
  struct Places {
    void add(std::size_t word) {
      if (count++ == 0) first = word;
    }
    Message others() const { return count == 1 ? Message() : message_of(" and ", count - 1, " more"); }

    std::size_t first = 0;
    int count = 0;
  };

  static std::uint64_t* words(const PinnedBuffer& buffer) { return reinterpret_cast<std::uint64_t*>(buffer.data()); }
  static bool is_idle(cudaStream_t s) {
    const cudaError_t status = cudaStreamQuery(s);
    if (status == cudaErrorNotReady) return false;
    check_cuda(status, "cudaStreamQuery");
    return true;
  }
  SideContext& side() {
    if (!side_) side_ = std::make_unique<SideContext>(driver_, device_, flags_.size_bytes);
    return *side_;
  }
  std::size_t used_bytes() const { return waiters_.size() * sizeof(std::uint64_t); }
  int world_rank(int source) const { return world_ranks_[static_cast<std::size_t>(source)]; }

  void release_until_idle(cudaStream_t s) noexcept {
    const auto until = std::chrono::steady_clock::now() + release_limit;
    while (cudaStreamQuery(s) == cudaErrorNotReady && std::chrono::steady_clock::now() < until) {
      release();
      std::this_thread::yield();
    }
  }

  /// The text about awaited signals that have not come; empty when all have.
  Message not_seen() {
    check_cuda(cudaMemcpyAsync(seen_.data(), flags_.data, used_bytes(), cudaMemcpyDeviceToHost, release_stream_),
               "cudaMemcpyAsync");
    const auto until = std::chrono::steady_clock::now() + queue_limit;
    for (Pause pause; !is_idle(release_stream_); pause()) {
      if (std::chrono::steady_clock::now() < until) continue;
      side().read(seen_.data(), flags_.data, used_bytes());
      break;
    }
    Places missing, in_graphs;
    for (std::size_t word = 0; word < waiters_.size(); ++word) {
      const std::uint64_t seen = words(seen_)[word];
      if (waiters_[word].holds_credit()) {
        if (seen == signal_value::taken) in_graphs.add(word);
      } else if (!ends_wait(seen, waiters_[word].count())) {
        missing.add(word);
      }
    }
    if (missing.count != 0) {
      return message_of(" for signal ", words(seen_)[missing.first] + 1, place(missing.first), missing.others());
    }
    // Which flags a replayed graph waits for just now, the host cannot know.
    if (in_graphs.count != 0) {
      return message_of("; no signal for graphs", place(in_graphs.first), in_graphs.others());
    }
    return {};
  }
  Message place(std::size_t word) const {
    const int source = static_cast<int>(word % world_ranks_.size());
    const int channel = static_cast<int>(word / world_ranks_.size());
    const auto window =
        std::find_if(windows_.begin(), windows_.end(), [&](const Window& w) { return channel < w.end; });
    const bool is_named = window->operation[0] != '\0';
    return message_of(" on channel ", channel - window->first, " of window ", window - windows_.begin(),
                      is_named ? " (" : "", window->operation, is_named ? ")" : "", " from rank ", world_rank(source));
  }

  CudaDriver driver_;
  std::vector<int> world_ranks_;
  int rank_;
  int device_ = 0;
  Block flags_;
  CudaStream release_stream_;
  std::chrono::steady_clock::time_point release_began_{};
  std::unique_ptr<SideContext> side_;
  PinnedBuffer released_;              // what a release writes
  PinnedBuffer seen_;                  // a copy of the flags, to tell which signals are missing
  std::vector<SignalWaiter> waiters_;  // [word]
  std::vector<Window> windows_;
};

}  // namespace pleat::inline v0
