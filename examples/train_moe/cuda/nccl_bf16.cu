// Ranks over NCCL; bf16.
#include "leaves.cuh"
#include "nccl_backend.cuh"
#include "train.hpp"

void train_moe::train_over_nccl_bf16(Run& run) {
  run_mesh<NcclBackend, pleat::bfloat16>(run);
}
