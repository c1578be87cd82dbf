// A host device whose copies and sums come late at random, so that ranks meet in many orders.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <random>
#include <span>
#include <thread>

#include <pleat/core/host/executor.hpp>
#include <pleat/core/host/leaf.hpp>

namespace testing_support {

/// Host memory and host streams, with delays.
struct jitter_device {};

/// Does nothing most of the time; else yields, or sleeps for up to 0.3 ms. No result may depend on it.
inline void jitter() {
  thread_local std::mt19937 random(
      static_cast<unsigned>(std::hash<std::thread::id>{}(std::this_thread::get_id()) ^ std::random_device{}()));
  switch (random() % 8) {
    case 0:
      return std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
    case 1:
      return std::this_thread::yield();
    default:
      return;
  }
}

class JitterExecutor {
 public:
  using device_type = jitter_device;
  using stream_type = pleat::HostStream;
  using event_type = pleat::HostEvent;

  pleat::Device device() const noexcept { return {}; }
  event_type make_event() const noexcept { return {}; }
  void record(event_type&, stream_type) const { jitter(); }
  void wait(stream_type, const event_type&) const { jitter(); }
  void copy(void* out, const void* in, std::size_t bytes, stream_type s) const {
    jitter();
    host_.copy(out, in, bytes, s);
  }
  void copy_2d(void* out, std::size_t out_pitch_bytes, const void* in, std::size_t in_pitch_bytes,
               std::size_t width_bytes, std::size_t height, stream_type s) const {
    jitter();
    host_.copy_2d(out, out_pitch_bytes, in, in_pitch_bytes, width_bytes, height, s);
  }
  void zero(void* out, std::size_t bytes, stream_type s) const {
    jitter();
    host_.zero(out, bytes, s);
  }

 private:
  pleat::HostExecutor host_;
};
static_assert(pleat::executor<JitterExecutor>);

}  // namespace testing_support

template <>
inline constexpr pleat::DeviceKind pleat::device_kind<testing_support::jitter_device> = pleat::DeviceKind::host;

template <>
struct pleat::core_leaf<testing_support::jitter_device> : pleat::core_leaf<pleat::host_device> {
  static void sum_ranks(void* out, DType out_dtype, std::span<const void* const> parts, DType part_dtype,
                        std::size_t elems, bool accumulate, HostStream s, int = 0) {
    testing_support::jitter();
    pleat::core_leaf<pleat::host_device>::sum_ranks(out, out_dtype, parts, part_dtype, elems, accumulate, s);
  }
};
