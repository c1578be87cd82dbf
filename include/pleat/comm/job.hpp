// Job: one rank's view of the ranks that run together; who failed, who is gone, and how to wait without hanging.
#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <pleat/comm/call_checks.hpp>
#include <pleat/comm/job_link.hpp>
#include <pleat/core/error.hpp>

namespace pleat::inline v0 {

/// Ranks here are those of the job. A job ends when one of its ranks throws, dies, gives up (C02), or is waited for
/// longer than the deadline (C04, or C03 when it has returned). It ends on each rank when that rank next waits or
/// checks: the function of `on_end` runs, and from then on everything throws the same comm_error. No thread is created;
/// one thread uses a Job.
class Job {
 public:
  using Duration = std::chrono::milliseconds;
  using Clock = std::chrono::steady_clock;

  /// Without a link nothing is known of the peers: `size` ranks, of which this is `rank`.
  Job(std::unique_ptr<JobLink> link, Duration deadline) : Job(std::move(link), deadline, 0, 0) {}
  Job(int rank, int size, Duration deadline) : Job(nullptr, deadline, rank, size) {}
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;
  ~Job() { leave(); }

  /// Says farewell, so that this rank's silence is not taken for death; for those that still wait for it, it has
  /// returned (C03). Only a rank whose part is done may leave.
  void leave() noexcept {
    if (std::exchange(has_said_farewell_, true)) return;
    try {
      tell_all(tag_farewell, operation_);
    } catch (...) {  // peers that hear nothing take this rank for dead
    }
  }

  /// Leaves, and returns when all others have left too, or after `limit`: for a rank whose end would be that of others.
  void leave_together(Duration limit) noexcept {
    leave();
    const auto until = Clock::now() + limit;
    const auto all_have_left = [this] {
      for (int r = 0; r < size_; ++r) {
        if (r != rank_ && !has_left_[static_cast<std::size_t>(r)]) return false;
      }
      return true;
    };
    try {
      for (listen(); link_ != nullptr && !all_have_left() && Clock::now() < until; listen()) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    } catch (...) {  // there is nobody to wait for
    }
  }

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }
  /// How long it waits; whether others are heard of at all; whether the job has failed.
  Duration deadline() const noexcept { return deadline_; }
  bool has_link() const noexcept { return link_ != nullptr; }
  bool has_failed() const noexcept { return failure_.size() != 0; }
  /// Empty while the job runs.
  const Message& failure() const noexcept { return failure_; }
  const char* last_operation() const noexcept { return operation_; }

  /// Notes what this rank does now (a string literal), for the texts of errors. Errors: what ended the job.
  void enter(const char* operation) {
    require_running();
    operation_ = operation;
  }

  /// Ends the job because of this rank: `why` goes to all others.
  void fail(const char* why) noexcept {
    if (has_failed()) return;
    const Message text = message_of("rank ", rank_, " failed after ", operation_, " (", why, ")");
    try {
      tell_all(tag_failure, text.c_str());
    } catch (...) {  // they see the connection end
    }
    end(message_of("pleat[C02]: ", text));
  }

  /// Looks at the peers without waiting. Errors: comm_error C02 when one of them has failed or died.
  void check() {
    require_running();
    listen();
    require_nobody_lost();
  }

  /// Polls until `done()`. `members`: the ranks whose part is waited for; `missing()`: those of them that are known not
  /// to have come. Errors: comm_error C02, C03, C04, naming rank and operation.
  template <class Done, class Missing>
  void wait_until(Done done, std::span<const int> members, Missing missing) {
    const auto start = Clock::now();
    for (;;) {
      require_running();
      listen();
      if (done()) return;
      require_nobody_lost();
      const auto waited = Clock::now() - start;
      if (waited > deadline_ || is_hopeless(missing)) give_up(members, missing());
      pause(waited);
    }
  }

  /// One small message each way between this rank and a peer, which names the same tag.
  struct Exchange {
    int peer;
    std::uint64_t tag;
  };
  /// Sends `mine` to each peer and returns what each has sent, in the order of `exchanges`. Blocks the host; does
  /// nothing without a link. Errors: as `wait_until`.
  std::vector<std::string> exchange(std::span<const Exchange> exchanges, std::string_view mine) {
    if (link_ == nullptr) return {};
    std::vector<std::optional<std::string>> got(exchanges.size());
    std::vector<int> members;
    for (const Exchange& with : exchanges) {
      link_->send(with.peer, with.tag, mine);
      members.push_back(with.peer);
    }
    const auto take = [&] {
      for (std::size_t i = 0; i < exchanges.size(); ++i) {
        if (!got[i]) got[i] = link_->take(exchanges[i].peer, exchanges[i].tag);
      }
      return std::all_of(got.begin(), got.end(), [](const auto& text) { return text.has_value(); });
    };
    const auto missing = [&] {
      std::vector<int> ranks;
      for (std::size_t i = 0; i < exchanges.size(); ++i) {
        if (!got[i]) ranks.push_back(exchanges[i].peer);
      }
      std::sort(ranks.begin(), ranks.end());
      ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());  // a peer may be there with several tags
      return ranks;
    };
    wait_until(take, members, missing);
    std::vector<std::string> texts;
    for (auto& text : got) texts.push_back(std::move(*text));
    return texts;
  }
  /// Returns when all `members`, this rank among them, have called with this tag. The result is every rank's text in
  /// their order; empty without a link. Blocks the host. Errors: as `wait_until`.
  std::vector<std::string> meet(std::span<const int> members, std::uint64_t tag, std::string_view mine = {}) {
    if (link_ == nullptr) return {};
    std::vector<Exchange> exchanges;
    for (const int member : members) {
      if (member != rank_) exchanges.push_back({member, tag});
    }
    std::vector<std::string> texts = exchange(exchanges, mine);
    const auto place = std::find(members.begin(), members.end(), rank_) - members.begin();
    texts.insert(texts.begin() + place, std::string(mine));
    return texts;
  }

  /// `call` runs once, when the job ends; null takes it back.
  void on_end(std::function<void()> call) { on_end_ = std::move(call); }

  /// The first tag that is free for users of a job.
  static constexpr std::uint64_t first_tag = 16;

 private:
  static constexpr std::uint64_t tag_failure = 1, tag_farewell = 2, tag_question = 3, tag_answer = 4;

  Job(std::unique_ptr<JobLink> link, Duration deadline, int rank, int size)
      : link_(std::move(link)),
        deadline_(detail::checked_deadline(deadline)),
        rank_(link_ != nullptr ? link_->rank() : rank),
        size_(link_ != nullptr ? link_->size() : size),
        has_left_(static_cast<std::size_t>(size_), 0) {}

  void require_running() const {
    if (has_failed()) throw comm_error(failure_);
  }

  void require_nobody_lost() {
    if (lost_.size() == 0) return;
    end(message_of("pleat[C02]: ", lost_, "; rank ", rank_, " was in ", operation_));
    throw comm_error(failure_);
  }

  /// Brings in messages; notes who has left and who failed or died; answers who asks.
  void listen() {
    if (link_ == nullptr) return;
    link_->progress();
    for (int peer = 0; peer < size_; ++peer) {
      if (peer == rank_) continue;
      if (link_->take(peer, tag_farewell)) has_left_[static_cast<std::size_t>(peer)] = 1;
      while (link_->take(peer, tag_question)) link_->send(peer, tag_answer, operation_);
      if (lost_.size() != 0) continue;
      if (const auto text = link_->take(peer, tag_failure)) {
        lost_ = message_of(*text);
      } else if (link_->is_lost(peer) && !has_left_[static_cast<std::size_t>(peer)]) {
        lost_ = message_of("rank ", peer, " died: its connection ended without a farewell");
      }
    }
  }

  void tell_all(std::uint64_t tag, const char* text) {
    if (link_ == nullptr) return;
    for (int peer = 0; peer < size_; ++peer) {
      if (peer != rank_) link_->send(peer, tag, text);
    }
    link_->progress();
  }

  /// Whether somebody has returned that is known not to have come: what it sent before its farewell is here already.
  template <class Missing>
  bool is_hopeless(Missing missing) const {
    if (std::find(has_left_.begin(), has_left_.end(), 1) == has_left_.end()) return false;
    return first_returned(missing()) >= 0;
  }
  int first_returned(const std::vector<int>& ranks) const {
    for (const int r : ranks) {
      if (has_left_[static_cast<std::size_t>(r)]) return r;
    }
    return -1;
  }

  [[noreturn]] void give_up(std::span<const int> members, const std::vector<int>& missing) {
    Message text = message_of("pleat[C04]: rank ", rank_, " waited ", deadline_.count(), " ms in ", operation_);
    std::vector<int> absent = missing;
    if (absent.empty()) {
      std::copy_if(members.begin(), members.end(), std::back_inserter(absent), [this](int r) { return r != rank_; });
    }
    const int returned = first_returned(absent);
    if (returned >= 0) {
      text = message_of("pleat[C03]: rank ", returned, " has returned, while rank ", rank_, " waits for it in ",
                        operation_, "; all ranks of a group must make the same calls");
    } else if (!absent.empty()) {
      append_answers(text, absent);
      require_nobody_lost();
    }
    try {
      tell_all(tag_failure, message_of("rank ", rank_, " gave up (", text, ")").c_str());
    } catch (...) {  // they see the connection end
    }
    end(text);
    throw comm_error(failure_);
  }

  /// Asks the absent what they do: those that wait or check as well answer soon, and the others are to blame.
  void append_answers(Message& text, const std::vector<int>& absent) {
    std::vector<std::string> answers(absent.size());
    if (link_ != nullptr) {
      for (const int peer : absent) link_->send(peer, tag_question, {});
      const auto until = Clock::now() + std::min<Clock::duration>(deadline_, std::chrono::milliseconds(500));
      bool is_complete = false;
      while (!is_complete && lost_.size() == 0 && Clock::now() < until) {
        listen();
        is_complete = true;
        for (std::size_t i = 0; i < absent.size(); ++i) {
          if (answers[i].empty()) answers[i] = link_->take(absent[i], tag_answer).value_or("");
          is_complete = is_complete && !answers[i].empty();
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
    std::vector<int> silent;
    for (std::size_t i = 0; i < absent.size(); ++i) {
      if (answers[i].empty()) silent.push_back(absent[i]);
    }
    text.append(" for rank ");
    if (!silent.empty()) {
      append_part(text, List<int>{silent.data(), silent.size()});
      text.append(link_ != nullptr ? ", which neither waits nor checks" : ", of which nothing is known without a link");
      return;
    }
    for (std::size_t i = 0; i < absent.size(); ++i) {
      if (i != 0) text.append(", rank ");
      text.append(absent[i]).append(" (in ").append(answers[i].data(), answers[i].size()).append(")");
    }
  }

  void end(const Message& text) noexcept {
    failure_ = text;
    try {
      if (on_end_) on_end_();
    } catch (...) {  // the job's failure is what is reported
    }
  }

  /// Soon at first, for what takes microseconds; then without burning a core.
  static void pause(Clock::duration waited) {
    if (waited < std::chrono::milliseconds(1)) return std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }

  std::unique_ptr<JobLink> link_;
  const Duration deadline_;
  const int rank_, size_;
  const char* operation_ = "no operation";
  Message failure_;             // why the job ended
  Message lost_;                // the first peer that failed or died
  std::vector<char> has_left_;  // [rank] its farewell has come
  bool has_said_farewell_ = false;
  std::function<void()> on_end_;
};

}  // namespace pleat::inline v0
