// DLPack, in and out: a tensor of any framework is read in place, and ours are lent with what owns their memory.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

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

/// What DLPack passes from owner to owner: `DLManagedTensor` and `DLManagedTensorVersioned`.
template <class T>
concept dl_managed_tensor = requires(T& t) {
  requires dl_tensor<decltype(t.dl_tensor)>;
  { t.manager_ctx } -> std::convertible_to<void*>;
  t.deleter = static_cast<void (*)(T*)>(nullptr);
};

/// Strides may be null (row-major). Errors: shape_error T08 for a dtype or a device that pleat has none for, a shape
/// that is not there, and elements without data or not aligned to their size.
template <dl_tensor T>
struct tensor_traits<T> {
  static void* data(const T& t) {
    bool has_elems = true;
    for (int axis = 0; axis < rank(t); ++axis) has_elems = has_elems && t.shape[axis] != 0;
    if (!has_elems) return t.data;
    if (t.data == nullptr) fail<shape_error>("pleat[T08]: a DLPack tensor has elements, but its data is null");
    const std::size_t alignment = size_bytes(dtype(t));
    if ((reinterpret_cast<std::uintptr_t>(t.data) + t.byte_offset) % alignment != 0) {
      fail<shape_error>("pleat[T08]: DLPack data with byte_offset ", t.byte_offset, " of ", dtype(t),
                        " is not aligned; valid: addresses that are multiples of ", alignment);
    }
    return static_cast<std::byte*>(t.data) + t.byte_offset;
  }
  static int rank(const T& t) {
    const int axes = static_cast<int>(t.ndim);
    if (axes < 0 || (axes > 0 && t.shape == nullptr)) {
      fail<shape_error>("pleat[T08]: a DLPack tensor of ", axes, " axes", axes < 0 ? "" : " without a shape",
                        "; valid: 0 axes or more, with a shape where there are any");
    }
    return axes;
  }
  static std::int64_t extent(const T& t, int axis) { return t.shape[axis]; }
  static std::int64_t stride(const T& t, int axis) {
    if (t.strides != nullptr) return t.strides[axis];
    std::uint64_t stride = 1;  // may wrap, until an extent is refused for it
    for (int inner = rank(t) - 1; inner > axis; --inner) stride *= static_cast<std::uint64_t>(t.shape[inner]);
    return static_cast<std::int64_t>(stride);
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
    if (type == 2 || type == 13) {
      if (index < 0) fail<shape_error>("pleat[T08]: DLPack device ", index, " of CUDA; valid: 0 and more");
      return {DeviceKind::cuda, index};
    }
    fail<shape_error>("pleat[T08]: DLPack device type ", type, " is neither host (1, 3) nor CUDA (2, 13)");
  }
};

/// In, with ownership: holds a tensor that another framework has given away and calls its deleter at the end. A tensor
/// itself; ask for one that is to be written with `as_writable`, which refuses a read-only one. Whoever enqueues work
/// on it keeps it until that work is done; see cuda/dlpack.hpp for streams.
template <dl_managed_tensor Managed>
class DlOwned {
 public:
  /// Takes `given`; one that cannot be read is given back to its deleter. Errors: shape_error T08 when it is null, or
  /// of a DLPack whose layout is another.
  explicit DlOwned(Managed* given) : managed_(given) {
    if (given == nullptr) fail<shape_error>("pleat[T08]: no DLPack tensor was given: the pointer is null");
    if constexpr (requires { given->version.major; }) {
      if (given->version.major != 1) {
        fail<shape_error>("pleat[T08]: DLPack tensor of version ", static_cast<int>(given->version.major), ".",
                          static_cast<int>(given->version.minor), "; valid: 1");
      }
    }
  }
  /// Errors: shape_error T08 when it was moved from.
  const auto& dl_tensor() const { return held().dl_tensor; }
  /// Whether its owner forbids to write it, where the struct says so. Errors: shape_error T08 when it was moved from.
  bool is_read_only() const {
    const Managed& managed = held();
    if constexpr (requires { managed.flags; }) return (managed.flags & 1U) != 0;
    return false;
  }

 private:
  const Managed& held() const {
    if (managed_ == nullptr) fail<shape_error>("pleat[T08]: a DLPack tensor was used after it was moved from");
    return *managed_;
  }
  struct Delete {
    void operator()(Managed* managed) const {
      if (managed->deleter != nullptr) managed->deleter(managed);
    }
  };
  std::unique_ptr<Managed, Delete> managed_;
};
/// As of the DLTensor that it owns.
template <class Managed>
struct tensor_traits<DlOwned<Managed>> {
  using view = std::remove_cvref_t<decltype(std::declval<Managed&>().dl_tensor)>;
  static void* data(const DlOwned<Managed>& t) { return tensor_traits<view>::data(t.dl_tensor()); }
  static int rank(const DlOwned<Managed>& t) { return tensor_traits<view>::rank(t.dl_tensor()); }
  static std::int64_t extent(const DlOwned<Managed>& t, int axis) {
    return tensor_traits<view>::extent(t.dl_tensor(), axis);
  }
  static std::int64_t stride(const DlOwned<Managed>& t, int axis) {
    return tensor_traits<view>::stride(t.dl_tensor(), axis);
  }
  static DType dtype(const DlOwned<Managed>& t) { return tensor_traits<view>::dtype(t.dl_tensor()); }
  static Device device(const DlOwned<Managed>& t) { return tensor_traits<view>::device(t.dl_tensor()); }
  static bool is_read_only(const DlOwned<Managed>& t) { return t.is_read_only(); }
};

namespace detail {
struct DlCode {
  int code;
  int bits;
};
constexpr DlCode dl_code(DType dtype) {
  const auto bits = static_cast<int>(8 * size_bytes(dtype));
  switch (dtype) {
    case DType::f64:
    case DType::f32:
    case DType::f16:
      return {2, bits};
    case DType::bf16:
      return {4, bits};
    case DType::i64:
    case DType::i32:
      return {0, bits};
    case DType::u8:
      return {1, bits};
  }
  return {-1, 0};
}

/// A tensor on its way, with what keeps its memory.
template <class Managed, class Owner>
struct DlLent {
  Managed managed{};
  std::int64_t extents[TensorRef::max_rank] = {};
  std::int64_t strides[TensorRef::max_rank] = {};
  Owner owner;
};
}  // namespace detail

/// Out: `tensor` as a new `Managed` for another framework, without a copy. `owner` is whatever keeps the memory alive
/// (a HostBuffer or CudaBuffer moved in, a shared_ptr); it is destroyed when the consumer calls the deleter, on any
/// thread. The consumer may read what it was lent, and write it unless it is read-only (const elements, a pointer to
/// const, a read-only DlOwned), on a stream that is ordered after what has written it: see cuda/dlpack.hpp.
/// Errors: shape_error T08 for elements without data, T12 for read-only ones as a `Managed` without flags.
template <dl_managed_tensor Managed, class T, class Owner>
[[nodiscard]] Managed* to_dlpack(T&& tensor, Owner owner) {
  using Lent = detail::DlLent<Managed, Owner>;
  TensorRef from = as_tensor(tensor);
  if constexpr (std::ranges::contiguous_range<T>) {
    if (std::is_const_v<std::remove_reference_t<std::ranges::range_reference_t<T>>>) from.set_read_only();
  }
  constexpr bool has_flags = requires(Managed & managed) {
    managed.flags;
  };
  if (from.data() == nullptr && from.elems() != 0) {
    fail<shape_error>("pleat[T08]: ", from,
                      " is to be lent through DLPack, but its data is null; make the tensor "
                      "before what owns its memory is moved");
  }
  if (from.is_read_only() && !has_flags) {
    fail<shape_error>("pleat[T12]: ", from,
                      " may only be read, which this DLPack struct cannot say; lend it as a "
                      "DLManagedTensorVersioned, or a copy");
  }
  auto* const lent = new Lent{.owner = std::move(owner)};
  auto& to = lent->managed.dl_tensor;
  const auto set = [](auto& field, auto value) { field = static_cast<std::remove_cvref_t<decltype(field)>>(value); };
  const detail::DlCode code = detail::dl_code(from.dtype());
  to.data = from.data();
  set(to.device.device_type, from.device().kind == DeviceKind::host ? 1 : 2);
  set(to.device.device_id, from.device().index);
  set(to.ndim, from.rank());
  set(to.dtype.code, code.code);
  set(to.dtype.bits, code.bits);
  set(to.dtype.lanes, 1);
  for (int axis = 0; axis < from.rank(); ++axis) {
    lent->extents[axis] = from.extent(axis);
    lent->strides[axis] = from.stride(axis);
  }
  to.shape = lent->extents;
  to.strides = lent->strides;
  to.byte_offset = 0;
  if constexpr (requires { lent->managed.version.major; }) lent->managed.version = {1, 0};
  if constexpr (has_flags) set(lent->managed.flags, from.is_read_only() ? 1 : 0);
  lent->managed.manager_ctx = lent;
  lent->managed.deleter = [](Managed* managed) { delete static_cast<Lent*>(managed->manager_ctx); };
  return &lent->managed;
}

}  // namespace pleat::inline v0
