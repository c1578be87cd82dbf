// Watchdog: ends a test that hangs, and says what each rank was doing.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

namespace testing_support {

/// Calls `on_timeout` with a text when it has lived longer than `limit`; by default that prints the text and aborts the
/// process. The text has the name of the test and what the function given to `watch` returns.
class Watchdog {
 public:
  using OnTimeout = std::function<void(const std::string&)>;

  explicit Watchdog(std::string test, std::chrono::milliseconds limit = std::chrono::seconds(120),
                    OnTimeout on_timeout = abort_process)
      : test_(std::move(test)), limit_(limit), on_timeout_(std::move(on_timeout)), thread_([this] { wait(); }) {}
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;
  ~Watchdog() {
    {
      const std::lock_guard lock(mutex_);
      is_over_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  /// `status` says what each rank does; it is called from another thread.
  void watch(std::function<std::string()> status) {
    const std::lock_guard lock(mutex_);
    status_ = std::move(status);
  }

  static void abort_process(const std::string& text) {
    std::fprintf(stderr, "%s\n", text.c_str());
    std::fflush(stderr);
    std::abort();
  }

 private:
  void wait() {
    std::unique_lock lock(mutex_);
    if (changed_.wait_for(lock, limit_, [this] { return is_over_; })) return;
    on_timeout_(test_ + " hangs after " + std::to_string(limit_.count()) + " ms" +
                (status_ ? "; last seen: " + status_() : std::string()));
  }

  const std::string test_;
  const std::chrono::milliseconds limit_;
  const OnTimeout on_timeout_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::function<std::string()> status_;
  bool is_over_ = false;
  std::thread thread_;
};

}  // namespace testing_support
