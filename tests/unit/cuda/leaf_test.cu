// The leaves on the GPU against those of the host: casts and sums bit for bit, squares to rounding.
#include <pleat/cuda/leaf.cuh>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include <pleat/core/host/leaf.hpp>
#include <pleat/cuda/buffer.hpp>

#include <doctest/doctest.h>

#include <support/copy_now.hpp>
#include <support/repeats.hpp>

namespace {

using namespace pleat;
using leaf = core_leaf<cuda_device>;
using host_leaf = core_leaf<host_device>;

/// The largest is several tiles of every kernel.
std::vector<std::size_t> sizes() {
  if (testing_support::is_quick()) return {0, 7, 4099, 70016};
  return {0, 1, 7, 8, 31, 1000, 4099, 1u << 20};
}
std::vector<int> numbers_of_ranks() {
  if (testing_support::is_quick()) return {1, 3};
  return {1, 2, 3, 8, 17};
}
constexpr DType floats[] = {DType::f64, DType::f32, DType::bf16};

std::vector<std::byte> random_values(DType dtype, std::size_t elems, unsigned seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal(0, 100);
  std::vector<std::byte> bytes(elems * size_bytes(dtype));
  std::vector<double> values(elems);
  for (double& v : values) v = normal(random);
  host_leaf::cast_copy(bytes.data(), dtype, values.data(), DType::f64, elems, {});
  return bytes;
}

/// Device memory of some bytes, `shift` elements behind an aligned address.
struct OnDevice {
  OnDevice(const std::vector<std::byte>& bytes, std::size_t shift_bytes = 0)
      : buffer(bytes.size() + shift_bytes + 16), data(buffer.data() + shift_bytes), size(bytes.size()) {
    check_cuda(cudaMemset(buffer.data(), 0xff, buffer.size_bytes()), "cudaMemset");
    testing_support::copy_now(data, bytes.data(), size);
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  std::vector<std::byte> download() const {
    std::vector<std::byte> bytes(size);
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    testing_support::copy_now(bytes.data(), data, size);
    return bytes;
  }
  CudaBuffer buffer;
  std::byte* data;
  std::size_t size;
};

TEST_CASE("cast_copy has the bits of the host") {
  const CudaStream s;
  for (const std::size_t elems : sizes()) {
    for (const DType from : floats) {
      for (const DType to : floats) {
        for (const std::size_t shift : {0, 1}) {
          const auto values = random_values(from, elems, static_cast<unsigned>(elems) + 1);
          std::vector<std::byte> expected(elems * size_bytes(to));
          host_leaf::cast_copy(expected.data(), to, values.data(), from, elems, {});
          const OnDevice in(values, shift * size_bytes(from)), out(std::vector<std::byte>(expected.size()));
          leaf::cast_copy(out.data, to, in.data, from, elems, s);
          const bool equal = out.download() == expected;
          CAPTURE(elems);
          CAPTURE(name_of(from));
          CAPTURE(name_of(to));
          CHECK(equal);
        }
      }
    }
  }
}

TEST_CASE("sum_ranks has the bits of the host, however its parts lie and on how many multiprocessors it runs") {
  const CudaStream s;
  for (const std::size_t elems : sizes()) {
    for (const DType part : floats) {
      for (const DType out_dtype : {DType::f64, DType::f32}) {
        for (const int ranks : numbers_of_ranks()) {
          for (const bool accumulate : {false, true}) {
            std::vector<std::vector<std::byte>> values;
            std::vector<OnDevice> devices;
            std::vector<const void*> parts, device_parts;
            for (int r = 0; r < ranks; ++r) {
              values.push_back(random_values(part, elems, static_cast<unsigned>(r) + 7));
              devices.emplace_back(values.back(), ranks == 3 ? size_bytes(part) : 0);
            }
            for (const auto& v : values) parts.push_back(v.data());
            for (const auto& d : devices) device_parts.push_back(d.data);
            const auto before = random_values(out_dtype, elems, 99);
            auto expected = before;
            host_leaf::sum_ranks(expected.data(), out_dtype, parts, part, elems, accumulate, {});
            for (const int ctas : {0, 1, 5}) {
              const OnDevice out(before);
              leaf::sum_ranks(out.data, out_dtype, device_parts, part, elems, accumulate, s, ctas);
              const bool equal = out.download() == expected;
              CAPTURE(elems);
              CAPTURE(ranks);
              CAPTURE(ctas);
              CAPTURE(name_of(part));
              CHECK(equal);
            }
          }
        }
      }
    }
  }
}

TEST_CASE("a thousand equally spaced parts are one sum; scattered ones are refused") {
  const CudaStream s;
  const int ranks = 1000;
  const std::size_t elems = 64;
  const auto values = random_values(DType::f32, ranks * elems, 3);
  const OnDevice in(values), out(std::vector<std::byte>(elems * sizeof(float)));
  std::vector<const void*> parts, device_parts;
  for (int r = 0; r < ranks; ++r) {
    parts.push_back(values.data() + static_cast<std::size_t>(r) * elems * sizeof(float));
    device_parts.push_back(in.data + static_cast<std::size_t>(r) * elems * sizeof(float));
  }
  std::vector<std::byte> expected(elems * sizeof(float));
  host_leaf::sum_ranks(expected.data(), DType::f32, parts, DType::f32, elems, false, {});
  leaf::sum_ranks(out.data, DType::f32, device_parts, DType::f32, elems, false, s);
  const bool equal = out.download() == expected;
  CHECK(equal);
  std::swap(device_parts[3], device_parts[5]);
  CHECK_THROWS_WITH_AS(leaf::sum_ranks(out.data, DType::f32, device_parts, DType::f32, elems, false, s),
                       doctest::Contains("pleat[T09]: a sum over 1000 parts"), shape_error);
}

TEST_CASE("sum_of_squares runs in float64, has the same bits each time and misses nothing") {
  const CudaStream s;
  CudaBuffer scratch(leaf::sum_of_squares_scratch_bytes);
  CudaBuffer sum(sizeof(double));
  for (const std::size_t elems : sizes()) {
    for (const DType dtype : floats) {
      for (const std::size_t shift : {0, 1}) {
        const auto values = random_values(dtype, elems, 5);
        double expected = 0;
        host_leaf::sum_of_squares(&expected, values.data(), dtype, elems, false, nullptr, {});
        const OnDevice in(values, shift * size_bytes(dtype));
        double found[2] = {};
        for (double& f : found) {
          check_cuda(cudaMemset(scratch.data(), 0xff, scratch.size_bytes()), "cudaMemset");
          check_cuda(cudaMemset(sum.data(), 0xff, sizeof(double)), "cudaMemset");
          check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
          auto* out = reinterpret_cast<double*>(sum.data());
          leaf::sum_of_squares(out, in.data, dtype, elems, false, scratch.data(), s);
          leaf::sum_of_squares(out, in.data, dtype, elems, true, scratch.data(), s);
          s.synchronize();
          testing_support::copy_now(&f, out, sizeof(double));
        }
        CHECK(found[0] == found[1]);
        // The host adds one after the other: its own error is what this allows.
        const double unit = std::numeric_limits<double>::epsilon() / 2;
        CHECK(std::abs(found[0] - 2 * expected) <= 2 * unit * static_cast<double>(elems + 8) * expected);
      }
    }
  }
}

TEST_CASE("a CUDA call that fails says so with CUDA's name of the error") {
  CHECK_THROWS_WITH_AS(check_cuda(cudaErrorMemoryAllocation, "cudaMalloc"),
                       doctest::Contains("pleat[C20]: cudaMalloc failed: cudaErrorMemoryAllocation"), cuda_error);
}

}  // namespace
