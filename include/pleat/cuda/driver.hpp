// The functions of the CUDA driver that the runtime does not offer: a stream's writes to memory and waits on it.
#pragma once

#include <cstdint>

#include <cuda.h>
#include <cudaTypedefs.h>

#include <pleat/cuda/check.hpp>

namespace pleat::inline v0 {

/// Driver functions for the device that is current at construction, asked of the runtime: nothing links libcuda.
/// Errors: cuda_error C20, also where the driver or the device lacks them.
class CudaDriver {
 public:
  CudaDriver() {
    find(error_name_, "cuGetErrorName", 6000);
    find(error_string_, "cuGetErrorString", 6000);
    find(write_value_, "cuStreamWriteValue64", 11070);
    find(wait_value_, "cuStreamWaitValue64", 11070);
    find(batch_, "cuStreamBatchMemOp", 11070);
    find(attribute_, "cuDeviceGetAttribute", 2000);
    int device = 0;
    check_cuda(cudaGetDevice(&device), "cudaGetDevice");
    if (attribute(CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, device) == 0) {
      fail<cuda_error>("pleat[C20]: device ", device, " has no 64-bit stream memory operations");
    }
    // Writes of peers may still be under way when the flag that announces them is seen; some devices can wait for them.
    if (attribute(CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES, device) != 0) wait_flags_ |= CU_STREAM_WAIT_VALUE_FLUSH;
  }

  /// Writes `value` after all that `s` has done so far, which whoever sees the value sees as well. `word` is device
  /// memory, a peer's too.
  void write(cudaStream_t s, std::uint64_t* word, std::uint64_t value) const {
    check(write_value_(s, address(word), value, CU_STREAM_WRITE_VALUE_DEFAULT), "cuStreamWriteValue64");
  }
  /// What follows on `s` runs after the word is at least `at_least`: a cyclic signed compare.
  void wait(cudaStream_t s, const std::uint64_t* word, std::uint64_t at_least) const {
    check(wait_value_(s, address(word), at_least, wait_flags_), "cuStreamWaitValue64");
  }
  /// Waits as above, then writes `value` to the word.
  void wait_and_write(cudaStream_t s, std::uint64_t* word, std::uint64_t at_least, std::uint64_t value) const {
    CUstreamBatchMemOpParams steps[2] = {};
    steps[0].waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_64;
    steps[0].waitValue.address = address(word);
    steps[0].waitValue.value64 = at_least;
    steps[0].waitValue.flags = wait_flags_;
    steps[1].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_64;
    steps[1].writeValue.address = address(word);
    steps[1].writeValue.value64 = value;
    steps[1].writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
    check(batch_(s, 2, steps, 0), "cuStreamBatchMemOp");
  }

  /// Whether waits also wait for the peers' earlier writes to arrive.
  bool flushes_remote_writes() const { return (wait_flags_ & CU_STREAM_WAIT_VALUE_FLUSH) != 0; }

  /// Looks a driver function up by name; for what a few need.
  template <class Function>
  static void find(Function& function, const char* name, unsigned int version) {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    check_cuda(cudaGetDriverEntryPointByVersion(name, &found, version, cudaEnableDefault, &result),
               "cudaGetDriverEntryPointByVersion");
    if (result != cudaDriverEntryPointSuccess || found == nullptr) {
      fail<cuda_error>("pleat[C20]: the driver has no ", name, " of CUDA ", version / 1000, ".", version % 1000 / 10);
    }
    function = reinterpret_cast<Function>(found);
  }
  /// Throws what a driver call returned; `call` names it. Errors: C20.
  void check(CUresult status, const char* call) const {
    if (status == CUDA_SUCCESS) return;
    const char *name = "unknown error", *text = "";
    (void)error_name_(status, &name);
    (void)error_string_(status, &text);
    fail<cuda_error>("pleat[C20]: ", call, " failed: ", name, ", ", text);
  }

 private:
  static CUdeviceptr address(const std::uint64_t* word) { return reinterpret_cast<CUdeviceptr>(word); }

  int attribute(CUdevice_attribute which, int device) const {
    int value = 0;
    check(attribute_(&value, which, device), "cuDeviceGetAttribute");
    return value;
  }
  PFN_cuGetErrorName_v6000 error_name_ = nullptr;
  PFN_cuGetErrorString_v6000 error_string_ = nullptr;
  PFN_cuStreamWriteValue64_v11070 write_value_ = nullptr;
  PFN_cuStreamWaitValue64_v11070 wait_value_ = nullptr;
  PFN_cuStreamBatchMemOp_v11070 batch_ = nullptr;
  PFN_cuDeviceGetAttribute_v2000 attribute_ = nullptr;
  unsigned int wait_flags_ = CU_STREAM_WAIT_VALUE_GEQ;
};

}  // namespace pleat::inline v0
