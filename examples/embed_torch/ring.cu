// Ring attention on torch's tensors.
#include <pleat/attention/cuda/cuda_attention.cuh>

#include "operations.hpp"
#include "torch_tensor.hpp"

/// Kernels of the dtype and head dims that are used here, which compile faster than those of leaf.cuh, of all.
template <>
struct pleat::attention_leaf<pleat::cuda_device>
    : pleat::CudaAttention<pleat::TypeList<pleat::bfloat16>, pleat::HeadDimsList<pleat::HeadDims<128, 128>>> {};

namespace embed {

namespace ring = pleat::ring;

struct Ring::State {
  using Operation = ring::RingAttention<pleat::CudaExecutor, pleat::NcclComm, pleat::NcclArena>;

  State(std::int64_t nccl_comm, const ring::Shape& shape, bool causal)
      : group(nccl_comm),
        by(group,
           [&](pleat::Transport t) {
             return ring::plan(group.ranks.size(), shape, {.causal = causal, .transport = t});
           }),
        memory(by.plan.footprint(), group.comm.device()),
        operation(ring::bind(by.plan, pleat::CudaExecutor(), group.ranks, memory.blocks(by.arena.get()),
                             group.streams().compute)) {
    if (by.arena != nullptr) by.arena->seal(group.ranks);
  }
  const ring::Plan& plan() const { return by.plan; }

  Group group;
  Transported<ring::Plan> by;
  Memory memory;
  Operation operation;
};

Ring::Ring(std::int64_t nccl_comm, std::int64_t batch, std::int64_t tokens, int q_heads, int kv_heads, int qk_dim,
           int v_dim, at::ScalarType dtype, bool causal)
    : state_(std::make_shared<State>(nccl_comm,
                                     ring::Shape{.batch = batch,
                                                 .tokens = tokens,
                                                 .q_heads = q_heads,
                                                 .kv_heads = kv_heads,
                                                 .qk_dim = qk_dim,
                                                 .v_dim = v_dim,
                                                 .dtype = pleat::tensor_traits<at::Tensor>::of(dtype)},
                                     causal)) {}

std::vector<std::int64_t> Ring::positions() const {
  const auto& mine = state_->plan().spans[static_cast<std::size_t>(state_->group.comm.rank())];
  std::vector<std::int64_t> at(static_cast<std::size_t>(mine.tokens()));
  for (std::size_t i = 0; i < at.size(); ++i) at[i] = mine.position(static_cast<std::int64_t>(i));
  return at;
}

std::vector<at::Tensor> Ring::forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  const at::Tensor out = at::empty({q.size(0), q.size(1), q.size(2), v.size(3)}, q.options());
  const at::Tensor kept =
      at::empty(static_cast<std::int64_t>(state_->plan().footprint().saved), q.options().dtype(at::kByte));
  ring::Saved saved(Memory::block(kept));
  state_->operation.forward(state_->group.streams(), q, k, v, out, saved);
  return {out, kept};
}

std::vector<at::Tensor> Ring::backward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                       const at::Tensor& out, const at::Tensor& kept, const at::Tensor& dout) {
  const at::Tensor dq = at::empty_like(q), dk = at::empty_like(k), dv = at::empty_like(v);
  const ring::Saved saved = state_->operation.restore(Memory::block(kept), q, k, v, out);
  state_->operation.backward(state_->group.streams(), dout, saved, dq, dk, dv);
  return {dq, dk, dv};
}

}  // namespace embed
