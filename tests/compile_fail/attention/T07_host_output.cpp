// expect: pleat[T07]: tensors of this type are never on the device of the operation
// values: GpuExecutor
#include <pleat/attention.hpp>
#include <pleat/attention/host/leaf.hpp>
#include <pleat/comm.hpp>

// Host ranks that say that they are a GPU's, so that no toolkit is needed.
struct GpuExecutor : pleat::HostExecutor {
  using device_type = pleat::cuda_device;
};
using Kernel = pleat::attention_leaf<pleat::host_device>;
using Ring = pleat::ring::RingAttention<GpuExecutor, pleat::ThreadComm, void, Kernel>;

#ifdef PLEAT_FIXED
using Tensor = pleat::TensorRef;
#else
using Tensor = std::vector<float>;
#endif

void attend(Ring& ring, const pleat::TensorRef& q, const Tensor& out, pleat::ring::Saved& saved) {
  ring.forward({}, q, q, q, out, saved);
}
