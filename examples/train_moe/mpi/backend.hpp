// Ranks that MPI has started, on the host.
#pragma once

#include <pleat/mpi.hpp>

#include "../host/backend.hpp"

namespace train_moe {

struct MpiBackend : HostBackend {
  using Comm = pleat::MpiComm;
  using Arena = pleat::MpiArena;

  /// This process is one rank. Errors: those of pleat::run_mpi_process; mesh_error M08 where mpirun has started another
  /// number of ranks.
  template <class F>
  static void run_ranks(int, std::chrono::milliseconds deadline, F&& f) {
    pleat::run_mpi_process(f, {.deadline = deadline});
  }
};

}  // namespace train_moe
