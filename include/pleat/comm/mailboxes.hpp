// Mailboxes: point-to-point batches between threads, by rendezvous: the receiver copies out of the sender's memory.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include <pleat/comm/communicator.hpp>
#include <pleat/comm/thread_world.hpp>

namespace pleat::inline v0::detail {

/// The mailboxes of one group, one per ordered pair of ranks. `Copy` is called as `copy(out, in, bytes)`.
class Mailboxes {
 public:
  Mailboxes(std::shared_ptr<ThreadWorld> world, std::vector<int> world_ranks)
      : world_(std::move(world)),
        place_(world_->make_place()),
        world_ranks_(std::move(world_ranks)),
        boxes_(world_ranks_.size() * world_ranks_.size()) {}

  /// Posts all sends, takes all receives in order, returns when the sends have been taken too.
  /// Errors: comm_error C06 on both sides when a pair's element counts or dtypes differ; C06 when a peer is no rank.
  template <class Copy>
  void exchange(int rank, std::span<const Send> tx, std::span<const Recv> rx, DType dtype, Copy copy) {
    world_->enter(world_ranks_[static_cast<std::size_t>(rank)], "exchange");
    for (const Send& send : tx) check_peer(send.peer);
    for (const Recv& recv : rx) check_peer(recv.peer);
    std::vector<Post> posts;  // stays in place: peers hold pointers into it
    posts.reserve(tx.size());
    std::unique_lock lock(place_->mutex);
    try {
      for (const Send& send : tx) {
        posts.push_back({send.data, send.elems, dtype, send.peer});
        box(rank, send.peer).push_back(&posts.back());
      }
      place_->changed.notify_all();
      for (const Recv& recv : rx) receive(rank, recv, dtype, posts, lock, copy);
      wait_taken(rank, posts, lock);
    } catch (...) {
      if (!lock.owns_lock()) lock.lock();
      withdraw(rank, posts, lock);
      throw;
    }
  }

 private:
  enum class State : std::uint8_t { posted, copying, taken, refused };
  struct Post {
    const void* data;
    std::size_t elems;
    DType dtype;
    int peer;
    State state = State::posted;
    std::size_t wanted_elems = 0;  // by the receive that refused it
    DType wanted_dtype = DType::u8;
  };

  std::deque<Post*>& box(int from, int to) { return boxes_[static_cast<std::size_t>(from) * world_ranks_.size() + to]; }

  void check_peer(int peer) const {
    if (peer < 0 || peer >= static_cast<int>(world_ranks_.size())) {
      pleat::fail<comm_error>("pleat[C06]: exchange with peer ", peer, "; valid peers: 0 to ", world_ranks_.size() - 1);
    }
  }

  template <class Copy>
  void receive(int rank, const Recv& recv, DType dtype, const std::vector<Post>& posts,
               std::unique_lock<std::mutex>& lock, Copy copy) {
    auto& inbox = box(recv.peer, rank);
    const int sender = world_ranks_[static_cast<std::size_t>(recv.peer)];
    world_->wait(
        *place_, lock, world_ranks_[static_cast<std::size_t>(rank)],
        [&] {
          require_not_refused(rank, posts);
          return !inbox.empty();
        },
        [&] { return std::vector<int>{sender}; }, "exchange, receiving from rank ", sender);
    Post& post = *inbox.front();
    inbox.pop_front();
    if (post.elems != recv.elems || post.dtype != dtype) {
      post.state = State::refused;
      post.wanted_elems = recv.elems;
      post.wanted_dtype = dtype;
      place_->changed.notify_all();
      mismatch(sender, post);
    }
    post.state = State::copying;
    lock.unlock();
    copy(recv.data, post.data, post.elems * size_bytes(dtype));
    lock.lock();
    post.state = State::taken;
    place_->changed.notify_all();
  }

  void wait_taken(int rank, const std::vector<Post>& posts, std::unique_lock<std::mutex>& lock) {
    for (const Post& post : posts) {
      const int receiver = world_ranks_[static_cast<std::size_t>(post.peer)];
      const int me = world_ranks_[static_cast<std::size_t>(rank)];
      world_->wait(
          *place_, lock, me,
          [&] {
            require_not_refused(rank, posts);
            return post.state == State::taken;
          },
          [&] { return std::vector<int>{receiver}; }, "exchange, sending to rank ", receiver);
    }
  }
  /// A refused message ends its sender's batch wherever the sender waits.
  void require_not_refused(int rank, const std::vector<Post>& posts) const {
    for (const Post& post : posts) {
      if (post.state == State::refused) mismatch(world_ranks_[static_cast<std::size_t>(rank)], post);
    }
  }
  [[noreturn]] void mismatch(int sender, const Post& post) const {
    pleat::fail<comm_error>("pleat[C06]: a message of ", post.elems, " ", post.dtype, " from rank ", sender,
                            " meets a receive of ", post.wanted_elems, " ", post.wanted_dtype, " on rank ",
                            world_ranks_[static_cast<std::size_t>(post.peer)], "; both sides must agree");
  }

  /// After a failure: takes back what nobody has taken, and outlives the copies under way.
  void withdraw(int rank, const std::vector<Post>& posts, std::unique_lock<std::mutex>& lock) {
    for (const Post& post : posts) std::erase(box(rank, post.peer), &post);
    for (const Post& post : posts) {
      place_->changed.wait(lock, [&] { return post.state != State::copying; });
    }
  }

  const std::shared_ptr<ThreadWorld> world_;
  const std::shared_ptr<WaitingPlace> place_;
  const std::vector<int> world_ranks_;
  std::vector<std::deque<Post*>> boxes_;
};

}  // namespace pleat::inline v0::detail
