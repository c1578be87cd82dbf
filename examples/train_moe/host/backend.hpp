// The host backend: ranks are threads, memory is plain, work is done when a call returns.
#pragma once

#include <chrono>
#include <vector>

#include <pleat/comm.hpp>
#include <pleat/tensor.hpp>

#include "ops.hpp"

namespace train_moe {

/// Moments of a stream, by number; differences may be read once it is done.
class HostClock {
 public:
  void mark(std::size_t i, pleat::HostStream) {
    if (i >= marks_.size()) marks_.resize(i + 1);
    marks_[i] = std::chrono::steady_clock::now();
  }
  double seconds(std::size_t from, std::size_t to) const {
    return std::chrono::duration<double>(marks_[to] - marks_[from]).count();
  }

 private:
  std::vector<std::chrono::steady_clock::time_point> marks_;
};
/// A part of a rank's host work that profilers know by a name.
struct HostRange {
  explicit HostRange(const char* /*name*/) {}
};

/// What the trainer needs of a device besides kernels; one object per rank, made in its thread, and owner of its
/// streams. Lane 0 computes everything but the backward of a pair, which runs beside the forward on lane 1.
struct HostBackend {
  using Device = pleat::host_device;
  using Executor = pleat::HostExecutor;
  using Comm = pleat::ThreadComm;
  using Arena = pleat::HostArena;
  using Buffer = pleat::HostBuffer;
  using PinnedBuffer = pleat::HostBuffer;
  using Stream = pleat::HostStream;
  using Clock = HostClock;
  using Range = HostRange;

  /// Of expert-major rows.
  static constexpr std::int64_t row_alignment = 1;
  /// Whether kernels are loaded when they are first launched.
  static constexpr bool loads_late = false;

  Stream compute(int /*lane*/) const { return {}; }
  Stream comm(int /*lane*/) const { return {}; }
  Stream gather() const { return {}; }
  Stream reduce() const { return {}; }
  Stream transfers() const { return {}; }  // between stages
  Stream snapshots() const { return {}; }  // of what is saved

  /// Runs f(Comm& world) on so many ranks. Errors: those of pleat::run_ranks.
  template <class F>
  static void run_ranks(int ranks, std::chrono::milliseconds deadline, F&& f) {
    pleat::run_ranks(ranks, f, {.deadline = deadline});
  }
};

}  // namespace train_moe
