// The check that all ranks of an arena have opened windows of the same sizes, in the same order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <pleat/core/error.hpp>
#include <pleat/mesh/group.hpp>

namespace pleat::inline v0::detail {

/// The windows that a rank has opened. A rank whose sizes differ has its windows at other offsets than its peers, who
/// would write into what is somebody else's.
class WindowLog {
 public:
  void add(std::size_t bytes, int channels) { windows_.push_back({bytes, static_cast<std::uint64_t>(channels), 1}); }

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
};

}  // namespace pleat::inline v0::detail
