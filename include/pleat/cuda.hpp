// Umbrella: pleat with ranks that are threads and share one GPU or several. Kernels are in .cuh headers of their own.
#pragma once

#include <pleat/cuda/buffer.hpp>
#include <pleat/cuda/dlpack.hpp>
#include <pleat/cuda/executor.hpp>
#include <pleat/cuda/thread_comm.hpp>
#include <pleat/pleat.hpp>
