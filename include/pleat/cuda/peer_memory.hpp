// Mapping the memory of one device into another, for ranks of one process.
#pragma once

#include <span>

#include <pleat/cuda/buffer.hpp>
#include <pleat/cuda/stream.hpp>

namespace pleat::inline v0 {

/// Whether `device` maps what is allocated on `other`. Errors: cuda_error C20.
inline bool maps_memory_of(int device, int other) {
  const CudaDeviceScope on_other(other);
  const CudaBuffer memory(1);
  const CudaDeviceScope on_device(device);
  cudaPointerAttributes attributes = {};
  check_cuda(cudaPointerGetAttributes(&attributes, memory.data()), "cudaPointerGetAttributes");
  return attributes.devicePointer != nullptr;
}

/// Lets each of the devices map the memory of the others, for the whole process. Pairs that do already are left alone:
/// CUDA takes a second request for an error. Errors: comm_error C26 when two of them cannot map each other; C20.
inline void map_memory_between(std::span<const int> devices) {
  for (const int device : devices) {
    for (const int other : devices) {
      if (device == other) continue;
      int can_access = 0;
      check_cuda(cudaDeviceCanAccessPeer(&can_access, device, other), "cudaDeviceCanAccessPeer");
      if (can_access == 0) {
        fail<comm_error>("pleat[C26]: device ", device, " cannot map the memory of device ", other,
                         "; run the ranks on devices that can, or on one");
      }
      if (maps_memory_of(device, other)) continue;
      const CudaDeviceScope on_device(device);
      const cudaError_t status = cudaDeviceEnablePeerAccess(other, 0);
      if (status == cudaErrorPeerAccessAlreadyEnabled) {  // by another thread just now
        (void)cudaGetLastError();
      } else {
        check_cuda(status, "cudaDeviceEnablePeerAccess");
      }
    }
  }
}

}  // namespace pleat::inline v0
