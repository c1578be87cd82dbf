// pleat_c.h on GPUs: every process is one rank of the job that torchrun, mpirun or srun has started.
#include <pleat/nccl.cuh>

namespace backend {
using Comm = pleat::NcclComm;
using Arena = pleat::NcclArena;
struct Streams {
  pleat::CudaStream compute, gather, reduce{pleat::first_priority()}, own;

  pleat::fsdp::ShardStreams<cudaStream_t> shard() const { return {compute, gather, reduce, own}; }
  void* raw() const { return static_cast<cudaStream_t>(compute); }
};
template <class F>
void run(int ranks, F&& f) {
  if (ranks == 1) {
    pleat::NcclComm alone = pleat::NcclComm::create(nullptr, pleat::CudaExecutor().device().index);
    return f(alone);
  }
  pleat::run_nccl_process([&](pleat::NcclComm& world) {
    if (world.size() != ranks) {
      throw std::invalid_argument("pleat_run asks for " + std::to_string(ranks) + " ranks, and the launcher started " +
                                  std::to_string(world.size()));
    }
    f(world);
  });
}
}  // namespace backend

#include "shim.hpp"
