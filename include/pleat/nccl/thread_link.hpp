// ThreadLink: the link of ranks that are threads of one process.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include <pleat/comm/job_link.hpp>

namespace pleat::inline v0 {

namespace detail {
/// The messages under way between the threads of a job, one box per ordered pair of ranks.
struct ThreadPost {
  explicit ThreadPost(int ranks)
      : size(ranks), boxes(static_cast<std::size_t>(ranks) * static_cast<std::size_t>(ranks)) {}

  const int size;
  std::mutex mutex;
  std::vector<std::map<std::uint64_t, std::deque<std::string>>> boxes;
};
}  // namespace detail

/// Every rank's link is made on the same `post`. A thread does not vanish: what it throws, its job reports.
class ThreadLink final : public JobLink {
 public:
  ThreadLink(std::shared_ptr<detail::ThreadPost> post, int rank) : post_(std::move(post)), rank_(rank) {}

  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return post_->size; }
  void send(int peer, std::uint64_t tag, std::string_view bytes) override {
    const std::lock_guard lock(post_->mutex);
    box(rank_, peer)[tag].emplace_back(bytes);
  }
  std::optional<std::string> take(int peer, std::uint64_t tag) override {
    const std::lock_guard lock(post_->mutex);
    auto& tags = box(peer, rank_);
    const auto found = tags.find(tag);
    if (found == tags.end()) return std::nullopt;
    std::string bytes = std::move(found->second.front());
    found->second.pop_front();
    if (found->second.empty()) tags.erase(found);
    return bytes;
  }
  void progress() override {}
  bool is_lost(int) const noexcept override { return false; }

 private:
  std::map<std::uint64_t, std::deque<std::string>>& box(int from, int to) {
    return post_->boxes[static_cast<std::size_t>(from * post_->size + to)];
  }

  std::shared_ptr<detail::ThreadPost> post_;
  int rank_;
};

}  // namespace pleat::inline v0
