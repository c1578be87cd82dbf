// Umbrella: sharded parameters and optimizers with their kernels, on ranks that have a GPU each.
#pragma once

#include <pleat/cuda/leaf.cuh>
#include <pleat/nccl.hpp>
#include <pleat/nccl/arena.cuh>
#include <pleat/optim/cuda/leaf.cuh>
