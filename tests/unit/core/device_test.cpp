// Devices as values and as types.
#include <pleat/core/device.hpp>
#include <pleat/core/error.hpp>

#include <string>

#include <doctest/doctest.h>

namespace {

using namespace pleat;

static_assert(device_kind<host_device> == DeviceKind::host && device_kind<cuda_device> == DeviceKind::cuda);
static_assert(Device{} == Device{DeviceKind::host, 0} && !(Device{DeviceKind::cuda, 1} == Device{DeviceKind::cuda, 0}));

TEST_CASE("a device prints its index where it has one") {
  CHECK(message_of(Device{}).c_str() == std::string("host"));
  CHECK(message_of(Device{DeviceKind::cuda, 3}).c_str() == std::string("cuda:3"));
}

}  // namespace
