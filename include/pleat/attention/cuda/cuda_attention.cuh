// The contract's calls on CUDA for chosen dtypes and head dims: tensors become kernel arguments, the table has the
// kernel.
#pragma once

#include <pleat/attention/cuda/dispatch.cuh>
#include <pleat/attention/cuda/row_kernels.cuh>
#include <pleat/core/dtype.hpp>
#include <pleat/cuda/executor.hpp>

namespace pleat::inline v0 {

/// What `attention_leaf<cuda_device>` is, for some dtypes and head dims. A program that needs few of them compiles
/// faster when it specializes the leaf from this and leaves leaf.cuh out. All calls are asynchronous on their stream,
/// can be captured, and allocate nothing. The work of a call must be in device memory; the scale must not be negative.
/// Errors: cuda_error C20; shape_error T01, A06 (head dims), A09 (work), A10 (scale).
template <class Types, class Dims, template <class T, class D> class Kernels = attention_kernel::KernelTable>
struct CudaAttention {
  /// As `AttentionForward` says, which is one block of keys.
  static void forward(const AttentionForward& a, cudaStream_t s) {
    dispatch(a, [&]<class T, class D>(std::type_identity<T>, D) {
      const attention_kernel::Forward<T> call = arguments<T>(a);
      const attention_kernel::Alignment alignment{
          .inputs = all_aligned<16>(a.q, a.k, a.v),
          .outputs = (a.last ? all_aligned<4>(a.out) : true) && all_aligned<8>(a.o_acc)};
      Kernels<T, D>::forward(call, alignment, s);
    });
  }

  /// As `AttentionForwardBlocks` says; false, and nothing is done, where no kernel takes the blocks together.
  static bool forward(const AttentionForwardBlocks& a, cudaStream_t s) {
    bool is_taken = false;
    dispatch(a.call, [&]<class T, class D>(std::type_identity<T>, D) {
      attention_kernel::Forward<T> call = arguments<T>(a.call);
      call.others = {attention_kernel::head_rows<const T>(a.k), attention_kernel::head_rows<const T>(a.v),
                     a.k.extent(1), a.block_rows, a.arrivals};
      if constexpr (requires { Kernels<T, D>::forward_blocks(call, s); }) {
        is_taken = Kernels<T, D>::forward_blocks(call, s);
      }
    });
    return is_taken;
  }

  /// As `AttentionBackward` says.
  static void backward(const AttentionBackward& a, cudaStream_t s) {
    dispatch(a, [&]<class T, class D>(std::type_identity<T>, D) {
      const attention_kernel::Backward<T> call{.extents = extents(a),
                                               .q = attention_kernel::head_rows<const T>(a.q),
                                               .k = attention_kernel::head_rows<const T>(a.k),
                                               .v = attention_kernel::head_rows<const T>(a.v),
                                               .dout = attention_kernel::head_rows<const T>(a.dout),
                                               .lse = attention_kernel::row_statistics(a.lse),
                                               .delta = attention_kernel::row_statistics(a.delta),
                                               .work = work(a),
                                               .scale = static_cast<float>(a.scale),
                                               .dq = attention_kernel::head_rows<float>(a.dq),
                                               .dk = attention_kernel::head_rows<float>(a.dk),
                                               .dv = attention_kernel::head_rows<float>(a.dv),
                                               .accumulate_dq = a.accumulate_dq,
                                               .accumulate_dk = a.accumulate_dk,
                                               .accumulate_dv = a.accumulate_dv,
                                               .deterministic = a.deterministic,
                                               .max_ctas = a.max_ctas,
                                               .workspace = static_cast<unsigned*>(a.workspace)};
      const attention_kernel::Alignment alignment{.inputs = all_aligned<16>(a.q, a.k, a.v, a.dout),
                                                  .outputs = all_aligned<8>(a.dq, a.dk, a.dv)};
      Kernels<T, D>::backward(call, alignment, s);
    });
  }

  /// delta [batch, q_heads, tokens] of each row: the dot product of out and dout.
  static void delta(const TensorRef& delta, const TensorRef& out, const TensorRef& dout, cudaStream_t s) {
    if (out.elems() == 0) return;
    dispatch_dtype(Types{}, out.dtype(), [&]<class T>(std::type_identity<T>) {
      const attention_kernel::RowGrid grid(out);
      attention_kernel::delta_kernel<T><<<grid.ctas(), grid.threads, 0, s>>>(
          attention_kernel::row_statistics(delta), attention_kernel::head_rows<const T>(out),
          attention_kernel::head_rows<const T>(dout), grid, all_aligned<16>(out, dout));
      check_launch("delta_kernel");
    });
  }

  /// out = the sum of one or two accumulators' rows, rounded once.
  static void store(const TensorRef& out, std::span<const TensorRef> terms, cudaStream_t s) {
    if (out.elems() == 0) return;
    dispatch_dtype(Types{}, out.dtype(), [&]<class T>(std::type_identity<T>) {
      const attention_kernel::RowGrid grid(out);
      attention_kernel::store_kernel<T><<<grid.ctas(), grid.threads, 0, s>>>(
          attention_kernel::head_rows<T>(out), attention_kernel::head_rows<const float>(terms.front()),
          attention_kernel::head_rows<const float>(terms.back()), static_cast<int>(terms.size()), grid,
          all_aligned<16>(out, terms.front(), terms.back()) &&
              out.extent(3) % attention_kernel::RowGrid::chunk_elems == 0);
      check_launch("store_kernel");
    });
  }

  static void preload() { preload_all(Types{}, Dims{}); }

 private:
  template <class... Ts, class... Ds>
  static void preload_all(TypeList<Ts...>, HeadDimsList<Ds...>) {
    const auto of_type = [&]<class T>(std::type_identity<T>) {
      (Kernels<T, Ds>::preload(), ...);
      preload_kernel(attention_kernel::delta_kernel<T>, "delta_kernel");
      preload_kernel(attention_kernel::store_kernel<T>, "store_kernel");
    };
    (of_type(std::type_identity<Ts>{}), ...);
  }

  template <class Call, class F>
  static void dispatch(const Call& a, F f) {
    if (!(a.scale >= 0)) {
      fail<shape_error>(
          "pleat[A10]: the scale of the scores is negative or NaN; CUDA kernels take 0 and more: negate q");
    }
    dispatch_dtype(Types{}, a.q.dtype(), [&](auto type) {
      dispatch_head_dims(Dims{}, a.q.extent(3), a.v.extent(3), [&](auto dims) { f(type, dims); });
    });
  }
  template <class T>
  static attention_kernel::Forward<T> arguments(const AttentionForward& a) {
    return {.extents = extents(a),
            .q = attention_kernel::head_rows<const T>(a.q),
            .k = attention_kernel::head_rows<const T>(a.k),
            .v = attention_kernel::head_rows<const T>(a.v),
            .work = work(a),
            .scale = static_cast<float>(a.scale),
            .o_acc = attention_kernel::head_rows<float>(a.o_acc),
            .lse = attention_kernel::row_statistics(a.lse),
            .out = attention_kernel::head_rows<T>(a.out),
            .first = a.first,
            .last = a.last,
            .others = {},
            .max_ctas = a.max_ctas};
  }
  template <class Call>
  static attention_kernel::Extents extents(const Call& a) {
    return {.batch = static_cast<int>(a.q.extent(0)),
            .q_heads = static_cast<int>(a.q.extent(2)),
            .kv_heads = static_cast<int>(a.k.extent(2)),
            .q_tokens = a.q.extent(1),
            .k_tokens = a.k.extent(1),
            .qk_dim = static_cast<int>(a.q.extent(3)),
            .v_dim = static_cast<int>(a.v.extent(3))};
  }
  template <class Call>
  static attention_kernel::WorkList work(const Call& a) {
    if (!a.work.empty() && a.work.device == nullptr) {
      fail<shape_error>("pleat[A09]: the work of a CUDA kernel, ", a.work.host.size(),
                        " rectangles, is not in device memory: set WorkView::device");
    }
    return {a.work.device, static_cast<int>(a.work.host.size())};
  }
  /// Whether all rows start at multiples of `bytes` and are as long.
  template <std::int64_t bytes, class... Tensors>
  static bool all_aligned(const Tensors&... tensors) {
    const auto is_aligned = [](const TensorRef& t) {
      const auto elem_bytes = static_cast<std::int64_t>(size_bytes(t.dtype()));
      bool fits = reinterpret_cast<std::uintptr_t>(t.data()) % bytes == 0 && t.extent(3) * elem_bytes % bytes == 0;
      for (int axis = 0; axis < 3; ++axis)
        fits = fits && (t.extent(axis) <= 1 || t.stride(axis) * elem_bytes % bytes == 0);
      return fits;
    };
    return (is_aligned(tensors) && ...);
  }
};

}  // namespace pleat::inline v0
