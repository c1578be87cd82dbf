// The trainer in f32 on ranks that are threads: see train_moe_thread_cases.cuh.
#include "train_moe_thread_cases.cuh"

int main(int argc, char** argv) {
  return train_moe_testing::main_on_threads<float>(argc, argv);
}
