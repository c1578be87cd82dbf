// Ranks are threads; bf16.
#include "backend.cuh"
#include "leaves.cuh"
#include "train.hpp"

void train_moe::train_on_threads_bf16(Run& run) {
  run_mesh<CudaBackend, pleat::bfloat16>(run);
}
