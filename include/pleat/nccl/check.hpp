// The status of an NCCL call, as an exception, and the check of the library behind the calls.
#pragma once

#include <cstdlib>

#include <nccl.h>

#include <pleat/nccl/requirements.hpp>

namespace pleat::inline v0 {

/// The text of nccl_error C21: what an NCCL call returned; `call` names it.
inline Message nccl_failure(ncclResult_t status, const char* call) {
  return message_of("pleat[C21]: ", call, " failed: ", ncclGetErrorString(status), "; ", ncclGetLastError(nullptr));
}

/// Errors: nccl_error C21 unless the call has succeeded.
inline void check_nccl(ncclResult_t status, const char* call) {
  if (status != ncclSuccess) throw nccl_error(nccl_failure(status, call));
}

/// Errors: nccl_error C22 when the loaded library is not that of the header, C23 when NVLS is not off.
inline void check_nccl_library() {
  int library = 0;
  check_nccl(ncclGetVersion(&library), "ncclGetVersion");
  check_nccl_versions({NCCL_VERSION_CODE}, {library});
  check_nvls_is_off(std::getenv("NCCL_NVLS_ENABLE"));
}

}  // namespace pleat::inline v0
