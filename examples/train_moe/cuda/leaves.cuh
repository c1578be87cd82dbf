// The library's GPU kernels that the trainer runs on, beside its own.
#pragma once

#include <pleat/cuda/leaf.cuh>
#include <pleat/moe/cuda/leaf.cuh>
#include <pleat/optim/cuda/leaf.cuh>
#include <pleat/optim/cuda/muon_leaf.cuh>
#include <pleat/optim/cuda/newton_schulz.cuh>

#include "attention.cuh"
#include "ops.cuh"
