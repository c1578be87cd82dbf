// The functions of the CUDA driver that the runtime does not offer: a stream's writes to memory and waits on it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

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

  /// A write or a wait of a stream on a word of device memory, a peer's too.
  using Step = CUstreamBatchMemOpParams;
  /// Writes `value` after all that the stream has done so far, which whoever sees the value sees as well.
  Step write_step(std::uint64_t* word, std::uint64_t value) const {
    Step step = {};
    step.writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_64;
    step.writeValue.address = address(word);
    step.writeValue.value64 = value;
    step.writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
    return step;
  }
  /// What follows runs after the word is at least `at_least`: a cyclic signed compare.
  Step wait_step(const std::uint64_t* word, std::uint64_t at_least) const {
    Step step = {};
    step.waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_64;
    step.waitValue.address = address(word);
    step.waitValue.value64 = at_least;
    step.waitValue.flags = wait_flags_;
    return step;
  }
  /// Enqueues the steps in their order, as one call: that costs the host and the device less than a call for each.
  void run(cudaStream_t s, std::span<Step> steps) const {
    constexpr std::size_t most_at_once = 256;
    for (; !steps.empty(); steps = steps.subspan(std::min(most_at_once, steps.size()))) {
      const auto count = static_cast<unsigned>(std::min(most_at_once, steps.size()));
      count == 1 ? run(s, steps.front()) : check(batch_(s, count, steps.data(), 0), "cuStreamBatchMemOp");
    }
  }
  void run(cudaStream_t s, const Step& step) const {
    if (step.operation == CU_STREAM_MEM_OP_WRITE_VALUE_64) {
      const auto& write = step.writeValue;
      check(write_value_(s, write.address, write.value64, write.flags), "cuStreamWriteValue64");
    } else {
      const auto& wait = step.waitValue;
      check(wait_value_(s, wait.address, wait.value64, wait.flags), "cuStreamWaitValue64");
    }
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
