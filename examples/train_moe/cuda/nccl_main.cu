// train_moe_nccl: the trainer on ranks with a GPU each, processes of a launcher or threads, over NCCL.
#include "nccl_backend.cuh"
#include "run.cuh"

int main(int argc, char** argv) {
  return train_moe::run_on_gpus<train_moe::NcclBackend>(argc, argv);
}
