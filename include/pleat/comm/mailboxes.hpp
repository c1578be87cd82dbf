// Mailboxes: point-to-point batches between threads, by rendezvous: the receiver copies out of the sender's memory.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include <pleat/comm/call_checks.hpp>
#include <pleat/comm/communicator.hpp>
#include <pleat/comm/thread_world.hpp>
#include <pleat/core/executor.hpp>

namespace pleat::inline v0::detail {

/// The mailboxes of one group, one per ordered pair of ranks. A message is copied on the receiver's stream, after what
/// the sender's stream has done before; the sender's stream goes on after the copy.
template <executor Executor>
class Mailboxes {
 public:
  using stream_type = typename Executor::stream_type;
  using event_type = typename Executor::event_type;
  /// The events of one rank: its messages are there; what it received is copied.
  struct Events {
    event_type sent, copied;
  };

  Mailboxes(std::shared_ptr<ThreadWorld> world, std::vector<int> world_ranks)
      : world_(std::move(world)),
        place_(world_->make_place()),
        world_ranks_(std::move(world_ranks)),
        boxes_(world_ranks_.size() * world_ranks_.size()),
        posts_(world_ranks_.size()) {}

  /// Posts all sends, takes all receives in order, returns when the sends have been taken too. Errors: comm_error C06
  /// on both sides when a pair's element counts or dtypes differ; C06 when a peer is no rank; T01, C05 as `bytes_of`.
  void exchange(int rank, std::span<const Send> tx, std::span<const Recv> rx, DType dtype, const Executor& executor,
                Events& events, stream_type s) {
    world_->enter(world_ranks_[static_cast<std::size_t>(rank)], "exchange");
    for (const Send& send : tx) check(send.peer, send.elems, dtype);
    for (const Recv& recv : rx) check(recv.peer, recv.elems, dtype);
    std::vector<Post>& posts = posts_[static_cast<std::size_t>(rank)];
    posts.clear();
    posts.reserve(tx.size());  // it stays in place: peers hold pointers into it
    executor.record(events.sent, s);
    std::unique_lock lock(place_->mutex);
    try {
      for (const Send& send : tx) {
        posts.push_back({send.data, send.elems, dtype, send.peer, &events.sent});
        box(rank, send.peer).push_back(&posts.back());
      }
      place_->changed.notify_all();
      for (const Recv& recv : rx) receive(rank, recv, dtype, posts, lock, executor, events, s);
      wait_taken(rank, posts, lock);
      for (const Post& post : posts) executor.wait(s, *post.copied);
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
    const event_type* sent;
    const event_type* copied = nullptr;
    State state = State::posted;
    std::size_t wanted_elems = 0;  // by the receive that refused it
    DType wanted_dtype = DType::u8;
  };

  std::deque<Post*>& box(int from, int to) {
    return boxes_[static_cast<std::size_t>(from) * world_ranks_.size() + static_cast<std::size_t>(to)];
  }

  void check(int peer, std::size_t elems, DType dtype) const {
    (void)bytes_of("exchange", elems, dtype);
    if (peer < 0 || peer >= static_cast<int>(world_ranks_.size())) {
      pleat::fail<comm_error>("pleat[C06]: exchange with peer ", peer, "; valid peers: 0 to ", world_ranks_.size() - 1);
    }
  }

  void receive(int rank, const Recv& recv, DType dtype, const std::vector<Post>& posts,
               std::unique_lock<std::mutex>& lock, const Executor& executor, Events& events, stream_type s) {
    auto& inbox = box(recv.peer, rank);
    const int sender = world_ranks_[static_cast<std::size_t>(recv.peer)];
    world_->wait(
        *place_, lock, world_ranks_[static_cast<std::size_t>(rank)],
        [&] {
          require_not_refused(rank, posts);
          return !inbox.empty();
        },
        [&](auto visit) { visit(sender); }, "exchange, receiving from rank ", sender);
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
    try {
      executor.wait(s, *post.sent);
      if (recv.data != post.data) executor.copy(recv.data, post.data, post.elems * size_bytes(dtype), s);
      executor.record(events.copied, s);
    } catch (...) {
      lock.lock();
      post.state = State::posted;  // the sender may go
      place_->changed.notify_all();
      throw;
    }
    lock.lock();
    post.copied = &events.copied;
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
          [&](auto visit) { visit(receiver); }, "exchange, sending to rank ", receiver);
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
  std::vector<std::vector<Post>> posts_;  // [rank]: of its batch, kept so that the next allocates nothing
};

}  // namespace pleat::inline v0::detail
