// Umbrella: pleat with ranks that have a GPU each, processes or threads. Kernels are in .cuh headers of their own.
#pragma once

#include <pleat/nccl/comm.hpp>
#include <pleat/nccl/run_process.hpp>
#include <pleat/nccl/run_threads.hpp>
#include <pleat/pleat.hpp>
