// RankValues: a few values in the memory of a rank's device, so that a small program is the same on every device.
#pragma once

#include <cstddef>
#include <type_traits>
#include <vector>

#include <pleat/comm/communicator.hpp>
#include <pleat/core/buffer.hpp>

namespace pleat::inline v0 {

/// `values.size()` values on the device of `Comm`, owned. Trainers carve their memory instead.
template <class T, communicator Comm>
class RankValues {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  /// Copies `values` to the device of the calling rank, on its default stream.
  RankValues(Comm&, const std::vector<T>& values) : size_(values.size()), memory_(values.size() * sizeof(T)) {
    Executor{}.copy(memory_.data(), values.data(), memory_.size_bytes(), {});
  }
  T* data() const { return reinterpret_cast<T*>(memory_.data()); }
  std::size_t size() const { return size_; }

  /// The values once the work on the default stream is done, which the host waits for. Errors: those of `comm.wait`.
  std::vector<T> read(Comm& comm) const {
    std::vector<T> values(size_);
    comm.wait({});  // first, for this wait ends when a peer has failed
    Executor{}.copy(values.data(), memory_.data(), memory_.size_bytes(), {});
    comm.wait({});
    return values;
  }

 private:
  using Executor = executor_for<typename Comm::device_type>;

  std::size_t size_;
  buffer_for<typename Comm::device_type> memory_;
};

}  // namespace pleat::inline v0
