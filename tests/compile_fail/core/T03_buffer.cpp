// expect: pleat[T03]: no memory for this device: include pleat/core/host/buffer.hpp or pleat/cuda/buffer.hpp
// values: host_device
#include <pleat/core/buffer.hpp>
#ifdef PLEAT_FIXED
#include <pleat/core/host/buffer.hpp>
#endif

using Buffer = pleat::buffer_for<pleat::host_device>;
