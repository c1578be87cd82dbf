// moe_leaf: the device code that the schedules of this folder call.
#pragma once

#include <pleat/core/device.hpp>
#include <pleat/core/executor.hpp>

namespace pleat::inline v0 {

/// Leaves of pleat::moe; specialized per device. Static members, ordered on the stream `s`, which do not communicate.
/// They take plans and raw pointers to dense row-major arrays; pointers to device data are never read by a schedule.
/// leaf_concepts.hpp says which there are, and what each does.
template <class DeviceType>
struct moe_leaf {
  static_assert(
      detail::no_device<DeviceType>,
      "pleat[T03]: no MoE leaves for this device: include pleat/moe/host/leaf.hpp or pleat/moe/cuda/leaf.cuh");
};

}  // namespace pleat::inline v0
