// The trainer's kernels on CUDA: what ops<host_device> computes, on a stream, with a workspace that was planned.
#pragma once

#include "embedding.cuh"
#include "initial.cuh"
#include "latent.cuh"
#include "loss.cuh"
#include "norm.cuh"
#include "pointwise.cuh"

namespace train_moe {

/// One lane's kernels. Nothing is allocated by calls, but for the algorithm that the first product of a matrix chooses.
/// All sums have a fixed order. Errors: cuda_error C20.
template <>
class ops<pleat::cuda_device> {
 public:
  using Stream = cudaStream_t;
  /// Not what T is deduced from.
  template <class T>
  using In = std::type_identity_t<Rows<const T>>;

  static std::size_t workspace_bytes(const OpsShape& shape) {
    pleat::Carver memory;
    carve(memory, shape);
    return memory.used_bytes();
  }
  ops(const OpsShape& shape, pleat::Block workspace, Stream)
      : work_(carved(workspace, shape)), products_(shape.tokens, work_.product) {}

  /// How many algorithms products have chosen so far; each loads code when it is first used.
  std::size_t chosen_algorithms() const { return products_.chosen(); }

  template <class T>
  void embed(const std::int32_t* ids, const T* table, T* out, std::int64_t rows, std::int64_t dim, Stream s) {
    gpu::embed(ids, table, out, rows, dim, s);
  }
  template <class T, class A>
  void embed_backward(const std::int32_t* ids, const T* dout, A* dtable, std::int64_t rows, std::int64_t dim,
                      std::int64_t, Stream s) {
    gpu::embed_backward(ids, dout, dtable, rows, dim, work_.embedding, s);
  }

  template <class T, class A>
  void rms_norm(In<T> x, const T* weight, Rows<T> y, A* inverse_rms, std::int64_t rows, std::int64_t dim,
                double epsilon, Stream s) {
    gpu::rms_norm<T>(x, weight, y, inverse_rms, rows, dim, epsilon, s);
  }
  template <class T, class A>
  void rms_norm_backward(In<T> dy, In<T> x, const T* weight, const A* inverse_rms, In<T> residual, Rows<T> dx,
                         A* dweight, std::int64_t rows, std::int64_t dim, Stream s) {
    gpu::rms_norm_backward<T>(dy, x, weight, inverse_rms, residual, dx, dweight, reinterpret_cast<A*>(work_.partials),
                              rows, dim, s);
  }
  template <class T>
  void rotate(T* x, std::int64_t token_stride, std::int64_t head_stride, const std::int32_t* positions,
              std::int64_t tokens, std::int64_t heads, std::int64_t dim, double theta, int direction, Stream s) {
    gpu::rotate(x, positions, tokens, heads, dim, {token_stride, head_stride}, theta, direction, s);
  }

  template <class T, class Y>
  void linear(In<T> x, const T* weight, Y* y, std::int64_t rows, std::int64_t in, std::int64_t out,
              std::type_identity_t<const Y*> residual, Stream s) {
    if (rows == 0) return;
    products_.run(gpu::product_of<T, Y>(false, true, rows, out, in, {x.stride, 0, 0}), x.data, weight,
                  residual == nullptr ? 0 : 1, residual, y, s);
  }
  template <class D, class T>
  void linear_input_gradient(const D* dy, const T* weight, T* dx, bool add, std::int64_t rows, std::int64_t in,
                             std::int64_t out, Stream s) {
    in_pieces<T>(dy, rows, out, s, [&](const T* piece, std::int64_t first, std::int64_t count) {
      T* const to = dx + first * in;
      products_.run(gpu::product_of<T, T>(false, false, count, in, out), piece, weight, add ? 1 : 0, to, to, s);
    });
  }
  template <class D, class X, class A>
  void linear_weight_gradient(const D* dy, Rows<X> x, A* dweight, bool add, std::int64_t rows, std::int64_t in,
                              std::int64_t out, Stream s) {
    using T = std::remove_const_t<X>;
    if (rows == 0 && !add) pleat::CudaExecutor{}.zero(dweight, static_cast<std::size_t>(in * out) * sizeof(A), s);
    in_pieces<T>(dy, rows, out, s, [&](const T* piece, std::int64_t first, std::int64_t count) {
      products_.run(gpu::product_of<T, A>(true, false, out, in, count, {0, x.stride, 0}), piece,
                    x.data + first * x.stride, add || first > 0 ? 1 : 0, dweight, dweight, s);
    });
  }

  template <class T>
  void swiglu(const T* gate, const T* up, T* act, std::int64_t elems, Stream s) {
    gpu::launch_pointwise<gpu::full_width<T>>(gpu::swiglu_kernel<T>, "swiglu_kernel", elems, s, gate, up, act);
  }
  template <class T>
  void swiglu_backward(T* gate, T* up, T* act, std::int64_t elems, Stream s) {
    gpu::launch_pointwise<gpu::full_width<T>>(gpu::swiglu_backward_kernel<T>, "swiglu_backward_kernel", elems, s, gate,
                                              up, act);
  }
  template <class T>
  void cross_entropy(T* logits, const std::int32_t* labels, double* loss, std::int64_t rows, std::int64_t classes,
                     Stream s) {
    gpu::cross_entropy(logits, labels, loss, rows, classes, work_.losses, s);
  }
  void add_constant(double* sum, double value, Stream s) {
    gpu::add_constant_kernel<double><<<1, 1, 0, s>>>(sum, value);
    pleat::check_launch("add_constant_kernel");
  }

  template <class T>
  void expand_latent(const LatentShape& shape, In<T> latent, const T* key_weight, const T* value_weight, T* keys,
                     T* values, std::int64_t rows, Stream s) {
    gpu::expand_latent<T>(products_, shape, latent, key_weight, value_weight, keys, values, rows, s);
  }
  template <class T, class A>
  void expand_latent_backward(const LatentShape& shape, In<T> latent, const T* key_weight, const T* value_weight,
                              const A* dkeys, const A* dvalues, Rows<A> dlatent, bool add, A* dkey_weight,
                              A* dvalue_weight, std::int64_t rows, Stream s) {
    const std::int64_t keys = shape.heads * shape.nope, values = shape.heads * shape.value;
    const auto gradients = [&](const T* piece, const T* weight, std::int64_t width, A* dweight, std::int64_t first,
                               std::int64_t count, bool add_latent) {
      A* const to = dlatent.data + first * dlatent.stride;
      products_.run(gpu::product_of<T, A>(false, false, count, shape.lora, width, {0, 0, dlatent.stride}), piece,
                    weight, add_latent ? 1 : 0, to, to, s);
      products_.run(gpu::product_of<T, A>(true, false, width, shape.lora, count, {0, latent.stride, 0}), piece,
                    latent.data + first * latent.stride, 1, dweight, dweight, s);
    };
    T* const plain = reinterpret_cast<T*>(work_.converted);
    const std::int64_t most = converted_bytes / static_cast<std::int64_t>(sizeof(T)) / keys;
    for (std::int64_t first = 0; first < rows; first += most) {
      const std::int64_t count = std::min(most, rows - first);
      const Rows<A> to{dlatent.data + first * dlatent.stride, dlatent.stride};
      gpu::gather_positions_kernel<T, A><<<gpu::grid_of(count, 1), gpu::threads, 0, s>>>(
          shape, dkeys + first * shape.heads * shape.key(), plain, to, add, count);
      pleat::check_launch("gather_positions_kernel");
      gradients(plain, key_weight, keys, dkey_weight, first, count, add);
    }
    in_pieces<T>(dvalues, rows, values, s, [&](const T* piece, std::int64_t first, std::int64_t count) {
      gradients(piece, value_weight, values, dvalue_weight, first, count, true);
    });
  }

  template <class A>
  void initialize(A* out, const Initial& initial, std::int64_t first, std::int64_t elems, Stream s) {
    gpu::initialize(out, initial, first, elems, s);
  }

 private:
  /// Of gradients that are wider than the activations, while products read them.
  static constexpr std::int64_t converted_bytes = std::int64_t{16} << 20;

  struct Work {
    std::byte* product;
    std::byte* partials;
    gpu::EmbeddingScratch embedding;
    double* losses;
    std::byte* converted;
  };
  static Work carve(pleat::Carver& memory, const OpsShape& shape) {
    const auto partials = static_cast<std::size_t>(gpu::norm_partials(std::max(shape.hidden, shape.widest)));
    Work work{};
    work.product = memory.take_bytes(gpu::Products::workspace_bytes);
    work.partials = memory.take_bytes(partials * pleat::size_bytes(pleat::accumulator(shape.dtype)));
    work.embedding = gpu::EmbeddingScratch::carve(memory, shape.tokens, shape.hidden, shape.dtype);
    work.losses = memory.take<double>(static_cast<std::size_t>(shape.tokens));
    work.converted = memory.take_bytes(converted_bytes);
    return work;
  }
  static Work carved(pleat::Block workspace, const OpsShape& shape) {
    pleat::Carver memory(workspace);
    return carve(memory, shape);
  }

  /// Calls `f(piece, first, count)` with rows of `d` [rows, width] in T: all at once where they are.
  template <class T, class D, class F>
  void in_pieces(const D* d, std::int64_t rows, std::int64_t width, Stream s, F f) {
    if (rows == 0) return;
    if constexpr (std::is_same_v<T, D>) {
      f(d, std::int64_t{0}, rows);
    } else {
      T* const piece = reinterpret_cast<T*>(work_.converted);
      const std::int64_t most = converted_bytes / static_cast<std::int64_t>(sizeof(T)) / width;
      for (std::int64_t first = 0; first < rows; first += most) {
        const std::int64_t count = std::min(most, rows - first);
        gpu::launch_pointwise<gpu::full_width<D>>(gpu::convert_kernel<T, D>, "convert_kernel", count * width, s,
                                                  d + first * width, piece);
        f(piece, first, count);
      }
    }
  }

  Work work_;
  gpu::Products products_;
};

}  // namespace train_moe
