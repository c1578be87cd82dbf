// The devices pleat runs on, as types for the templates and as a value for tensors.
#pragma once

#include <type_traits>

#include <pleat/core/message.hpp>

namespace pleat::inline v0 {

/// Plain memory; ranks are threads. The oracle of every GPU result.
struct host_device {};
/// CUDA memory and the caller's streams.
struct cuda_device {};

/// Where memory lies, as a value; `device_kind` says it of a device's type.
enum class DeviceKind : unsigned char { host, cuda };

/// A device as a value: its kind, and which one of them. The host has no number.
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

/// The kind of memory that a device's type works on.
template <class DeviceType>
inline constexpr DeviceKind device_kind = DeviceKind::cuda;
template <>
inline constexpr DeviceKind device_kind<host_device> = DeviceKind::host;
/// The same as a value that has it in its type, for whom judges at compile time.
template <class DeviceType>
using KnownDevice = std::integral_constant<DeviceKind, device_kind<DeviceType>>;

}  // namespace pleat::inline v0
