// Umbrella: pleat with ranks that MPI has started, on host memory.
#pragma once

#include <pleat/mpi/arena.hpp>
#include <pleat/mpi/comm.hpp>
#include <pleat/mpi/launcher.hpp>
#include <pleat/mpi/run_process.hpp>
#include <pleat/pleat.hpp>
