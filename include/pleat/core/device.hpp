// The devices pleat runs on, as types for the templates and as a value for tensors.
#pragma once

#include <pleat/core/message.hpp>

namespace pleat::inline v0 {

/// Plain memory; ranks are threads. The oracle of every GPU result.
struct host_device {};
/// CUDA memory and the caller's streams.
struct cuda_device {};

enum class DeviceKind : unsigned char { host, cuda };

struct Device {
  DeviceKind kind = DeviceKind::host;
  int index = 0;
  friend constexpr bool operator==(const Device&, const Device&) = default;
};
constexpr void append_to(Message& message, const Device& device) {
  if (device.kind == DeviceKind::host) {
    message.append("host");
  } else {
    message.append("cuda:").append(device.index);
  }
}

template <class DeviceType>
inline constexpr DeviceKind device_kind = DeviceKind::cuda;
template <>
inline constexpr DeviceKind device_kind<host_device> = DeviceKind::host;

}  // namespace pleat::inline v0
