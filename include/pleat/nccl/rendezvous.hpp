// Rendezvous: how the processes of a job find each other over TCP, without MPI, and keep a connection per pair.
#pragma once

#include <memory>
#include <thread>

#include <pleat/comm/call_checks.hpp>
#include <pleat/comm/launcher.hpp>
#include <pleat/nccl/socket_address.hpp>

namespace pleat::inline v0 {

namespace detail {
/// The first bytes on each connection; whoever does not send them is a stranger. Ranks of a job run the same build.
struct Greeting {
  std::uint64_t magic = 0x70'6c'65'61'74'6a'6f'62;
  std::uint64_t job = 0;  // a hash of the job's name, address and size
  std::int32_t rank = 0;
  std::int32_t port = 0;  // where this rank waits for those behind it
};

/// One process's part of a rendezvous. Rank 0 listens at the job's address and takes a greeting from each rank, then
/// tells everybody all addresses; each rank connects to those before it and takes those behind it.
class TcpRendezvous {
 public:
  TcpRendezvous(const LauncherEnvironment& environment, std::chrono::milliseconds deadline)
      : environment_(environment),
        deadline_(checked_deadline(deadline)),
        until_(SocketClock::now() + deadline_),
        connections_(static_cast<std::size_t>(environment.size)),
        addresses_(connections_.size()) {
    me_.job = hash(environment.address + ":" + std::to_string(environment.port) + "/" +
                   std::to_string(environment.size) + environment.job);
    me_.rank = environment.rank;
  }

  std::vector<Socket> connect() {
    const std::vector<SocketAddress> rank_0 = resolve_rank_0();
    listener_ = listen_at(rank_0.front(), me_.rank == 0 ? environment_.port : 0, environment_.size + 16);
    me_.port = port_of(listener_);
    if (me_.rank == 0) {
      accept_from(1);
      for (Socket& connection : connections_) {
        if (connection.is_open()) send_all(connection, addresses_.data(), addresses_bytes());
      }
    } else {
      connections_[0] = join(rank_0);
      for (int r = 1; r < me_.rank; ++r) connections_[static_cast<std::size_t>(r)] = greet(r);
      accept_from(me_.rank + 1);
    }
    return std::move(connections_);
  }

 private:
  struct Visitor {
    Socket socket;
    std::string greeting;
  };

  /// source: Fowler, Noll and Vo's FNV-1a, isthe.com/chongo/tech/comp/fnv.
  static std::uint64_t hash(const std::string& text) {
    std::uint64_t value = 0xcbf29ce484222325U;
    for (const char c : text) value = (value ^ static_cast<unsigned char>(c)) * 0x100000001b3U;
    return value;
  }
  std::size_t addresses_bytes() const { return addresses_.size() * sizeof(SocketAddress); }
  bool is_late() const { return SocketClock::now() > until_; }
  void rest() const { std::this_thread::sleep_for(std::chrono::milliseconds(10)); }
  template <class... Parts>
  [[noreturn]] void give_up(const Parts&... parts) const {
    fail<comm_error>("pleat[C25]: rank ", me_.rank, " waited ", deadline_.count(), " ms ", parts...);
  }

  std::vector<SocketAddress> resolve_rank_0() const {
    for (;; rest()) {
      auto addresses = resolve(environment_.address, environment_.port);
      if (!addresses.empty()) return addresses;
      if (is_late()) give_up("for the name ", environment_.address, " of rank 0's machine to be known");
    }
  }

  /// Takes a connection from each rank from `first` on. Strangers and silent ones keep nobody waiting.
  void accept_from(int first) {
    std::vector<Visitor> visitors;
    int missing = environment_.size - first;
    while (missing > 0) {
      std::vector<pollfd> polled{{listener_.get(), POLLIN, 0}};
      for (const Visitor& visitor : visitors) polled.push_back({visitor.socket.get(), POLLIN, 0});
      (void)::poll(polled.data(), polled.size(), 10);
      Socket arrived(::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
      if (arrived.is_open()) visitors.push_back({std::move(arrived), {}});
      for (Visitor& visitor : visitors) {
        if (!hear(visitor)) continue;
        missing -= admit(visitor, first) ? 1 : 0;
        visitor.socket.close();
      }
      std::erase_if(visitors, [](const Visitor& visitor) { return !visitor.socket.is_open(); });
      if (missing > 0 && is_late()) give_up("on port ", me_.port, " for rank ", absent_from(first));
    }
  }
  /// Whether the greeting is complete; closes the connection of who says something else, or goes.
  static bool hear(Visitor& visitor) {
    char buffer[sizeof(Greeting)];
    const ssize_t got = ::recv(visitor.socket.get(), buffer, sizeof buffer - visitor.greeting.size(), MSG_DONTWAIT);
    if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) visitor.socket.close();
    if (got > 0) visitor.greeting.append(buffer, static_cast<std::size_t>(got));
    return visitor.greeting.size() == sizeof(Greeting);
  }
  /// Whether the visitor is a rank of this job that was not here yet. One that comes again replaces its connection.
  bool admit(Visitor& visitor, int first) {
    Greeting greeting;
    std::memcpy(&greeting, visitor.greeting.data(), sizeof greeting);
    if (greeting.magic != me_.magic || greeting.job != me_.job || greeting.rank < first ||
        greeting.rank >= environment_.size) {
      return false;
    }
    const auto r = static_cast<std::size_t>(greeting.rank);
    SocketAddress address;
    (void)::getpeername(visitor.socket.get(), &address.any, &address.bytes);
    addresses_[r] = address.unmapped();
    addresses_[r].set_port(greeting.port);
    prepare_connection(visitor.socket.get());
    const bool is_new = !connections_[r].is_open();
    connections_[r] = std::exchange(visitor.socket, Socket());
    send_all(connections_[r], &me_, sizeof me_);
    return is_new;
  }
  std::string absent_from(int first) const {
    std::string ranks;
    for (int r = first; r < environment_.size; ++r) {
      if (!connections_[static_cast<std::size_t>(r)].is_open()) ranks += (ranks.empty() ? "" : " ") + std::to_string(r);
    }
    return ranks;
  }

  /// Connects to rank 0, which may not be there yet, and receives all addresses.
  Socket join(const std::vector<SocketAddress>& rank_0) {
    int error = 0;
    for (;; rest()) {
      for (const SocketAddress& address : rank_0) {
        Socket socket = connect_to(address, until_);
        if (!socket.is_open()) error = errno;
        if (socket.is_open() && exchange_greetings(socket, 0) &&
            receive_all(socket, addresses_.data(), addresses_bytes())) {
          return socket;
        }
      }
      if (is_late()) {
        give_up("for rank 0 and the others at ", environment_.address, ":", environment_.port,
                error == 0 ? "" : ", last error: ", error == 0 ? "" : std::strerror(error));
      }
    }
  }
  /// Connects to a rank that has told rank 0 where it listens.
  Socket greet(int rank) {
    for (;; rest()) {
      Socket socket = connect_to(addresses_[static_cast<std::size_t>(rank)], until_);
      if (socket.is_open() && exchange_greetings(socket, rank)) return socket;
      if (is_late()) give_up("to connect to rank ", rank);
    }
  }
  bool exchange_greetings(Socket& socket, int rank) const {
    Greeting theirs;
    return send_all(socket, &me_, sizeof me_) && receive_all(socket, &theirs, sizeof theirs) &&
           theirs.magic == me_.magic && theirs.job == me_.job && theirs.rank == rank;
  }

  /// Both: whether all bytes have gone in time; a connection that breaks is no error, as it may be a stranger's.
  bool send_all(Socket& socket, const void* data, std::size_t bytes) const {
    return move_all(socket, bytes, POLLOUT, [&](std::size_t done) {
      return ::send(socket.get(), static_cast<const char*>(data) + done, bytes - done, MSG_NOSIGNAL | MSG_DONTWAIT);
    });
  }
  bool receive_all(Socket& socket, void* data, std::size_t bytes) const {
    return move_all(socket, bytes, POLLIN, [&](std::size_t done) {
      return ::recv(socket.get(), static_cast<char*>(data) + done, bytes - done, MSG_DONTWAIT);
    });
  }
  template <class Move>
  bool move_all(Socket& socket, std::size_t bytes, short events, Move move) const {
    std::size_t done = 0;
    while (done < bytes && !is_late()) {
      const ssize_t moved = move(done);
      if (moved == 0 || (moved < 0 && errno != EAGAIN && errno != EINTR)) return false;
      if (moved > 0) done += static_cast<std::size_t>(moved);
      pollfd polled{socket.get(), events, 0};
      if (done < bytes) (void)::poll(&polled, 1, 10);
    }
    return done == bytes;
  }

  const LauncherEnvironment& environment_;
  const std::chrono::milliseconds deadline_;
  const SocketClock::time_point until_;
  Greeting me_;
  Socket listener_;
  std::vector<Socket> connections_;
  std::vector<SocketAddress> addresses_;  // [rank]
};
}  // namespace detail

/// Connects all processes of the job; each calls it once. Rank 0 listens while it runs, on all addresses of its machine
/// unless the job's is a loopback one. Errors: comm_error C25 when somebody is not there within the deadline, with who
/// and where.
inline std::unique_ptr<SocketLink> rendezvous(const LauncherEnvironment& environment,
                                              std::chrono::milliseconds deadline) {
  return std::make_unique<SocketLink>(environment.rank, detail::TcpRendezvous(environment, deadline).connect());
}

}  // namespace pleat::inline v0
