// run_nccl_process: how a program that a launcher has started runs as one rank of the launcher's job.
#pragma once

#include <exception>

#include <pleat/nccl/comm.hpp>

namespace pleat::inline v0 {

/// Runs `f(NcclComm& world)` as this process's rank of the job that torchrun, Open MPI or Slurm has started, see
/// LauncherEnvironment. What `f` throws ends the job on all ranks, with its text, and is rethrown here.
/// Errors: as NcclComm::from_environment.
template <class F>
void run_nccl_process(F&& f, NcclOptions options = {}) {
  NcclComm world = NcclComm::from_environment(options);
  try {
    f(world);
  } catch (const std::exception& e) {
    world.abandon(e.what());
    throw;
  } catch (...) {
    world.abandon("an exception that is no std::exception");
    throw;
  }
}

}  // namespace pleat::inline v0
