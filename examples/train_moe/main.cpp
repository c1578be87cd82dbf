// train_moe: trains a small Mixture-of-Experts transformer over a folded mesh, and proves it against one rank.
#include "host/train.hpp"

namespace {

using pleat::FoldedMesh;

template <class TrainRank>
void run_host(train_moe::Run& run, TrainRank train_rank) {
  train_moe::run_all_ranks<train_moe::HostBackend, FoldedMesh<1, 8, 4, 8>
#if !defined(PLEAT_TRAIN_MOE_DEMO)
                           ,
                           FoldedMesh<1, 1, 1, 1>, FoldedMesh<1, 2, 4, 2>, FoldedMesh<1, 4, 2, 8>,
                           FoldedMesh<1, 4, 4, 4, 2>
#endif
                           >(run, train_rank);
}

}  // namespace

int main(int argc, char** argv) {
  return train_moe::run_program(argc, argv, [](train_moe::Run& run) {
    if (run.options.dtype == pleat::DType::f64) return run_host(run, train_moe::train_f64);
#if !defined(PLEAT_TRAIN_MOE_DEMO)
    if (run.options.dtype == pleat::DType::f32) return run_host(run, train_moe::train_f32);
    throw train_moe::usage_error("--dtype bf16 is for GPUs; valid on the host: f64 f32");
#endif
    throw train_moe::usage_error("this build of train_moe has --dtype f64 alone");
  });
}
