// What an operation needs from the caller, before anything is allocated.
#pragma once

#include <algorithm>
#include <cstddef>

namespace pleat::inline v0 {

/// What an operation needs on one rank; bytes but for the channels.
///
/// - scratch: valid only during a call; operations that never overlap may share it (`max_scratch`).
/// - saved: what backward needs from forward, one per live micro-batch.
/// - symmetric: its part of the symmetric arena, the same on every rank.
/// - channels: that its signals take in the symmetric arena, the same on every rank.
/// - persistent: owned by the bound operation from bind until it goes.
/// - pinned_host: host memory that asynchronous copies read or write.
struct Footprint {
  std::size_t scratch = 0;
  std::size_t saved = 0;
  std::size_t symmetric = 0;
  std::size_t persistent = 0;
  std::size_t pinned_host = 0;
  int channels = 0;

  friend constexpr bool operator==(const Footprint&, const Footprint&) = default;
  /// Both operations live and run at the same time.
  friend constexpr Footprint operator+(const Footprint& a, const Footprint& b) {
    return {a.scratch + b.scratch,         a.saved + b.saved,
            a.symmetric + b.symmetric,     a.persistent + b.persistent,
            a.pinned_host + b.pinned_host, a.channels + b.channels};
  }
  /// Both live, but never run at the same time: they share scratch.
  friend constexpr Footprint max_scratch(const Footprint& a, const Footprint& b) {
    Footprint both = a + b;
    both.scratch = std::max(a.scratch, b.scratch);
    return both;
  }
};

}  // namespace pleat::inline v0
