// cuDNN as the local kernel of a ring, or alone: each rectangle is one of its attentions, joined to running results.
#pragma once

#include <map>

#include <pleat/attention/cuda/cuda_attention.cuh>
#include <pleat/attention/cuda/cudnn_graph.cuh>
#include <pleat/attention/cuda/cudnn_rows.cuh>
#include <pleat/core/carve.hpp>
#include <pleat/cuda/buffer.hpp>

namespace pleat::inline v0 {

/// A local kernel (`local_attention`) for `ring::bind`; what it can do is what `cudnn::mask_of` and `cudnn::call_of` do
/// not refuse, and cuDNN has an engine for. A handle: copies share plans and a workspace, so their calls follow each
/// other on one stream, on the device that was current at construction.
///
/// A plan per extents, strides, mask and scale is made by `prepare` and by nothing else; it may allocate and wait for
/// the device. Calls allocate no device memory and may be captured; prepare before a capture, since a larger workspace
/// is another one. Joining a rectangle costs one pass over its
/// results; a forward of one rectangle alone costs none.
///
/// Error: cuDNN's results have the inputs' dtype, of unit roundoff u (2^-8 of bf16, 2^-11 of f16). To the error of an
/// exact kernel, which rounds once, each element of `out` adds at most u times the largest partial result of its row,
/// since weights add up to 1, and each gradient u times the sum of its contributions' sizes, one per rectangle.
/// A key's gradients are added once per rectangle. Errors: shape_error A13, A14 (not prepared); cuda_error C31, C20.
class CudnnAttention : public CudaAttention<TypeList<bfloat16, float16>, HeadDimsList<>> {
  using Types = TypeList<bfloat16, float16>;

 public:
  CudnnAttention() : state_(std::make_shared<State>()) {}

  /// Plans for calls like this one, forward or backward: of its extents, strides, mask and scale.
  void prepare(const AttentionForward& a) const { prepare_all(a); }
  void prepare(const AttentionBackward& a) const { prepare_all(a); }
  /// Of device memory, for what has been prepared.
  std::size_t workspace_bytes() const { return state_->workspace.size_bytes(); }

  /// As `AttentionForward` and `AttentionBackward` say, of what has been prepared.
  void forward(const AttentionForward& a, cudaStream_t s) const {
    dispatch_dtype(Types{}, a.q.dtype(), [&]<class T>(std::type_identity<T>) { forward_as<T>(a, s); });
  }
  void backward(const AttentionBackward& a, cudaStream_t s) const {
    dispatch_dtype(Types{}, a.q.dtype(), [&]<class T>(std::type_identity<T>) { backward_as<T>(a, s); });
  }

  static void preload() {
    CudaAttention::preload();
    preload_kernel(cudnn::clear_kernel<float>, "clear_kernel");
    preload_kernel(cudnn::pack_lse_kernel<float>, "pack_lse_kernel");
    preload_for<bfloat16>();
    preload_for<float16>();
  }

 private:
  using Call = cudnn::Call;
  using Grid = attention_kernel::RowGrid;
  struct State {
    cudnn::Handle handle;
    std::map<Call, cudnn::Graph> graphs;
    CudaBuffer workspace;
  };

  /// What a call has in the workspace, in the order of `Carver`; backward has all.
  struct Parts {
    Parts(Carver& memory, const Call& c, std::size_t cudnn_bytes) {
      const auto take = [&](std::int64_t tokens, std::int64_t heads, std::int64_t dim) {
        return memory.take_bytes(static_cast<std::size_t>(c.batch * tokens * heads * dim) * size_bytes(c.dtype));
      };
      lse = memory.take<float>(static_cast<std::size_t>(c.batch * c.q_heads * c.q_tokens));
      cudnn = memory.take_bytes(cudnn_bytes);
      if (!c.is_backward) {
        out = take(c.q_tokens, c.q_heads, c.v_dim);
      } else {
        dq = take(c.q_tokens, c.q_heads, c.qk_dim);
        dk = take(c.k_tokens, c.kv_heads, c.qk_dim);
        dv = take(c.k_tokens, c.kv_heads, c.v_dim);
      }
    }
    float* lse;
    std::byte *cudnn, *out = nullptr, *dq = nullptr, *dk = nullptr, *dv = nullptr;
  };

  template <class AnyCall>
  void prepare_all(const AnyCall& a) const {
    if (a.q.extent(0) == 0) return;
    for (const Rectangle& r : a.work) {
      const Call call = cudnn::call_of(a, r);
      auto found = state_->graphs.find(call);
      if (found == state_->graphs.end()) found = state_->graphs.emplace(call, cudnn::Graph(call, state_->handle)).first;
      Carver memory;
      Parts(memory, call, found->second.workspace_bytes());
      if (memory.used_bytes() > workspace_bytes()) state_->workspace = CudaBuffer(memory.used_bytes());
    }
  }
  const cudnn::Graph& graph(const Call& c) const {
    const auto found = state_->graphs.find(c);
    if (found == state_->graphs.end()) {
      fail<shape_error>("pleat[A14]: cuDNN has no plan for ", c.is_backward ? "backward" : "forward", " of ",
                        c.q_tokens, " queries x ", c.k_tokens, " keys, ", c.q_heads, '/', c.kv_heads,
                        " heads, qk_dim=", c.qk_dim,
                        ", with these strides: call prepare() with tensors laid out like those of the call");
    }
    return found->second;
  }

  /// Tokens [begin, end) of a tensor [batch, tokens, ...].
  static TensorRef rows(const TensorRef& t, std::int64_t begin, std::int64_t end) {
    return detail::token_rows(t, {begin, end});
  }
  static attention_kernel::RowStatistics statistics(const TensorRef& t, std::int64_t begin) {
    attention_kernel::RowStatistics s = attention_kernel::row_statistics(t);
    s.data += begin * s.token_stride;
    return s;
  }
  static bool is_aligned(const TensorRef& t) {
    return (reinterpret_cast<std::uintptr_t>(t.data()) | 4 * t.stride(0) | 4 * t.stride(1) | 4 * t.stride(2)) % 16 == 0;
  }
  template <class T>
  static attention_kernel::HeadRows<const T> part(const std::byte* data, std::int64_t tokens, std::int64_t heads,
                                                  std::int64_t dim) {
    const cudnn::Strides s = cudnn::packed(tokens, heads, dim);
    return {reinterpret_cast<const T*>(data), s.batch, s.token, s.head};
  }
  static void clear(const TensorRef& t, const attention_kernel::RowStatistics& lse, cudaStream_t s) {
    if (t.elems() == 0) return;
    const Grid grid(t);
    cudnn::clear_kernel<<<grid.ctas(), Grid::threads, 0, s>>>(attention_kernel::head_rows<float>(t), lse, grid);
    check_launch("clear_kernel");
  }
  template <class T>
  static void preload_for() {
    preload_kernel(cudnn::merge_kernel<T>, "merge_kernel");
    preload_kernel(cudnn::add_kernel<T>, "add_kernel");
  }
  static bool covers(const WorkView& work, std::int64_t Rectangle::*begin, std::int64_t Rectangle::*end,
                     std::int64_t tokens) {
    return work.host.size() == 1 && work.host[0].*begin == 0 && work.host[0].*end == tokens;
  }

  template <class T>
  void forward_as(const AttentionForward& a, cudaStream_t s) const {
    if (a.q.elems() == 0) return;
    const bool is_whole = cudnn::is_whole(a);
    const bool starts = a.first && covers(a.work, &Rectangle::q0, &Rectangle::q1, a.q.extent(1));
    if (a.first && !starts) clear(a.o_acc, statistics(a.lse, 0), s);
    for (const Rectangle& r : a.work) {
      const Call call = cudnn::call_of(a, r);
      const cudnn::Graph& plan = graph(call);
      Carver memory(state_->workspace.block());
      const Parts parts(memory, call, plan.workspace_bytes());
      plan.run(state_->handle,
               {{cudnn::q, rows(a.q, r.q0, r.q1).data()},
                {cudnn::k, rows(a.k, r.k0, r.k1).data()},
                {cudnn::v, rows(a.v, r.k0, r.k1).data()},
                {cudnn::out, is_whole ? a.out.data() : parts.out},
                {cudnn::lse, is_whole ? a.lse.data() : parts.lse}},
               parts.cudnn, s);
      if (is_whole) return;
      const TensorRef o = rows(a.o_acc, r.q0, r.q1);
      const Grid grid(o);
      cudnn::merge_kernel<T><<<grid.ctas(), Grid::threads, 0, s>>>(
          attention_kernel::head_rows<float>(o), statistics(a.lse, r.q0),
          part<T>(parts.out, call.q_tokens, call.q_heads, call.v_dim),
          {parts.lse, call.q_heads * call.q_tokens, call.q_tokens, 1}, grid, starts, is_aligned(o));
      check_launch("merge_kernel");
    }
    if (a.last) store(a.out, {&a.o_acc, 1}, s);
  }

  template <class T>
  void backward_as(const AttentionBackward& a, cudaStream_t s) const {
    const auto overwrites = [&](bool accumulates, const TensorRef& t, auto begin, auto end) {
      const bool is_one = !accumulates && covers(a.work, begin, end, t.extent(1));
      if (!accumulates && !is_one) clear(t, {}, s);
      return is_one;
    };
    const bool new_dq = overwrites(a.accumulate_dq, a.dq, &Rectangle::q0, &Rectangle::q1);
    const bool new_dk = overwrites(a.accumulate_dk, a.dk, &Rectangle::k0, &Rectangle::k1);
    const bool new_dv = overwrites(a.accumulate_dv, a.dv, &Rectangle::k0, &Rectangle::k1);
    if (a.q.extent(0) == 0) return;
    for (const Rectangle& r : a.work) {
      const Call c = cudnn::call_of(a, r);
      const cudnn::Graph& plan = graph(c);
      Carver memory(state_->workspace.block());
      const Parts parts(memory, c, plan.workspace_bytes());
      const auto count = static_cast<unsigned>(c.batch * c.q_heads * c.q_tokens);
      cudnn::pack_lse_kernel<<<std::min(4096u, count / Grid::threads + 1), Grid::threads, 0, s>>>(
          parts.lse, statistics(a.lse, r.q0), static_cast<unsigned>(c.q_heads), static_cast<unsigned>(c.q_tokens),
          count);
      check_launch("pack_lse_kernel");
      plan.run(state_->handle,
               {{cudnn::q, rows(a.q, r.q0, r.q1).data()},
                {cudnn::k, rows(a.k, r.k0, r.k1).data()},
                {cudnn::v, rows(a.v, r.k0, r.k1).data()},
                {cudnn::out, rows(a.out, r.q0, r.q1).data()},
                {cudnn::dout, rows(a.dout, r.q0, r.q1).data()},
                {cudnn::lse, parts.lse},
                {cudnn::dq, parts.dq},
                {cudnn::dk, parts.dk},
                {cudnn::dv, parts.dv}},
               parts.cudnn, s);
      add<T>(rows(a.dq, r.q0, r.q1), parts.dq, new_dq, s);
      add<T>(rows(a.dk, r.k0, r.k1), parts.dk, new_dk, s);
      add<T>(rows(a.dv, r.k0, r.k1), parts.dv, new_dv, s);
    }
  }
  template <class T>
  static void add(const TensorRef& out, const std::byte* contribution, bool overwrites, cudaStream_t s) {
    const Grid grid(out);
    cudnn::add_kernel<T><<<grid.ctas(), Grid::threads, 0, s>>>(
        attention_kernel::head_rows<float>(out), part<T>(contribution, out.extent(1), out.extent(2), out.extent(3)),
        grid, !overwrites, is_aligned(out));
    check_launch("add_kernel");
  }

  std::shared_ptr<State> state_;
};

}  // namespace pleat::inline v0
