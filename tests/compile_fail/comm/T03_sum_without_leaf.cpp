// expect: pleat[T03]: no leaves for this device: include pleat/core/host/leaf.hpp or pleat/cuda/leaf.cuh
// values: host_device
#include <pleat/comm/ordered_sum.hpp>
#include <pleat/comm/thread_comm.hpp>
#ifdef PLEAT_FIXED
#include <pleat/core/host/leaf.hpp>
#endif

void f(const pleat::GroupComm<pleat::ThreadComm>& comm, float* sum, pleat::Block scratch) {
  pleat::all_reduce_ordered(comm, sum, 1, pleat::DType::f32, scratch, {});
}
