// The trainer in bf16 on ranks that are threads: see train_moe_thread_cases.cuh.
#include "train_moe_thread_cases.cuh"

int main(int argc, char** argv) {
  return train_moe_testing::main_on_threads<pleat::bfloat16>(argc, argv);
}
