// The protocol of stream-ordered signals on mapped memory: what a signal writes, what an await waits for, and why no
// signal is lost. Its proof is the model of tests/unit/comm/signal_protocol_test.cpp, which runs these classes.
//
// A flag is one 64-bit word in the receiver's memory per (source, channel), zero at first. Its source writes it, its
// receiver waits on it, each on a stream. The k-th signal writes k.
//
// Flags that count (outside graphs). The k-th await waits until the word is at least k; the compare is the one of
// CUDA's streams, cyclic and signed. Any number of signals may be outstanding.
//
// Flags that hold a credit (in a captured graph). A graph's values are baked and each replay repeats them, so a count
// cannot advance. An await waits until the word is more than the awaits counted before the capture, and then takes the
// credit: it writes `taken`, below all of these, before what follows on its stream.
// - Every signal since then writes more than that, whenever and however often it is replayed. So does the signal that
//   was outstanding at the capture, such as the credit given at bind: the first captured await accepts it.
// - A flag holds a credit from its first captured await on, outside graphs as well: the host does not see when a graph
//   is replayed, so it could not go on counting. Calls and replays then mix in any order.
//
// What makes the second kind sound is the discipline of credits: a source's next signal on a flag is ordered after the
// await of its last, by a signal of its receiver on another flag, as *free* and *full* answer each other. `taken` is
// written before the answer and so never wipes out a signal. Nothing depends on how many signals a graph has.
// - A barrier through one flag per pair breaks this: whoever has seen its peer enters the next round, and signals again
//   before the peer has taken the first signal, which is lost; both hang. A barrier takes two flags, to enter and to
//   leave: `peer_barrier`.
// - Two words in turn in place of the discipline break where a graph has an odd number of signals: its replay starts
//   with the other word than the last one ended with.
//
// Undefined: a flag that is captured while more than one signal is outstanding, or is used against the discipline; a
// graph with more signals than awaits of a flag, or fewer, or not replayed by all ranks alike; a captured signal whose
// await is not captured.
//
// Release, after a failure: the receiver's own release stream writes `released` to all its flags, which ends every
// wait. (~0 would not: the signed compare takes it for -1.) Awaits of graphs take it again and live peers write over
// it, so a release is repeated until the waiting stream is idle: each one ends at least one wait.
#pragma once

#include <cstddef>
#include <cstdint>

#include <pleat/comm/peer_access.hpp>
#include <pleat/core/config.hpp>

namespace pleat::inline v0 {

namespace signal_value {
/// What a flag holds once an await has taken its signal, and when a failure sets free who waits.
inline constexpr std::uint64_t taken = 0;
inline constexpr std::uint64_t released = std::uint64_t{1} << 62;  // above every count
}  // namespace signal_value

/// Whether a flag that holds `word` ends a wait for `at_least`: CUDA's CU_STREAM_WAIT_VALUE_GEQ, and what kernels do.
PLEAT_HD constexpr bool ends_wait(std::uint64_t word, std::uint64_t at_least) {
  return static_cast<std::int64_t>(word - at_least) >= 0;
}

/// A source's side of one flag.
class SignalWriter {
 public:
  /// What the next signal writes, captured or not.
  constexpr std::uint64_t next() { return ++count_; }

 private:
  std::uint64_t count_ = 0;
};

/// What an await does: it waits until `ends_wait(word, at_least)`; if it takes, it then writes signal_value::taken.
struct SignalWait {
  std::uint64_t at_least;
  bool takes;
};

/// The receiver's side of one flag.
class SignalWaiter {
 public:
  /// What the next await does; `is_captured`: it is put in a graph, which runs it any number of times.
  constexpr SignalWait next(bool is_captured) {
    holds_credit_ = holds_credit_ || is_captured;
    if (holds_credit_) return {count_ + 1, true};
    return {++count_, false};
  }
  /// Awaits so far; those since the first capture are not counted.
  constexpr std::uint64_t count() const { return count_; }
  constexpr bool holds_credit() const { return holds_credit_; }

 private:
  std::uint64_t count_ = 0;
  bool holds_credit_ = false;
};

/// Where the flags of an arena of `sources` ranks lie in each rank's flag area: a row of all sources per channel. Every
/// rank opens the same windows, so the same channels follow each other everywhere, whatever the groups are.
struct FlagLayout {
  int sources;

  /// Words and bytes of so many channels; the word of a source on a channel.
  constexpr std::size_t words(int channels) const {
    return static_cast<std::size_t>(channels) * static_cast<std::size_t>(sources);
  }
  constexpr std::size_t bytes(int channels) const { return words(channels) * sizeof(std::uint64_t); }
  constexpr std::size_t word(int source, int channel) const {
    return words(channel) + static_cast<std::size_t>(source);
  }
};

/// Nobody's stream passes before everybody's has arrived; takes the channels `channel` and `channel + 1`, and may be
/// captured. Every rank of the window calls it.
inline constexpr int peer_barrier_channels = 2;
template <peer_access Peers>
void peer_barrier(Peers& peers, int channel, typename Peers::stream_type s) {
  for (int phase = 0; phase < peer_barrier_channels; ++phase) {
    detail::signal_peers(peers, channel + phase, s);
    detail::await_peers(peers, channel + phase, s);
  }
}

}  // namespace pleat::inline v0
