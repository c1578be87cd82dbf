// Addresses of sockets: names to numbers, listening and connecting within a deadline.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>

#include <pleat/core/error.hpp>
#include <pleat/nccl/socket_link.hpp>

namespace pleat::inline v0::detail {

using SocketClock = std::chrono::steady_clock;

/// An address of a socket, of any family; plain bytes, so that ranks can send it to each other.
struct SocketAddress {
  union {
    sockaddr_storage storage{};
    sockaddr any;
    sockaddr_in four;
    sockaddr_in6 six;
  };
  socklen_t bytes = sizeof(sockaddr_storage);

  bool is_four() const { return any.sa_family == AF_INET; }
  void set_port(int port) { (is_four() ? four.sin_port : six.sin6_port) = htons(static_cast<std::uint16_t>(port)); }
  int port() const { return ntohs(is_four() ? four.sin_port : six.sin6_port); }
  bool is_loopback() const {
    return is_four() ? ntohl(four.sin_addr.s_addr) >> 24 == 127 : IN6_IS_ADDR_LOOPBACK(&six.sin6_addr) != 0;
  }
  /// The address of IPv4 that an address of IPv6 stands for, as connections have it that a socket for both took.
  SocketAddress unmapped() const {
    if (is_four() || !IN6_IS_ADDR_V4MAPPED(&six.sin6_addr)) return *this;
    SocketAddress result = any_of(AF_INET);
    result.four.sin_port = six.sin6_port;
    std::memcpy(&result.four.sin_addr, six.sin6_addr.s6_addr + 12, 4);
    return result;
  }
  /// All addresses of this machine in a family, at port 0.
  static SocketAddress any_of(sa_family_t family) {
    SocketAddress result;
    result.any.sa_family = family;
    result.bytes = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    return result;
  }
};

/// All addresses of a host; empty when the name is not known (now).
inline std::vector<SocketAddress> resolve(const std::string& host, int port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) return {};
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(found, ::freeaddrinfo);
  std::vector<SocketAddress> addresses;
  for (const addrinfo* i = found; i != nullptr; i = i->ai_next) {
    SocketAddress address;
    address.bytes = i->ai_addrlen;
    std::memcpy(&address.storage, i->ai_addr, i->ai_addrlen);
    addresses.push_back(address);
  }
  return addresses;
}

/// A listening socket at `address`, or at all addresses of this machine when it is not a loopback one; port 0: any.
/// Errors: comm_error C25.
inline Socket listen_at(SocketAddress address, int port, int backlog) {
  std::vector<SocketAddress> choices{address};
  // A socket of IPv6 takes IPv4 as well, where the machine has IPv6 at all.
  if (!address.is_loopback()) choices = {SocketAddress::any_of(AF_INET6), SocketAddress::any_of(AF_INET)};
  int error = 0;
  for (SocketAddress& choice : choices) {
    choice.set_port(port);
    Socket socket(::socket(choice.any.sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    const int on = 1, off = 0;
    (void)::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (choice.any.sa_family == AF_INET6) (void)::setsockopt(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    if (socket.is_open() && ::bind(socket.get(), &choice.any, choice.bytes) == 0 &&
        ::listen(socket.get(), backlog) == 0) {
      return socket;
    }
    if (error == 0 || errno == EADDRINUSE) error = errno;
  }
  fail<comm_error>("pleat[C25]: cannot listen on port ", port, ": ", std::strerror(error),
                   "; set PLEAT_PORT to a port that is free on rank 0's machine");
}
inline int port_of(const Socket& socket) {
  SocketAddress address;
  (void)::getsockname(socket.get(), &address.any, &address.bytes);
  return address.port();
}

/// A connection to `address`, or a closed socket with errno set when there is none within a second or the time left.
inline Socket connect_to(const SocketAddress& address, SocketClock::time_point until) {
  Socket socket(::socket(address.any.sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket.is_open()) return socket;
  if (::connect(socket.get(), &address.any, address.bytes) != 0) {
    if (errno != EINPROGRESS) return {};
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - SocketClock::now()).count();
    pollfd polled{socket.get(), POLLOUT, 0};
    const int ready = ::poll(&polled, 1, static_cast<int>(std::clamp<long long>(left, 1, 1000)));
    int error = ready == 0 ? ETIMEDOUT : 0;
    socklen_t bytes = sizeof error;
    if (ready > 0) (void)::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &bytes);
    if (error != 0) {
      errno = error;
      return {};
    }
  }
  prepare_connection(socket.get());
  return socket;
}

}  // namespace pleat::inline v0::detail
