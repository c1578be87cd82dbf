// Worlds of two ranks for the suites, which are threads of this process or, where RANK is set, two processes that go
// through the same checks together.
#pragma once

#include <array>
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

#include <pleat/nccl/run_threads.hpp>

#include "shared_page.hpp"

namespace nccl_testing {

inline constexpr int world_ranks = 2;
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
  std::array<const pleat::Job*, world_ranks> jobs_{};
};
/// The suites' backends have no object that could hold it.
inline WatchedJobs watched_jobs;

/// Two threads that run one check after another, since making a world takes half a second. A check that fails ends
/// them; the next check gets new ones.
class ThreadWorld {
 public:
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

/// This rank's side of a world of two processes: both make the same calls. One check after another runs in the same
/// world, until one fails.
class ProcessWorld {
 public:
  void run(const Check& check) {
    if (!world_) world_.emplace(process_world(++worlds_, std::chrono::seconds(20)));
    run_in(check, false);
  }
  void run_anew(const Check& check, milliseconds deadline) {
    end();
    world_.emplace(process_world(++worlds_, deadline));
    run_in(check, true);
  }
  void end() { world_.reset(); }

 private:
  /// How a check ended on one rank.
  struct Report {
    enum class Kind { returned, comm_error, other, no_exception } kind;
    char text[pleat::Message::capacity_bytes];     // of the exception
    char failure[pleat::Message::capacity_bytes];  // what the rank told the others
  };
  struct Reports {
    Report of_rank[world_ranks];
    std::atomic<int> arrived;
  };

  /// Throws what run_ranks would throw: what both threw alike, the error of a communicator, or rank_error.
  void run_in(const Check& check, bool leaves) {
    const int rank = world_->rank();
    const Shared<Reports> reports;
    Report& mine = reports->of_rank[rank];
    std::exception_ptr error;
    const auto fail = [&](Report::Kind kind, const char* text) {
      mine.kind = kind;
      copy(mine.text, text);
      world_->abandon(text);
      copy(mine.failure, world_->job().failure().c_str());
      error = std::current_exception();
    };
    try {
      watched_jobs.call(check, *world_);
    } catch (const pleat::comm_error& e) {
      fail(Report::Kind::comm_error, e.what());
    } catch (const std::exception& e) {
      fail(Report::Kind::other, e.what());
    } catch (...) {
      fail(Report::Kind::no_exception, "an exception that is no std::exception");
    }
    if (leaves || error) end();
    reports->arrived.fetch_add(1);
    while (reports->arrived.load() < world_ranks) std::this_thread::yield();
    const Report* all = reports->of_rank;
    if (all[0].kind == Report::Kind::returned && all[1].kind == Report::Kind::returned) return;
    end();
    int cause = -1;
    for (int r = 0; r < world_ranks; ++r) {
      if (all[r].kind > Report::Kind::comm_error) cause = r;
    }
    if (error && std::string_view(all[0].text) == all[1].text) std::rethrow_exception(error);
    for (int r = 0; r < world_ranks && cause < 0; ++r) {
      if (all[r].kind == Report::Kind::comm_error) throw pleat::comm_error(pleat::message_of(all[r].text));
    }
    try {
      if (cause == rank) std::rethrow_exception(error);
      if (all[cause].kind == Report::Kind::no_exception) throw cause;
      throw std::runtime_error(all[cause].text);
    } catch (...) {
      throw pleat::rank_error(pleat::message_of(all[cause].failure), cause);
    }
  }
  static void copy(char (&to)[pleat::Message::capacity_bytes], const char* from) {
    std::snprintf(to, sizeof to, "%s", from);
  }

  std::optional<pleat::NcclComm> world_;
  int worlds_ = 0;
};

/// The world of this program's checks. Call `end_world` before the program ends.
inline ThreadWorld thread_world;
inline ProcessWorld process_world_of_rank;

inline void run_check(const Check& check) {
  ranks_are_processes() ? process_world_of_rank.run(check) : thread_world.run(check);
}
inline void run_check_anew(const Check& check, milliseconds deadline) {
  const Stopwatch watch("world of one check");
  if (ranks_are_processes()) return process_world_of_rank.run_anew(check, deadline);
  pleat::run_nccl_threads(world_ranks, [&](pleat::NcclComm& world) { watched_jobs.call(check, world); },
                          {.deadline = deadline});
}
inline void end_world() {
  thread_world.end();
  process_world_of_rank.end();
}

}  // namespace nccl_testing
