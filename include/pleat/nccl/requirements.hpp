// What pleat asks of the NCCL it runs with, checked before the first communicator.
#pragma once

#include <string_view>

#include <pleat/core/error.hpp>

namespace pleat::inline v0 {

/// A version as NCCL codes it: major * 10000 + minor * 100 + patch.
struct NcclVersion {
  int code;
};
constexpr void append_to(Message& message, NcclVersion version) {
  message.append(version.code / 10000)
      .append('.')
      .append(version.code / 100 % 100)
      .append('.')
      .append(version.code % 100);
}

/// The structs of NCCL's device interface change between patch releases, so header and library must be the same.
/// Errors: nccl_error C22.
inline void check_nccl_versions(NcclVersion header, NcclVersion library) {
  if (header.code == library.code) return;
  fail<nccl_error>(
      "pleat[C22]: compiled with the header of NCCL ", header, ", running with the library of NCCL ", library,
      "; compile with the nccl.h beside that library, or let LD_LIBRARY_PATH lead to libnccl.so.2 of ", header);
}

/// NVLink multicast must be off; `value` is NCCL_NVLS_ENABLE of the environment, null when it is not set. NCCL reads it
/// at its first call, so it must be set before. Errors: nccl_error C23.
inline void check_nvls_is_off(const char* value) {
  if (value != nullptr && std::string_view(value) == "0") return;
  fail<nccl_error>("pleat[C23]: NCCL_NVLS_ENABLE is ", value == nullptr ? "not set" : value,
                   "; set NCCL_NVLS_ENABLE=0 in the environment before the first NCCL call");
}

}  // namespace pleat::inline v0
