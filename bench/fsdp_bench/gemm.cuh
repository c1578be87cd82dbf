// A batch of matrix products by cuBLASLt, planned once.
#pragma once

#include <array>
#include <stdexcept>
#include <string>

#include <cublasLt.h>

#include <pleat/core/dtype.hpp>
#include <pleat/cuda/buffer.hpp>

namespace fsdp_bench {

inline void check_cublas(cublasStatus_t status, const char* call) {
  if (status != CUBLAS_STATUS_SUCCESS)
    throw std::runtime_error(std::string(call) + ": " + cublasLtGetStatusString(status));
}

/// The handle and the workspace of one rank's products, which follow each other on one stream.
class Cublas {
 public:
  Cublas() : workspace_(std::size_t{64} << 20) { check_cublas(cublasLtCreate(&handle_), "cublasLtCreate"); }
  Cublas(const Cublas&) = delete;
  Cublas& operator=(const Cublas&) = delete;
  ~Cublas() { (void)cublasLtDestroy(handle_); }
  cublasLtHandle_t handle() const { return handle_; }
  pleat::Block workspace() const { return workspace_.block(); }

 private:
  cublasLtHandle_t handle_ = nullptr;
  pleat::CudaBuffer workspace_;
};

/// Row-major matrices [batch, rows, cols]; `stride` elements from one of the batch to the next.
struct Matrices {
  std::int64_t rows, cols, stride;
  cudaDataType type = CUDA_R_16BF;
  bool is_transposed = false;
};

/// c = a b (+ c), with fp32 sums.
class Gemm {
 public:
  /// `sms`: how many multiprocessors it is made for; 0: all.
  Gemm(const Cublas& cublas, const Matrices& a, const Matrices& b, const Matrices& c, int batch, int sms)
      : cublas_(&cublas) {
    check_cublas(cublasLtMatmulDescCreate(&operation_, CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescCreate");
    // cuBLAS counts columns first: there the product is c^T = b^T a^T.
    set(CUBLASLT_MATMUL_DESC_TRANSA, b.is_transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(CUBLASLT_MATMUL_DESC_TRANSB, a.is_transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
    if (sms != 0) set(CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, sms);
    layouts_ = {layout(b, batch), layout(a, batch), layout(c, batch)};
    cublasLtMatmulPreference_t preference = nullptr;
    check_cublas(cublasLtMatmulPreferenceCreate(&preference), "cublasLtMatmulPreferenceCreate");
    const std::size_t most = cublas.workspace().size_bytes;
    check_cublas(
        cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &most, sizeof most),
        "cublasLtMatmulPreferenceSetAttribute");
    int found = 0;
    check_cublas(cublasLtMatmulAlgoGetHeuristic(cublas.handle(), operation_, layouts_[0], layouts_[1], layouts_[2],
                                                layouts_[2], preference, 1, &algorithm_, &found),
                 "cublasLtMatmulAlgoGetHeuristic");
    (void)cublasLtMatmulPreferenceDestroy(preference);
    if (found == 0) throw std::runtime_error("cuBLASLt has no algorithm for a product");
  }
  Gemm(const Gemm&) = delete;
  Gemm& operator=(const Gemm&) = delete;
  ~Gemm() {
    for (const cublasLtMatrixLayout_t l : layouts_) (void)cublasLtMatrixLayoutDestroy(l);
    (void)cublasLtMatmulDescDestroy(operation_);
  }

  void run(const void* a, const void* b, void* c, bool accumulate, cudaStream_t s) const {
    const float alpha = 1, beta = accumulate ? 1.0f : 0.0f;
    check_cublas(
        cublasLtMatmul(cublas_->handle(), operation_, &alpha, b, layouts_[0], a, layouts_[1], &beta, c, layouts_[2], c,
                       layouts_[2], &algorithm_.algo, cublas_->workspace().data, cublas_->workspace().size_bytes, s),
        "cublasLtMatmul");
  }

 private:
  template <class T>
  void set(cublasLtMatmulDescAttributes_t attribute, T value) {
    check_cublas(cublasLtMatmulDescSetAttribute(operation_, attribute, &value, sizeof value),
                 "cublasLtMatmulDescSetAttribute");
  }
  static cublasLtMatrixLayout_t layout(const Matrices& m, int batch) {
    cublasLtMatrixLayout_t made = nullptr;
    check_cublas(cublasLtMatrixLayoutCreate(&made, m.type, static_cast<std::uint64_t>(m.cols),
                                            static_cast<std::uint64_t>(m.rows), m.cols),
                 "cublasLtMatrixLayoutCreate");
    check_cublas(cublasLtMatrixLayoutSetAttribute(made, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batch, sizeof batch),
                 "cublasLtMatrixLayoutSetAttribute");
    check_cublas(
        cublasLtMatrixLayoutSetAttribute(made, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &m.stride, sizeof m.stride),
        "cublasLtMatrixLayoutSetAttribute");
    return made;
  }

  const Cublas* cublas_;
  cublasLtMatmulDesc_t operation_ = nullptr;
  std::array<cublasLtMatrixLayout_t, 3> layouts_{};  // b, a, c
  cublasLtMatmulHeuristicResult_t algorithm_{};
};

}  // namespace fsdp_bench
