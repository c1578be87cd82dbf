// Matrix products through cuBLASLt: one handle, one workspace, an algorithm per shape that is chosen once.
#pragma once

#include <algorithm>
#include <bit>
#include <compare>
#include <map>

#include <pleat/optim/cuda/strided_gemm.cuh>

namespace train_moe::gpu {

/// out [m, n] = op(a) op(b) + beta * c, all row-major; `trans_a`: a is [k, m], `trans_b`: b is [n, k].
struct Product {
  bool trans_a, trans_b;
  std::int64_t m, n, k;
  pleat::DType in, out;
  /// From a row to the next; 0: rows follow each other. `c` lies as `out`.
  std::int64_t a_pitch = 0, b_pitch = 0, out_pitch = 0;
  /// So many products at once, whose matrices lie so many elements apart.
  std::int32_t count = 1;
  std::int64_t a_step = 0, b_step = 0, out_step = 0;
  auto operator<=>(const Product&) const = default;
};

/// From a row to the next of each matrix.
struct Pitches {
  std::int64_t a = 0, b = 0, out = 0;
};
/// One product of matrices of In and Out.
template <class In, class Out>
constexpr Product product_of(bool trans_a, bool trans_b, std::int64_t m, std::int64_t n, std::int64_t k,
                             Pitches pitches = {}) {
  return {trans_a, trans_b, m, n, k, pleat::dtype_of<In>, pleat::dtype_of<Out>, pitches.a, pitches.b, pitches.out};
}

/// Sums in the accumulator; fp32 products are fp32 throughout. Algorithms split a sum only into parts that are added in
/// a fixed order, so that results have the same bits from run to run. One algorithm serves many numbers of rows, so
/// that rows of any number allocate nothing and load no code once those of `planned_rows` were multiplied. Matrices
/// begin at multiples of 16 bytes. Errors: cuda_error C20.
class Products {
 public:
  static constexpr std::size_t workspace_bytes = std::size_t{32} << 20;

  /// `most_rows`: of a product; m, or k where `trans_a`. `workspace`: workspace_bytes of the current device, used by
  /// one stream at a time.
  Products(std::int64_t most_rows, void* workspace)
      : most_rows_(most_rows), handle_(pleat::detail::make_cublaslt()), workspace_(workspace) {}

  /// `c` may be `out`, or anything where beta is 0.
  void run(const Product& product, const void* a, const void* b, double beta, const void* c, void* out,
           cudaStream_t s) {
    Product planned = product;
    if (product.trans_a) {
      planned.k = planned_rows(product.k);
    } else {
      planned.m = std::max(most_rows_, product.m);
    }
    const Arguments arguments{a, b, beta, c, out, s};
    cublasStatus_t status = multiply(call_of(planned), product, arguments);
    // Few rows may be too few for the algorithm of many.
    if (status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE) {
      status = multiply(call_of(product), product, arguments);
    }
    pleat::detail::check_cublas(status, "cublasLtMatmul");
  }
  /// The rows that the algorithm of a sum over rows is chosen for: it may cut a sum into as many parts as it has terms.
  static std::int64_t planned_rows(std::int64_t rows) {
    return static_cast<std::int64_t>(std::bit_floor(static_cast<std::uint64_t>(rows)));
  }
  /// How many algorithms were chosen so far.
  std::size_t chosen() const { return calls_.size(); }

 private:
  using Layout = cublasLtMatrixLayoutOpaque_t;
  struct Layouts {
    Layout a, b, out;
  };
  struct Call {
    pleat::detail::CublasLtOwned<cublasLtMatmulDesc_t> product;
    cublasLtMatmulAlgo_t algorithm;
  };
  struct Arguments {
    const void *a, *b;
    double beta;
    const void* c;
    void* out;
    cudaStream_t stream;
  };

  static cudaDataType type_of(pleat::DType dtype) {
    return dtype == pleat::DType::f64 ? CUDA_R_64F : dtype == pleat::DType::f32 ? CUDA_R_32F : CUDA_R_16BF;
  }
  /// Row-major matrices [rows, columns].
  static Layout layout(const Product& p, pleat::DType dtype, std::int64_t rows, std::int64_t columns,
                       std::int64_t pitch, std::int64_t step) {
    Layout made{};
    pleat::detail::check_cublas(
        cublasLtMatrixLayoutInit(&made, type_of(dtype), static_cast<std::uint64_t>(columns),
                                 static_cast<std::uint64_t>(rows), pitch == 0 ? columns : pitch),
        "cublasLtMatrixLayoutInit");
    const auto set = [&](cublasLtMatrixLayoutAttribute_t which, const auto& value) {
      pleat::detail::check_cublas(cublasLtMatrixLayoutSetAttribute(&made, which, &value, sizeof(value)),
                                  "cublasLtMatrixLayoutSetAttribute");
    };
    set(CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, p.count);
    set(CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, step);
    return made;
  }
  static Layouts layouts_of(const Product& p) {
    return {p.trans_a ? layout(p, p.in, p.k, p.m, p.a_pitch, p.a_step) : layout(p, p.in, p.m, p.k, p.a_pitch, p.a_step),
            p.trans_b ? layout(p, p.in, p.n, p.k, p.b_pitch, p.b_step) : layout(p, p.in, p.k, p.n, p.b_pitch, p.b_step),
            layout(p, p.out, p.m, p.n, p.out_pitch, p.out_step)};
  }

  cublasStatus_t multiply(const Call& call, const Product& product, const Arguments& x) const {
    Layouts of = layouts_of(product);
    const bool is_double = product.in == pleat::DType::f64;
    const float narrow[] = {1.0f, static_cast<float>(x.beta)};
    const double wide[] = {1.0, x.beta};
    const void* const alpha = is_double ? static_cast<const void*>(wide) : narrow;
    const void* const scaled = is_double ? static_cast<const void*>(wide + 1) : narrow + 1;
    // cuBLAS counts columns first: there it is out^T = op(b)^T op(a)^T.
    return cublasLtMatmul(handle_.get(), call.product.get(), alpha, x.b, &of.b, x.a, &of.a, scaled,
                          x.beta == 0 ? x.out : x.c, &of.out, x.out, &of.out, &call.algorithm, workspace_,
                          workspace_bytes, x.stream);
  }

  const Call& call_of(const Product& product) {
    const auto known = calls_.find(product);
    return known != calls_.end() ? known->second : calls_.emplace(product, make_call(product)).first->second;
  }

  Call make_call(const Product& p) const {
    Call call{};
    const bool is_double = p.in == pleat::DType::f64;
    cublasLtMatmulDesc_t made = nullptr;
    pleat::detail::check_cublas(cublasLtMatmulDescCreate(&made, is_double ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F,
                                                         is_double ? CUDA_R_64F : CUDA_R_32F),
                                "cublasLtMatmulDescCreate");
    call.product.reset(made);
    const auto transpose = [&](cublasLtMatmulDescAttributes_t which, bool is_transposed) {
      const cublasOperation_t op = is_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
      pleat::detail::check_cublas(cublasLtMatmulDescSetAttribute(made, which, &op, sizeof(op)),
                                  "cublasLtMatmulDescSetAttribute");
    };
    transpose(CUBLASLT_MATMUL_DESC_TRANSA, p.trans_b);
    transpose(CUBLASLT_MATMUL_DESC_TRANSB, p.trans_a);
    choose(call, layouts_of(p));
    return call;
  }

  void choose(Call& call, Layouts of) const {
    cublasLtMatmulPreference_t made = nullptr;
    pleat::detail::check_cublas(cublasLtMatmulPreferenceCreate(&made), "cublasLtMatmulPreferenceCreate");
    const pleat::detail::CublasLtOwned<cublasLtMatmulPreference_t> preference(made);
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
      pleat::detail::check_cublas(cublasLtMatmulPreferenceSetAttribute(made, attribute, &value, sizeof(value)),
                                  "cublasLtMatmulPreferenceSetAttribute");
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, std::uint64_t{workspace_bytes});
    // Not in place, where the parts are added as they come.
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
           std::uint32_t{CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
    for (const auto alignment :
         {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
          CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
      prefer(alignment, std::uint32_t{16});
    }
    cublasLtMatmulHeuristicResult_t result{};
    int found = 0;
    pleat::detail::check_cublas(cublasLtMatmulAlgoGetHeuristic(handle_.get(), call.product.get(), &of.b, &of.a, &of.out,
                                                               &of.out, made, 1, &result, &found),
                                "cublasLtMatmulAlgoGetHeuristic");
    pleat::detail::check_cublas(found == 0 ? CUBLAS_STATUS_NOT_SUPPORTED : result.state,
                                "cublasLtMatmulAlgoGetHeuristic");
    call.algorithm = result.algo;
  }

  std::int64_t most_rows_;
  pleat::detail::CublasLtOwned<cublasLtHandle_t> handle_;
  void* workspace_;
  std::map<Product, Call> calls_;
};

}  // namespace train_moe::gpu
