// A batch of equal matrix products through cuBLASLt, its algorithm chosen once, by the shape alone.
#pragma once

#include <algorithm>
#include <cstdint>

#include <pleat/core/dtype.hpp>
#include <pleat/cuda/cublaslt.hpp>

namespace pleat::inline v0::detail {

/// `count` column-major matrices [rows, cols] without gaps between columns, `stride_elems` apart.
struct MatrixPlaces {
  std::int64_t rows, cols, stride_elems;
};

/// D = alpha op(A) op(B) + beta C for each matrix of a batch; all of one dtype, summed in its accumulator. Matrices
/// begin at multiples of 128 bytes. The algorithm splits no sum, needs no workspace and is the one that cuBLASLt
/// recommends for `pinned_count` products of the shape: results do not depend on `count`. Errors: cuda_error C20.
class StridedGemm {
 public:
  /// As many products as fill the largest chips, 8 at most: an algorithm for a lone small one starves a batch, one for
  /// a batch a large one.
  static constexpr std::int64_t pinned_count(const MatrixPlaces& out) {
    return std::clamp<std::int64_t>((std::int64_t{1} << 23) / (out.rows * out.cols), 1, 8);
  }

  StridedGemm(cublasLtHandle_t handle, DType dtype, cublasOperation_t op_a, cublasOperation_t op_b,
              const MatrixPlaces& a, const MatrixPlaces& b, const MatrixPlaces& out, std::int64_t count)
      : handle_(handle), dtype_(dtype) {
    const bool is_double = dtype == DType::f64;
    cublasLtMatmulDesc_t product = nullptr;
    check_cublas(cublasLtMatmulDescCreate(&product, is_double ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F,
                                          is_double ? CUDA_R_64F : CUDA_R_32F),
                 "cublasLtMatmulDescCreate");
    product_.reset(product);
    set(CUBLASLT_MATMUL_DESC_TRANSA, op_a);
    set(CUBLASLT_MATMUL_DESC_TRANSB, op_b);
    const std::int64_t pinned = pinned_count(out);
    choose(make_layout(a, pinned), make_layout(b, pinned), make_layout(out, pinned));
    a_ = make_layout(a, count);
    b_ = make_layout(b, count);
    out_ = make_layout(out, count);
  }

  /// `c` may be null where beta is 0; `d` is none of the others.
  void run(double alpha, const void* a, const void* b, double beta, const void* c, void* d, cudaStream_t s) const {
    const float narrow[] = {static_cast<float>(alpha), static_cast<float>(beta)};
    const double wide[] = {alpha, beta};
    const void* const factors[] = {dtype_ == DType::f64 ? static_cast<const void*>(wide) : narrow,
                                   dtype_ == DType::f64 ? static_cast<const void*>(wide + 1) : narrow + 1};
    check_cublas(cublasLtMatmul(handle_, product_.get(), factors[0], a, a_.get(), b, b_.get(), factors[1],
                                c == nullptr ? d : c, out_.get(), d, out_.get(), &algorithm_, nullptr, 0, s),
                 "cublasLtMatmul");
  }

 private:
  using Layout = CublasLtOwned<cublasLtMatrixLayout_t>;

  template <class T>
  void set(cublasLtMatmulDescAttributes_t attribute, const T& value) {
    check_cublas(cublasLtMatmulDescSetAttribute(product_.get(), attribute, &value, sizeof(value)),
                 "cublasLtMatmulDescSetAttribute");
  }

  Layout make_layout(const MatrixPlaces& places, std::int64_t count) const {
    const cudaDataType type = dtype_ == DType::f64 ? CUDA_R_64F : dtype_ == DType::f32 ? CUDA_R_32F : CUDA_R_16BF;
    cublasLtMatrixLayout_t made = nullptr;
    check_cublas(cublasLtMatrixLayoutCreate(&made, type, static_cast<std::uint64_t>(places.rows),
                                            static_cast<std::uint64_t>(places.cols), places.rows),
                 "cublasLtMatrixLayoutCreate");
    Layout layout(made);
    const auto batch = static_cast<std::int32_t>(count);
    check_cublas(cublasLtMatrixLayoutSetAttribute(made, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batch, sizeof(batch)),
                 "cublasLtMatrixLayoutSetAttribute");
    check_cublas(cublasLtMatrixLayoutSetAttribute(made, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
                                                  &places.stride_elems, sizeof(places.stride_elems)),
                 "cublasLtMatrixLayoutSetAttribute");
    return layout;
  }

  void choose(const Layout& a, const Layout& b, const Layout& out) {
    cublasLtMatmulPreference_t made = nullptr;
    check_cublas(cublasLtMatmulPreferenceCreate(&made), "cublasLtMatmulPreferenceCreate");
    const CublasLtOwned<cublasLtMatmulPreference_t> preference(made);
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
      check_cublas(cublasLtMatmulPreferenceSetAttribute(made, attribute, &value, sizeof(value)),
                   "cublasLtMatmulPreferenceSetAttribute");
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, std::uint64_t{0});
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, std::uint32_t{CUBLASLT_REDUCTION_SCHEME_NONE});
    for (const auto alignment :
         {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
          CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
      prefer(alignment, std::uint32_t{128});
    }
    cublasLtMatmulHeuristicResult_t result{};
    int found = 0;
    check_cublas(cublasLtMatmulAlgoGetHeuristic(handle_, product_.get(), a.get(), b.get(), out.get(), out.get(), made,
                                                1, &result, &found),
                 "cublasLtMatmulAlgoGetHeuristic");
    check_cublas(found == 0 ? CUBLAS_STATUS_NOT_SUPPORTED : result.state, "cublasLtMatmulAlgoGetHeuristic");
    algorithm_ = result.algo;
  }

  cublasLtHandle_t handle_;
  DType dtype_;
  CublasLtOwned<cublasLtMatmulDesc_t> product_;
  Layout a_, b_, out_;
  cublasLtMatmulAlgo_t algorithm_{};
};

}  // namespace pleat::inline v0::detail
