// The experts' products through cuBLASLt, one per expert: for chips whose tensor cores the library has no kernel for,
// and to check the kernels that there are. The host reads where experts begin, so these leaves wait and cannot be
// captured.
#pragma once

#include <cstdint>

#include <pleat/core/block.hpp>
#include <pleat/core/carve.hpp>
#include <pleat/cuda/cublaslt.hpp>
#include <pleat/cuda/kernel.hpp>
#include <pleat/moe/experts.hpp>
#include <pleat/moe/leaf_concepts.hpp>

namespace pleat::inline v0::moe {

namespace detail {
/// act = silu(gate) * up.
template <class T>
PLEAT_KERNEL void swiglu_rows_kernel(const T* gate, const T* up, T* act, std::int64_t elems) {
  using Acc = accumulator_t<T>;
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < elems; i += step) {
    const Acc g = static_cast<Acc>(gate[i]);
    act[i] = static_cast<T>(g / (1 + exp(-g)) * static_cast<Acc>(up[i]));
  }
}
/// From dact, in `act`, and gate and up: dgate and dup, which may be gate and up; then act = silu(gate) * up.
template <class T>
PLEAT_KERNEL void swiglu_rows_backward_kernel(const T* gate, const T* up, T* dgate, T* dup, T* act,
                                              std::int64_t elems) {
  using Acc = accumulator_t<T>;
  const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < elems; i += step) {
    const Acc g = static_cast<Acc>(gate[i]), u = static_cast<Acc>(up[i]), d = static_cast<Acc>(act[i]);
    const Acc sigmoid = 1 / (1 + exp(-g)), silu = g * sigmoid;
    act[i] = static_cast<T>(silu * u);
    dup[i] = static_cast<T>(d * silu);
    dgate[i] = static_cast<T>(d * u * (sigmoid + silu * (1 - sigmoid)));
  }
}
}  // namespace detail

/// An `expert_leaf` to give to `bind` of Experts or of the layer. Every call waits for its stream. What the kernels
/// round once is rounded twice where two products meet: dact, and drows, which is a sum of two. Errors of all calls:
/// cuda_error C20.
class CublasLtExperts {
 public:
  static constexpr std::size_t workspace_bytes = std::size_t{32} << 20;
  /// Of host memory, for the experts' offsets.
  static std::size_t pinned_bytes(const ExpertPlan& plan) {
    Carver host;
    take_starts(plan, host);
    return host.used_bytes();
  }

  /// `pinned`: pinned_bytes of host memory; `workspace`: workspace_bytes of the current device. Both are borrowed, and
  /// used by one stream at a time. Errors: shape_error T02.
  CublasLtExperts(const ExpertPlan& plan, Block pinned, Block workspace) : handle_(pleat::detail::make_cublaslt()) {
    Carver host(pinned), device(workspace);
    starts_ = take_starts(plan, host);
    workspace_ = device.take_bytes(workspace_bytes);
  }

  /// The kernels here; those of cuBLASLt load when they are first used, or with CUDA_MODULE_LOADING=EAGER.
  static void preload() {
    for_each_type(FloatTypes{}, [](auto type) {
      using T = typename decltype(type)::type;
      preload_kernel(detail::swiglu_rows_kernel<T>, "swiglu_rows_kernel");
      preload_kernel(detail::swiglu_rows_backward_kernel<T>, "swiglu_rows_backward_kernel");
    });
  }

  void gate_up(const ExpertPlan& plan, const void* rows, const std::int64_t* offsets, const TensorRef& gate_w,
               const TensorRef& up_w, void* gate, void* up, void* act, cudaStream_t s) const {
    read(plan, offsets, s);
    rows_times(plan, {rows, plan.shape.hidden}, gate_w, true, {gate, plan.shape.inner}, 0, s);
    rows_times(plan, {rows, plan.shape.hidden}, up_w, true, {up, plan.shape.inner}, 0, s);
    each_elem(plan, [&](auto type, std::int64_t first, std::int64_t elems, unsigned ctas) {
      using T = typename decltype(type)::type;
      detail::swiglu_rows_kernel<<<ctas, threads, 0, s>>>(
          static_cast<const T*>(gate) + first, static_cast<const T*>(up) + first, static_cast<T*>(act) + first, elems);
      check_launch("swiglu_rows_kernel");
    });
  }
  void down(const ExpertPlan& plan, const void* act, const std::int64_t* offsets, const TensorRef& down_w, void* out,
            cudaStream_t s) const {
    read(plan, offsets, s);
    rows_times(plan, {act, plan.shape.inner}, down_w, true, {out, plan.shape.hidden}, 0, s);
  }
  void down_backward(const ExpertPlan& plan, const void* dout, const std::int64_t* offsets, const TensorRef& down_w,
                     const void* gate, const void* up, void* dgate, void* dup, void* act, cudaStream_t s) const {
    read(plan, offsets, s);
    rows_times(plan, {dout, plan.shape.hidden}, down_w, false, {act, plan.shape.inner}, 0, s);
    each_elem(plan, [&](auto type, std::int64_t first, std::int64_t elems, unsigned ctas) {
      using T = typename decltype(type)::type;
      detail::swiglu_rows_backward_kernel<<<ctas, threads, 0, s>>>(
          static_cast<const T*>(gate) + first, static_cast<const T*>(up) + first, static_cast<T*>(dgate) + first,
          static_cast<T*>(dup) + first, static_cast<T*>(act) + first, elems);
      check_launch("swiglu_rows_backward_kernel");
    });
  }
  void gate_up_backward(const ExpertPlan& plan, const void* dgate, const void* dup, const std::int64_t* offsets,
                        const TensorRef& gate_w, const TensorRef& up_w, void* drows, cudaStream_t s) const {
    read(plan, offsets, s);
    rows_times(plan, {dgate, plan.shape.inner}, gate_w, false, {drows, plan.shape.hidden}, 0, s);
    rows_times(plan, {dup, plan.shape.inner}, up_w, false, {drows, plan.shape.hidden}, 1, s);
  }
  void weight_gradient(const ExpertPlan& plan, const void* d, std::int64_t d_cols, const void* x, std::int64_t x_cols,
                       const std::int64_t* offsets, bool accumulate, const TensorRef& dw, cudaStream_t s) const {
    read(plan, offsets, s);
    const std::size_t elem = size_bytes(plan.shape.dtype), sum = size_bytes(dw.dtype());
    for (int e = 0; e < plan.shape.experts_local; ++e) {
      std::byte* const to = static_cast<std::byte*>(dw.data()) + static_cast<std::size_t>(e * dw.stride(0)) * sum;
      const std::int64_t rows = starts_[e + 1] - starts_[e];
      if (rows == 0) {
        const std::size_t bytes = static_cast<std::size_t>(d_cols * x_cols) * sum;
        if (!accumulate) check_cuda(cudaMemsetAsync(to, 0, bytes, s), "cudaMemsetAsync");
        continue;
      }
      // dw [d_cols, x_cols] = d^T x, row-major: its transpose is x^T d.
      multiply(plan.shape.dtype, dw.dtype(), {at(x, starts_[e] * x_cols, elem), x_cols, rows, x_cols, CUBLAS_OP_N},
               {at(d, starts_[e] * d_cols, elem), d_cols, rows, d_cols, CUBLAS_OP_T}, to, x_cols, d_cols,
               accumulate ? 1 : 0, s);
    }
  }

 private:
  static constexpr unsigned threads = 256;

  /// Rows of all experts, one behind the other.
  struct In {
    const void* data;
    std::int64_t columns;
  };
  struct Out {
    void* data;
    std::int64_t columns;
  };
  /// A column-major matrix [rows, columns] with gaps between columns.
  struct Operand {
    const void* data;
    std::int64_t rows, columns, pitch;
    cublasOperation_t op;
  };
  using Layout = pleat::detail::CublasLtOwned<cublasLtMatrixLayout_t>;

  static std::int64_t* take_starts(const ExpertPlan& plan, Carver& host) {
    return host.take<std::int64_t>(static_cast<std::size_t>(plan.shape.experts_local) + 1);
  }
  static const std::byte* at(const void* data, std::int64_t elems, std::size_t elem_bytes) {
    return static_cast<const std::byte*>(data) + static_cast<std::size_t>(elems) * elem_bytes;
  }
  void read(const ExpertPlan& plan, const std::int64_t* offsets, cudaStream_t s) const {
    const std::size_t bytes = (static_cast<std::size_t>(plan.shape.experts_local) + 1) * sizeof(std::int64_t);
    check_cuda(cudaMemcpyAsync(starts_, offsets, bytes, cudaMemcpyDeviceToHost, s), "cudaMemcpyAsync");
    check_cuda(cudaStreamSynchronize(s), "cudaStreamSynchronize");
  }
  /// Calls f(type, first, elems, ctas) for the elements [first, first + elems) of all rows of `inner` columns.
  template <class F>
  void each_elem(const ExpertPlan& plan, const F& f) const {
    const std::int64_t first = starts_[0] * plan.shape.inner,
                       elems = starts_[plan.shape.experts_local] * plan.shape.inner - first;
    if (elems == 0) return;
    const auto ctas = static_cast<unsigned>(elems / threads < 1056 ? elems / threads + 1 : 1056);
    dispatch_dtype(FloatTypes{}, plan.shape.dtype, [&](auto type) { f(type, first, elems, ctas); });
  }

  /// out = in W^T for W [out.columns, in.columns], or in W for its transpose; += where `beta` is 1.
  void rows_times(const ExpertPlan& plan, const In& in, const TensorRef& w, bool is_transposed, const Out& out,
                  double beta, cudaStream_t s) const {
    const std::size_t elem = size_bytes(plan.shape.dtype);
    for (int e = 0; e < plan.shape.experts_local; ++e) {
      const std::int64_t rows = starts_[e + 1] - starts_[e];
      if (rows == 0) continue;
      // The transpose of each row-major matrix is a column-major one: out^T [out.columns, rows] = op(w) in^T.
      const Operand matrix{at(w.data(), e * w.stride(0), elem), w.extent(2), w.extent(1), w.extent(2),
                           is_transposed ? CUBLAS_OP_T : CUBLAS_OP_N};
      const Operand of_rows{at(in.data, starts_[e] * in.columns, elem), in.columns, rows, in.columns, CUBLAS_OP_N};
      multiply(plan.shape.dtype, plan.shape.dtype, matrix, of_rows,
               const_cast<std::byte*>(at(out.data, starts_[e] * out.columns, elem)), out.columns, rows, beta, s);
    }
  }

  /// d [m, n] = op(a) op(b) + beta d, column-major.
  void multiply(DType in, DType out, const Operand& a, const Operand& b, std::byte* d, std::int64_t m, std::int64_t n,
                double beta, cudaStream_t s) const {
    using pleat::detail::check_cublas;
    const bool is_double = in == DType::f64;
    cublasLtMatmulDesc_t made = nullptr;
    check_cublas(cublasLtMatmulDescCreate(&made, is_double ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F,
                                          is_double ? CUDA_R_64F : CUDA_R_32F),
                 "cublasLtMatmulDescCreate");
    const pleat::detail::CublasLtOwned<cublasLtMatmulDesc_t> product(made);
    const auto transpose = [&](cublasLtMatmulDescAttributes_t which, cublasOperation_t op) {
      check_cublas(cublasLtMatmulDescSetAttribute(made, which, &op, sizeof op), "cublasLtMatmulDescSetAttribute");
    };
    transpose(CUBLASLT_MATMUL_DESC_TRANSA, a.op);
    transpose(CUBLASLT_MATMUL_DESC_TRANSB, b.op);
    const Layout of_a = layout(in, a.rows, a.columns, a.pitch), of_b = layout(in, b.rows, b.columns, b.pitch),
                 of_d = layout(out, m, n, m);
    cublasLtMatmulPreference_t preferred = nullptr;
    check_cublas(cublasLtMatmulPreferenceCreate(&preferred), "cublasLtMatmulPreferenceCreate");
    const pleat::detail::CublasLtOwned<cublasLtMatmulPreference_t> preference(preferred);
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t which, auto value) {
      check_cublas(cublasLtMatmulPreferenceSetAttribute(preferred, which, &value, sizeof value),
                   "cublasLtMatmulPreferenceSetAttribute");
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, std::uint64_t{workspace_bytes});
    const auto alignment = [](const void* p) {
      const auto address = reinterpret_cast<std::uintptr_t>(p) | 256;
      return static_cast<std::uint32_t>(address & (~address + 1));
    };
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment(a.data));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment(b.data));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment(d));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment(d));
    cublasLtMatmulHeuristicResult_t result{};
    int found = 0;
    check_cublas(cublasLtMatmulAlgoGetHeuristic(handle_.get(), made, of_a.get(), of_b.get(), of_d.get(), of_d.get(),
                                                preferred, 1, &result, &found),
                 "cublasLtMatmulAlgoGetHeuristic");
    check_cublas(found == 0 ? CUBLAS_STATUS_NOT_SUPPORTED : result.state, "cublasLtMatmulAlgoGetHeuristic");
    const double wide[] = {1, beta};
    const float narrow[] = {1, static_cast<float>(beta)};
    const auto* const factors =
        is_double ? reinterpret_cast<const std::byte*>(wide) : reinterpret_cast<const std::byte*>(narrow);
    const std::size_t factor_bytes = is_double ? sizeof wide[0] : sizeof narrow[0];
    check_cublas(
        cublasLtMatmul(handle_.get(), made, factors, a.data, of_a.get(), b.data, of_b.get(), factors + factor_bytes, d,
                       of_d.get(), d, of_d.get(), &result.algo, workspace_, workspace_bytes, s),
        "cublasLtMatmul");
  }
  static Layout layout(DType dtype, std::int64_t rows, std::int64_t columns, std::int64_t pitch) {
    const cudaDataType type = dtype == DType::f64 ? CUDA_R_64F : dtype == DType::f32 ? CUDA_R_32F : CUDA_R_16BF;
    cublasLtMatrixLayout_t made = nullptr;
    pleat::detail::check_cublas(cublasLtMatrixLayoutCreate(&made, type, static_cast<std::uint64_t>(rows),
                                                           static_cast<std::uint64_t>(columns), pitch),
                                "cublasLtMatrixLayoutCreate");
    return Layout(made);
  }

  pleat::detail::CublasLtOwned<cublasLtHandle_t> handle_;
  std::int64_t* starts_;
  std::byte* workspace_;
};
static_assert(expert_leaf<CublasLtExperts, cudaStream_t>);

}  // namespace pleat::inline v0::moe
