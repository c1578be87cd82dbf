// Carver: what it measures is what it takes, arrays are aligned and apart, and a block too small is T02.
#include <pleat/core/carve.hpp>
#include <pleat/core/host/buffer.hpp>

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include <doctest/doctest.h>

namespace {

using pleat::Block;
using pleat::Carver;
using pleat::HostBuffer;

struct Layout {
  double* sums;
  char* flags;
  std::int64_t* offsets;
  std::byte* tail;
};
Layout carve(Carver& memory, std::size_t n) {
  return {memory.take<double>(n), memory.take<char>(n), memory.take<std::int64_t>(2 * n), memory.take_bytes(n)};
}

std::size_t measured(std::size_t n) {
  Carver memory;
  carve(memory, n);
  return memory.used_bytes();
}

TEST_CASE("measuring hands out no pointers") {
  Carver memory;
  const Layout layout = carve(memory, 100);
  CHECK(layout.sums == nullptr);
  CHECK(layout.flags == nullptr);
  CHECK(layout.offsets == nullptr);
  CHECK(layout.tail == nullptr);
  CHECK(memory.used_bytes() == 896 + 128 + 1664 + 128);
}

TEST_CASE("a block of the measured size suffices, and one byte less does not") {
  for (const std::size_t n : {1, 7, 16, 128, 1000}) {
    const std::size_t bytes = measured(n);
    HostBuffer buffer(bytes);
    Carver memory(buffer.block());
    const Layout layout = carve(memory, n);
    CHECK(memory.used_bytes() == bytes);
    const auto at = [&](const void* pointer) {
      return static_cast<std::size_t>(static_cast<const std::byte*>(pointer) - buffer.data());
    };
    CHECK(at(layout.sums) == 0);
    CHECK(at(layout.flags) >= n * sizeof(double));
    CHECK(at(layout.offsets) >= at(layout.flags) + n);
    CHECK(at(layout.tail) >= at(layout.offsets) + 2 * n * sizeof(std::int64_t));
    CHECK(at(layout.tail) + n <= bytes);
    for (const void* pointer : {static_cast<void*>(layout.sums), static_cast<void*>(layout.flags),
                                static_cast<void*>(layout.offsets), static_cast<void*>(layout.tail)}) {
      CHECK(reinterpret_cast<std::uintptr_t>(pointer) % Carver::alignment_bytes == 0);
    }
    Carver small(Block{buffer.data(), bytes - 1});
    CHECK_THROWS_AS(carve(small, n), pleat::shape_error);
  }
}

TEST_CASE("T02 says what is there and what is needed so far") {
  HostBuffer buffer(256);
  Carver memory(buffer.block());
  memory.take<float>(40);
  CHECK_THROWS_WITH_AS(memory.take_bytes(1),
                       "pleat[T02]: a block of 256 bytes is too small; at least 384 are needed: allocate what "
                       "footprint() says",
                       pleat::shape_error);
}

TEST_CASE("a null block is a block of no bytes") {
  Carver memory{Block{}};
  CHECK(memory.take<double>(0) == nullptr);
  CHECK(memory.used_bytes() == 0);
  CHECK_THROWS_WITH_AS(memory.take<double>(1),
                       "pleat[T02]: a block of 0 bytes is too small; at least 128 are needed: allocate what "
                       "footprint() says",
                       pleat::shape_error);
}

TEST_CASE("random layouts do not overlap") {
  std::mt19937 random(7);
  for (int round = 0; round < 50; ++round) {
    std::vector<std::size_t> sizes(random() % 10 + 1);
    for (std::size_t& size : sizes) size = random() % 500;
    Carver plan;
    for (const std::size_t size : sizes) plan.take_bytes(size);
    HostBuffer buffer(plan.used_bytes());
    Carver memory(buffer.block());
    std::vector<std::byte*> arrays;
    for (const std::size_t size : sizes) arrays.push_back(memory.take_bytes(size));
    for (std::size_t i = 0; i + 1 < sizes.size(); ++i) REQUIRE(arrays[i] + sizes[i] <= arrays[i + 1]);
    REQUIRE(arrays.back() + sizes.back() <= buffer.data() + buffer.size_bytes());
  }
}

}  // namespace
