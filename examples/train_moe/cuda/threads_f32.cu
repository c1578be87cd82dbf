// Ranks are threads; f32.
#include "backend.cuh"
#include "leaves.cuh"
#include "train.hpp"

void train_moe::train_on_threads_f32(Run& run) {
  run_mesh<CudaBackend, float>(run);
}
