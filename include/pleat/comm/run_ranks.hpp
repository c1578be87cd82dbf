// run_ranks: how a program asks for ranks that are threads of its own process.
#pragma once

#include <algorithm>
#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include <pleat/comm/thread_comm.hpp>

namespace pleat::inline v0 {

/// Options of `run_ranks`.
struct RunOptions {
  /// How long a rank waits for a peer before the run fails (C04).
  std::chrono::milliseconds deadline = std::chrono::seconds(120);
  /// Called with the rank on each thread before anything else: where a program sets the thread's device.
  std::function<void(int)> prepare = {};
};

/// The failure of one rank, as the program sees it: `what()` names the rank and its last operation; `rethrow_nested()`
/// throws the rank's own exception.
class [[gnu::visibility("default")]] rank_error : public comm_error, public std::nested_exception {
 public:
  rank_error(const Message& text, int rank) : comm_error(text), rank_(rank) {}
  int rank() const noexcept {
    return rank_;
  }

 private:
  int rank_;
};

namespace detail {
template <class Comm, class F>
std::exception_ptr run_rank(F& f, const std::shared_ptr<typename Comm::group_type>& group, int rank,
                            const RunOptions& options) {
  ThreadWorld& world = *group->meeting.world();
  try {
    if (options.prepare) options.prepare(rank);
    Comm comm(group, rank);
    f(comm);
    world.leave(rank);
    return nullptr;
  } catch (const std::exception& e) {
    world.fail(rank, e.what());
    return std::current_exception();
  } catch (...) {
    world.fail(rank, "an exception that is no std::exception");
    return std::current_exception();
  }
}

/// Whether two exceptions say the same, so that they stand for one error that every rank saw.
inline bool same_text(const std::exception_ptr& a, const std::exception_ptr& b) {
  const auto text = [](const std::exception_ptr& e) -> std::string {
    try {
      std::rethrow_exception(e);
    } catch (const std::exception& known) {
      return known.what();
    } catch (...) {
      return {};
    }
  };
  return text(a) == text(b);
}
}  // namespace detail

/// Runs `f(Comm& world)` on `ranks` threads and joins them; `Comm` is a BasicThreadComm. Errors: what all ranks threw
/// alike is rethrown as it is; when one rank failed and ended the others, rank_error C02 with the rank's own exception
/// nested. comm_error C01 for fewer than one rank.
template <class Comm = ThreadComm, class F>
void run_ranks(int ranks, F&& f, RunOptions options = {}) {
  if (ranks < 1) fail<comm_error>("pleat[C01]: a run of ", ranks, " ranks; at least 1 is needed");
  std::vector<int> all(static_cast<std::size_t>(ranks));
  std::iota(all.begin(), all.end(), 0);
  auto world = std::make_shared<detail::ThreadWorld>(ranks, options.deadline);
  auto group = std::make_shared<typename Comm::group_type>(world, all);
  std::vector<std::exception_ptr> errors(all.size());
  {
    std::vector<std::jthread> threads;
    threads.reserve(all.size());
    for (const int rank : all) {
      try {
        threads.emplace_back(
            [&, rank] { errors[static_cast<std::size_t>(rank)] = detail::run_rank<Comm>(f, group, rank, options); });
      } catch (const std::exception& e) {
        world->fail(rank, e.what());  // ends the waits of those that have
                                      // started, which are joined on the way out
        throw;
      }
    }
  }
  const int failed = world->failed_rank();
  if (failed < 0) return;
  const std::exception_ptr cause = errors[static_cast<std::size_t>(failed)];
  if (cause == nullptr) fail<comm_error>("pleat[C02]: ",
                                         world->failure());  // the rank caught its own error
  const bool all_alike = std::all_of(errors.begin(), errors.end(), [&](const std::exception_ptr& e) {
    return e != nullptr && detail::same_text(e, cause);
  });
  if (all_alike) std::rethrow_exception(cause);
  try {
    std::rethrow_exception(cause);
  } catch (const comm_error&) {
    throw;  // a deadline or a missing rank: it names rank and operation already
  } catch (...) {
    throw rank_error(message_of("pleat[C02]: ", world->failure()), failed);
  }
}

/// A world of one rank, the calling thread, for work beside a run: `run_ranks` without the threads.
inline ThreadComm single_rank() {
  auto world = std::make_shared<detail::ThreadWorld>(1, RunOptions{}.deadline);
  return ThreadComm(std::make_shared<ThreadComm::group_type>(std::move(world), std::vector<int>{0}), 0);
}

}  // namespace pleat::inline v0
