// The caller's streams, as every call of an operation takes them.
#pragma once

namespace pleat::inline v0 {

/// Borrowed from the caller, who orders what uses the results after them. Both may be the same stream.
template <class Stream>
struct Streams {
  /// Leaves run here; a call's inputs are ready and its outputs appear on it.
  Stream compute{};
  /// Transfers that may run beside `compute`.
  Stream comm{};
};

}  // namespace pleat::inline v0
