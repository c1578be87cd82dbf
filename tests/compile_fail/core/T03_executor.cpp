// expect: pleat[T03]: no executor for this device: include pleat/core/host/executor.hpp or pleat/cuda/executor.hpp
// values: host_device
#include <pleat/core/executor.hpp>
#ifdef PLEAT_FIXED
#include <pleat/core/host/executor.hpp>
#endif

using Executor = pleat::executor_for<pleat::host_device>;
