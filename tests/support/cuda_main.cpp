// The main of every doctest program that needs a GPU: exit code 77, which ctest reports as skipped, where there is
// none.
#include <cstdio>

#include <cuda_runtime_api.h>

#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

int main(int argc, char** argv) {
  int devices = 0;
  const cudaError_t status = cudaGetDeviceCount(&devices);
  if (status != cudaSuccess || devices == 0) {
    std::printf("skipped: %s\n", status == cudaSuccess ? "no GPU" : cudaGetErrorString(status));
    return 77;
  }
  return doctest::Context(argc, argv).run();
}
