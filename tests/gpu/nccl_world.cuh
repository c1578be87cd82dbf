// Worlds of ranks for the suites, which are threads of this process or, where RANK is set, processes that go through
// the same checks together.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <pleat/nccl/run_threads.hpp>

#include <support/process_world.hpp>

#include "nccl_ranks.hpp"

namespace nccl_testing {

using Check = std::function<void(pleat::NcclComm&)>;
using std::chrono::milliseconds;

/// Prints how long it has lived, for the output of a case that fails.
class Stopwatch {
 public:
  explicit Stopwatch(const char* what) : what_(what) {}
  ~Stopwatch() {
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start_;
    std::printf("%s: %.2f s\n", what_, took.count());
  }

 private:
  const char* what_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

inline bool ranks_are_processes() {
  return std::getenv("RANK") != nullptr;
}

/// What each rank does, for a watchdog: the last operation on the communicator that it gave to `watch`.
class WatchedJobs {
 public:
  std::string status() const {
    const std::lock_guard lock(mutex_);
    std::string text;
    for (std::size_t r = 0; r < jobs_.size(); ++r) {
      if (jobs_[r] == nullptr) continue;
      text += (text.empty() ? "rank " : ", rank ") + std::to_string(r) + ": " + jobs_[r]->last_operation();
    }
    return text.empty() ? "no rank in a check" : text;
  }
  void watch(int rank, const pleat::Job* job) {
    const std::lock_guard lock(mutex_);
    jobs_[static_cast<std::size_t>(rank)] = job;
  }
  /// Calls `check(world)` and watches it meanwhile.
  void call(const Check& check, pleat::NcclComm& world) {
    struct Watch {
      WatchedJobs& jobs;
      int rank;
      ~Watch() { jobs.watch(rank, nullptr); }
    };
    const Watch end{*this, world.rank()};
    watch(world.rank(), &world.job());
    check(world);
  }

 private:
  mutable std::mutex mutex_;
  std::vector<const pleat::Job*> jobs_ = std::vector<const pleat::Job*>(static_cast<std::size_t>(world_ranks));
};
/// The suites' backends have no object that could hold it.
inline WatchedJobs watched_jobs;

/// Threads that run one check after another, since making a world takes half a second. A check that fails ends
/// them; the next check gets new ones.
class ThreadWorld {
 public:
  /// Runs `check` on all ranks, which have left it when this returns. Throws as run_nccl_threads does.
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
    changed_.wait(lock, [this] { return has_ended_ || done_ == world_ranks; });
    if (!has_ended_ && check) return;
    lock.unlock();
    runner_.join();
    if (const auto error = std::exchange(error_, nullptr)) std::rethrow_exception(error);
  }
  void end() {
    if (runner_.joinable()) run({});
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
      watched_jobs.call(check, world);
      const std::lock_guard lock(mutex_);
      ++done_;
      changed_.notify_all();
    }
  }
  /// Checks its job meanwhile: the peer may fail in the check that this rank has left.
  const Check* next(pleat::NcclComm& world, unsigned round) {
    std::unique_lock lock(mutex_);
    while (!changed_.wait_for(lock, milliseconds(1), [&] { return round_ >= round; })) world.check();
    return check_;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  const Check* check_ = nullptr;
  unsigned round_ = 0;
  int done_ = 0;
  bool has_ended_ = true;
  std::exception_ptr error_;
  std::thread runner_;
};

/// In this rank's process: a world of the launcher's job on the `i`-th port after the job's.
inline pleat::NcclComm process_world(int i, milliseconds deadline) {
  auto environment = pleat::LauncherEnvironment::from_process();
  environment.port += i;
  return pleat::NcclComm::create(pleat::rendezvous(environment, std::chrono::seconds(10)), environment.local_rank,
                                 {.deadline = deadline});
}

/// The world of this program's checks. Call `end_world` before the program ends.
inline ThreadWorld thread_world;
inline testing_support::ProcessWorld<pleat::NcclComm> process_world_of_rank(
    [worlds = 0](milliseconds deadline) mutable { return process_world(++worlds, deadline); });

inline Check watched(const Check& check) {
  return [&check](pleat::NcclComm& world) { watched_jobs.call(check, world); };
}
inline void run_check(const Check& check) {
  ranks_are_processes() ? process_world_of_rank.run(watched(check)) : thread_world.run(check);
}
inline void run_check_anew(const Check& check, milliseconds deadline) {
  const Stopwatch watch("world of one check");
  if (ranks_are_processes()) return process_world_of_rank.run_anew(watched(check), deadline);
  pleat::run_nccl_threads(world_ranks, [&](pleat::NcclComm& world) { watched_jobs.call(check, world); },
                          {.deadline = deadline});
}
inline void end_world() {
  thread_world.end();
  process_world_of_rank.end();
}

}  // namespace nccl_testing
