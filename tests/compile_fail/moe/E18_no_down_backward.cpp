// expect: pleat[E18]: the leaf of experts needs const gate_up, down, down_backward, gate_up_backward and
// weight_gradient values: expert_leaf
#include <pleat/comm.hpp>
#include <pleat/core/host/executor.hpp>
#include <pleat/moe.hpp>

struct OwnProducts : pleat::moe_leaf<pleat::host_device> {
#ifndef PLEAT_FIXED
  void down_backward() const {}
#endif
};

auto bind_experts(const pleat::moe::ExpertPlan& plan, const pleat::Memory<pleat::HostArena>& memory) {
  return pleat::moe::bind(plan, pleat::HostExecutor{}, memory, OwnProducts{});
}

auto bind_layer(const pleat::moe::LayerPlan& plan, const pleat::GroupComm<pleat::ThreadComm>& group,
                const pleat::Memory<pleat::HostArena>& memory) {
  return pleat::moe::bind(plan, pleat::HostExecutor{}, group, memory, {}, OwnProducts{});
}
