// TensorRef: extents and strides of any rank, contiguity, large offsets, and the errors T04 and T05.
#include <pleat/tensor/tensor_ref.hpp>

#include <string>
#include <type_traits>

#include <doctest/doctest.h>

namespace {

using namespace pleat;

static_assert(std::is_trivially_copyable_v<TensorRef>);

TensorRef strided(float* data, std::initializer_list<std::pair<std::int64_t, std::int64_t>> axes) {
  TensorRef ref(data, DType::f32, {});
  for (const auto& [extent, stride] : axes) ref.push_extent(extent, stride);
  return ref;
}

TEST_CASE("a contiguous tensor is row-major") {
  float data[24];
  const TensorRef ref(data, {2, 3, 4}, {DeviceKind::cuda, 1});
  CHECK(ref.data() == data);
  CHECK(ref.dtype() == DType::f32);
  CHECK(ref.device() == Device{DeviceKind::cuda, 1});
  CHECK(ref.rank() == 3);
  CHECK(ref.elems() == 24);
  const std::int64_t extents[] = {2, 3, 4}, strides[] = {12, 4, 1};
  for (int axis = 0; axis < 3; ++axis) {
    CHECK(ref.extent(axis) == extents[axis]);
    CHECK(ref.stride(axis) == strides[axis]);
  }
  CHECK(ref.is_contiguous());
}

TEST_CASE("the dtype comes from the pointer, a pointer to const is an input") {
  const bfloat16 input[2] = {};
  CHECK(TensorRef(input, {2}).dtype() == DType::bf16);
  CHECK(TensorRef(input, {2}).data() == static_cast<const void*>(input));
  std::byte bytes[2];
  CHECK(TensorRef(bytes, {2}).dtype() == DType::u8);
}

TEST_CASE("no axes make one element, an extent of zero none") {
  double value = 0;
  const TensorRef scalar(&value, {});
  CHECK(scalar.rank() == 0);
  CHECK(scalar.elems() == 1);
  CHECK(scalar.is_contiguous());
  const TensorRef empty(&value, {3, 0, 5});
  CHECK(empty.elems() == 0);
  CHECK(empty.is_contiguous());
  CHECK(strided(nullptr, {{0, 7}, {4, 3}}).is_contiguous());
  CHECK(TensorRef().data() == nullptr);
}

TEST_CASE("contiguity") {
  float data[64];
  CHECK(strided(data, {{2, 4}, {4, 1}}).is_contiguous());
  CHECK_FALSE(strided(data, {{2, 5}, {4, 1}}).is_contiguous());  // a gap after each row
  CHECK_FALSE(strided(data, {{2, 1}, {4, 2}}).is_contiguous());  // column-major
  CHECK_FALSE(strided(data, {{4, 2}}).is_contiguous());
  CHECK_FALSE(strided(data, {{4, 0}}).is_contiguous());              // broadcast
  CHECK_FALSE(strided(data, {{4, -1}}).is_contiguous());             // reversed
  CHECK(strided(data, {{1, 99}, {4, 1}, {1, -7}}).is_contiguous());  // the stride of an axis of one says nothing
}

TEST_CASE("extents and strides beyond 2^31 elements") {
  float value = 0;
  const std::int64_t rows = std::int64_t{1} << 20, columns = std::int64_t{1} << 16;
  const TensorRef large(&value, {3, rows, columns});
  CHECK(large.elems() == 3 * (std::int64_t{1} << 36));
  CHECK(large.stride(0) == std::int64_t{1} << 36);
  CHECK(large.is_contiguous());
  const TensorRef pitched = strided(&value, {{2, (std::int64_t{1} << 33) + 1}, {5, 1}});
  CHECK(pitched.stride(0) == 8589934593);
  CHECK_FALSE(pitched.is_contiguous());
}

TEST_CASE("T04: too many axes and negative extents") {
  float value = 0;
  CHECK(TensorRef(&value, {1, 2, 3, 4, 5, 6}).rank() == TensorRef::max_rank);
  CHECK_THROWS_WITH_AS(TensorRef(&value, {1, 2, 3, 4, 5, 6, 7}),
                       "pleat[T04]: axis 6 has extent 7; a tensor has at most 6 axes, each of extent 0 or more, and "
                       "fewer than 2^60 elements",
                       shape_error);
  CHECK_THROWS_WITH_AS(TensorRef(&value, {2, -1}),
                       "pleat[T04]: axis 1 has extent -1; a tensor has at most 6 axes, each of extent 0 or more, and "
                       "fewer than 2^60 elements",
                       shape_error);
}

TEST_CASE("T04: more elements than can be counted") {
  float value = 0;
  const std::int64_t huge = std::int64_t{1} << 40;
  CHECK_THROWS_WITH_AS(TensorRef(&value, {huge, huge}),
                       "pleat[T04]: axis 1 has extent 1099511627776; a tensor has at most 6 axes, each of extent 0 or "
                       "more, and fewer than 2^60 elements",
                       shape_error);
  CHECK_THROWS_AS(TensorRef(&value, {0, huge, huge}), shape_error);  // nor would its strides be
  CHECK_THROWS_AS(strided(&value, {{huge, 0}, {huge, 0}}), shape_error);
  CHECK_THROWS_AS(TensorRef(&value, {TensorRef::max_elems + 1}), shape_error);
  CHECK(TensorRef(&value, {TensorRef::max_elems}).elems() == TensorRef::max_elems);
  CHECK(TensorRef(&value, {huge, 0, (std::int64_t{1} << 20) - 1}).elems() == 0);
}

TEST_CASE("a pointer to const makes a tensor that may only be read") {
  float value = 0;
  const float constant = 0;
  CHECK(TensorRef(&constant, {1}).is_read_only());
  CHECK_FALSE(TensorRef(&value, {1}).is_read_only());
  CHECK_FALSE(TensorRef(&value, DType::f32, {1}).is_read_only());
}

TEST_CASE("T05: read as another dtype") {
  float data[2] = {1, 2};
  const TensorRef ref(data, {2});
  CHECK(ref.as<float>()[1] == 2.0f);
  CHECK(ref.as<const float>() == data);
  CHECK_THROWS_WITH_AS(ref.as<double>(), "pleat[T05]: a tensor of dtype f32 was read as f64", shape_error);
}

TEST_CASE("a tensor in an error text") {
  float value = 0;
  CHECK(message_of(TensorRef(&value, {2, 0, 5})).c_str() == std::string("f32 [2, 0, 5] on host"));
  CHECK(message_of(TensorRef(&value, DType::bf16, {}, {DeviceKind::cuda, 2})).c_str() ==
        std::string("bf16 [] on cuda:2"));
}

}  // namespace
