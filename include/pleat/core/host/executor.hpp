// The executor of host ranks: a stream is the calling thread, so everything is complete on return.
#pragma once

#include <cstring>

#include <pleat/core/executor.hpp>

namespace pleat::inline v0 {

/// The host's stream: empty, since work on it is complete when the call returns.
struct HostStream {};
/// The host's event: empty, since what it would wait for has happened.
struct HostEvent {};

/// Does at once what it is given. Stateless; its streams and events are empty.
class HostExecutor {
 public:
  using device_type = host_device;
  using stream_type = HostStream;
  using event_type = HostEvent;

  Device device() const noexcept { return {}; }
  [[nodiscard]] HostEvent make_event() const noexcept { return {}; }
  void record(HostEvent&, HostStream) const noexcept {}
  void wait(HostStream, const HostEvent&) const noexcept {}
  void copy(void* out, const void* in, std::size_t bytes, HostStream) const noexcept {
    if (bytes != 0) std::memcpy(out, in, bytes);
  }
  void copy_2d(void* out, std::size_t out_pitch_bytes, const void* in, std::size_t in_pitch_bytes,
               std::size_t width_bytes, std::size_t height, HostStream s) const noexcept {
    for (std::size_t row = 0; row < height; ++row) {
      copy(static_cast<std::byte*>(out) + row * out_pitch_bytes,
           static_cast<const std::byte*>(in) + row * in_pitch_bytes, width_bytes, s);
    }
  }
  void zero(void* out, std::size_t bytes, HostStream) const noexcept {
    if (bytes != 0) std::memset(out, 0, bytes);
  }
  bool is_idle(HostStream) const noexcept { return true; }
};
static_assert(executor<HostExecutor>);

template <>
struct detail::ExecutorFor<host_device> {
  using type = HostExecutor;
};

}  // namespace pleat::inline v0
