// The executor concept and its host model: what fits, what does not, and copies at their edges.
#include <pleat/core/executor.hpp>
#include <pleat/core/host/executor.hpp>

#include <numeric>
#include <vector>

#include <doctest/doctest.h>

namespace {

using namespace pleat;

struct NoEvents : HostExecutor {
  void make_event() const {}
};
struct NoDevice : HostExecutor {
  int device() const { return 0; }
};
struct NoZero {
  using device_type = host_device;
  using stream_type = HostStream;
  using event_type = HostEvent;
  Device device() const { return {}; }
  HostEvent make_event() const { return {}; }
  void record(HostEvent&, HostStream) const {}
  void wait(HostStream, const HostEvent&) const {}
  void copy(void*, const void*, std::size_t, HostStream) const {}
  void copy_2d(void*, std::size_t, const void*, std::size_t, std::size_t, std::size_t, HostStream) const {}
};
static_assert(executor<HostExecutor> && !executor<NoEvents> && !executor<NoDevice> && !executor<NoZero> &&
              !executor<int>);
static_assert(std::is_same_v<executor_for<host_device>, HostExecutor>);
static_assert(std::is_empty_v<HostExecutor> && std::is_empty_v<HostStream> && std::is_empty_v<HostEvent>);

const HostExecutor host;
constexpr HostStream s{};

TEST_CASE("copy and zero touch their bytes only") {
  std::vector<unsigned char> in(16), out(16, 0xee);
  std::iota(in.begin(), in.end(), 1);
  host.copy(out.data() + 4, in.data() + 2, 8, s);
  for (std::size_t i = 0; i < 16; ++i) CHECK(out[i] == (i < 4 || i >= 12 ? 0xee : in[i - 2]));
  host.zero(out.data() + 5, 3, s);
  for (std::size_t i = 4; i < 12; ++i) CHECK(out[i] == (i >= 5 && i < 8 ? 0 : in[i - 2]));
}

TEST_CASE("zero bytes do nothing, whatever the pointers") {
  int value = 5;
  host.copy(nullptr, nullptr, 0, s);
  host.copy(&value, nullptr, 0, s);
  host.zero(nullptr, 0, s);
  host.copy_2d(nullptr, 0, nullptr, 0, 0, 4, s);
  host.copy_2d(nullptr, 8, nullptr, 8, 8, 0, s);
  CHECK(value == 5);
}

TEST_CASE("copy_2d takes height rows of width bytes, each pitch on its own side") {
  constexpr std::size_t width = 3, height = 4, out_pitch = 5, in_pitch = 7;
  std::vector<unsigned char> in(in_pitch * height), out(out_pitch * height, 0xee);
  std::iota(in.begin(), in.end(), 1);
  host.copy_2d(out.data(), out_pitch, in.data(), in_pitch, width, height, s);
  for (std::size_t row = 0; row < height; ++row) {
    for (std::size_t column = 0; column < out_pitch; ++column) {
      CHECK(out[row * out_pitch + column] == (column < width ? in[row * in_pitch + column] : 0xee));
    }
  }
}

TEST_CASE("copy_2d repeats a row whose pitch is zero") {
  const unsigned char row[] = {1, 2};
  std::vector<unsigned char> out(6);
  host.copy_2d(out.data(), 2, row, 0, 2, 3, s);
  CHECK(out == std::vector<unsigned char>{1, 2, 1, 2, 1, 2});
}

int loads = 0;
struct WithKernels {
  static void preload() { ++loads; }
};
struct WithoutKernels {};

TEST_CASE("leaves that have kernels are loaded") {
  preload_leaves<WithKernels, WithoutKernels, WithKernels>();
  CHECK(loads == 2);
}

TEST_CASE("events are made, recorded and waited for") {
  HostEvent event = host.make_event();
  host.record(event, s);
  host.wait(s, event);
}

}  // namespace
