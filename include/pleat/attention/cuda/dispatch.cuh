// The table of CUDA attention kernels: which one runs for a device and head dims, and how kernels are launched.
#pragma once

#include <algorithm>
#include <type_traits>

#include <pleat/attention/cuda/head_dims.hpp>
#include <pleat/attention/cuda/hopper_backward.cuh>
#include <pleat/attention/cuda/hopper_forward.cuh>
#include <pleat/attention/cuda/hopper_gradients.cuh>
#include <pleat/attention/cuda/portable_forward.cuh>
#include <pleat/attention/cuda/portable_query_gradient.cuh>

namespace pleat::inline v0::attention_kernel {

/// Launches one CTA per tile, at most `max_ctas` of them (0: no limit). Errors: cuda_error C20.
template <class Tiles, class Arguments>
void launch_tiles(void (*kernel)(Arguments, Alignment), const char* name, std::int64_t tiles, int max_ctas,
                  const Arguments& a, const Alignment& alignment, cudaStream_t s) {
  if (tiles == 0) return;
  check_cuda(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  Tiles::shared_bytes),
             name);
  const auto ctas = static_cast<unsigned>(max_ctas > 0 ? std::min<std::int64_t>(tiles, max_ctas) : tiles);
  kernel<<<ctas, Tiles::threads, Tiles::shared_bytes, s>>>(a, alignment);
  check_launch(name);
}
constexpr std::int64_t tiles_of(std::int64_t tokens, int tile, std::int64_t batch, std::int64_t heads) {
  return (tokens + tile - 1) / tile * batch * heads;
}

/// Bytes of shared memory that a CTA may have on the current device. Errors: cuda_error C20.
inline int most_shared_bytes() {
  int device = 0, bytes = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "cudaDeviceGetAttribute");
  return bytes;
}

/// The gradients' kernels of sm_80 and up, in tiles that fit `MostShared` bytes.
template <class T, class Dims, int MostShared>
struct PortableBackward {
  using KeyTiles = KeyGradientTiles<T, Dims::qk, Dims::v, MostShared>;
  using QueryTiles = QueryGradientTiles<T, Dims::qk, Dims::v, MostShared>;

  static void run(const Backward<T>& a, const Alignment& alignment, cudaStream_t s) {
    const Extents& x = a.extents;
    for_each_key_kernel([&](auto* kernel) {
      launch_tiles<KeyTiles>(kernel, "portable_key_gradients_kernel",
                             tiles_of(x.k_tokens, KeyTiles::keys, x.batch, x.kv_heads), a.max_ctas, a, alignment, s);
    });
    launch_tiles<QueryTiles>(
        portable_query_gradient_kernel<T, Dims::qk, Dims::v, MostShared>, "portable_query_gradient_kernel",
        tiles_of(x.q_tokens, QueryTiles::queries, x.batch, x.q_heads), a.max_ctas, a, alignment, s);
  }
  static void preload() {
    for_each_key_kernel([](auto* kernel) { preload_kernel(kernel, "portable_key_gradients_kernel"); });
    preload_kernel(portable_query_gradient_kernel<T, Dims::qk, Dims::v, MostShared>, "portable_query_gradient_kernel");
  }

 private:
  template <class F>
  static void for_each_key_kernel(F f) {
    if constexpr (KeyTiles::are_apart) {
      f(portable_key_gradients_kernel<T, Dims::qk, Dims::v, Gradients::values, MostShared>);
      f(portable_key_gradients_kernel<T, Dims::qk, Dims::v, Gradients::keys, MostShared>);
    } else {
      f(portable_key_gradients_kernel<T, Dims::qk, Dims::v, Gradients::both, MostShared>);
    }
  }
};

/// The kernels of sm_80 and up.
template <class T, class Dims>
struct Portable {
  using ForwardTiles = attention_kernel::ForwardTiles<T, Dims::qk, Dims::v>;

  static void forward(const Forward<T>& a, const Alignment& alignment, cudaStream_t s) {
    const Extents& x = a.extents;
    launch_tiles<ForwardTiles>(portable_forward_kernel<T, Dims::qk, Dims::v>, "portable_forward_kernel",
                               tiles_of(x.q_tokens, ForwardTiles::queries, x.batch, x.q_heads), a.max_ctas, a,
                               alignment, s);
  }
  static void backward(const Backward<T>& a, const Alignment& alignment, cudaStream_t s) {
    for_device([&](auto backward) { backward.run(a, alignment, s); });
  }
  static void preload() {
    preload_kernel(portable_forward_kernel<T, Dims::qk, Dims::v>, "portable_forward_kernel");
    for_device([](auto backward) { backward.preload(); });
  }

 private:
  /// Up to 192 the same tiles serve all.
  template <class F>
  static void for_device(F f) {
    if constexpr (Dims::qk > 192) {
      if (most_shared_bytes() >= shared_of_sm90) return f(PortableBackward<T, Dims, shared_of_sm90>{});
    }
    f(PortableBackward<T, Dims, shared_of_sm80>{});
  }
};

/// The table: for each pass, the fastest kernels that a device, head dims and strides have.
template <class T, class Dims>
struct KernelTable {
  using Forward90 = HopperForward<T, forward_tiling<Dims>>;
  /// Up to 128 the three gradients fit a CTA's registers.
  using Backward90 = std::conditional_t<(Dims::qk <= 128), HopperBackward<T, BackwardTiling<Dims::qk, Dims::v>>,
                                        HopperGradients<T, Dims>>;

  static void forward(const Forward<T>& a, const Alignment& alignment, cudaStream_t s) {
    if (Forward90::takes(a)) return Forward90::run(a, s);
    Portable<T, Dims>::forward(a, alignment, s);
  }
  /// With blocks of others; false where no kernel takes them.
  static bool forward_blocks(const Forward<T>& a, cudaStream_t s) {
    if (!Forward90::takes(a)) return false;
    Forward90::run(a, s);
    return true;
  }
  static void backward(const Backward<T>& a, const Alignment& alignment, cudaStream_t s) {
    if (a.scale > 0 && Backward90::takes(a)) return Backward90::run(a, s);
    Portable<T, Dims>::backward(a, alignment, s);
  }
  static void preload() {
    Forward90::preload();
    Backward90::preload();
    Portable<T, Dims>::preload();
  }
};

}  // namespace pleat::inline v0::attention_kernel
