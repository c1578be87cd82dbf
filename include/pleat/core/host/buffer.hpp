// Owned, aligned host memory for footprints.
#pragma once

#include <cstring>
#include <memory>
#include <new>

#include <pleat/core/block.hpp>
#include <pleat/core/buffer.hpp>
#include <pleat/core/carve.hpp>

namespace pleat::inline v0 {

/// Host memory aligned for a Carver. Contents are zero bytes, or `fill` (0xff makes every float a NaN).
/// Errors: shape_error T11 when there is not so much memory.
class HostBuffer {
 public:
  HostBuffer() = default;
  explicit HostBuffer(std::size_t size_bytes, unsigned char fill = 0)
      : data_(static_cast<std::byte*>(
            ::operator new (size_bytes, std::align_val_t{Carver::alignment_bytes}, std::nothrow))),
        size_bytes_(size_bytes) {
    if (data_ == nullptr) {
      fail<shape_error>("pleat[T11]: ", size_bytes, " bytes of host memory cannot be had; plan for smaller sizes");
    }
    if (size_bytes != 0) std::memset(data_.get(), fill, size_bytes);
  }
  /// What was allocated: as a block, its address, its size.
  Block block() const { return {data_.get(), size_bytes_}; }
  std::byte* data() const { return data_.get(); }
  std::size_t size_bytes() const { return size_bytes_; }

 private:
  struct Delete {
    void operator()(std::byte* data) const { ::operator delete (data, std::align_val_t{Carver::alignment_bytes}); }
  };
  std::unique_ptr<std::byte, Delete> data_;
  std::size_t size_bytes_ = 0;
};

template <>
struct detail::BufferFor<host_device> {
  using type = HostBuffer;
};

}  // namespace pleat::inline v0
