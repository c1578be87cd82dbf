// HostBuffer: aligned, filled, movable, and large enough for nothing.
#include <pleat/core/host/buffer.hpp>

#include <cmath>
#include <cstdint>
#include <utility>

#include <doctest/doctest.h>

namespace {

using pleat::Carver;
using pleat::HostBuffer;

static_assert(!std::is_copy_constructible_v<HostBuffer> && std::is_nothrow_move_constructible_v<HostBuffer>);

TEST_CASE("memory is aligned and zero, or filled") {
  for (const std::size_t bytes : {1, 127, 128, 4096}) {
    const HostBuffer zeros(bytes);
    const HostBuffer filled(bytes, 0xff);
    for (const HostBuffer* buffer : {&zeros, &filled}) {
      CHECK(reinterpret_cast<std::uintptr_t>(buffer->data()) % Carver::alignment_bytes == 0);
      CHECK(buffer->size_bytes() == bytes);
      CHECK(buffer->block().data == buffer->data());
      CHECK(buffer->block().size_bytes == bytes);
    }
    for (std::size_t i = 0; i < bytes; ++i) {
      REQUIRE(zeros.data()[i] == std::byte{0});
      REQUIRE(filled.data()[i] == std::byte{0xff});
    }
  }
}

TEST_CASE("0xff makes every float a NaN") {
  const HostBuffer poison(64, 0xff);
  CHECK(std::isnan(*reinterpret_cast<const float*>(poison.data())));
  CHECK(std::isnan(*reinterpret_cast<const double*>(poison.data())));
}

TEST_CASE("a buffer of no bytes and one that was never made") {
  const HostBuffer empty(0), none;
  CHECK(empty.size_bytes() == 0);
  CHECK(none.data() == nullptr);
  CHECK(none.block().size_bytes == 0);
}

TEST_CASE("T11: more than there is") {
  CHECK_THROWS_WITH_AS(HostBuffer(std::size_t{1} << 60),
                       "pleat[T11]: 1152921504606846976 bytes of host memory cannot be had; plan for smaller sizes",
                       pleat::shape_error);
}

TEST_CASE("moving hands the memory over") {
  HostBuffer a(256, 7);
  const std::byte* data = a.data();
  HostBuffer b = std::move(a);
  CHECK(b.data() == data);
  a = HostBuffer(128);
  CHECK(a.size_bytes() == 128);
  CHECK(b.data()[255] == std::byte{7});
}

}  // namespace
