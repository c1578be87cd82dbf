// expect: pleat[A11]: the kernel of a ring needs forward, delta, backward and store
// values: local_kernel.hpp
#include <pleat/attention.hpp>
#include <pleat/attention/host/leaf.hpp>
#include <pleat/comm.hpp>

struct OwnKernel : pleat::attention_leaf<pleat::host_device> {
#ifndef PLEAT_FIXED
  void backward() const {}
#endif
};

auto bind_own(const pleat::ring::Plan& plan, const pleat::GroupComm<pleat::ThreadComm>& group,
              const pleat::Memory<pleat::HostArena>& memory) {
  return pleat::ring::bind(plan, pleat::HostExecutor{}, group, memory, {}, OwnKernel{});
}
