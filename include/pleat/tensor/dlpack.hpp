// DLPack in: a DLTensor of any framework is a pleat tensor; no copy, no ownership taken.
#pragma once

#include <cstdint>

#include <pleat/tensor/tensor_traits.hpp>

namespace pleat::inline v0 {

/// Anything laid out like DLPack's `DLTensor` (source: github.com/dmlc/dlpack, dlpack.h): include your own dlpack.h.
template <class T>
concept dl_tensor = requires(const T& t) {
  { t.data } -> std::convertible_to<void*>;
  t.device.device_type;
  t.device.device_id;
  { t.ndim } -> std::convertible_to<int>;
  t.dtype.code;
  t.dtype.bits;
  t.dtype.lanes;
  { t.shape } -> std::convertible_to<const std::int64_t*>;
  { t.strides } -> std::convertible_to<const std::int64_t*>;
  { t.byte_offset } -> std::convertible_to<std::uint64_t>;
};

/// Strides may be null (row-major). Errors: shape_error T08 for a dtype or a device that pleat has none for.
template <dl_tensor T>
struct tensor_traits<T> {
  static void* data(const T& t) { return static_cast<std::byte*>(t.data) + t.byte_offset; }
  static int rank(const T& t) { return static_cast<int>(t.ndim); }
  static std::int64_t extent(const T& t, int axis) { return t.shape[axis]; }
  static std::int64_t stride(const T& t, int axis) {
    if (t.strides != nullptr) return t.strides[axis];
    std::int64_t stride = 1;
    for (int inner = static_cast<int>(t.ndim) - 1; inner > axis; --inner) stride *= t.shape[inner];
    return stride;
  }
  static DType dtype(const T& t) {
    const int code = static_cast<int>(t.dtype.code);  // kDLInt 0, kDLUInt 1, kDLFloat 2, kDLBfloat 4
    const int bits = static_cast<int>(t.dtype.bits);
    if (t.dtype.lanes == 1) {
      if (code == 2 && bits == 64) return DType::f64;
      if (code == 2 && bits == 32) return DType::f32;
      if (code == 4 && bits == 16) return DType::bf16;
      if (code == 2 && bits == 16) return DType::f16;
      if (code == 0 && bits == 64) return DType::i64;
      if (code == 0 && bits == 32) return DType::i32;
      if (code == 1 && bits == 8) return DType::u8;
    }
    fail<shape_error>("pleat[T08]: DLPack dtype code ", code, ", ", bits, " bits, ", static_cast<int>(t.dtype.lanes),
                      " lanes has no pleat dtype; valid: f64 f32 bf16 f16 i64 i32 u8");
  }
  static Device device(const T& t) {
    const int type = static_cast<int>(t.device.device_type);  // kDLCPU 1, kDLCUDA 2, kDLCUDAHost 3, kDLCUDAManaged 13
    const int index = static_cast<int>(t.device.device_id);
    if (type == 1 || type == 3) return {DeviceKind::host, 0};
    if (type == 2 || type == 13) return {DeviceKind::cuda, index};
    fail<shape_error>("pleat[T08]: DLPack device type ", type, " is neither host (1, 3) nor CUDA (2, 13)");
  }
};

}  // namespace pleat::inline v0
