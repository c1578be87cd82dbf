// What cuBLASLt makes, owned, and its errors.
#pragma once

#include <memory>
#include <type_traits>

#include <cublasLt.h>

#include <pleat/cuda/check.hpp>

namespace pleat::inline v0::detail {

inline void check_cublas(cublasStatus_t status, const char* call) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  fail<cuda_error>("pleat[C20]: ", call, " failed: ", cublasLtGetStatusName(status));
}

/// Frees what cuBLASLt made.
struct CublasLtDelete {
  void operator()(cublasLtHandle_t handle) const { (void)cublasLtDestroy(handle); }
  void operator()(cublasLtMatmulDesc_t product) const { (void)cublasLtMatmulDescDestroy(product); }
  void operator()(cublasLtMatrixLayout_t layout) const { (void)cublasLtMatrixLayoutDestroy(layout); }
  void operator()(cublasLtMatmulPreference_t preference) const { (void)cublasLtMatmulPreferenceDestroy(preference); }
};
template <class Handle>
using CublasLtOwned = std::unique_ptr<std::remove_pointer_t<Handle>, CublasLtDelete>;

inline CublasLtOwned<cublasLtHandle_t> make_cublaslt() {
  cublasLtHandle_t handle = nullptr;
  check_cublas(cublasLtCreate(&handle), "cublasLtCreate");
  return CublasLtOwned<cublasLtHandle_t>(handle);
}

}  // namespace pleat::inline v0::detail
