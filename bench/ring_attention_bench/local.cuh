// The local kernel alone: all queries of a causal sequence on one GPU.
#pragma once

#include <cmath>
#include <span>

#include <pleat/attention/local_kernel.hpp>
#include <pleat/cuda/buffer.hpp>

namespace ring_attention_bench {

using pleat::DType;
using pleat::TensorRef;

/// [1, tokens, heads, dim] of bf16, borrowed.
struct LocalInputs {
  TensorRef q, k, v, dout, out;
};

/// `Leaf`: the kernel, an attention_leaf.
template <class Leaf>
class Local {
 public:
  explicit Local(const LocalInputs& in)
      : in_(in),
        work_{0, tokens(), 0, tokens(), 0},
        placed_(sizeof work_),
        o_acc_(in.out),
        dq_(in.q),
        dk_(in.k),
        dv_(in.v),
        rows_(2 * rows() * sizeof(float)),
        workspace_(pleat::attention_workspace_bytes(1, heads(), tokens())) {
    pleat::check_cuda(cudaMemcpy(placed_.data(), &work_, sizeof work_, cudaMemcpyDefault), "cudaMemcpy");
  }

  void forward(cudaStream_t s) const {
    Leaf::forward(pleat::AttentionForward{in_.q, in_.k, in_.v, work(), scale(), o_acc_.ref, statistics(0), in_.out}, s);
  }
  /// After forward and delta.
  void backward(bool deterministic, cudaStream_t s) const {
    pleat::AttentionBackward call{in_.q,  in_.k,   in_.v,   in_.dout, statistics(0), statistics(1),
                                  work(), scale(), dq_.ref, dk_.ref,  dv_.ref};
    call.deterministic = deterministic;
    call.workspace = workspace_.data();
    Leaf::backward(call, s);
  }
  void delta(cudaStream_t s) const { Leaf::delta(statistics(1), in_.out, in_.dout, s); }

 private:
  /// An fp32 tensor like another.
  struct Sums {
    explicit Sums(const TensorRef& like)
        : memory(static_cast<std::size_t>(like.elems()) * sizeof(float)),
          ref(memory.data(), DType::f32, {1, like.extent(1), like.extent(2), like.extent(3)}, like.device()) {}
    pleat::CudaBuffer memory;
    TensorRef ref;
  };

  std::int64_t tokens() const { return in_.q.extent(1); }
  int heads() const { return static_cast<int>(in_.q.extent(2)); }
  std::size_t rows() const { return static_cast<std::size_t>(tokens() * heads()); }
  double scale() const { return 1 / std::sqrt(static_cast<double>(in_.q.extent(3))); }
  pleat::WorkView work() const {
    return {std::span(&work_, 1), reinterpret_cast<const pleat::Rectangle*>(placed_.data())};
  }
  TensorRef statistics(int number) const {
    return {rows_.data() + static_cast<std::size_t>(number) * rows() * sizeof(float),
            DType::f32,
            {1, heads(), tokens()},
            in_.q.device()};
  }

  LocalInputs in_;
  pleat::Rectangle work_;
  pleat::CudaBuffer placed_;
  Sums o_acc_, dq_, dk_, dv_;
  pleat::CudaBuffer rows_, workspace_;
};

}  // namespace ring_attention_bench
