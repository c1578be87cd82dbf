// MpiTransfer: the messages of one call, which MPI moves from and to memory that outlives a failure.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <vector>

#include <pleat/mpi/check.hpp>

namespace pleat::inline v0::detail {

/// MPI cannot take back what it has begun to send or receive. When a call fails, its caller's memory may go at once; so
/// bytes go through memory of the transfer, which is then left to MPI. The memory is used again by later calls.
class MpiTransfer {
 public:
  /// Begins a call that sends at most `sent_bytes` and receives at most `received_bytes`.
  void begin(std::size_t sent_bytes, std::size_t received_bytes) {
    if (sent_.size() < sent_bytes) sent_.resize(sent_bytes);
    if (received_.size() < received_bytes) received_.resize(received_bytes);
    requests_.clear();
    peers_.clear();
  }
  std::byte* sent(std::size_t offset) { return sent_.data() + offset; }
  const std::byte* received(std::size_t offset) const { return received_.data() + offset; }

  /// From `offset` of the sent bytes to the peer. `is_met`: done only when the peer has come for it.
  void send(MPI_Comm comm, int peer, int tag, std::size_t offset, std::size_t bytes, bool is_met = false) {
    pieces(offset, bytes, peer, [&](std::size_t at, int count, MPI_Request* request) {
      return is_met ? MPI_Issend(sent_.data() + at, count, MPI_BYTE, peer, tag, comm, request)
                    : MPI_Isend(sent_.data() + at, count, MPI_BYTE, peer, tag, comm, request);
    });
  }
  void receive(MPI_Comm comm, int peer, int tag, std::size_t offset, std::size_t bytes) {
    pieces(offset, bytes, peer, [&](std::size_t at, int count, MPI_Request* request) {
      return MPI_Irecv(received_.data() + at, count, MPI_BYTE, peer, tag, comm, request);
    });
  }

  /// Whether everything from request `first` to `end` is done.
  bool is_done(std::size_t first, std::size_t end) {
    bool all_done = true;
    for (std::size_t i = first; i < end; ++i) {
      int is_complete = 1;
      if (requests_[i] != MPI_REQUEST_NULL) {
        check_mpi(MPI_Test(&requests_[i], &is_complete, MPI_STATUS_IGNORE), "MPI_Test");
      }
      all_done = all_done && is_complete != 0;
    }
    return all_done;
  }
  bool is_done() { return is_done(0, requests_.size()); }
  std::size_t requests() const { return requests_.size(); }
  /// The peers of what is not done, ascending.
  std::vector<int> missing() const {
    std::vector<int> peers;
    for (std::size_t i = 0; i < requests_.size(); ++i) {
      if (requests_[i] != MPI_REQUEST_NULL) peers.push_back(peers_[i]);
    }
    std::sort(peers.begin(), peers.end());
    peers.erase(std::unique(peers.begin(), peers.end()), peers.end());
    return peers;
  }

 private:
  static constexpr std::size_t most_at_once = std::size_t{1} << 30;  // MPI counts in int

  template <class Post>
  void pieces(std::size_t offset, std::size_t bytes, int peer, Post post) {
    for (std::size_t done = 0; done < bytes; done += most_at_once) {
      requests_.push_back(MPI_REQUEST_NULL);
      peers_.push_back(peer);
      const auto count = static_cast<int>(std::min(most_at_once, bytes - done));
      check_mpi(post(offset + done, count, &requests_.back()), "a message");
    }
  }

  std::vector<std::byte> sent_, received_;
  std::vector<MPI_Request> requests_;
  std::vector<int> peers_;  // [request]
};

}  // namespace pleat::inline v0::detail
