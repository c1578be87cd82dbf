// expect: pleat[T06]: this type is no tensor: specialize pleat::tensor_traits for it
// values: Matrix
#include <pleat/tensor/tensor_traits.hpp>

struct Matrix {
  float* data;
  int rows;
};
#ifdef PLEAT_FIXED
template <>
struct pleat::tensor_traits<Matrix> {
  static void* data(const Matrix& t) { return t.data; }
  static int rank(const Matrix&) { return 1; }
  static std::int64_t extent(const Matrix& t, int) { return t.rows; }
  static std::int64_t stride(const Matrix&, int) { return 1; }
  static DType dtype(const Matrix&) { return DType::f32; }
  static Device device(const Matrix&) { return {}; }
};
#endif

auto f(const Matrix& matrix) {
  return pleat::as_tensor(matrix);
}
