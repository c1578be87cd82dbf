// The host executor that counts the bytes it copies.
#pragma once

#include <memory>

#include <pleat/core/host/executor.hpp>

namespace counting {

using namespace pleat;

class CountingExecutor : public HostExecutor {
 public:
  void copy(void* out, const void* in, std::size_t bytes, HostStream s) const {
    *bytes_ += static_cast<std::int64_t>(bytes);
    HostExecutor::copy(out, in, bytes, s);
  }
  void copy_2d(void* out, std::size_t out_pitch, const void* in, std::size_t in_pitch, std::size_t width,
               std::size_t height, HostStream s) const {
    *bytes_ += static_cast<std::int64_t>(width * height);
    HostExecutor::copy_2d(out, out_pitch, in, in_pitch, width, height, s);
  }
  /// Of this executor and its copies, since the last reset; one thread.
  std::int64_t copied_bytes() const { return *bytes_; }
  void reset() const { *bytes_ = 0; }

 private:
  std::shared_ptr<std::int64_t> bytes_ = std::make_shared<std::int64_t>(0);
};
static_assert(executor<CountingExecutor>);

}  // namespace counting
