// A shared library with kernels of pleat, built for one architecture; PART is its only function.
#include <pleat/cuda/buffer.hpp>
#include <pleat/cuda/leaf.cuh>

#include "part.hpp"

double PART(pleat::DType dtype) {
  constexpr std::size_t elems = 1000;
  const std::vector<float> ones(elems, 1.0F);
  std::vector<double> out(elems);
  const pleat::CudaBuffer in(elems * sizeof(float)), widened(elems * sizeof(double));
  const pleat::CudaStream stream;
  const pleat::CudaExecutor executor;
  executor.copy(in.data(), ones.data(), in.size_bytes(), stream);
  pleat::core_leaf<pleat::cuda_device>::cast_copy(widened.data(), dtype, in.data(), pleat::DType::f32, elems, stream);
  executor.copy(out.data(), widened.data(), widened.size_bytes(), stream);
  stream.synchronize();
  return std::accumulate(out.begin(), out.end(), 0.0);
}
