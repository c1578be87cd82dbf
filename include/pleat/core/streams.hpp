// The caller's streams, as every call of an operation takes them.
#pragma once

#include <type_traits>

namespace pleat::inline v0 {

/// Borrowed from the caller, who orders what uses the results after them. Both may be the same stream.
template <class Stream>
struct Streams {
  /// Leaves run here; a call's inputs are ready and its outputs appear on it.
  Stream compute{};
  /// Transfers that may run beside `compute`.
  Stream comm{};
};

/// The stream of a `bind` that is given none: where a stream is no more than a type, as on the host. A device's default
/// stream is not ordered with the caller's, so there the caller names one (T10).
template <class Stream>
constexpr Stream only_stream() {
  static_assert(std::is_empty_v<Stream>,
                "pleat[T10]: a bind on this device needs a stream: pass the one that the calls compute on");
  return {};
}

}  // namespace pleat::inline v0
