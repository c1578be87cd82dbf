// The local attention kernel of CUDA: every dtype and all head dims.
#pragma once

#include <pleat/attention/cuda/cuda_attention.cuh>

namespace pleat::inline v0 {

template <>
struct attention_leaf<cuda_device> : CudaAttention<TypeList<bfloat16, float16>, AllHeadDims> {};

}  // namespace pleat::inline v0
