// DLPack: a struct laid out like dlpack.h's DLTensor is a tensor, with null strides, offsets, dtypes and devices.
#include <pleat/tensor/dlpack.hpp>

#include <cstdint>
#include <vector>

#include <doctest/doctest.h>

namespace {

using namespace pleat;

// source: github.com/dmlc/dlpack, include/dlpack/dlpack.h
enum DLDeviceType : std::int32_t { kDLCPU = 1, kDLCUDA = 2, kDLCUDAHost = 3, kDLROCM = 10, kDLCUDAManaged = 13 };
enum DLDataTypeCode : std::uint8_t { kDLInt = 0, kDLUInt = 1, kDLFloat = 2, kDLBfloat = 4, kDLBool = 6 };
struct DLDevice {
  DLDeviceType device_type;
  std::int32_t device_id;
};
struct DLDataType {
  std::uint8_t code, bits;
  std::uint16_t lanes;
};
struct DLTensor {
  void* data;
  DLDevice device;
  std::int32_t ndim;
  DLDataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;
  std::uint64_t byte_offset;
};
static_assert(dl_tensor<DLTensor> && tensor<DLTensor>);

struct Case {
  float data[64] = {};
  std::int64_t shape[3] = {2, 3, 4};
  std::int64_t strides[3] = {1, 20, 2};
  DLTensor tensor{data, {kDLCPU, 0}, 3, {kDLFloat, 32, 1}, shape, nullptr, 0};
};

TEST_CASE("null strides mean row-major") {
  const Case given;
  const TensorRef ref = as_tensor(given.tensor);
  CHECK(ref.data() == given.data);
  CHECK(ref.dtype() == DType::f32);
  CHECK(ref.stride(0) == 12);
  CHECK(ref.stride(1) == 4);
  CHECK(ref.stride(2) == 1);
  CHECK(ref.is_contiguous());
}

TEST_CASE("strides and byte_offset are taken as they are") {
  Case given;
  given.tensor.strides = given.strides;
  given.tensor.byte_offset = 12;
  const TensorRef ref = as_tensor(given.tensor);
  CHECK(ref.data() == given.data + 3);
  for (int axis = 0; axis < 3; ++axis) {
    CHECK(ref.extent(axis) == given.shape[axis]);
    CHECK(ref.stride(axis) == given.strides[axis]);
  }
  CHECK_FALSE(ref.is_contiguous());
}

TEST_CASE("no axes, extents of zero, and strides beyond 2^31") {
  Case given;
  given.tensor.ndim = 0;
  CHECK(as_tensor(given.tensor).elems() == 1);
  given.tensor.ndim = 3;
  given.shape[1] = 0;
  CHECK(as_tensor(given.tensor).elems() == 0);
  given.shape[1] = std::int64_t{1} << 20;
  given.shape[2] = std::int64_t{1} << 20;
  CHECK(as_tensor(given.tensor).stride(0) == std::int64_t{1} << 40);
}

TEST_CASE("every dtype that pleat has") {
  const std::pair<DLDataType, DType> dtypes[] = {{{kDLFloat, 64, 1}, DType::f64},   {{kDLFloat, 32, 1}, DType::f32},
                                                 {{kDLBfloat, 16, 1}, DType::bf16}, {{kDLFloat, 16, 1}, DType::f16},
                                                 {{kDLInt, 64, 1}, DType::i64},     {{kDLInt, 32, 1}, DType::i32},
                                                 {{kDLUInt, 8, 1}, DType::u8}};
  Case given;
  for (const auto& [dl, dtype] : dtypes) {
    given.tensor.dtype = dl;
    CHECK(as_tensor(given.tensor).dtype() == dtype);
  }
}

TEST_CASE("host and CUDA devices") {
  Case given;
  given.tensor.device = {kDLCUDA, 3};
  CHECK(as_tensor(given.tensor).device() == Device{DeviceKind::cuda, 3});
  given.tensor.device = {kDLCUDAManaged, 1};
  CHECK(as_tensor(given.tensor).device() == Device{DeviceKind::cuda, 1});
  given.tensor.device = {kDLCUDAHost, 2};
  CHECK(as_tensor(given.tensor).device() == Device{});
}

TEST_CASE("T08: a dtype or a device that pleat has none for") {
  const DLDataType dtypes[] = {{kDLFloat, 8, 1}, {kDLInt, 8, 1}, {kDLUInt, 64, 1}, {kDLBool, 8, 1}, {kDLFloat, 32, 4}};
  Case given;
  for (const DLDataType& dtype : dtypes) {
    given.tensor.dtype = dtype;
    CHECK_THROWS_AS(as_tensor(given.tensor), shape_error);
  }
  CHECK_THROWS_WITH(as_tensor(given.tensor),
                    "pleat[T08]: DLPack dtype code 2, 32 bits, 4 lanes has no pleat dtype; valid: f64 f32 bf16 f16 i64 "
                    "i32 u8");
  given.tensor.dtype = {kDLFloat, 32, 1};
  given.tensor.device = {kDLROCM, 0};
  CHECK_THROWS_WITH_AS(as_tensor(given.tensor),
                       "pleat[T08]: DLPack device type 10 is neither host (1, 3) nor CUDA (2, 13)", shape_error);
}

}  // namespace
