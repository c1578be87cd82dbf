// MappedPeers: peer access of ranks with a GPU each, whose memory is mapped: in one process or across processes.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include <pleat/cuda/executor.hpp>
#include <pleat/cuda/signal_board.hpp>

namespace pleat::inline v0 {

/// What a group's window consists of, as mapped into this process, in the group's order.
struct MappedWindow {
  std::vector<int> members;           // ranks of the arena
  std::vector<std::byte*> bases;      // each member's range of the window
  std::vector<std::uint64_t*> flags;  // the start of each member's flag area
  int channels;
};

/// A window on mapped memory; see peer_access.hpp. Signals are writes of a stream to the peer's flags, awaits are waits
/// of a stream on the own ones (signal_protocol.hpp). Both may be captured in a graph, by all ranks alike. A wait
/// occupies its hardware queue: enqueue it after all work, on any rank, that its signal depends on. Every rank needs a
/// GPU of its own. Failures surface in SignalBoard::wait. Errors of signal and await: C33, C20.
class MappedPeers {
 public:
  using device_type = cuda_device;
  using stream_type = cudaStream_t;
  /// Calls only enqueue, and may be captured in a graph.
  static constexpr bool is_capturable = true;

  /// The windows of an arena are made in the same order on all its ranks.
  MappedPeers(std::shared_ptr<SignalBoard> board, MappedWindow window)
      : board_(std::move(board)),
        window_(std::move(window)),
        writers_(window_.members.size() * static_cast<std::size_t>(window_.channels)),
        first_channel_(board_->open(window_.channels)) {
    while (window_.members[static_cast<std::size_t>(rank_)] != board_->rank()) ++rank_;
    steps_.reserve(2 * window_.members.size());
  }
  // A copy would count its signals on its own.
  MappedPeers(MappedPeers&&) noexcept = default;
  MappedPeers& operator=(MappedPeers&&) noexcept = default;

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return static_cast<int>(window_.members.size()); }
  std::byte* base(int peer) const {
    detail::check_peer("base", peer, size());
    return window_.bases[static_cast<std::size_t>(peer)];
  }
  /// What errors call the operation that the window is for; a string literal.
  void name(const char* operation) { board_->name(first_channel_, operation); }

  void signal(int peer, int channel, cudaStream_t s) { board_->driver().run(s, signal_step(peer, channel)); }
  void await(int peer, int channel, cudaStream_t s) {
    steps_.clear();
    add_await(peer, channel, is_capturing(s));
    board_->driver().run(s, steps_);
  }
  /// `signal` to every peer, and `await` of every peer, in one call of the driver.
  void signal_peers(int channel, cudaStream_t s) {
    steps_.clear();
    detail::for_each_peer(*this, [&](int peer) { steps_.push_back(signal_step(peer, channel)); });
    board_->driver().run(s, steps_);
  }
  void await_peers(int channel, cudaStream_t s) {
    steps_.clear();
    const bool is_captured = is_capturing(s);
    detail::for_each_peer(*this, [&](int peer) { add_await(peer, channel, is_captured); });
    board_->driver().run(s, steps_);
  }

  /// The flag that the next await of the peer on the channel looks at, and what ends its wait (`ends_wait`): for a
  /// kernel that waits itself, part by part, before that await follows on its stream. Errors: C33.
  struct NextSignal {
    const std::uint64_t* word;
    std::uint64_t at_least;
  };
  NextSignal next_signal(int peer, int channel) const {
    return {incoming(peer, channel), board_->waiter(word_of(member(peer), channel)).count() + 1};
  }

  /// The flag of the peer that this rank's signals write, and the own one that the peer's signals write: for kernels,
  /// on channels that `signal` and `await` do not use. Errors: C33.
  std::uint64_t* outgoing(int peer, int channel) const {
    check("signal", peer, channel);
    return window_.flags[static_cast<std::size_t>(peer)] + word_of(board_->rank(), channel);
  }
  std::uint64_t* incoming(int peer, int channel) const {
    check("await", peer, channel);
    return board_->flag(word_of(member(peer), channel));
  }
  /// From such a flag to the next channel's.
  int words_per_channel() const { return static_cast<int>(board_->layout().words(1)); }

 private:
  int member(int peer) const { return window_.members[static_cast<std::size_t>(peer)]; }
  std::size_t word_of(int source, int channel) const { return board_->layout().word(source, first_channel_ + channel); }
  void check(const char* call, int peer, int channel) const {
    detail::check_signal(call, peer, size(), channel, window_.channels);
  }
  CudaDriver::Step signal_step(int peer, int channel) {
    std::uint64_t* const flag = outgoing(peer, channel);
    SignalWriter& writer = writers_[static_cast<std::size_t>(peer * window_.channels + channel)];
    return board_->driver().write_step(flag, writer.next());
  }
  void add_await(int peer, int channel, bool is_captured) {
    check("await", peer, channel);
    const std::size_t word = word_of(member(peer), channel);
    const SignalWait wait = board_->waiter(word).next(is_captured);
    steps_.push_back(board_->driver().wait_step(board_->flag(word), wait.at_least));
    if (wait.takes) steps_.push_back(board_->driver().write_step(board_->flag(word), signal_value::taken));
  }
  static bool is_capturing(cudaStream_t s) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check_cuda(cudaStreamIsCapturing(s, &status), "cudaStreamIsCapturing");
    return status != cudaStreamCaptureStatusNone;
  }

  std::shared_ptr<SignalBoard> board_;
  MappedWindow window_;
  std::vector<SignalWriter> writers_;    // [peer, channel]
  std::vector<CudaDriver::Step> steps_;  // of one call; kept, so that calls allocate nothing
  int first_channel_;
  int rank_ = 0;
};
static_assert(peer_access<MappedPeers>);

}  // namespace pleat::inline v0
