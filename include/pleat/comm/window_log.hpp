// The windows that a rank has opened on its arena: where the next one begins, and whether all ranks have opened the
// same.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include <pleat/core/carve.hpp>
#include <pleat/core/error.hpp>
#include <pleat/mesh/group.hpp>

namespace pleat::inline v0 {

/// Channels of an arena whose creator does not say how many.
inline constexpr int default_channels = 1024;

}  // namespace pleat::inline v0

namespace pleat::inline v0::detail {

/// Errors: comm_error C08.
inline void check_channels(int channels) {
  if (channels < 0) fail<comm_error>("pleat[C08]: ", channels, " channels; valid: 0 or more");
}

/// What a rank asks for; all get the largest of each.
struct ArenaSize {
  std::size_t bytes = 0;
  int channels = 0;

  void take(const ArenaSize& other) {
    bytes = bytes < other.bytes ? other.bytes : bytes;
    channels = channels < other.channels ? other.channels : channels;
  }
};

/// Errors: comm_error C34.
inline void check_not_moved_from(bool is_whole) {
  if (!is_whole) fail<comm_error>("pleat[C34]: an arena is used after it was moved from; use what it was moved to");
}

/// A rank whose sizes differ has its windows at other offsets than its peers, who would write into what is somebody
/// else's.
class WindowLog {
 public:
  WindowLog() = default;
  explicit WindowLog(const ArenaSize& size) : size_(size) {}

  struct Place {
    std::size_t offset_bytes;
    int first_channel;
  };
  /// Where the next window lies. Errors: comm_error C08 when the arena is used up, which uses nothing of it.
  Place add(std::size_t bytes, int channels) {
    if (bytes > size_.bytes || used_bytes_ > size_.bytes - bytes) {
      const bool wraps = bytes > SIZE_MAX - used_bytes_;
      fail<comm_error>("pleat[C08]: the arena has ", size_.bytes, " bytes, the operations bound to it so far need ",
                       wraps ? SIZE_MAX : used_bytes_ + bytes, "; size it by the sum of footprint().symmetric");
    }
    check_channels(channels);
    if (channels > size_.channels - used_channels_) {
      fail<comm_error>(
          "pleat[C08]: the arena has ", size_.channels, " channels, the operations bound to it so far need ",
          static_cast<std::int64_t>(used_channels_) + channels, "; size it by the sum of footprint().channels");
    }
    Carver windows;
    windows.take_bytes(used_bytes_ + bytes);
    windows_.push_back({bytes, static_cast<std::uint64_t>(channels), 1});
    return {std::exchange(used_bytes_, windows.used_bytes()), std::exchange(used_channels_, used_channels_ + channels)};
  }

  /// Collective. `gather(value)`: every rank's value, in the order of `ranks`. Errors, on all of them: comm_error C32.
  template <class Gather>
  void check(const Group& ranks, Gather&& gather) const {
    const std::vector<Window> all = gather(summary());
    std::uint64_t most = 0;
    bool differ = false;
    for (const Window& rank : all) {
      differ = differ || rank != all[0];
      most = most < rank.count ? rank.count : most;
    }
    if (!differ) return;
    for (std::size_t i = 0; i < most; ++i) {
      const std::vector<Window> opened = gather(i < windows_.size() ? windows_[i] : Window{});
      for (std::size_t r = 1; r < opened.size(); ++r) {
        if (opened[r] != opened[0]) fail_at(i, ranks[static_cast<int>(r)], opened[r], ranks[0], opened[0]);
      }
    }
  }

 private:
  struct Window {
    std::uint64_t bytes, channels;
    std::uint64_t count;  // 1; 0 for one that is not there; in a summary the number of windows
    friend bool operator==(const Window&, const Window&) = default;
  };

  /// Equal for equal lists, and different for lists that differ, but for accidents of 2^-64.
  Window summary() const {
    Window sum{14695981039346656037u, 14695981039346656037u, windows_.size()};
    const auto mix = [](std::uint64_t& hash, std::uint64_t value) { hash = (hash ^ value) * 1099511628211u; };
    for (const Window& window : windows_) {
      mix(sum.bytes, window.bytes);
      mix(sum.channels, window.channels);
    }
    return sum;
  }
  [[noreturn]] static void fail_at(std::size_t ordinal, int rank, const Window& theirs, int first_rank,
                                   const Window& first) {
    fail<comm_error>("pleat[C32]: window ", ordinal, " of the arena has ", theirs.bytes, " bytes and ", theirs.channels,
                     " channels on rank ", rank, ", ", first.bytes, " bytes and ", first.channels, " channels on rank ",
                     first_rank,
                     "; bind the same operations, with plans of the same sizes, in the same order on every "
                     "rank");
  }

  std::vector<Window> windows_;
  std::size_t used_bytes_ = 0;
  int used_channels_ = 0;
  ArenaSize size_;
};

}  // namespace pleat::inline v0::detail
