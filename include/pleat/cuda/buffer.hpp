// Owned device and pinned host memory for footprints.
#pragma once

#include <cstddef>
#include <utility>

#include <pleat/core/block.hpp>
#include <pleat/core/buffer.hpp>
#include <pleat/cuda/check.hpp>

namespace pleat::inline v0 {

namespace detail {
inline void* cuda_allocate(std::size_t bytes) {
  void* data = nullptr;
  check_cuda(cudaMalloc(&data, bytes), "cudaMalloc");
  return data;
}
inline void cuda_release(void* data) noexcept {
  (void)cudaFree(data);
}
inline void* pinned_allocate(std::size_t bytes) {
  void* data = nullptr;
  check_cuda(cudaMallocHost(&data, bytes), "cudaMallocHost");
  return data;
}
inline void pinned_release(void* data) noexcept {
  (void)cudaFreeHost(data);
}

/// A block that one pair of functions allocates and releases.
template <void* (*allocate)(std::size_t), void (*release)(void*) noexcept>
class OwnedBlock {
 public:
  OwnedBlock() = default;
  explicit OwnedBlock(std::size_t size_bytes)
      : data_(size_bytes == 0 ? nullptr : static_cast<std::byte*>(allocate(size_bytes))), size_bytes_(size_bytes) {}
  OwnedBlock(OwnedBlock&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_bytes_(std::exchange(other.size_bytes_, 0)) {}
  OwnedBlock& operator=(OwnedBlock&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_bytes_, other.size_bytes_);
    return *this;
  }
  ~OwnedBlock() {
    if (data_ != nullptr) release(data_);
  }
  Block block() const { return {data_, size_bytes_}; }
  std::byte* data() const { return data_; }
  std::size_t size_bytes() const { return size_bytes_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t size_bytes_ = 0;
};
}  // namespace detail

/// Memory of the device that is current at construction; contents are undefined. Errors: C20.
using CudaBuffer = detail::OwnedBlock<detail::cuda_allocate, detail::cuda_release>;
template <>
struct detail::BufferFor<cuda_device> {
  using type = CudaBuffer;
};

/// Page-locked host memory. Errors: C20.
using PinnedBuffer = detail::OwnedBlock<detail::pinned_allocate, detail::pinned_release>;

}  // namespace pleat::inline v0
