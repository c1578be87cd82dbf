// The leaves of pleat::moe on CUDA.
#pragma once

#include <pleat/moe/cuda/experts.cuh>
#include <pleat/moe/cuda/losses.cuh>
#include <pleat/moe/cuda/plan.cuh>
#include <pleat/moe/cuda/routing.cuh>
#include <pleat/moe/cuda/row_leaf.cuh>
#include <pleat/moe/leaf_concepts.hpp>

namespace pleat::inline v0 {

/// Kernels move rows on at most DispatchOptions::max_ctas CTAs; the bits do not depend on it. Errors: cuda_error C20;
/// shape_error T01, E13.
template <>
struct moe_leaf<cuda_device> : moe::detail::CudaRouterLeaf,
                               moe::detail::CudaLossLeaf,
                               moe::detail::CudaPlanLeaf,
                               moe::detail::CudaRowLeaf,
                               moe::detail::CudaExpertLeaf {
  static void preload() {
    moe::detail::CudaRouterLeaf::preload();
    moe::detail::CudaLossLeaf::preload();
    moe::detail::CudaPlanLeaf::preload();
    moe::detail::CudaRowLeaf::preload();
    moe::detail::CudaExpertLeaf::preload();
  }
};
static_assert(moe::moe_leaves<moe_leaf<cuda_device>, cudaStream_t>);

}  // namespace pleat::inline v0
