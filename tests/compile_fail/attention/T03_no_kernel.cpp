// expect: pleat[T03]: no attention kernel for this device
// values: pleat/attention/host/leaf.hpp
#include <pleat/attention/local_kernel.hpp>
#include <pleat/core/host/executor.hpp>
#ifdef PLEAT_FIXED
#include <pleat/attention/host/leaf.hpp>
#endif

void attend(const pleat::AttentionForward& call) {
  pleat::attention_leaf<pleat::host_device>::forward(call, {});
}
