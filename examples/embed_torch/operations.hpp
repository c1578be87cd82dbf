// What Python sees, without a header of pleat: each file of kernels is compiled once, apart from the bindings. All
// ranks of the process group make and drop operations in the same order, while the group lives.
#pragma once

#include <memory>
#include <tuple>
#include <vector>

#include <ATen/ATen.h>

namespace embed {

/// Ring attention over a process group of torch: each rank has q [batch, local_tokens, q_heads, qk_dim], ... of the
/// tokens at `positions()` of the sequence. All calls enqueue on torch's current stream.
class Ring {
 public:
  Ring(std::int64_t nccl_comm, std::int64_t batch, std::int64_t tokens, int q_heads, int kv_heads, int qk_dim,
       int v_dim, at::ScalarType dtype, bool causal);
  std::vector<std::int64_t> positions() const;
  /// {out, what backward needs}
  std::vector<at::Tensor> forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v);
  /// {dq, dk, dv}
  std::vector<at::Tensor> backward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& out,
                                   const at::Tensor& kept, const at::Tensor& dout);

 private:
  struct State;
  std::shared_ptr<State> state_;
};

/// The way of token rows to the ranks of their experts and back, over a process group of torch.
class Experts {
 public:
  struct Call {
    struct State;
    std::shared_ptr<State> state;
  };

  Experts(std::int64_t nccl_comm, std::int64_t max_tokens, std::int64_t hidden, int experts, int k,
          at::ScalarType dtype);
  /// x [tokens, hidden], ids [tokens, k] i32, weights [tokens, k] f32 -> rows [capacity, hidden], offsets [local + 1].
  std::tuple<at::Tensor, at::Tensor, Call> dispatch(const at::Tensor& x, const at::Tensor& ids,
                                                    const at::Tensor& weights);
  at::Tensor combine(const at::Tensor& expert_out, const Call& call);
  at::Tensor combine_backward(const at::Tensor& dy, const at::Tensor& expert_out, const Call& call);
  /// {dx, dweights}, after combine_backward.
  std::tuple<at::Tensor, at::Tensor> dispatch_backward(const at::Tensor& drows, const Call& call);

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace embed
