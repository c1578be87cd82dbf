// One plan of cuDNN: the attention of a rectangle, forward or backward, compiled and loaded. By NVIDIA's
// cudnn-frontend, because cuDNN's own interface has no attention, only the dozen operations whose exact pattern its
// engines recognize.
#pragma once

#include <cudnn_frontend.h>

#include <memory>
#include <unordered_map>
#include <vector>

#include <pleat/attention/cuda/cudnn_call.hpp>
#include <pleat/cuda/check.hpp>
#include <pleat/cuda/stream.hpp>

namespace pleat::inline v0::cudnn {

/// cuDNN on the device that is current at construction. Errors: cuda_error C31.
class Handle {
 public:
  Handle() { check(cudnnCreate(&handle_), "cudnnCreate"); }
  ~Handle() { (void)cudnnDestroy(handle_); }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  cudnnHandle_t get() const { return handle_; }
  cudaStream_t idle_stream() const { return idle_stream_; }
  cudnnHandle_t on(cudaStream_t s) const {
    check(cudnnSetStream(handle_, s), "cudnnSetStream");
    return handle_;
  }

 private:
  static void check(cudnnStatus_t status, const char* call) {
    if (status != CUDNN_STATUS_SUCCESS) {
      fail<cuda_error>("pleat[C31]: ", call, " failed: ", cudnnGetErrorString(status));
    }
  }
  CudaStream idle_stream_;  // not ordered with the default stream, which other threads may use during a capture
  cudnnHandle_t handle_ = nullptr;
};

/// The tensors of a call, by the numbers that its graph knows them by.
enum Tensor : std::int64_t { q = 1, k, v, out, lse, dout, dq, dk, dv };
using Pointers = std::unordered_map<std::int64_t, void*>;

class Graph {
 public:
  /// Compiles and loads what the call runs. Errors: shape_error A13 with cuDNN's words when it has no engine for it.
  Graph(const Call& c, const Handle& handle) {
    const auto type = c.dtype == DType::bf16 ? fe::DataType_t::BFLOAT16 : fe::DataType_t::HALF;
    graph_->set_io_data_type(type)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
    c.is_backward ? add_backward(c) : add_forward(c);
    check(graph_->build(handle.get(), {fe::HeurMode_t::A, fe::HeurMode_t::FALLBACK}), c);
    // A capture that nobody runs loads the kernels; one that fails leaves that to the first call.
    const bool is_loaded = graph_->warmup(handle.on(handle.idle_stream())).is_good();
    if (!is_loaded) (void)cudaGetLastError();
  }

  std::size_t workspace_bytes() const { return static_cast<std::size_t>(graph_->get_workspace_size()); }

  /// Errors: cuda_error C31.
  void run(const Handle& handle, Pointers pointers, void* workspace, cudaStream_t s) const {
    const fe::error_t status = graph_->execute(handle.on(s), pointers, workspace);
    if (status.is_bad()) fail<cuda_error>("pleat[C31]: cuDNN's attention failed: ", status.err_msg.c_str());
  }

 private:
  using Attributes = std::shared_ptr<cudnn_frontend::graph::Tensor_attributes>;
  struct fe {  // NOLINT(readability-identifier-naming): as its users call it
    using DataType_t = cudnn_frontend::DataType_t;
    using HeurMode_t = cudnn_frontend::HeurMode_t;
    using error_t = cudnn_frontend::error_t;
  };

  /// [batch, tokens, heads, dim], which cuDNN calls [batch, heads, tokens, dim] with other strides.
  static Attributes describe(const Attributes& t, Tensor id, const Call& c, std::int64_t heads, std::int64_t tokens,
                             std::int64_t dim, const Strides& s) {
    t->set_uid(id).set_dim({c.batch, heads, tokens, dim}).set_stride({s.batch, s.head, s.token, 1});
    return t;
  }
  static Attributes describe_lse(const Attributes& t, const Call& c) {
    t->set_data_type(fe::DataType_t::FLOAT);
    return describe(t, lse, c, c.q_heads, c.q_tokens, 1, {c.q_heads * c.q_tokens, 1, c.q_tokens});
  }
  Attributes input() { return graph_->tensor(cudnn_frontend::graph::Tensor_attributes()); }

  template <class Options>
  static Options masked(Options options, const Call& c) {
    options.set_name("attention").set_attn_scale(c.scale);
    if (c.mask != Mask::full) {
      options
          .set_diagonal_alignment(c.mask == Mask::top_left ? cudnn_frontend::DiagonalAlignment_t::TOP_LEFT
                                                           : cudnn_frontend::DiagonalAlignment_t::BOTTOM_RIGHT)
          .set_diagonal_band_right_bound(0);
    }
    return options;
  }

  void add_forward(const Call& c) {
    auto options = masked(cudnn_frontend::graph::SDPA_attributes(), c);
    options.set_generate_stats(true);
    const auto [o, stats] = graph_->sdpa(describe(input(), q, c, c.q_heads, c.q_tokens, c.qk_dim, c.q),
                                         describe(input(), k, c, c.kv_heads, c.k_tokens, c.qk_dim, c.k),
                                         describe(input(), v, c, c.kv_heads, c.k_tokens, c.v_dim, c.v), options);
    describe(o, out, c, c.q_heads, c.q_tokens, c.v_dim, c.out)->set_output(true);
    describe_lse(stats, c)->set_output(true);
  }
  void add_backward(const Call& c) {
    auto options = masked(cudnn_frontend::graph::SDPA_backward_attributes(), c);
    options.set_deterministic_algorithm(c.deterministic);
    const auto [to_q, to_k, to_v] = graph_->sdpa_backward(
        describe(input(), q, c, c.q_heads, c.q_tokens, c.qk_dim, c.q),
        describe(input(), k, c, c.kv_heads, c.k_tokens, c.qk_dim, c.k),
        describe(input(), v, c, c.kv_heads, c.k_tokens, c.v_dim, c.v),
        describe(input(), out, c, c.q_heads, c.q_tokens, c.v_dim, c.out),
        describe(input(), dout, c, c.q_heads, c.q_tokens, c.v_dim, c.dout), describe_lse(input(), c), options);
    describe(to_q, dq, c, c.q_heads, c.q_tokens, c.qk_dim, packed(c.q_tokens, c.q_heads, c.qk_dim))->set_output(true);
    describe(to_k, dk, c, c.kv_heads, c.k_tokens, c.qk_dim, packed(c.k_tokens, c.kv_heads, c.qk_dim))->set_output(true);
    describe(to_v, dv, c, c.kv_heads, c.k_tokens, c.v_dim, packed(c.k_tokens, c.kv_heads, c.v_dim))->set_output(true);
  }

  static void check(const fe::error_t& status, const Call& c) {
    if (status.is_good()) return;
    fail<shape_error>("pleat[A13]: cuDNN ", cudnnGetVersion(), " has no ", c.is_backward ? "backward" : "forward",
                      " for ", c.q_tokens, " queries x ", c.k_tokens, " keys, ", c.q_heads, '/', c.kv_heads,
                      " heads, qk_dim=", c.qk_dim, ", v_dim=", c.v_dim,
                      c.is_backward && c.deterministic ? ", deterministic: " : ": ", status.err_msg.c_str());
  }

  std::shared_ptr<cudnn_frontend::graph::Graph> graph_ = std::make_shared<cudnn_frontend::graph::Graph>();
};

}  // namespace pleat::inline v0::cudnn
