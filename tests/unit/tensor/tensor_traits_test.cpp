// tensor_traits: what ships, a hand-made mdspan, a type that is as odd as can be, and what expect() says.
#include <pleat/tensor/tensor_traits.hpp>

#include <array>
#include <span>
#include <string>
#include <vector>

#include <doctest/doctest.h>

namespace odd {

struct Ticket {};
/// What a framework's tensor may look like at its worst: no default constructor, no copies, private data, conversions
/// that must be asked for, operators that lie.
class Tensor {
 public:
  Tensor(Ticket, double* data, long rows) : data_(data), rows_(rows) {}
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;
  const Tensor* operator&() const = delete;
  template <class Any>
  void operator,(const Any&) const = delete;
  bool operator==(const Tensor&) const = delete;
  explicit operator bool() const = delete;
  explicit operator double*() const { return data_; }
  explicit operator long() const { return rows_; }

 private:
  double* data_;
  long rows_;
};
template <class Any>
void operator,(const Any&, const Tensor&) = delete;

}  // namespace odd

namespace odd {
struct HalfTensor {};
}  // namespace odd
/// A specialization that lacks members is no hook.
template <>
struct pleat::tensor_traits<odd::HalfTensor> {
  static void* data(const odd::HalfTensor&) { return nullptr; }
};

namespace odd {
/// An mdspan on a GPU, whose traits are those of any mdspan but for the device.
struct GpuSpan {
  using value_type = float;
  using extents_type = int;
  std::size_t rank() const { return 1; }
  std::size_t extent(std::size_t) const { return 2; }
  std::size_t stride(std::size_t) const { return 1; }
  float* data_handle() const { return nullptr; }
};
struct GpuSpanOfOurs : GpuSpan {};
}  // namespace odd
template <>
struct pleat::tensor_traits<odd::GpuSpanOfOurs> : pleat::tensor_traits<odd::GpuSpan> {
  static Device device(const odd::GpuSpanOfOurs&) { return {DeviceKind::cuda, 1}; }
};

// The hook, in under 15 lines.
template <>
struct pleat::tensor_traits<odd::Tensor> {
  static void* data(const odd::Tensor& t) { return static_cast<double*>(t); }
  static int rank(const odd::Tensor&) { return 2; }
  static std::int64_t extent(const odd::Tensor& t, int axis) { return axis == 0 ? static_cast<long>(t) : 3; }
  static std::int64_t stride(const odd::Tensor&, int axis) { return axis == 0 ? 3 : 1; }
  static DType dtype(const odd::Tensor&) { return DType::f64; }
  static Device device(const odd::Tensor&) { return {DeviceKind::cuda, 1}; }
};

namespace {

using namespace pleat;

/// The members of std::mdspan, with any strides.
template <class T, std::size_t Rank>
struct StridedSpan {
  using value_type = std::remove_cv_t<T>;
  using element_type = T;
  struct extents_type {};

  T* pointer;
  std::array<std::size_t, Rank> extents, strides;

  static constexpr std::size_t rank() { return Rank; }
  std::size_t extent(std::size_t axis) const { return extents[axis]; }
  std::size_t stride(std::size_t axis) const { return strides[axis]; }
  T* data_handle() const { return pointer; }
};

/// What an mdspan with an accessor of its own may hold: elements in two banks, found by a number.
struct BankedSpan : StridedSpan<float, 1> {
  struct Handle {
    int bank;
  };
  Handle data_handle() const { return {1}; }
};

struct NoTensor {
  float* data;
};

static_assert(tensor<TensorRef> && tensor<std::vector<float>> && tensor<std::span<const bfloat16>> &&
              tensor<std::array<double, 4>> && tensor<float[4]> && tensor<const std::vector<float>&> &&
              tensor<odd::Tensor> && tensor<StridedSpan<const float, 3>>);
static_assert(!tensor<NoTensor> && !tensor<BankedSpan> && !tensor<odd::HalfTensor> && !tensor<int> && !tensor<float*> &&
              !tensor<std::vector<bool>> && !tensor<std::vector<short>> && !tensor<std::string> &&
              !tensor<std::vector<std::vector<float>>>);

TEST_CASE("contiguous ranges are tensors of one axis") {
  std::vector<float> vector = {1, 2, 3};
  const std::vector<std::int64_t> ids = {4, 5};
  std::array<bfloat16, 4> array{};
  double plain[2] = {};
  const TensorRef a = as_tensor(vector), b = as_tensor(ids), c = as_tensor(array), d = as_tensor(plain),
                  e = as_tensor(std::span<const float>(vector).subspan(1));
  CHECK(a.data() == vector.data());
  CHECK(a.extent(0) == 3);
  CHECK(a.stride(0) == 1);
  CHECK(a.rank() == 1);
  CHECK(a.device() == Device{});
  CHECK(b.dtype() == DType::i64);
  CHECK(b.data() == static_cast<const void*>(ids.data()));
  CHECK(c.dtype() == DType::bf16);
  CHECK(c.extent(0) == 4);
  CHECK(d.dtype() == DType::f64);
  CHECK(d.extent(0) == 2);
  CHECK(e.data() == vector.data() + 1);
  CHECK(e.elems() == 2);
  CHECK(as_tensor(std::vector<float>{}).elems() == 0);
  CHECK(as_tensor(std::array<float, 0>{}).elems() == 0);
}

TEST_CASE("an mdspan keeps its strides") {
  float data[64] = {};
  const StridedSpan<const float, 3> span{data + 2, {2, 3, 4}, {1, 16, 2}};
  const TensorRef ref = as_tensor(span);
  CHECK(ref.data() == data + 2);
  CHECK(ref.dtype() == DType::f32);
  CHECK(ref.rank() == 3);
  for (int axis = 0; axis < 3; ++axis) {
    const auto at = static_cast<std::size_t>(axis);
    CHECK(ref.extent(axis) == static_cast<std::int64_t>(span.extents[at]));
    CHECK(ref.stride(axis) == static_cast<std::int64_t>(span.strides[at]));
  }
  CHECK_FALSE(ref.is_contiguous());
  CHECK(as_tensor(StridedSpan<double, 0>{nullptr, {}, {}}).elems() == 1);
  CHECK_THROWS_AS(as_tensor(StridedSpan<float, 7>{data, {1, 1, 1, 1, 1, 1, 1}, {1, 1, 1, 1, 1, 1, 1}}), shape_error);
}

TEST_CASE("a TensorRef is itself") {
  float data[6];
  const TensorRef ref = as_tensor(TensorRef(data, {2, 3}));
  CHECK(ref.data() == data);
  CHECK(ref.stride(0) == 3);
}

TEST_CASE("the odd tensor is read through its hook alone") {
  double data[6] = {};
  const odd::Tensor tensor({}, data, 2);
  const TensorRef ref = expect("grad", tensor, DType::f64, DeviceKind::cuda, {2, 3});
  CHECK(ref.data() == data);
  CHECK(ref.extent(0) == 2);
  CHECK(ref.device().index == 1);
  CHECK_THROWS_WITH_AS(expect("grad", tensor, DType::f64, DeviceKind::host, {2, 3}),
                       "pleat[T07]: grad is f64 [2, 3] on cuda:1; it must be f64 [2, 3] on host", shape_error);
}

TEST_CASE("expect passes what fits, and any extent where it is told so") {
  float data[24];
  const TensorRef q(data, {2, 3, 4});
  CHECK(expect("q", q, DType::f32, DeviceKind::host, {2, 3, 4}).data() == data);
  CHECK(expect("q", q, DType::f32, DeviceKind::host, {any_extent, 3, any_extent}).extent(0) == 2);
  CHECK(expect("scalar", TensorRef(data, {}), DType::f32, DeviceKind::host, {}).rank() == 0);
  CHECK(expect("empty", std::vector<float>{}, DType::f32, DeviceKind::host, {0}).elems() == 0);
}

TEST_CASE("only_on holds for the type that it names, not for traits that derive from it") {
  const TensorRef ref = expect("q", odd::GpuSpanOfOurs(), DType::f32, KnownDevice<cuda_device>(), {2});
  CHECK(ref.device() == Device{DeviceKind::cuda, 1});
  CHECK_THROWS_WITH_AS(expect("q", odd::GpuSpanOfOurs(), DType::f32, KnownDevice<host_device>(), {2}),
                       "pleat[T07]: q is f32 [2] on cuda:1; it must be f32 [2] on host", shape_error);
}

TEST_CASE("T12: a tensor that may only be read is not one to write") {
  float data[24] = {};
  std::vector<float> vector(3);
  const TensorRef input(static_cast<const float*>(data), {2, 3, 4});
  CHECK(as_tensor(input).is_read_only());
  CHECK_THROWS_WITH_AS(as_writable("out", input),
                       "pleat[T12]: out is f32 [2, 3, 4] on host, which may only be read; pass memory that may be "
                       "written",
                       shape_error);
  CHECK_THROWS_AS(as_writable("out", std::span<const float>(vector)), shape_error);
  CHECK_THROWS_AS(as_writable("out", StridedSpan<const float, 1>{data, {3}, {1}}), shape_error);
  CHECK(as_writable("out", TensorRef(data, {2, 3, 4})).data() == data);
  CHECK(as_writable("out", vector).data() == vector.data());
  CHECK(as_writable("out", std::span<float>(vector)).data() == vector.data());
  CHECK(as_writable("out", StridedSpan<float, 1>{data, {3}, {1}}).data() == data);
  CHECK(as_writable("out", odd::Tensor({}, nullptr, 0)).elems() == 0);
}

TEST_CASE("T07 names the tensor, what it is and what it must be") {
  float data[24];
  const TensorRef q(data, {2, 3, 4});
  CHECK_THROWS_WITH_AS(expect("q", q, DType::bf16, DeviceKind::host, {2, 3, 4}),
                       "pleat[T07]: q is f32 [2, 3, 4] on host; it must be bf16 [2, 3, 4] on host", shape_error);
  CHECK_THROWS_WITH_AS(expect("q", q, DType::f32, DeviceKind::cuda, {2, 3, 4}),
                       "pleat[T07]: q is f32 [2, 3, 4] on host; it must be f32 [2, 3, 4] on cuda", shape_error);
  CHECK_THROWS_WITH_AS(expect("q", q, DType::f32, DeviceKind::host, {any_extent, 3, 5}),
                       "pleat[T07]: q is f32 [2, 3, 4] on host; it must be f32 [any, 3, 5] on host", shape_error);
  CHECK_THROWS_WITH_AS(expect("q", q, DType::f32, DeviceKind::host, {24}),
                       "pleat[T07]: q is f32 [2, 3, 4] on host; it must be f32 [24] on host", shape_error);
  CHECK_THROWS_WITH_AS(expect("scale", std::vector<double>(3), DType::f64, DeviceKind::host, {}),
                       "pleat[T07]: scale is f64 [3] on host; it must be f64 [] on host", shape_error);
  CHECK_THROWS_AS(expect("q", q, DType::f32, DeviceKind::host, {2, 3}), shape_error);
  CHECK_THROWS_AS(expect("q", q, DType::f32, DeviceKind::host, {2, 3, 4, 1}), shape_error);
  CHECK_THROWS_AS(expect("q", q, DType::f32, DeviceKind::host, {0, 3, 4}), shape_error);
}

}  // namespace
