// expect: pleat[T06]: this type is no tensor: specialize pleat::tensor_traits for it
// values: float
#include <pleat/tensor/tensor_traits.hpp>

auto f(float* data) {
#ifdef PLEAT_FIXED
  return pleat::expect("q", pleat::TensorRef(data, {4}), pleat::DType::f32, pleat::DeviceKind::host, {4});
#else
  return pleat::expect("q", data, pleat::DType::f32, pleat::DeviceKind::host, {4});  // a bare pointer has no extents
#endif
}
