// MpiLink: the link of ranks that MPI has started; small messages on a communicator of their own, polled.
#pragma once

#include <chrono>
#include <cstring>
#include <deque>
#include <list>
#include <map>
#include <thread>
#include <utility>
#include <vector>

#include <pleat/comm/job_link.hpp>
#include <pleat/mpi/check.hpp>

namespace pleat::inline v0 {

/// MPI ends the whole job when a process dies, so no connection is ever seen to be lost.
class MpiLink final : public JobLink {
 public:
  /// Collective over `comm`. Errors: comm_error C37.
  explicit MpiLink(MPI_Comm comm) : comm_(detail::duplicate(comm)) {
    check_mpi(MPI_Comm_rank(comm_, &rank_), "MPI_Comm_rank");
    check_mpi(MPI_Comm_size(comm_, &size_), "MPI_Comm_size");
    inboxes_.resize(static_cast<std::size_t>(size_));
  }
  /// What has not gone out soon is left to MPI, which may still read it.
  ~MpiLink() override {
    const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(100);
    while (!outgoing_.empty() && std::chrono::steady_clock::now() < until) {
      forget_sent();
      std::this_thread::yield();
    }
    if (!outgoing_.empty()) (void)new std::list<Outgoing>(std::move(outgoing_));
  }

  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return size_; }

  void send(int peer, std::uint64_t tag, std::string_view bytes) override {
    Outgoing& message = outgoing_.emplace_back();
    message.bytes.append(reinterpret_cast<const char*>(&tag), sizeof tag).append(bytes);
    check_mpi(MPI_Isend(message.bytes.data(), static_cast<int>(message.bytes.size()), MPI_BYTE, peer, 0, comm_,
                        &message.request),
              "MPI_Isend");
  }
  std::optional<std::string> take(int peer, std::uint64_t tag) override {
    auto& inbox = inboxes_[static_cast<std::size_t>(peer)];
    const auto found = inbox.find(tag);
    if (found == inbox.end()) return std::nullopt;
    std::string bytes = std::move(found->second.front());
    found->second.pop_front();
    if (found->second.empty()) inbox.erase(found);
    return bytes;
  }
  void progress() override {
    forget_sent();
    for (;;) {
      int has_come = 0, count = 0;
      MPI_Status status;
      check_mpi(MPI_Iprobe(MPI_ANY_SOURCE, 0, comm_, &has_come, &status), "MPI_Iprobe");
      if (has_come == 0) return;
      check_mpi(MPI_Get_count(&status, MPI_BYTE, &count), "MPI_Get_count");
      std::string bytes(static_cast<std::size_t>(count), '\0');
      check_mpi(MPI_Recv(bytes.data(), count, MPI_BYTE, status.MPI_SOURCE, 0, comm_, MPI_STATUS_IGNORE), "MPI_Recv");
      std::uint64_t tag = 0;
      std::memcpy(&tag, bytes.data(), sizeof tag);
      inboxes_[static_cast<std::size_t>(status.MPI_SOURCE)][tag].push_back(bytes.substr(sizeof tag));
    }
  }
  bool is_lost(int) const noexcept override { return false; }

 private:
  struct Outgoing {
    std::string bytes;
    MPI_Request request = MPI_REQUEST_NULL;
  };

  void forget_sent() {
    outgoing_.remove_if([](Outgoing& message) {
      int is_sent = 0;
      return MPI_Test(&message.request, &is_sent, MPI_STATUS_IGNORE) == MPI_SUCCESS && is_sent != 0;
    });
  }

  MPI_Comm comm_;
  int rank_ = 0, size_ = 0;
  std::list<Outgoing> outgoing_;                                           // messages stay where MPI reads them
  std::vector<std::map<std::uint64_t, std::deque<std::string>>> inboxes_;  // [peer]
};

}  // namespace pleat::inline v0
