// train_moe_nccl: the trainer on ranks with a GPU each, processes of a launcher or threads, over NCCL.
#include "train.hpp"

int main(int argc, char** argv) {
  return train_moe::run_on_gpus(argc, argv, train_moe::train_over_nccl_bf16, train_moe::train_over_nccl_f32);
}
