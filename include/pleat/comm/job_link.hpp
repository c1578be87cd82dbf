// JobLink: how the ranks of one job hear of each other beside what they compute; small messages, and whose connection
// is gone.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace pleat::inline v0 {

/// One rank's ends of the connections to all others. Nothing blocks: `send` queues what does not go out at once, `take`
/// gives what has come. Messages of one tag from one peer stay in order.
class JobLink {
 public:
  JobLink() = default;
  JobLink(const JobLink&) = delete;
  JobLink& operator=(const JobLink&) = delete;
  virtual ~JobLink() = default;

  virtual int rank() const noexcept = 0;
  virtual int size() const noexcept = 0;
  /// Queues `bytes` for the peer; to a peer whose connection is gone, nothing happens.
  virtual void send(int peer, std::uint64_t tag, std::string_view bytes) = 0;
  /// The next message of the peer with this tag, among those that `progress` has brought.
  virtual std::optional<std::string> take(int peer, std::uint64_t tag) = 0;
  /// Brings in what has come and sends what is queued.
  virtual void progress() = 0;
  /// Whether the connection to the peer has ended, as it does when its process dies.
  virtual bool is_lost(int peer) const noexcept = 0;
};

}  // namespace pleat::inline v0
