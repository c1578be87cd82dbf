// SocketLink: the link of ranks that are processes; one TCP connection per pair, polled, never waited on.
#pragma once

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <map>
#include <utility>
#include <vector>

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <pleat/comm/job_link.hpp>

namespace pleat::inline v0 {

/// An owned file descriptor of a socket.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int descriptor) : descriptor_(descriptor) {}
  Socket(Socket&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }
  ~Socket() { close(); }
  /// Closes the socket if it is open.
  void close() noexcept {
    if (descriptor_ >= 0) (void)::close(std::exchange(descriptor_, -1));
  }
  /// The descriptor, -1 when closed.
  int get() const noexcept { return descriptor_; }
  bool is_open() const noexcept { return descriptor_ >= 0; }

 private:
  int descriptor_ = -1;
};

namespace detail {
/// Small messages at once, and an end of the connection when the peer's machine vanishes without a word.
inline void prepare_connection(int descriptor) {
  const auto set = [descriptor](int level, int name, int value) {
    (void)::setsockopt(descriptor, level, name, &value, sizeof value);
  };
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, 10);
  set(IPPROTO_TCP, TCP_KEEPINTVL, 5);
  set(IPPROTO_TCP, TCP_KEEPCNT, 3);
  set(IPPROTO_TCP, TCP_USER_TIMEOUT, 30000);
}
}  // namespace detail

/// Made by `rendezvous`. The kernel ends a connection when the process at its other end dies, by SIGKILL too; a process
/// that forks children which live on without exec keeps its connections open through them.
class SocketLink final : public JobLink {
 public:
  /// `connections[r]` leads to rank r; that of `rank` itself is closed. Sockets are non-blocking.
  SocketLink(int rank, std::vector<Socket> connections) : rank_(rank), peers_(connections.size()) {
    for (std::size_t r = 0; r < peers_.size(); ++r) peers_[r].socket = std::move(connections[r]);
  }

  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return static_cast<int>(peers_.size()); }

  void send(int peer, std::uint64_t tag, std::string_view bytes) override {
    Peer& to = peers_[static_cast<std::size_t>(peer)];
    if (!to.socket.is_open()) return;
    const Header header{bytes.size(), tag};
    to.outgoing.append(reinterpret_cast<const char*>(&header), sizeof header).append(bytes);
    push(to);
  }

  std::optional<std::string> take(int peer, std::uint64_t tag) override {
    auto& inbox = peers_[static_cast<std::size_t>(peer)].inbox;
    const auto found = inbox.find(tag);
    if (found == inbox.end()) return std::nullopt;
    std::string bytes = std::move(found->second.front());
    found->second.pop_front();
    if (found->second.empty()) inbox.erase(found);
    return bytes;
  }

  void progress() override {
    polled_.clear();
    for (const Peer& peer : peers_) {
      const int events = peer.outgoing.empty() ? POLLIN : POLLIN | POLLOUT;
      polled_.push_back({peer.socket.get(), static_cast<short>(events), 0});  // poll skips closed ones, which are < 0
    }
    if (::poll(polled_.data(), polled_.size(), 0) <= 0) return;
    for (std::size_t r = 0; r < peers_.size(); ++r) {
      if (polled_[r].revents & POLLOUT) push(peers_[r]);
      if (polled_[r].revents & (POLLIN | POLLERR | POLLHUP)) pull(peers_[r]);
    }
  }

  bool is_lost(int peer) const noexcept override { return !peers_[static_cast<std::size_t>(peer)].socket.is_open(); }

 private:
  struct Header {
    std::uint64_t bytes, tag;
  };
  static constexpr std::uint64_t most_bytes = 1 << 24;  // more is no message of ours
  struct Peer {
    Socket socket;
    std::string incoming, outgoing;  // parts of messages
    std::map<std::uint64_t, std::deque<std::string>> inbox;
  };

  static bool is_passing(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

  void push(Peer& peer) {
    while (!peer.outgoing.empty()) {
      const ssize_t sent =
          ::send(peer.socket.get(), peer.outgoing.data(), peer.outgoing.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      if (sent < 0) {
        // What the peer said before it went is still to be read, so the connection is not closed here.
        if (!is_passing(errno)) peer.outgoing.clear();
        return;
      }
      peer.outgoing.erase(0, static_cast<std::size_t>(sent));
    }
  }

  void pull(Peer& peer) {
    char buffer[4096];
    for (;;) {
      const ssize_t got = ::recv(peer.socket.get(), buffer, sizeof buffer, MSG_DONTWAIT);
      if (got < 0 && is_passing(errno)) break;
      if (got <= 0) {
        peer.socket.close();
        break;
      }
      peer.incoming.append(buffer, static_cast<std::size_t>(got));
    }
    while (peer.incoming.size() >= sizeof(Header)) {
      Header header;
      std::memcpy(&header, peer.incoming.data(), sizeof header);
      if (header.bytes > most_bytes) return peer.socket.close();
      if (peer.incoming.size() < sizeof header + header.bytes) return;
      peer.inbox[header.tag].push_back(peer.incoming.substr(sizeof header, header.bytes));
      peer.incoming.erase(0, sizeof header + header.bytes);
    }
  }

  int rank_;
  std::vector<Peer> peers_;
  std::vector<pollfd> polled_;
};

}  // namespace pleat::inline v0
