// The host backend: ranks are threads, memory is plain, work is done when a call returns.
#pragma once

#include <chrono>

#include <pleat/comm.hpp>
#include <pleat/tensor.hpp>

#include "ops.hpp"

namespace train_moe {

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
