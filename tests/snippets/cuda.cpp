// The blocks that need the CUDA toolkit; see host.cpp.
#include <cuda_runtime_api.h>

#include "support/dlpack.hpp"

#include <pleat/cuda.hpp>

using namespace pleat;

void fsdp_3(fsdp::Sharder<CudaExecutor, CudaThreadComm, CudaThreadArena>& op, fsdp::ShardStreams<cudaStream_t> streams,
            cudaStream_t compute, cudaGraph_t graph) {
#include "fsdp.3"
}
void tensors_4(TensorRef y, CudaBuffer memory, cudaStream_t producer, std::int64_t consumer_number) {
#include "tensors.4"
}
