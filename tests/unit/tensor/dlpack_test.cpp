// DLPack: a DLTensor is a tensor, with null strides, offsets, dtypes and devices; owners come in and go out once.
#include <pleat/tensor/dlpack.hpp>

#include <cstdint>
#include <memory>
#include <vector>

#include "support/dlpack.hpp"

#include <doctest/doctest.h>

namespace {

using namespace pleat;

static_assert(dl_tensor<DLTensor> && tensor<DLTensor>);
static_assert(dl_managed_tensor<DLManagedTensor> && dl_managed_tensor<DLManagedTensorVersioned>);
static_assert(tensor<DlOwned<DLManagedTensor>> && !dl_managed_tensor<DLTensor>);

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

TEST_CASE("T08: elements without data, at any byte_offset") {
  Case given;
  given.tensor.data = nullptr;
  for (const std::uint64_t offset : {0, 64}) {
    given.tensor.byte_offset = offset;
    for (const int ndim : {3, 0}) {
      given.tensor.ndim = ndim;
      CHECK_THROWS_WITH_AS(as_tensor(given.tensor), "pleat[T08]: a DLPack tensor has elements, but its data is null",
                           shape_error);
    }
  }
  given.tensor.ndim = 3;
  given.shape[1] = 0;
  CHECK(as_tensor(given.tensor).data() == nullptr);
  CHECK(as_tensor(given.tensor).elems() == 0);
}

TEST_CASE("T08: axes without a shape, and fewer than none") {
  Case given;
  given.tensor.shape = nullptr;
  CHECK_THROWS_WITH_AS(as_tensor(given.tensor),
                       "pleat[T08]: a DLPack tensor of 3 axes without a shape; valid: 0 axes or more, with a shape "
                       "where there are any",
                       shape_error);
  given.tensor.ndim = 0;
  CHECK(as_tensor(given.tensor).rank() == 0);
  given.tensor.shape = given.shape;
  given.tensor.ndim = -1;
  CHECK_THROWS_WITH_AS(as_tensor(given.tensor),
                       "pleat[T08]: a DLPack tensor of -1 axes; valid: 0 axes or more, with a shape where there are "
                       "any",
                       shape_error);
}

TEST_CASE("T08: elements that are not aligned to their size") {
  Case given;
  given.tensor.byte_offset = 3;
  CHECK_THROWS_WITH_AS(as_tensor(given.tensor),
                       "pleat[T08]: DLPack data with byte_offset 3 of f32 is not aligned; valid: addresses that are "
                       "multiples of 4",
                       shape_error);
  given.tensor.data = reinterpret_cast<std::byte*>(given.data) + 1;  // what counts is where the elements begin
  CHECK(as_tensor(given.tensor).data() == given.data + 1);
  given.tensor.byte_offset = 0;
  CHECK_THROWS_AS(as_tensor(given.tensor), shape_error);
  given.shape[0] = 0;
  CHECK(as_tensor(given.tensor).elems() == 0);
}

TEST_CASE("T08: a CUDA device below 0") {
  Case given;
  for (const DLDeviceType type : {kDLCUDA, kDLCUDAManaged}) {
    given.tensor.device = {type, -1};
    CHECK_THROWS_WITH_AS(as_tensor(given.tensor), "pleat[T08]: DLPack device -1 of CUDA; valid: 0 and more",
                         shape_error);
  }
}

int deleted = 0;
template <class Managed>
Managed managed_of(const Case& given) {
  Managed managed{};
  managed.dl_tensor = given.tensor;
  managed.deleter = [](Managed*) { ++deleted; };
  return managed;
}

TEST_CASE("a tensor that is given away goes back to its deleter once") {
  const Case given;
  auto managed = managed_of<DLManagedTensor>(given);
  deleted = 0;
  {
    DlOwned first(&managed);
    DlOwned second = std::move(first);
    const TensorRef ref = as_tensor(second);
    CHECK(ref.data() == given.data);
    CHECK(ref.stride(0) == 12);
    CHECK(ref.dtype() == DType::f32);
    CHECK(ref.device() == Device{});
    CHECK_FALSE(second.is_read_only());
    CHECK(deleted == 0);
    // NOLINTBEGIN(bugprone-use-after-move): that is what is refused
    const char* const moved = "pleat[T08]: a DLPack tensor was used after it was moved from";
    CHECK_THROWS_WITH_AS(as_tensor(first), moved, shape_error);
    CHECK_THROWS_WITH_AS((void)first.is_read_only(), moved, shape_error);
    // NOLINTEND(bugprone-use-after-move)
  }
  CHECK(deleted == 1);
  managed.deleter = nullptr;  // its owner wants no word
  { const DlOwned without(&managed); }
  CHECK(deleted == 1);
}

TEST_CASE("[T08]: versions and flags of a versioned tensor") {
  const Case given;
  auto managed = managed_of<DLManagedTensorVersioned>(given);
  managed.version = {1, 3};
  managed.flags = 1;
  deleted = 0;
  CHECK(DlOwned(&managed).is_read_only());
  managed.flags = 2;
  CHECK_FALSE(DlOwned(&managed).is_read_only());
  CHECK(deleted == 2);
  managed.version = {2, 0};
  const auto take = [](auto* any) { const DlOwned owned(any); };
  CHECK_THROWS_WITH_AS(take(&managed), "pleat[T08]: DLPack tensor of version 2.0; valid: 1", shape_error);
  CHECK(deleted == 3);  // what cannot be read goes back all the same
  CHECK_THROWS_WITH_AS(take(static_cast<DLManagedTensor*>(nullptr)),
                       "pleat[T08]: no DLPack tensor was given: the pointer is null", shape_error);
}

TEST_CASE_TEMPLATE("a tensor that is lent holds its owner until the deleter is called", Managed, DLManagedTensor,
                   DLManagedTensorVersioned) {
  auto memory = std::make_shared<std::vector<bfloat16>>(64);
  const std::weak_ptr<std::vector<bfloat16>> watched = memory;
  TensorRef tensor(memory->data(), DType::bf16, {});
  tensor.push_extent(3, 20);
  tensor.push_extent(5, 2);
  auto* const lent = to_dlpack<Managed>(tensor, std::move(memory));
  const DLTensor& out = lent->dl_tensor;
  CHECK(out.data == tensor.data());
  CHECK(out.byte_offset == 0);
  CHECK(out.ndim == 2);
  CHECK(out.shape[0] == 3);
  CHECK(out.strides[1] == 2);
  CHECK(out.dtype.code == kDLBfloat);
  CHECK(out.dtype.bits == 16);
  CHECK(out.dtype.lanes == 1);
  CHECK(out.device.device_type == kDLCPU);
  if constexpr (requires { lent->version; }) {
    CHECK(lent->version.major == 1);
    CHECK(lent->flags == 0);
  }
  CHECK_FALSE(watched.expired());
  lent->deleter(lent);
  CHECK(watched.expired());
}

TEST_CASE("T04: more elements than can be counted, with strides that are not there") {
  Case given;
  for (std::int64_t& extent : given.shape) extent = std::int64_t{1} << 40;
  CHECK_THROWS_AS(as_tensor(given.tensor), shape_error);
  given.tensor.ndim = 2;
  CHECK_THROWS_AS(as_tensor(given.tensor), shape_error);
}

std::uint64_t lent_flags(DLManagedTensorVersioned* lent) {
  return DlOwned(lent).is_read_only() ? 1 : 0;
}

TEST_CASE("T12: what may only be read stays so") {
  const Case given;
  auto managed = managed_of<DLManagedTensorVersioned>(given);
  managed.version = {1, 0};
  managed.flags = 1;
  DlOwned owned(&managed);
  const TensorRef ref = as_tensor(owned);
  CHECK(ref.is_read_only());
  CHECK_THROWS_WITH_AS(as_writable("out", owned),
                       "pleat[T12]: out is f32 [2, 3, 4] on host, which may only be read; pass memory that may be "
                       "written",
                       shape_error);
  CHECK_THROWS_WITH_AS((void)to_dlpack<DLManagedTensor>(owned, 0),
                       "pleat[T12]: f32 [2, 3, 4] on host may only be read, which this DLPack struct cannot say; lend "
                       "it as a DLManagedTensorVersioned, or a copy",
                       shape_error);
  CHECK(lent_flags(to_dlpack<DLManagedTensorVersioned>(owned, 0)) == 1);
  CHECK(lent_flags(to_dlpack<DLManagedTensorVersioned>(ref, std::move(owned))) == 1);

  std::vector<float> vector(8);
  const std::vector<float> constant(8);
  CHECK(lent_flags(to_dlpack<DLManagedTensorVersioned>(vector, 0)) == 0);
  CHECK(lent_flags(to_dlpack<DLManagedTensorVersioned>(constant, 0)) == 1);
  CHECK(lent_flags(to_dlpack<DLManagedTensorVersioned>(TensorRef(constant.data(), {8}), 0)) == 1);
  CHECK(lent_flags(to_dlpack<DLManagedTensorVersioned>(given.tensor, 0)) == 0);  // a DLTensor has no word for it
  CHECK_THROWS_AS((void)to_dlpack<DLManagedTensor>(constant, 0), shape_error);
}

TEST_CASE("T08: elements without data are not lent") {
  CHECK_THROWS_WITH_AS((void)to_dlpack<DLManagedTensor>(TensorRef(nullptr, DType::f32, {4}), 0),
                       "pleat[T08]: f32 [4] on host is to be lent through DLPack, but its data is null; make the "
                       "tensor before what owns its memory is moved",
                       shape_error);
  const DlOwned empty(to_dlpack<DLManagedTensor>(TensorRef(nullptr, DType::f32, {0}), 0));
  CHECK(as_tensor(empty).elems() == 0);
}

TEST_CASE("what goes out comes in as it was, for every dtype and device") {
  for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16, DType::i64, DType::i32, DType::u8}) {
    for (const Device device : {Device{}, Device{DeviceKind::cuda, 3}}) {
      alignas(8) std::byte memory[8 * 6];
      const TensorRef out(memory, dtype, {2, 3}, device);
      const DlOwned back(to_dlpack<DLManagedTensor>(out, 0));
      const TensorRef in = as_tensor(back);
      CHECK(in.data() == memory);
      CHECK(in.dtype() == dtype);
      CHECK(in.device() == device);
      CHECK(in.rank() == 2);
      CHECK(in.extent(1) == 3);
      CHECK(in.is_contiguous());
    }
  }
}

}  // namespace
