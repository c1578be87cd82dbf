// expect: pleat[T03]: no leaves for this device: include pleat/core/host/leaf.hpp or pleat/cuda/leaf.cuh
// values: host_device
#include <pleat/core/executor.hpp>
#ifdef PLEAT_FIXED
#include <pleat/core/host/leaf.hpp>
#endif

const pleat::core_leaf<pleat::host_device> leaf;
