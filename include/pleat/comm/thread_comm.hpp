// ThreadComm: the communicator of host ranks, threads of one process that read each other's memory.
#pragma once

#include <algorithm>
#include <memory>
#include <span>
#include <vector>

#include <pleat/comm/mailboxes.hpp>
#include <pleat/comm/rendezvous.hpp>
#include <pleat/core/host/executor.hpp>

namespace pleat::inline v0 {

namespace detail {
/// All that the threads of one group share.
struct ThreadGroup {
  ThreadGroup(const std::shared_ptr<ThreadWorld>& world, const std::vector<int>& world_ranks)
      : meeting(world, world_ranks), mail(world, world_ranks) {}

  Rendezvous meeting;
  Mailboxes mail;
};
}  // namespace detail

/// A communicator over threads and host memory; made by `run_ranks`. Operations are complete on return and give the
/// same bits whatever the timing. A rank that throws, returns early or never comes ends the waits of all others with a
/// comm_error (C02, C03, C04) that names rank and operation. One thread uses one ThreadComm.
class ThreadComm {
 public:
  using device_type = host_device;
  using stream_type = HostStream;

  /// Rank `rank` of a group; every rank's communicator is built on the same `group`.
  ThreadComm(std::shared_ptr<detail::ThreadGroup> group, int rank) : group_(std::move(group)), rank_(rank) {}

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return group_->meeting.size(); }

  ThreadComm split(int color, int key) {
    std::vector<int> members;
    members.reserve(static_cast<std::size_t>(size()));  // nothing may throw between meet and part
    meet({.operation = "split", .elems = static_cast<std::size_t>(key), .root = color, .must_agree = false});
    for (int r = 0; r < size(); ++r) {
      if (call_of(r).root == color) members.push_back(r);
    }
    const auto key_of = [&](int r) { return static_cast<int>(call_of(r).elems); };
    std::stable_sort(members.begin(), members.end(), [&](int a, int b) { return key_of(a) < key_of(b); });
    part();
    std::shared_ptr<detail::ThreadGroup> group;
    if (members.front() == rank_) {
      std::vector<int> ranks;
      for (const int r : members) ranks.push_back(world_ranks()[static_cast<std::size_t>(r)]);
      group = std::make_shared<detail::ThreadGroup>(world(), std::move(ranks));
    }
    group = share("split", group, members.front());
    const auto place = std::find(members.begin(), members.end(), rank_);
    return ThreadComm(std::move(group), static_cast<int>(place - members.begin()));
  }

  void all_gather(const void* in, void* out, std::size_t elems, DType dtype, HostStream = {}) {
    meet({.operation = "all_gather", .dtype = dtype, .elems = elems, .in = in, .out = out});
    const std::size_t bytes = elems * size_bytes(dtype);
    for (int r = 0; r < size(); ++r) copy(at(out, static_cast<std::size_t>(r) * bytes), call_of(r).in, bytes);
    part();
  }

  void all_gather_v(const void* in, void* out, Counts counts, DType dtype, HostStream = {}) {
    meet({.operation = "all_gather_v", .dtype = dtype, .in = in, .out = out, .recv = counts, .count_lists = 1});
    std::size_t offset = 0;
    for (int r = 0; r < size(); ++r) {
      const std::size_t bytes = counts[static_cast<std::size_t>(r)] * size_bytes(dtype);
      copy(at(out, offset), call_of(r).in, bytes);
      offset += bytes;
    }
    part();
  }

  void all_to_all(const void* in, void* out, std::size_t elems, DType dtype, HostStream = {}) {
    meet({.operation = "all_to_all", .dtype = dtype, .elems = elems, .in = in, .out = out});
    const std::size_t bytes = elems * size_bytes(dtype);
    for (int r = 0; r < size(); ++r) {
      copy(at(out, static_cast<std::size_t>(r) * bytes), at(call_of(r).in, static_cast<std::size_t>(rank_) * bytes),
           bytes);
    }
    part();
  }

  void all_to_all_v(const void* in, Counts send, void* out, Counts recv, DType dtype, HostStream = {}) {
    meet({.operation = "all_to_all_v",
          .dtype = dtype,
          .in = in,
          .out = out,
          .send = send,
          .recv = recv,
          .count_lists = 2});
    std::size_t offset = 0;
    for (int r = 0; r < size(); ++r) {
      const detail::Call& peer = call_of(r);
      std::size_t peer_offset = 0;
      for (int p = 0; p < rank_; ++p) peer_offset += peer.send[static_cast<std::size_t>(p)] * size_bytes(dtype);
      const std::size_t bytes = recv[static_cast<std::size_t>(r)] * size_bytes(dtype);
      copy(at(out, offset), at(peer.in, peer_offset), bytes);
      offset += bytes;
    }
    part();
  }

  /// Errors: comm_error C05 on every rank when the roots differ or name no rank.
  void broadcast(void* buffer, std::size_t elems, int root, DType dtype, HostStream = {}) {
    meet({.operation = "broadcast", .dtype = dtype, .elems = elems, .root = root, .out = buffer});
    if (rank_ != root) copy(buffer, call_of(root).out, elems * size_bytes(dtype));
    part();
  }

  /// Errors: comm_error C06 on both sides when a message and its receive differ, or a peer is no rank.
  void exchange(std::span<const Send> tx, std::span<const Recv> rx, DType dtype, HostStream = {}) {
    group_->mail.exchange(rank_, tx, rx, dtype, copy);
  }

  void barrier(HostStream = {}) { meet({.operation = "barrier"}); }
  void wait(HostStream = {}) {}

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
  void meet(const detail::Call& call) { group_->meeting.meet(rank_, call); }
  void part() { group_->meeting.part(); }
  const detail::Call& call_of(int rank) const { return group_->meeting.call(rank); }
  static void copy(void* out, const void* in, std::size_t bytes) {
    if (out != in) HostExecutor{}.copy(out, in, bytes, {});
  }
  static std::byte* at(void* base, std::size_t offset) { return static_cast<std::byte*>(base) + offset; }
  static const std::byte* at(const void* base, std::size_t offset) {
    return static_cast<const std::byte*>(base) + offset;
  }

  std::shared_ptr<detail::ThreadGroup> group_;
  int rank_ = 0;
};
static_assert(communicator<ThreadComm>);

}  // namespace pleat::inline v0
