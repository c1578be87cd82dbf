// SharedWorld: a world of two threads that runs one check after another, since making a world takes half a second.
#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include <pleat/nccl/run_threads.hpp>

namespace nccl_testing {

inline constexpr int world_ranks = 2;

/// A check that fails ends the world; the next check gets a new one. Call `end` before the program ends.
class SharedWorld {
 public:
  using Check = std::function<void(pleat::NcclComm&)>;

  /// Runs `check` on both ranks, which have left it when this returns. Throws as run_nccl_threads does.
  void run(const Check& check) {
    std::unique_lock lock(mutex_);
    check_ = &check;
    done_ = 0;
    ++round_;
    changed_.notify_all();
    if (!runner_.joinable()) {
      has_ended_ = false;
      runner_ = std::thread([this, first = round_] { live(first); });
    }
    const auto start = std::chrono::steady_clock::now();
    changed_.wait(lock, [this] { return has_ended_ || done_ == world_ranks; });
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    if (check) std::printf("check %u on two ranks: %.2f s\n", round_, took.count());
    if (!has_ended_ && check) return;
    lock.unlock();
    runner_.join();
    if (const auto error = std::exchange(error_, nullptr)) std::rethrow_exception(error);
  }
  void end() {
    if (runner_.joinable()) run({});
  }

  /// What each rank does, for a watchdog: the last operation on the communicator that it gave to `watch`.
  std::string status() const {
    const std::lock_guard lock(mutex_);
    std::string text;
    for (std::size_t r = 0; r < jobs_.size(); ++r) {
      text += (r == 0 ? "rank " : ", rank ") + std::to_string(r) + ": " +
              (jobs_[r] != nullptr ? jobs_[r]->last_operation() : "in no check");
    }
    return text;
  }
  void watch(int rank, const pleat::Job* job) {
    const std::lock_guard lock(mutex_);
    jobs_[static_cast<std::size_t>(rank)] = job;
  }

 private:
  void live(unsigned first) {
    std::exception_ptr error;
    try {
      pleat::run_nccl_threads(world_ranks, [&](pleat::NcclComm& world) { serve(world, first); },
                              {.deadline = std::chrono::seconds(20)});
    } catch (...) {
      error = std::current_exception();
    }
    const std::lock_guard lock(mutex_);
    error_ = error;
    has_ended_ = true;
    changed_.notify_all();
  }
  void serve(pleat::NcclComm& world, unsigned round) {
    for (;; ++round) {
      const Check& check = *next(world, round);
      if (!check) return;
      watch(world.rank(), &world.job());
      try {
        check(world);
      } catch (...) {
        watch(world.rank(), nullptr);
        throw;
      }
      watch(world.rank(), nullptr);
      const std::lock_guard lock(mutex_);
      ++done_;
      changed_.notify_all();
    }
  }
  /// Checks its job meanwhile: the peer may fail in the check that this rank has left.
  const Check* next(pleat::NcclComm& world, unsigned round) {
    std::unique_lock lock(mutex_);
    while (!changed_.wait_for(lock, std::chrono::milliseconds(1), [&] { return round_ >= round; })) world.check();
    return check_;
  }

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  const Check* check_ = nullptr;
  unsigned round_ = 0;
  int done_ = 0;
  bool has_ended_ = true;
  std::exception_ptr error_;
  std::array<const pleat::Job*, world_ranks> jobs_{};
  std::thread runner_;
};
/// The suites' backends have no object that could hold it.
inline SharedWorld shared_world;

}  // namespace nccl_testing
