// What is kept of a ring's forward for its backward, and whether a later forward has overwritten it.
#pragma once

#include <array>
#include <memory>

#include <pleat/attention/ring_schedule.hpp>
#include <pleat/comm/memory.hpp>

namespace pleat::inline v0::ring {

/// What backward needs of one forward; one per live micro-batch and layer. It owns no memory: `memory` is
/// `footprint().saved` bytes of the caller's and holds the LSE; q, k, v and out are the caller's tensors, which must
/// stay alive and unchanged until backward, as must what a `PlacedWork` given to forward borrows. A new forward
/// overwrites it. Two that are live at once need memory of their own each.
class Saved {
 public:
  Saved() = default;
  explicit Saved(Block memory) : memory_(memory) {}

 private:
  template <executor Executor, communicator Comm, optional_arena Arena, class Leaf>
  friend class RingAttention;

  Block memory_;
  detail::RingTensors tensors_;
  PlacedWork work_;
  std::shared_ptr<const Plan> plan_;  // of the op that filled it, which no other op has as long as this is held
  std::uint64_t forward_ = 0;         // that filled it; 0: its memory was restored, by whom knows what it holds
};

namespace detail {
/// Which forward of an operation has filled which memory last, for the blocks that were filled lately.
class SavedLog {
 public:
  /// The number of a forward, 1 and more, that fills `memory` now.
  std::uint64_t fill(const std::byte* memory) {
    Entry* entry = find(memory);
    if (entry == nullptr) entry = &entries_[next_++ % entries_.size()];
    *entry = {memory, ++count_};
    return count_;
  }
  /// Whether a later one than `forward` has filled it.
  bool is_overwritten(const std::byte* memory, std::uint64_t forward) {
    const Entry* const entry = find(memory);
    return forward != 0 && entry != nullptr && entry->forward > forward;
  }

 private:
  struct Entry {
    const std::byte* memory = nullptr;
    std::uint64_t forward = 0;
  };
  Entry* find(const std::byte* memory) {
    for (Entry& entry : entries_) {
      if (entry.forward != 0 && entry.memory == memory) return &entry;
    }
    return nullptr;
  }
  std::array<Entry, 64> entries_{};
  std::uint64_t count_ = 0;
  std::size_t next_ = 0;
};
}  // namespace detail

}  // namespace pleat::inline v0::ring
