// Views of rows and copies between strided tensors, against one element at a time.
#include <pleat/attention/tensor_rows.hpp>
#include <pleat/core/host/executor.hpp>

#include <numeric>
#include <random>
#include <vector>

#include <doctest/doctest.h>

namespace {

using namespace pleat;

/// The host executor, counting its copies.
struct CountingExecutor : HostExecutor {
  int* copies;
  void copy(void* out, const void* in, std::size_t bytes, HostStream s) const {
    ++*copies;
    HostExecutor::copy(out, in, bytes, s);
  }
  void copy_2d(void* out, std::size_t out_pitch, const void* in, std::size_t in_pitch, std::size_t width,
               std::size_t height, HostStream s) const {
    ++*copies;
    REQUIRE((out_pitch >= width && in_pitch >= width));
    HostExecutor::copy_2d(out, out_pitch, in, in_pitch, width, height, s);
  }
};

TensorRef strided(std::vector<int>& data, const std::vector<std::pair<std::int64_t, std::int64_t>>& axes) {
  TensorRef t(data.data(), DType::i32, {});
  for (const auto& [extent, stride] : axes) t.push_extent(extent, stride);
  return t;
}
std::vector<std::int64_t> offsets(const TensorRef& t) {
  std::vector<std::int64_t> at{0};
  for (int axis = 0; axis < t.rank(); ++axis) {
    std::vector<std::int64_t> finer;
    for (const std::int64_t base : at) {
      for (std::int64_t i = 0; i < t.extent(axis); ++i) finer.push_back(base + i * t.stride(axis));
    }
    at = std::move(finer);
  }
  return at;
}

int copies_of(const TensorRef& out, const TensorRef& in) {
  int copies = 0;
  detail::copy_tensor(CountingExecutor{{}, &copies}, out, in, HostStream{});
  const auto to = offsets(out), from = offsets(in);
  for (std::size_t i = 0; i < to.size(); ++i) {
    REQUIRE(out.as<std::int32_t>()[to[i]] == in.as<std::int32_t>()[from[i]]);
  }
  return copies;
}

TEST_CASE("a copy is exact for all strides, and one call where the strides allow it") {
  std::vector<int> source(4000), target(4000);
  std::iota(source.begin(), source.end(), 1);
  const auto packed = [&](std::int64_t b, std::int64_t t, std::int64_t h, std::int64_t d) {
    std::fill(target.begin(), target.end(), 0);
    return strided(target, {{b, t * h * d}, {t, h * d}, {h, d}, {d, 1}});
  };
  CHECK(copies_of(packed(2, 3, 4, 5), strided(source, {{2, 60}, {3, 20}, {4, 5}, {5, 1}})) == 1);
  CHECK(copies_of(packed(2, 3, 4, 5), strided(source, {{2, 120}, {3, 40}, {4, 5}, {5, 1}})) == 1);  // one pitch
  CHECK(copies_of(packed(1, 3, 4, 5), strided(source, {{1, 7}, {3, 40}, {4, 5}, {5, 1}})) == 1);    // batch of one
  CHECK(copies_of(packed(2, 3, 4, 5), strided(source, {{2, 200}, {3, 40}, {4, 5}, {5, 1}})) == 2);  // gap per batch
  CHECK(copies_of(packed(2, 3, 4, 5), strided(source, {{2, 300}, {3, 50}, {4, 9}, {5, 1}})) == 6);  // heads apart
  CHECK(copies_of(packed(2, 3, 4, 5), strided(source, {{2, 100}, {3, 5}, {4, 20}, {5, 1}})) == 6);  // heads first
  CHECK(copies_of(packed(2, 3, 4, 5), strided(source, {{2, 60}, {3, 0}, {4, 5}, {5, 1}})) == 6);    // expanded
  CHECK(copies_of(packed(2, 3, 1, 1), strided(source, {{2, 60}, {3, 20}, {1, 5}, {1, 9}})) == 1);
  CHECK(copies_of(packed(1, 1, 1, 1), strided(source, {{1, 60}, {1, 20}, {1, 5}, {1, 1}})) == 1);
  CHECK(copies_of(packed(2, 0, 4, 5), strided(source, {{2, 60}, {0, 20}, {4, 5}, {5, 1}})) == 0);
}

TEST_CASE("rows of a tensor share its memory and strides") {
  std::vector<int> data(240);
  std::iota(data.begin(), data.end(), 0);
  const TensorRef t = strided(data, {{2, 120}, {5, 24}, {3, 8}, {4, 1}});
  const TensorRef rows = detail::token_rows(t, {2, 4});
  CHECK((rows.extent(0) == 2 && rows.extent(1) == 2 && rows.extent(2) == 3 && rows.extent(3) == 4));
  CHECK(rows.as<std::int32_t>()[rows.stride(0) + rows.stride(1) + 2 * rows.stride(2) + 3] == 120 + 3 * 24 + 16 + 3);
}

}  // namespace
