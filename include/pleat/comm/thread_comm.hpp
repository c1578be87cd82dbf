// Communicators whose ranks are threads of one process that read each other's memory; ThreadComm is the host's.
#pragma once

#include <algorithm>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include <pleat/comm/call_checks.hpp>
#include <pleat/comm/mailboxes.hpp>
#include <pleat/comm/rendezvous.hpp>
#include <pleat/core/host/executor.hpp>

namespace pleat::inline v0 {

namespace detail {
/// All that the threads of one group share.
template <executor Executor>
struct ThreadGroup {
  /// A rank's events: its input is there; it has read its peers' inputs.
  struct Events {
    typename Executor::event_type ready, done;
    typename Mailboxes<Executor>::Events mail;
  };

  ThreadGroup(const std::shared_ptr<ThreadWorld>& world, const std::vector<int>& world_ranks)
      : meeting(world, world_ranks), mail(world, world_ranks), events(world_ranks.size()) {}

  Rendezvous meeting;
  Mailboxes<Executor> mail;
  std::vector<std::optional<Events>> events;  // [rank], each made by its rank, on its device
};
}  // namespace detail

/// A communicator over threads; made by `run_ranks`. The thread of a rank meets its peers on the host, then copies out
/// of their memory on its own stream, in the order of theirs: a call blocks until the peers enter it, never for a
/// device. On the host, operations are complete on return. Ranks may share a device. Results have the same bits
/// whatever the timing.
///
/// A rank that throws, returns early or never comes ends the waits of all others with a comm_error (C02, C03, C04) that
/// names rank and operation. Copies are handles on the same communicator; one thread uses them. Cannot be captured in a
/// CUDA graph.
template <executor Executor>
class BasicThreadComm {
 public:
  using device_type = typename Executor::device_type;
  using stream_type = typename Executor::stream_type;
  using executor_type = Executor;
  using group_type = detail::ThreadGroup<Executor>;

  /// Rank `rank` of a group; every rank's communicator is built on the same `group`, by its own thread.
  BasicThreadComm(std::shared_ptr<group_type> group, int rank) : group_(std::move(group)), rank_(rank) {
    auto& mine = group_->events[static_cast<std::size_t>(rank)];
    const auto event = [&] { return executor_.make_event(); };
    if (!mine) mine.emplace(typename group_type::Events{event(), event(), {event(), event()}});
  }

  // No moves: what is moved from stays a handle on the group.
  BasicThreadComm(const BasicThreadComm&) = default;
  BasicThreadComm& operator=(const BasicThreadComm&) = default;

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return group_->meeting.size(); }

  [[nodiscard]] BasicThreadComm split(int color, int key) {
    std::vector<int> members;
    members.reserve(static_cast<std::size_t>(size()));  // nothing may throw between meet and part
    meet({.operation = "split", .elems = static_cast<std::size_t>(key), .root = color, .must_agree = false});
    for (int r = 0; r < size(); ++r) {
      if (call_of(r).root == color) members.push_back(r);
    }
    const auto key_of = [&](int r) { return static_cast<int>(call_of(r).elems); };
    std::stable_sort(members.begin(), members.end(), [&](int a, int b) { return key_of(a) < key_of(b); });
    part();
    std::shared_ptr<group_type> group;
    if (members.front() == rank_) {
      std::vector<int> ranks;
      for (const int r : members) ranks.push_back(world_ranks()[static_cast<std::size_t>(r)]);
      group = std::make_shared<group_type>(world(), std::move(ranks));
    }
    group = share("split", group, members.front());
    const auto place = std::find(members.begin(), members.end(), rank_);
    return BasicThreadComm(std::move(group), static_cast<int>(place - members.begin()));
  }

  void all_gather(const void* in, void* out, std::size_t elems, DType dtype, stream_type s = {}) {
    const std::size_t bytes = elems * size_bytes(dtype);
    collective({.operation = "all_gather", .dtype = dtype, .elems = elems, .in = in, .out = out}, s, [&] {
      for (int r = 0; r < size(); ++r) copy(at(out, static_cast<std::size_t>(r) * bytes), call_of(r).in, bytes, s);
    });
  }

  void all_gather_v(const void* in, void* out, Counts counts, DType dtype, stream_type s = {}) {
    const detail::Call call{
        .operation = "all_gather_v", .dtype = dtype, .in = in, .out = out, .recv = counts, .count_lists = 1};
    collective(call, s, [&] {
      std::size_t offset = 0;
      for (int r = 0; r < size(); ++r) {
        const std::size_t bytes = counts[static_cast<std::size_t>(r)] * size_bytes(dtype);
        copy(at(out, offset), call_of(r).in, bytes, s);
        offset += bytes;
      }
    });
  }

  void all_to_all(const void* in, void* out, std::size_t elems, DType dtype, stream_type s = {}) {
    const std::size_t bytes = elems * size_bytes(dtype);
    collective({.operation = "all_to_all", .dtype = dtype, .elems = elems, .in = in, .out = out}, s, [&] {
      for (int r = 0; r < size(); ++r) {
        copy(at(out, static_cast<std::size_t>(r) * bytes), at(call_of(r).in, static_cast<std::size_t>(rank_) * bytes),
             bytes, s);
      }
    });
  }

  void all_to_all_v(const void* in, Counts send, void* out, Counts recv, DType dtype, stream_type s = {}) {
    const detail::Call call{.operation = "all_to_all_v",
                            .dtype = dtype,
                            .in = in,
                            .out = out,
                            .send = send,
                            .recv = recv,
                            .count_lists = 2};
    collective(call, s, [&] {
      std::size_t offset = 0;
      for (int r = 0; r < size(); ++r) {
        const detail::Call& peer = call_of(r);
        std::size_t peer_offset = 0;
        for (int p = 0; p < rank_; ++p) peer_offset += peer.send[static_cast<std::size_t>(p)] * size_bytes(dtype);
        const std::size_t bytes = recv[static_cast<std::size_t>(r)] * size_bytes(dtype);
        copy(at(out, offset), at(peer.in, peer_offset), bytes, s);
        offset += bytes;
      }
    });
  }

  /// Errors: comm_error C05 on every rank when the roots differ or name no rank.
  void broadcast(void* buffer, std::size_t elems, int root, DType dtype, stream_type s = {}) {
    collective({.operation = "broadcast", .dtype = dtype, .elems = elems, .root = root, .out = buffer}, s,
               [&] { copy(buffer, call_of(root).out, elems * size_bytes(dtype), s); });
  }

  /// Errors: comm_error C06 on both sides when a message and its receive differ, or a peer is no rank.
  void exchange(std::span<const Send> tx, std::span<const Recv> rx, DType dtype, stream_type s = {}) {
    group_->mail.exchange(rank_, tx, rx, dtype, executor_, my_events().mail, s);
  }

  void barrier(stream_type s = {}) {
    collective({.operation = "barrier"}, s, [] {});
  }

  /// Errors: comm_error C02, C04 when the work does not end because a rank has failed, or until the deadline.
  void wait(stream_type s = {}) {
    world()->poll(
        world_ranks()[static_cast<std::size_t>(rank_)], [&] { return executor_.is_idle(s); }, "wait");
  }

  /// Collective, beyond the concept: the object that rank `owner` of the group passes as `mine`; ranks may name
  /// different owners. `operation` is a string literal, for the texts of errors.
  template <class T>
  std::shared_ptr<T> share(const char* operation, const std::shared_ptr<T>& mine, int owner) {
    meet({.operation = operation, .in = &mine, .must_agree = false});
    std::shared_ptr<T> theirs = *static_cast<const std::shared_ptr<T>*>(call_of(owner).in);
    part();
    return theirs;
  }

  /// The failure state that this rank's run shares; what else waits for peers (an arena) waits through it.
  const std::shared_ptr<detail::ThreadWorld>& world() const { return group_->meeting.world(); }
  /// The ranks of this group, as ranks of the run.
  const std::vector<int>& world_ranks() const { return group_->meeting.world_ranks(); }

 private:
  /// What all collectives do: once everybody's arguments are here, `read` reads the peers' memory, after their streams
  /// have come to the call; then nobody goes on, host or stream, before all have read.
  template <class Read>
  void collective(const detail::Call& call, stream_type s, Read read) {
    (void)detail::bytes_of(call.operation, call.elems, call.dtype, size());
    for (const Counts counts : {call.send, call.recv}) detail::check_counts(call.operation, counts, call.dtype);
    executor_.record(my_events().ready, s);
    meet(call);
    std::exception_ptr error;
    try {
      for (int r = 0; r < size(); ++r) {
        if (r != rank_) executor_.wait(s, events_of(r).ready);
      }
      read();
      executor_.record(my_events().done, s);
    } catch (...) {
      error = std::current_exception();  // who met must part
    }
    part();
    if (error) std::rethrow_exception(error);
    for (int r = 0; r < size(); ++r) {
      if (r != rank_) executor_.wait(s, events_of(r).done);
    }
  }

  void meet(const detail::Call& call) { group_->meeting.meet(rank_, call); }
  void part() { group_->meeting.part(); }
  const detail::Call& call_of(int rank) const { return group_->meeting.call(rank); }
  typename group_type::Events& events_of(int rank) const { return *group_->events[static_cast<std::size_t>(rank)]; }
  typename group_type::Events& my_events() const { return events_of(rank_); }

  void copy(void* out, const void* in, std::size_t bytes, stream_type s) const {
    if (out != in) executor_.copy(out, in, bytes, s);
  }
  static std::byte* at(void* base, std::size_t offset) { return static_cast<std::byte*>(base) + offset; }
  static const std::byte* at(const void* base, std::size_t offset) {
    return static_cast<const std::byte*>(base) + offset;
  }

  std::shared_ptr<group_type> group_;
  int rank_ = 0;
  [[no_unique_address]] Executor executor_;
};

/// Ranks that are threads on host memory.
using ThreadComm = BasicThreadComm<HostExecutor>;
static_assert(communicator<ThreadComm>);

}  // namespace pleat::inline v0
