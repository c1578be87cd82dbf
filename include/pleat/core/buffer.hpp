// The owned memory of a device, chosen by the device's type.
#pragma once

#include <pleat/core/executor.hpp>

namespace pleat::inline v0 {

namespace detail {
template <class DeviceType>
struct BufferFor {
  static_assert(no_device<DeviceType>,
                "pleat[T03]: no memory for this device: include pleat/core/host/buffer.hpp or pleat/cuda/buffer.hpp");
};
}  // namespace detail

/// Memory of the rank's own device: constructed from a number of bytes, movable, with `block()`, `data()` and
/// `size_bytes()`.
template <class DeviceType>
using buffer_for = typename detail::BufferFor<DeviceType>::type;

}  // namespace pleat::inline v0
