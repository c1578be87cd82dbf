// expect: pleat[T07]: tensors of this type are never on the device of the operation, as tensor_traits::only_on says
// values: GpuExecutor
#include <pleat/comm.hpp>
#include <pleat/fsdp.hpp>

// Host ranks that say that they are a GPU's, so that no toolkit is needed.
struct GpuExecutor : pleat::HostExecutor {
  using device_type = pleat::cuda_device;
};
template <>
struct pleat::core_leaf<pleat::cuda_device> : pleat::core_leaf<pleat::host_device> {};
using Sharder = pleat::fsdp::Sharder<GpuExecutor, pleat::ThreadComm, pleat::HostArena>;

#ifdef PLEAT_FIXED
using Tensor = pleat::TensorRef;
#else
using Tensor = std::vector<float>;
#endif

void read(Sharder& sharder, const Tensor& weight) {
  sharder.export_master(0, 0, weight, {});
}
