// Dispatch and combine of mixture-of-experts layers on torch's tensors.
#include <pleat/moe/cuda/leaf.cuh>

#include "operations.hpp"
#include "torch_tensor.hpp"

namespace embed {

namespace moe = pleat::moe;

struct Experts::State {
  using Operation = moe::Dispatch<pleat::CudaExecutor, pleat::NcclComm, pleat::NcclArena>;

  State(std::int64_t nccl_comm, const moe::DispatchShape& shape)
      : group(nccl_comm),
        by(group, [&](pleat::Transport t) { return moe::plan(group.ranks.size(), shape, {.transport = t}); }),
        memory(by.plan.footprint(), group.comm.device()),
        operation(moe::bind(by.plan, pleat::CudaExecutor(), group.ranks, memory.blocks(by.arena.get()),
                            group.streams().compute)) {
    if (by.arena != nullptr) by.arena->seal(group.ranks);
  }
  const moe::DispatchPlan& plan() const { return by.plan; }

  Group group;
  Transported<moe::DispatchPlan> by;
  Memory memory;
  Operation operation;
};

/// What one forward call keeps for backward.
struct Experts::Call::State {
  State(const moe::DispatchPlan& plan, const at::TensorOptions& options)
      : memory(at::empty(static_cast<std::int64_t>(plan.footprint().saved), options.dtype(at::kByte))),
        saved(plan, Memory::block(memory)) {}

  at::Tensor memory;
  moe::DispatchSaved saved;
};

Experts::Experts(std::int64_t nccl_comm, std::int64_t max_tokens, std::int64_t hidden, int experts, int k,
                 at::ScalarType dtype)
    : state_(std::make_shared<State>(nccl_comm,
                                     moe::DispatchShape{.max_tokens = max_tokens,
                                                        .hidden = hidden,
                                                        .experts = experts,
                                                        .k = k,
                                                        .dtype = pleat::tensor_traits<at::Tensor>::of(dtype)})) {}

std::tuple<at::Tensor, at::Tensor, Experts::Call> Experts::dispatch(const at::Tensor& x, const at::Tensor& ids,
                                                                    const at::Tensor& weights) {
  const Call call{std::make_shared<Call::State>(state_->plan(), x.options())};
  const moe::ExpertRows rows = state_->operation.dispatch(state_->group.streams(), x, ids, weights, call.state->saved);
  const auto owner = [state = call.state](void*) {};
  return {at::from_blob(rows.rows.data(), {rows.rows.extent(0), rows.rows.extent(1)}, owner, x.options()),
          at::from_blob(rows.offsets.data(), {rows.offsets.extent(0)}, owner, x.options().dtype(at::kLong)), call};
}

at::Tensor Experts::combine(const at::Tensor& expert_out, const Call& call) {
  const at::Tensor y = at::empty({call.state->saved.tokens, state_->plan().shape.hidden}, expert_out.options());
  state_->operation.combine(state_->group.streams(), expert_out, call.state->saved, y);
  return y;
}

at::Tensor Experts::combine_backward(const at::Tensor& dy, const at::Tensor& expert_out, const Call& call) {
  const at::Tensor dout = at::zeros_like(expert_out);
  state_->operation.combine_backward(state_->group.streams(), dy, expert_out, call.state->saved, dout);
  return dout;
}

std::tuple<at::Tensor, at::Tensor> Experts::dispatch_backward(const at::Tensor& drows, const Call& call) {
  const at::Tensor dx = at::empty({call.state->saved.tokens, state_->plan().shape.hidden}, drows.options());
  const at::Tensor dweights =
      at::empty({call.state->saved.tokens, state_->plan().shape.k}, drows.options().dtype(at::kFloat));
  state_->operation.dispatch_backward(state_->group.streams(), drows, call.state->saved, dx, dweights);
  return {dx, dweights};
}

}  // namespace embed
