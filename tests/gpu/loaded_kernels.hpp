// Which kernels of a program the driver has not loaded yet: what binds have to load must not be among them.
#pragma once

#include <cstring>
#include <string>
#include <vector>

#include <pleat/cuda/driver.hpp>

namespace gpu_testing {

/// The mangled names of the kernels in the translation unit of `kernel` that are not loaded on the current device. With
/// CUDA_MODULE_LOADING=LAZY, which is the default, each is loaded on its own.
template <class Kernel>
std::vector<std::string> unloaded_kernels(Kernel* kernel) {
  PFN_cuFuncGetModule_v11000 module_of = nullptr;
  PFN_cuModuleGetFunctionCount_v12040 count_of = nullptr;
  PFN_cuModuleEnumerateFunctions_v12040 enumerate = nullptr;
  PFN_cuFuncIsLoaded_v12040 is_loaded = nullptr;
  PFN_cuFuncGetName_v12030 name_of = nullptr;
  pleat::CudaDriver::find(module_of, "cuFuncGetModule", 11000);
  pleat::CudaDriver::find(count_of, "cuModuleGetFunctionCount", 12040);
  pleat::CudaDriver::find(enumerate, "cuModuleEnumerateFunctions", 12040);
  pleat::CudaDriver::find(is_loaded, "cuFuncIsLoaded", 12040);
  pleat::CudaDriver::find(name_of, "cuFuncGetName", 12030);
  const pleat::CudaDriver driver;
  cudaFunction_t function = nullptr;
  pleat::check_cuda(cudaGetFuncBySymbol(&function, reinterpret_cast<const void*>(kernel)), "cudaGetFuncBySymbol");
  CUmodule module = nullptr;
  driver.check(module_of(&module, function), "cuFuncGetModule");
  unsigned count = 0;
  driver.check(count_of(&count, module), "cuModuleGetFunctionCount");
  std::vector<CUfunction> functions(count);
  driver.check(enumerate(functions.data(), count, module), "cuModuleEnumerateFunctions");
  std::vector<std::string> names;
  for (const CUfunction one : functions) {
    CUfunctionLoadingState state = CU_FUNCTION_LOADING_STATE_UNLOADED;
    driver.check(is_loaded(&state, one), "cuFuncIsLoaded");
    const char* name = "";
    driver.check(name_of(&name, one), "cuFuncGetName");
    if (state == CU_FUNCTION_LOADING_STATE_UNLOADED) names.emplace_back(name);
  }
  return names;
}

/// Those of them whose names hold `text`.
inline std::vector<std::string> holding(const std::vector<std::string>& names, const char* text) {
  std::vector<std::string> found;
  for (const std::string& name : names) {
    if (name.find(text) != std::string::npos) found.push_back(name);
  }
  return found;
}

}  // namespace gpu_testing
