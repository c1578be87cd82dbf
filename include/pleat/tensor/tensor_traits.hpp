// tensor_traits: the one customization point, by which pleat reads the user's own tensor type.
#pragma once

#include <concepts>
#include <ranges>

#include <pleat/tensor/tensor_ref.hpp>

namespace pleat::inline v0 {

/// Specialize for your tensor type `T`; everything is read at run time:
///
///     template <> struct pleat::tensor_traits<my::Tensor> {
///       static void* data(const my::Tensor& t);
///       static int rank(const my::Tensor& t);
///       static std::int64_t extent(const my::Tensor& t, int axis);
///       static std::int64_t stride(const my::Tensor& t, int axis);   // in elements
///       static pleat::DType dtype(const my::Tensor& t);
///       static pleat::Device device(const my::Tensor& t);            // {kind, index}
///       static bool is_read_only(const my::Tensor& t);               // may be left out: not known to be
///       static constexpr pleat::OnlyOn<my::Tensor> only_on{...};     // may be left out: the DeviceKind of all of them
///     };
///
/// Shipped: TensorRef, contiguous ranges (std::span, std::vector, std::array; one axis) and mdspan-like types.
template <class T>
struct tensor_traits;

/// Where all tensors of type `T` are. Traits of another type that derive from those of `T` do not say it of theirs.
template <class T>
struct OnlyOn {
  DeviceKind kind;
};

/// A type that pleat can read as a tensor, by `tensor_traits`.
template <class T>
concept tensor = requires(const std::remove_cvref_t<T>& t, int axis) {
  { tensor_traits<std::remove_cvref_t<T>>::data(t) } -> std::convertible_to<void*>;
  { tensor_traits<std::remove_cvref_t<T>>::rank(t) } -> std::convertible_to<int>;
  { tensor_traits<std::remove_cvref_t<T>>::extent(t, axis) } -> std::convertible_to<std::int64_t>;
  { tensor_traits<std::remove_cvref_t<T>>::stride(t, axis) } -> std::convertible_to<std::int64_t>;
  { tensor_traits<std::remove_cvref_t<T>>::dtype(t) } -> std::convertible_to<DType>;
  { tensor_traits<std::remove_cvref_t<T>>::device(t) } -> std::convertible_to<Device>;
};

/// A TensorRef is what it says.
template <>
struct tensor_traits<TensorRef> {
  static void* data(const TensorRef& t) { return t.data(); }
  static int rank(const TensorRef& t) { return t.rank(); }
  static std::int64_t extent(const TensorRef& t, int axis) { return t.extent(axis); }
  static std::int64_t stride(const TensorRef& t, int axis) { return t.stride(axis); }
  static DType dtype(const TensorRef& t) { return t.dtype(); }
  static Device device(const TensorRef& t) { return t.device(); }
  static bool is_read_only(const TensorRef& t) { return t.is_read_only(); }
};

/// A contiguous range on the host is a tensor [size].
template <std::ranges::contiguous_range R>
requires std::ranges::sized_range<R> && element<std::ranges::range_value_t<R>>
struct tensor_traits<R> {
  static void* data(const R& t) {
    return const_cast<std::remove_const_t<std::ranges::range_value_t<R>>*>(std::ranges::data(t));
  }
  static int rank(const R&) { return 1; }
  static std::int64_t extent(const R& t, int) { return static_cast<std::int64_t>(std::ranges::size(t)); }
  static std::int64_t stride(const R&, int) { return 1; }
  static DType dtype(const R&) { return dtype_of<std::ranges::range_value_t<R>>; }
  static constexpr OnlyOn<R> only_on{DeviceKind::host};
  static Device device(const R&) { return {only_on.kind}; }
  static bool is_read_only(const R&) {
    return std::is_const_v<std::remove_reference_t<std::ranges::range_reference_t<R>>>;
  }
};

/// Anything with the members of std::mdspan (Kokkos' and cuda::std's too) and elements behind a pointer: read as host
/// memory. An accessor with another kind of handle needs a specialization of its own.
template <class T>
concept mdspan_like = element<typename T::value_type> && requires(const T& t) {
  typename T::extents_type;
  { t.rank() } -> std::convertible_to<std::size_t>;
  { t.extent(0) } -> std::convertible_to<std::int64_t>;
  { t.stride(0) } -> std::convertible_to<std::int64_t>;
  { t.data_handle() } -> std::convertible_to<const typename T::value_type*>;
};
template <mdspan_like T>
struct tensor_traits<T> {
  static void* data(const T& t) {
    const typename T::value_type* const elements = t.data_handle();
    return const_cast<std::remove_const_t<typename T::value_type>*>(elements);
  }
  static int rank(const T& t) { return static_cast<int>(t.rank()); }
  static std::int64_t extent(const T& t, int axis) {
    return static_cast<std::int64_t>(t.extent(static_cast<std::size_t>(axis)));
  }
  static std::int64_t stride(const T& t, int axis) {
    return static_cast<std::int64_t>(t.stride(static_cast<std::size_t>(axis)));
  }
  static DType dtype(const T&) { return dtype_of<typename T::value_type>; }
  static constexpr OnlyOn<T> only_on{DeviceKind::host};
  static Device device(const T&) { return {only_on.kind}; }
  static bool is_read_only(const T& t) {
    return !std::is_convertible_v<decltype(t.data_handle()), typename T::value_type*>;
  }
};

/// Reads any tensor into a TensorRef.
template <class T>
TensorRef as_tensor(const T& t) {
  static_assert(tensor<T>,
                "pleat[T06]: this type is no tensor: specialize pleat::tensor_traits for it (include "
                "pleat/tensor/tensor_traits.hpp), or pass a TensorRef{pointer, {extents...}}");
  if constexpr (tensor<T>) {
    using traits = tensor_traits<T>;
    TensorRef ref(traits::data(t), traits::dtype(t), {}, traits::device(t));
    for (int axis = 0; axis < traits::rank(t); ++axis)
      ref.push_extent(traits::extent(t, axis), traits::stride(t, axis));
    if constexpr (requires { traits::is_read_only(t); }) {
      if (traits::is_read_only(t)) ref.set_read_only();
    }
    return ref;
  } else {
    return {};
  }
}

/// The same for an operation on a device of `kind`. Errors: static T07 for a type that is never there.
template <class T, DeviceKind kind>
TensorRef as_tensor(const T& t, std::integral_constant<DeviceKind, kind>) {
  if constexpr (requires { requires std::same_as<decltype(tensor_traits<T>::only_on), const OnlyOn<T>>; }) {
    static_assert(
        tensor_traits<T>::only_on.kind == kind,
        "pleat[T07]: tensors of this type are never on the device of the operation, as tensor_traits::only_on "
        "says: copy the data there and pass a TensorRef{pointer, {extents...}, device}");
  }
  return as_tensor(t);
}
/// The same where the kind is known at run time: the caller compares.
template <class T>
TensorRef as_tensor(const T& t, DeviceKind) {
  return as_tensor(t);
}

/// The same for a tensor that is to be written, which `what` names. Errors: shape_error T12 when it may only be read.
template <class T>
TensorRef as_writable(const char* what, const T& t) {
  const TensorRef ref = as_tensor(t);
  if (ref.is_read_only()) {
    fail<shape_error>("pleat[T12]: ", what, " is ", ref, ", which may only be read; pass memory that may be written");
  }
  return ref;
}
/// The same for an operation on a device of `kind`. Errors: shape_error T12; static T07.
template <class T, class Kind>
TensorRef as_writable(const char* what, const T& t, Kind kind) {
  return as_writable(what, as_tensor(t, kind));
}

/// A dimension that `expect` does not check.
inline constexpr std::int64_t any_extent = -1;

/// Reads the tensor that `what` names and checks it against what an operation needs. `kind`: a DeviceKind, or a
/// `KnownDevice`, with which a type that is never there does not compile.
/// Errors: shape_error T07 naming the tensor, what it is and what it must be; static T07.
template <class T, class Kind>
TensorRef expect(const char* what, const T& t, DType dtype, Kind kind, std::initializer_list<std::int64_t> extents) {
  const DeviceKind device = kind;
  const TensorRef ref = as_tensor(t, kind);
  bool fits = ref.dtype() == dtype && ref.device().kind == device && ref.rank() == static_cast<int>(extents.size());
  int axis = 0;
  for (auto e = extents.begin(); fits && e != extents.end(); ++e, ++axis) {
    fits = *e == any_extent || *e == ref.extent(axis);
  }
  if (!fits) {
    Message wanted;
    wanted.append(name_of(dtype)).append(" [");
    for (auto e = extents.begin(); e != extents.end(); ++e) {
      if (e != extents.begin()) wanted.append(", ");
      if (*e == any_extent) {
        wanted.append("any");
      } else {
        wanted.append(*e);
      }
    }
    wanted.append(device == DeviceKind::host ? "] on host" : "] on cuda");
    fail<shape_error>("pleat[T07]: ", what, " is ", ref, "; it must be ", wanted.c_str());
  }
  return ref;
}

}  // namespace pleat::inline v0
