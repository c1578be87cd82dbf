// expect: pleat[T07]: tensors of this type are never on the device of the operation, as tensor_traits::only_on says
// values: GpuExecutor
#include <pleat/attention.hpp>
#include <pleat/comm.hpp>

// Host ranks that say that they are a GPU's, so that no toolkit is needed.
struct GpuExecutor : pleat::HostExecutor {
  using device_type = pleat::cuda_device;
};
template <>
struct pleat::core_leaf<pleat::cuda_device> : pleat::core_leaf<pleat::host_device> {};
using Relayout = pleat::relayout::Relayout<GpuExecutor, pleat::ThreadComm>;

#ifdef PLEAT_FIXED
using Tensor = pleat::TensorRef;
#else
using Tensor = std::vector<float>;
#endif

void order(Relayout& relayout, const Tensor& in, const pleat::TensorRef& out) {
  relayout.forward({}, in, out);
}
