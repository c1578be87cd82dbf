// What the threads of one run share: who failed, who has returned, and how to wait for a peer without hanging.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <pleat/comm/call_checks.hpp>
#include <pleat/core/error.hpp>

namespace pleat::inline v0::detail {

/// A place where ranks wait: what they wait for changes under `mutex`, and whoever changes it notifies `changed`.
struct WaitingPlace {
  std::mutex mutex;
  std::condition_variable changed;
};

/// The failure state of a run. Every wait goes through `wait`, which ends when its condition holds, a rank has failed
/// (C02), a rank that is waited for has returned (C03) or the deadline has passed (C04); the last three throw
/// comm_error. (std::barrier and friends cannot be ended from outside.)
class ThreadWorld {
 public:
  using Duration = std::chrono::milliseconds;

  ThreadWorld(int ranks, Duration deadline)
      : deadline_(checked_deadline(deadline)),
        has_returned_(static_cast<std::size_t>(ranks)),
        operation_(has_returned_.size()) {}

  std::shared_ptr<WaitingPlace> make_place() {
    auto place = std::make_shared<WaitingPlace>();
    const std::lock_guard lock(places_mutex_);
    std::erase_if(places_, [](const auto& old) { return old.expired(); });
    places_.push_back(place);
    return place;
  }

  /// Notes what world rank `rank` does now, for the texts of errors. `operation` is a string literal.
  void enter(int rank, const char* operation) { operation_[static_cast<std::size_t>(rank)] = operation; }

  /// What a rank did last, for the texts of errors and of watchdogs; "no operation" before the first.
  const char* last_operation(int rank) const {
    const char* operation = operation_[static_cast<std::size_t>(rank)];
    return operation == nullptr ? "no operation" : operation;
  }
  int ranks() const { return static_cast<int>(operation_.size()); }

  /// Ends every wait of the run; the first failure is the one that is reported.
  void fail(int rank, const char* why) {
    record_failure(rank, why);
    wake_all();
  }
  void leave(int rank) {
    has_returned_[static_cast<std::size_t>(rank)] = true;
    wake_all();
  }
  int failed_rank() const { return failed_rank_; }
  Message failure() const {
    const std::lock_guard lock(failure_mutex_);
    return failure_;
  }

  /// Errors: comm_error C02 when a rank has failed. `operation...` are the parts of what `rank` is about to wait in.
  template <class... Operation>
  void require_no_failure(int rank, const Operation&... operation) const {
    if (failed_rank_ >= 0) {
      pleat::fail<comm_error>("pleat[C02]: ", failure(), "; rank ", rank, " waited in ", operation...);
    }
  }

  /// Blocks world rank `rank` until `ready()`, which it asks again and again: for devices, which notify nobody. Errors:
  /// comm_error C02 when a rank has failed, C04 after the deadline.
  template <class Ready>
  void poll(int rank, Ready ready, const char* operation) {
    const auto until = std::chrono::steady_clock::now() + deadline_;
    for (auto pause = std::chrono::microseconds(1); !ready(); pause = std::min(2 * pause, longest_pause)) {
      require_no_failure(rank, operation);
      if (std::chrono::steady_clock::now() > until) {
        const Message text = message_of("pleat[C04]: rank ", rank, " waited ", deadline_.count(), " ms in ", operation,
                                        " for its device, after ", last_operation(rank));
        fail(rank, text.c_str());
        throw comm_error(text);
      }
      std::this_thread::sleep_for(pause);
    }
  }

  /// Blocks world rank `rank` until `ready()`. `lock` holds the place's mutex, under which both callables run.
  /// `missing(visit)` calls visit(world rank) for each that has not come yet. `operation...` are the parts of its
  /// description. Whoever takes the place's mutex after a wait on it has thrown sees the failure. Allocates nothing but
  /// to fail.
  template <class Ready, class Missing, class... Operation>
  void wait(WaitingPlace& place, std::unique_lock<std::mutex>& lock, int rank, Ready ready, Missing missing,
            const Operation&... operation) {
    const auto until = std::chrono::steady_clock::now() + deadline_;
    bool in_time = true;
    while (!ready()) {
      require_no_failure(rank, operation...);
      int returned = -1;
      bool is_missing = false;
      missing([&](int r) {
        if (returned < 0 && has_returned_[static_cast<std::size_t>(r)]) returned = r;
        is_missing = is_missing || r == rank;
      });
      if (returned >= 0) {
        give_up(lock, rank,
                message_of("pleat[C03]: rank ", returned, " has returned, while rank ", rank, " waits for it in ",
                           operation..., "; all ranks of a group must make the same calls"));
      }
      if (is_missing) {
        give_up(lock, rank,
                message_of("pleat[C03]: rank ", rank, " waits for itself in ", operation...,
                           "; what a rank awaits of itself comes before the wait"));
      }
      if (!in_time) {
        std::vector<int> absent;
        missing([&](int r) { absent.push_back(r); });
        give_up(lock, rank,
                message_of("pleat[C04]: rank ", rank, " waited ", deadline_.count(), " ms in ", operation...,
                           " for rank ", List<int>{absent.data(), absent.size()}, ", last seen in ",
                           absent.empty() ? "?" : last_operation(absent.front())));
      }
      in_time = place.changed.wait_until(lock, until) == std::cv_status::no_timeout;
    }
  }

 private:
  static constexpr std::chrono::microseconds longest_pause{256};

  [[noreturn]] void give_up(std::unique_lock<std::mutex>& lock, int rank, const Message& text) {
    record_failure(rank, text.c_str());  // under the lock: who comes later must
                                         // not take this rank for present
    lock.unlock();                       // waking takes the mutex of every place, this one too
    wake_all();
    throw comm_error(text);
  }
  void record_failure(int rank, const char* why) {
    const std::lock_guard lock(failure_mutex_);
    if (failed_rank_ >= 0) return;
    failure_ = message_of("rank ", rank, " failed after ", last_operation(rank), " (", why, ")");
    failed_rank_ = rank;
  }
  void wake_all() {
    const std::lock_guard lock(places_mutex_);
    for (const auto& weak : places_) {
      const auto place = weak.lock();
      if (!place) continue;
      { const std::lock_guard visible(place->mutex); }  // a waiter has seen the change or is asleep by now
      place->changed.notify_all();
    }
  }

  const Duration deadline_;
  std::vector<std::atomic<bool>> has_returned_;
  std::vector<std::atomic<const char*>> operation_;
  std::atomic<int> failed_rank_ = -1;
  mutable std::mutex failure_mutex_;
  Message failure_;
  std::mutex places_mutex_;
  std::vector<std::weak_ptr<WaitingPlace>> places_;
};

}  // namespace pleat::inline v0::detail
