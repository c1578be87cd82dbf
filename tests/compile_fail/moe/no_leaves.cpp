// expect: pleat[T03]: no MoE leaves for this device: include pleat/moe/host/leaf.hpp or pleat/moe/cuda/leaf.cuh
// values: host_device
#include <pleat/core/host/executor.hpp>
#include <pleat/moe/router.hpp>
#ifdef PLEAT_FIXED
#include <pleat/moe/host/leaf.hpp>
#endif

void f(const pleat::moe::Router<pleat::HostExecutor>& router, pleat::TensorRef logits, pleat::TensorRef ids,
       pleat::TensorRef weights, pleat::TensorRef probs) {
  router.choose({}, logits, ids, weights, probs);
}
