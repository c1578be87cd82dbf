// GroupComm: the handle by which a schedule uses the communicator of a group, or does without when it is alone.
#pragma once

#include <cstddef>
#include <span>
#include <thread>

#include <pleat/comm/call_checks.hpp>
#include <pleat/comm/communicator.hpp>
#include <pleat/core/executor.hpp>
#include <pleat/mesh/group.hpp>

namespace pleat::inline v0 {

/// A copyable, non-owning handle with the operations of a communicator (see communicator.hpp) over one group. A group
/// of one holds no communicator: its operations are local copies on the same stream, and C05, C06 and T01 where a
/// communicator has them. The communicator must outlive the handle.
template <communicator Comm>
class GroupComm {
 public:
  using device_type = typename Comm::device_type;
  using stream_type = typename Comm::stream_type;

  /// The group of one rank, `world_rank`. It waits as `waits_with` does: its stream may hold work of other groups.
  explicit GroupComm(int world_rank = 0, Comm* waits_with = nullptr)
      : waits_with_(waits_with), ranks_{world_rank, {}} {}
  /// All of `comm`, whose ranks are `ranks` of the world (by default its own numbers: `comm` is the world).
  GroupComm(Comm& comm) : GroupComm(comm, GroupShape{}.append(1, comm.size()).of(0)) {}  // NOLINT: a handle on purpose
  GroupComm(Comm& comm, const Group& ranks)
      : comm_(comm.size() == 1 ? nullptr : &comm), waits_with_(&comm), rank_(comm.rank()), ranks_(ranks) {}

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return ranks_.size(); }
  /// The world ranks of the group, ascending.
  const Group& ranks() const noexcept { return ranks_; }
  /// The communicator behind it, null for a group of one.
  Comm* comm() const noexcept { return comm_; }

  void all_gather(const void* in, void* out, std::size_t elems, DType dtype, stream_type s) const {
    comm_ ? comm_->all_gather(in, out, elems, dtype, s) : copy("all_gather", out, in, elems, dtype, s);
  }
  void all_gather_v(const void* in, void* out, Counts counts, DType dtype, stream_type s) const {
    if (comm_) return comm_->all_gather_v(in, out, counts, dtype, s);
    require(counts.size() == 1, "all_gather_v");
    copy("all_gather_v", out, in, counts[0], dtype, s);
  }
  void all_to_all(const void* in, void* out, std::size_t elems, DType dtype, stream_type s) const {
    comm_ ? comm_->all_to_all(in, out, elems, dtype, s) : copy("all_to_all", out, in, elems, dtype, s);
  }
  void all_to_all_v(const void* in, Counts send, void* out, Counts recv, DType dtype, stream_type s) const {
    if (comm_) return comm_->all_to_all_v(in, send, out, recv, dtype, s);
    require(send.size() == 1 && recv.size() == 1 && send[0] == recv[0], "all_to_all_v");
    copy("all_to_all_v", out, in, send[0], dtype, s);
  }
  void broadcast(void* buffer, std::size_t elems, int root, DType dtype, stream_type s) const {
    if (comm_) return comm_->broadcast(buffer, elems, root, dtype, s);
    require(root == 0, "broadcast");
    (void)detail::bytes_of("broadcast", elems, dtype);
  }
  /// Errors: comm_error C06 as the communicator's.
  void exchange(std::span<const Send> tx, std::span<const Recv> rx, DType dtype, stream_type s) const {
    if (comm_) return comm_->exchange(tx, rx, dtype, s);
    bool matches = tx.size() == rx.size();
    for (std::size_t i = 0; matches && i < tx.size(); ++i) {
      matches = tx[i].peer == 0 && rx[i].peer == 0 && tx[i].elems == rx[i].elems;
    }
    if (!matches) {
      fail<comm_error>("pleat[C06]: in a group of one every message goes to peer 0 and matches a receive of its size; ",
                       tx.size(), " sends and ", rx.size(), " receives do not");
    }
    for (std::size_t i = 0; i < tx.size(); ++i) copy("exchange", rx[i].data, tx[i].data, tx[i].elems, dtype, s);
  }
  void barrier(stream_type s) const {
    if (comm_) comm_->barrier(s);
  }
  /// Waits on the host until the work on `s` is done, with the communicator's deadline and failure rules; a group of
  /// one that was given none to wait with asks the executor until the stream is idle. Errors: comm_error.
  void wait(stream_type s) const {
    if (waits_with_) return waits_with_->wait(s);
    const executor_for<device_type> executor;
    if constexpr (polling_executor<executor_for<device_type>>) {
      while (!executor.is_idle(s)) std::this_thread::yield();
    }
  }

 private:
  static void require(bool is_right, const char* operation) {
    if (!is_right) {
      fail<comm_error>("pleat[C05]: ", operation,
                       " in a group of one: valid: root 0, one count per list, and as many elements sent as received");
    }
  }
  static void copy(const char* operation, void* out, const void* in, std::size_t elems, DType dtype, stream_type s) {
    const std::size_t bytes = detail::bytes_of(operation, elems, dtype);
    if (out != in) executor_for<device_type>{}.copy(out, in, bytes, s);
  }

  Comm* comm_ = nullptr;
  Comm* waits_with_ = nullptr;
  int rank_ = 0;
  Group ranks_;
};

}  // namespace pleat::inline v0
