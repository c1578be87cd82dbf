// The program on GPUs, whatever its ranks are.
#pragma once

#include <pleat/cuda/leaf.cuh>
#include <pleat/moe/cuda/leaf.cuh>
#include <pleat/optim/cuda/leaf.cuh>
#include <pleat/optim/cuda/muon_leaf.cuh>
#include <pleat/optim/cuda/newton_schulz.cuh>

#include "../program.hpp"
#include "backend.cuh"

namespace train_moe {

/// main() on the ranks of a backend.
template <class Backend>
int run_on_gpus(int argc, char** argv) {
  return run_program(argc, argv, [](Run& run) {
    if (run.options.dtype == pleat::DType::bf16) return run_mesh<Backend, pleat::bfloat16>(run);
    if (run.options.dtype == pleat::DType::f32) return run_mesh<Backend, float>(run);
    throw usage_error("--dtype f64 is for the host; valid on GPUs: bf16 f32");
  });
}

}  // namespace train_moe
