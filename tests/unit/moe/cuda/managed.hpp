// Arrays that host and device read alike, for tests that run the same leaves on both.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include <pleat/core/block.hpp>
#include <pleat/cuda/check.hpp>
#include <pleat/cuda/executor.hpp>

namespace moe_testing {

/// Managed memory, full of 0xff.
inline std::shared_ptr<std::byte> managed_bytes(std::size_t bytes) {
  void* data = nullptr;
  pleat::check_cuda(cudaMallocManaged(&data, std::max<std::size_t>(bytes, 1)), "cudaMallocManaged");
  std::memset(data, 0xff, bytes);
  return {static_cast<std::byte*>(data), [](std::byte* p) { (void)cudaFree(p); }};
}

template <class T>
class Managed {
 public:
  Managed() = default;
  explicit Managed(std::size_t elems) : data_(managed_bytes(elems * sizeof(T))), elems_(elems) {}
  explicit Managed(const std::vector<T>& values) : Managed(values.size()) {
    if (elems_ != 0) std::memcpy(data_.get(), values.data(), elems_ * sizeof(T));
  }
  T* data() const { return reinterpret_cast<T*>(data_.get()); }
  std::size_t size() const { return elems_; }
  T& operator[](std::size_t i) const { return data()[i]; }
  T* begin() const { return data(); }
  T* end() const { return data() + elems_; }
  pleat::Block block() const { return {data_.get(), elems_ * sizeof(T)}; }

 private:
  std::shared_ptr<std::byte> data_;
  std::size_t elems_ = 0;
};

inline void finish() {
  pleat::check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

}  // namespace moe_testing
