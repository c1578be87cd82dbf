// train_moe_cuda: the trainer on GPUs, with ranks that are threads and may share one.
#include "train.hpp"

int main(int argc, char** argv) {
  return train_moe::run_on_gpus(argc, argv, train_moe::train_on_threads_bf16, train_moe::train_on_threads_f32);
}
