// The training on GPUs: of each kind of ranks and each dtype compiled on its own, since kernels take minutes.
#pragma once

#include "../program.hpp"

namespace train_moe {

/// Ranks are threads, which may share a GPU.
void train_on_threads_bf16(Run& run);
void train_on_threads_f32(Run& run);
/// Ranks have a GPU each, over NCCL.
void train_over_nccl_bf16(Run& run);
void train_over_nccl_f32(Run& run);

/// main() on one kind of ranks.
inline int run_on_gpus(int argc, char** argv, void (*bf16)(Run&), void (*f32)(Run&)) {
  return run_program(argc, argv, [&](Run& run) {
    if (run.options.dtype == pleat::DType::bf16) return bf16(run);
    if (run.options.dtype == pleat::DType::f32) return f32(run);
    throw usage_error("--dtype f64 is for the host; valid on GPUs: bf16 f32");
  });
}

}  // namespace train_moe
