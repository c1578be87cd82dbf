// Ranks over NCCL; f32.
#include "leaves.cuh"
#include "nccl_backend.cuh"
#include "train.hpp"

void train_moe::train_over_nccl_f32(Run& run) {
  run_mesh<NcclBackend, float>(run);
}
