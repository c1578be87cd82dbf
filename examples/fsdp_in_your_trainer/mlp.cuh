// What plain.cu and sharded.cu compute with, and what sharding leaves alone: products by cuBLASLt, a few kernels.
#pragma once

#include <cstdio>
#include <cstdlib>

#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

using bf16 = __nv_bfloat16;

constexpr int layers = 4, width = 1024, rows = 512, steps = 40;
constexpr int weights_per_layer = width * width;

inline void check(cudaError_t status) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "%s\n", cudaGetErrorString(status));
  std::exit(1);
}
inline void check(cublasStatus_t status) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  std::fprintf(stderr, "cuBLASLt: status %d\n", static_cast<int>(status));
  std::exit(1);
}
template <class T>
T* allocate(std::size_t elems) {
  void* data = nullptr;
  check(cudaMalloc(&data, elems * sizeof(T)));
  return static_cast<T*>(data);
}

/// Row-major products of bf16 matrices with fp32 sums.
class Gemm {
 public:
  Gemm() : workspace_(allocate<char>(workspace_bytes)) { check(cublasLtCreate(&handle_)); }
  Gemm(const Gemm&) = delete;
  Gemm& operator=(const Gemm&) = delete;
  ~Gemm() {
    (void)cublasLtDestroy(handle_);
    (void)cudaFree(workspace_);
  }

  /// c [m, n] = a b, or c + a b to accumulate, where a is [m, k], or [k, m] to be transposed, and b is [k, n], or [n,
  /// k] to be transposed.
  template <class C>
  void run(const bf16* a, bool transpose_a, const bf16* b, bool transpose_b, C* c, int m, int n, int k,
           cudaStream_t stream, bool accumulate = false) const {
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t a_layout, b_layout, c_layout;
    check(cublasLtMatmulDescCreate(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    // cuBLAS counts columns first: there it is c^T = b^T a^T.
    const cublasOperation_t first = transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cublasOperation_t second = transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    check(cublasLtMatmulDescSetAttribute(operation, CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof first));
    check(cublasLtMatmulDescSetAttribute(operation, CUBLASLT_MATMUL_DESC_TRANSB, &second, sizeof second));
    check(cublasLtMatrixLayoutCreate(&b_layout, CUDA_R_16BF, transpose_b ? k : n, transpose_b ? n : k,
                                     transpose_b ? k : n));
    check(cublasLtMatrixLayoutCreate(&a_layout, CUDA_R_16BF, transpose_a ? m : k, transpose_a ? k : m,
                                     transpose_a ? m : k));
    check(cublasLtMatrixLayoutCreate(&c_layout, sizeof(C) == 4 ? CUDA_R_32F : CUDA_R_16BF, n, m, n));
    const float alpha = 1, beta = accumulate ? 1 : 0;
    check(cublasLtMatmul(handle_, operation, &alpha, b, b_layout, a, a_layout, &beta, c, c_layout, c, c_layout, nullptr,
                         workspace_, workspace_bytes, stream));
    for (const auto layout : {a_layout, b_layout, c_layout}) (void)cublasLtMatrixLayoutDestroy(layout);
    (void)cublasLtMatmulDescDestroy(operation);
  }

 private:
  static constexpr std::size_t workspace_bytes = std::size_t{32} << 20;
  cublasLtHandle_t handle_ = nullptr;
  char* workspace_;
};

/// out [elems] = scale * something random in [-1, 1) that depends on `seed`, the same every `period` elements.
template <class T>
__global__ void draw(T* out, unsigned seed, float scale, int elems, int period) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < elems; i += gridDim.x * blockDim.x) {
    unsigned h = (seed * 0x9E3779B9u) ^ (i % period * 0x85EBCA6Bu);
    h = (h ^ (h >> 16)) * 0xC2B2AE35u;
    h = (h ^ (h >> 13)) * 0x27D4EB2Fu;
    out[i] = T(scale * ((h >> 8) * 0x1p-23f - 1.0f));
  }
}
__global__ void to_bf16(bf16* out, const float* in, int elems) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < elems; i += gridDim.x * blockDim.x) out[i] = bf16(in[i]);
}
__global__ void relu(bf16* x, int elems) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < elems; i += gridDim.x * blockDim.x) {
    if (float(x[i]) < 0) x[i] = bf16(0.0f);
  }
}
__global__ void relu_backward(bf16* dx, const bf16* x, int elems) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < elems; i += gridDim.x * blockDim.x) {
    if (float(x[i]) <= 0) dx[i] = bf16(0.0f);
  }
}
/// One block: loss = sum of (y - target)^2 / all, dy = its gradient.
__global__ void squared_error(float* loss, bf16* dy, const bf16* y, const bf16* target, int elems, int all) {
  __shared__ float sums[1024];
  float sum = 0;
  for (int i = threadIdx.x; i < elems; i += blockDim.x) {
    const float difference = float(y[i]) - float(target[i]);
    sum += difference * difference;
    dy[i] = bf16(2 * difference / all);
  }
  sums[threadIdx.x] = sum;
  __syncthreads();
  for (int half = blockDim.x / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    __syncthreads();
  }
  if (threadIdx.x == 0) *loss = sums[0] / all;
}
__global__ void adamw(float* master, bf16* weights, float* m, float* v, const float* gradient, long elems, int step) {
  const float lr = 1e-4f, beta1 = 0.9f, beta2 = 0.95f, eps = 1e-8f, decay = 0.01f;
  for (long i = blockIdx.x * long(blockDim.x) + threadIdx.x; i < elems; i += gridDim.x * blockDim.x) {
    m[i] = beta1 * m[i] + (1 - beta1) * gradient[i];
    v[i] = beta2 * v[i] + (1 - beta2) * gradient[i] * gradient[i];
    const float mean = m[i] / (1 - powf(beta1, step)), square = v[i] / (1 - powf(beta2, step));
    master[i] -= lr * (mean / (sqrtf(square) + eps) + decay * master[i]);
    weights[i] = bf16(master[i]);
  }
}
