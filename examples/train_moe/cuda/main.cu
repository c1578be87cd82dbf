// train_moe_cuda: the trainer on GPUs, with ranks that are threads and may share one.
#include "run.cuh"

int main(int argc, char** argv) {
  return train_moe::run_on_gpus<train_moe::CudaBackend>(argc, argv);
}
