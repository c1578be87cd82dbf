// Copies by the tensor memory accelerator: boxes of a tensor to and from shared memory, and bulk adds into fp32.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <pleat/core/bfloat16.hpp>
#include <pleat/core/float16.hpp>
#include <pleat/cuda/driver.hpp>
#include <pleat/cuda/hopper/barrier.cuh>

namespace pleat::inline v0::hopper {

/// How the 16-byte pieces of a box's rows lie in shared memory. `b128`: rows of 128 bytes, and piece i of row r lies at
/// i ^ (r % 8); the box starts at a multiple of 1024 bytes. This is what the descriptors of wgmma.cuh read. `b64`: rows
/// of 64 bytes, i ^ (r / 2 % 4), 512 bytes.
enum class Swizzle {
  none = CU_TENSOR_MAP_SWIZZLE_NONE,
  b64 = CU_TENSOR_MAP_SWIZZLE_64B,
  b128 = CU_TENSOR_MAP_SWIZZLE_128B
};

/// A tensor in device memory as the copy engine sees it: axes from the contiguous one outwards, cut into boxes. Parts
/// of a box outside the tensor are loaded as 0 and not stored.
template <int Axes>
struct TensorBoxes {
  std::array<std::int64_t, Axes> extents;            ///< elements
  std::array<std::int64_t, Axes - 1> strides_bytes;  ///< of the axes after the first
  std::array<int, Axes> box;                         ///< elements, at most 256 each
};

/// Whether a tensor map can describe it: the base and the strides are multiples of 16 bytes, strides below 2^40.
template <int Axes>
bool is_mappable(const void* base, const TensorBoxes<Axes>& t) {
  bool fits = reinterpret_cast<std::uintptr_t>(base) % 16 == 0;
  for (int i = 0; i < Axes; ++i) {
    fits = fits && t.extents[i] > 0 && t.extents[i] < (std::int64_t{1} << 31);
    if (i == 0 || t.extents[i] == 1) continue;  // the stride of one row is never used
    const std::int64_t stride = t.strides_bytes[i - 1];
    fits = fits && stride >= 0 && stride % 16 == 0 && stride < (std::int64_t{1} << 40);
  }
  return fits;
}

namespace detail {
template <class T>
inline constexpr CUtensorMapDataType map_type = CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
template <>
inline constexpr CUtensorMapDataType map_type<bfloat16> = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
template <>
inline constexpr CUtensorMapDataType map_type<float16> = CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
}  // namespace detail

/// The tensor map of what `is_mappable`, of float, bfloat16 or float16. Passed to a kernel by value, as `const
/// __grid_constant__ CUtensorMap`. Errors: cuda_error C20.
template <class T, int Axes>
CUtensorMap tensor_map(const T* base, const TensorBoxes<Axes>& t, Swizzle swizzle) {
  static_assert(sizeof(T) == 2 || std::is_same_v<T, float>, "pleat: the copy engine knows float and 16-bit floats");
  cuuint64_t extents[Axes], strides[Axes - 1];
  cuuint32_t box[Axes], steps[Axes];
  for (int i = 0; i < Axes; ++i) {
    extents[i] = static_cast<cuuint64_t>(t.extents[i]);
    box[i] = static_cast<cuuint32_t>(t.box[i]);
    steps[i] = 1;
    if (i > 0) strides[i - 1] = t.extents[i] == 1 ? 16 : static_cast<cuuint64_t>(t.strides_bytes[i - 1]);
  }
  PFN_cuTensorMapEncodeTiled_v12000 encode = nullptr;
  CudaDriver::find(encode, "cuTensorMapEncodeTiled", 12000);
  CUtensorMap map;
  const CUresult status = encode(&map, detail::map_type<T>, Axes, const_cast<T*>(base), extents, strides, box, steps,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, static_cast<CUtensorMapSwizzle>(swizzle),
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    fail<cuda_error>("pleat[C20]: cuTensorMapEncodeTiled failed with status ", static_cast<int>(status));
  }
  return map;
}

/// Hints the copy engine to fetch the map; one thread.
__device__ inline void prefetch(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

/// Loads the box whose first element has these coordinates (contiguous axis first; they may lie outside the tensor) to
/// `to`, in shared memory, and reports its bytes (of the whole box) to `done`. One thread.
__device__ inline void load(void* to, const CUtensorMap& map, Barrier& done, int x0, int x1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::
          "r"(shared_address(to)),
      "l"(&map), "r"(shared_address(&done.word)), "r"(x0), "r"(x1)
      : "memory");
}
__device__ inline void load(void* to, const CUtensorMap& map, Barrier& done, int x0, int x1, int x2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
      "[%2];" ::"r"(shared_address(to)),
      "l"(&map), "r"(shared_address(&done.word)), "r"(x0), "r"(x1), "r"(x2)
      : "memory");
}
__device__ inline void load(void* to, const CUtensorMap& map, Barrier& done, int x0, int x1, int x2, int x3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(shared_address(to)),
      "l"(&map), "r"(shared_address(&done.word)), "r"(x0), "r"(x1), "r"(x2), "r"(x3)
      : "memory");
}
__device__ inline void load(void* to, const CUtensorMap& map, Barrier& done, int x0, int x1, int x2, int x3, int x4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, "
      "%7}], [%2];" ::"r"(shared_address(to)),
      "l"(&map), "r"(shared_address(&done.word)), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4)
      : "memory");
}

/// Hints that the box will be loaded soon: it moves to L2. One thread.
__device__ inline void prefetch(const CUtensorMap& map, int x0, int x1) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(&map), "r"(x0), "r"(x1)
               : "memory");
}

/// Copies `bytes`, a multiple of 16 between addresses that are, from device to shared memory. One thread.
__device__ inline void load_bytes(void* to, const void* from, Barrier& done, std::uint32_t bytes) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(&done.word))
               : "memory");
}

/// Stores a box from shared memory. One thread, after `fence_async_proxy` of the writers and a barrier among them; then
/// `commit_stores`, and `wait_stores` by the same thread.
__device__ inline void store(const CUtensorMap& map, const void* from, int x0, int x1) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(&map),
               "r"(shared_address(from)), "r"(x0), "r"(x1)
               : "memory");
}
__device__ inline void store(const CUtensorMap& map, const void* from, int x0, int x1, int x2) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(&map),
               "r"(shared_address(from)), "r"(x0), "r"(x1), "r"(x2)
               : "memory");
}
__device__ inline void store(const CUtensorMap& map, const void* from, int x0, int x1, int x2, int x3) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
               "r"(shared_address(from)), "r"(x0), "r"(x1), "r"(x2), "r"(x3)
               : "memory");
}
/// Adds a box of floats from shared memory to the tensor; rules as of `store`. Adds of several CTAs land in any order.
__device__ inline void add(const CUtensorMap& map, const void* from, int x0, int x1, int x2) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(&map),
      "r"(shared_address(from)), "r"(x0), "r"(x1), "r"(x2)
      : "memory");
}
__device__ inline void add(const CUtensorMap& map, const void* from, int x0, int x1, int x2, int x3) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
      "r"(shared_address(from)), "r"(x0), "r"(x1), "r"(x2), "r"(x3)
      : "memory");
}
__device__ inline void add(const CUtensorMap& map, const void* from, int x0, int x1, int x2, int x3, int x4) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.5d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(
          &map),
      "r"(shared_address(from)), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "r"(x4)
      : "memory");
}
/// Copies `bytes`, a multiple of 16 between addresses that are, from shared to device memory, a peer's too; rules as of
/// `store`.
__device__ inline void store_bytes(void* to, const void* from, std::uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)),
               "r"(bytes)
               : "memory");
}
/// Adds `bytes` of floats, a multiple of 16 between addresses that are, to device memory; rules as of `store`.
__device__ inline void add_floats(float* to, const float* from, std::uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
               "r"(shared_address(from)), "r"(bytes)
               : "memory");
}
__device__ inline void commit_stores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
/// Returns when at most `Pending` of this thread's committed groups still read shared memory: it may be overwritten.
template <int Pending>
__device__ void wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Pending) : "memory");
}
/// Returns when at most `Pending` of this thread's committed groups have not landed: the others are visible to it.
template <int Pending>
__device__ void wait_stores() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(Pending) : "memory");
}

}  // namespace pleat::inline v0::hopper
