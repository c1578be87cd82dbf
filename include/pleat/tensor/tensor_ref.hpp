// TensorRef: the non-owning tensor every schedule sees, made from the user's own type at the boundary.
#pragma once

#include <cstdint>
#include <initializer_list>

#include <pleat/core/device.hpp>
#include <pleat/core/dtype.hpp>

namespace pleat::inline v0 {

/// A borrowed tensor: pointer, dtype, device, extents and strides in elements. Copying it copies no data. The memory
/// must stay valid until the work that was given it is done on its stream. An input's data is never written.
class TensorRef {
 public:
  static constexpr int max_rank = 6;
  /// Extents, without those of 0, have a product of at most so many: bytes and row-major strides can be counted.
  static constexpr std::int64_t max_elems = (std::int64_t{1} << 60) - 1;

  TensorRef() = default;

  /// A contiguous row-major tensor over `data`; a pointer to const makes an input, which is read-only.
  /// Errors: shape_error T04 for more than `max_rank` or negative extents, or more than `max_elems`.
  template <element T>
  TensorRef(T* data, std::initializer_list<std::int64_t> extents, Device device = {})
      : TensorRef(const_cast<std::remove_const_t<T>*>(data), dtype_of<T>, extents, device) {
    is_read_only_ = std::is_const_v<T>;
  }
  TensorRef(void* data, DType dtype, std::initializer_list<std::int64_t> extents, Device device = {})
      : data_(data), dtype_(dtype), device_(device) {
    for (const std::int64_t extent : extents) push_extent(extent, 0);
    std::int64_t stride = 1;
    for (int axis = rank_ - 1; axis >= 0; --axis) {
      strides_[axis] = stride;
      stride *= extents_[axis];
    }
  }

  /// Appends the innermost axis so far. Errors: shape_error T04.
  void push_extent(std::int64_t extent, std::int64_t stride) {
    std::int64_t most = max_elems;
    for (int axis = 0; axis < rank_; ++axis) most /= extents_[axis] > 0 ? extents_[axis] : 1;
    if (rank_ == max_rank || extent < 0 || extent > most) {
      fail<shape_error>("pleat[T04]: axis ", rank_, " has extent ", extent, "; a tensor has at most ", max_rank,
                        " axes, each of extent 0 or more, and fewer than 2^60 elements");
    }
    extents_[rank_] = extent;
    strides_[rank_] = stride;
    ++rank_;
  }

  /// Makes it one that may only be read.
  void set_read_only() { is_read_only_ = true; }
  /// Whether its memory is known to be one that may only be read: `as_writable` refuses it, `to_dlpack` lends it so.
  bool is_read_only() const { return is_read_only_; }

  void* data() const { return data_; }
  DType dtype() const { return dtype_; }
  Device device() const { return device_; }
  int rank() const { return rank_; }
  std::int64_t extent(int axis) const { return extents_[axis]; }
  std::int64_t stride(int axis) const { return strides_[axis]; }

  std::int64_t elems() const {
    std::int64_t product = 1;
    for (int axis = 0; axis < rank_; ++axis) product *= extents_[axis];
    return product;
  }
  /// Whether the elements lie row-major without gaps.
  bool is_contiguous() const {
    std::int64_t expected = 1;
    for (int axis = rank_ - 1; axis >= 0; --axis) {
      if (extents_[axis] != 1 && strides_[axis] != expected) return elems() == 0;
      expected *= extents_[axis];
    }
    return true;
  }

  /// The data as `T`. Errors: shape_error T05 when the dtype is another one.
  template <element T>
  T* as() const {
    if (dtype_ != dtype_of<T>) {
      fail<shape_error>("pleat[T05]: a tensor of dtype ", dtype_, " was read as ", dtype_of<T>);
    }
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
  DType dtype_ = DType::f32;
  bool is_read_only_ = false;
  Device device_;
  int rank_ = 0;
  std::int64_t extents_[max_rank] = {};
  std::int64_t strides_[max_rank] = {};
};

inline void append_to(Message& message, const TensorRef& tensor) {
  message.append(name_of(tensor.dtype())).append(" [");
  for (int axis = 0; axis < tensor.rank(); ++axis) {
    if (axis != 0) message.append(", ");
    message.append(tensor.extent(axis));
  }
  message.append("] on ");
  append_to(message, tensor.device());
}

}  // namespace pleat::inline v0
