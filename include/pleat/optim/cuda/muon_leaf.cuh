// The element-wise leaves of Muon on CUDA: all pieces of a round in one kernel.
#pragma once

#include <pleat/optim/cuda/leaf.cuh>  // a step checks its rates

namespace pleat::inline v0 {

namespace detail {

/// Moves `Count` elements at once where they are aligned so: matrices of owners need not be as shards are.
template <int Count, class P>
__device__ bool is_pack_aligned(const P* data) {
  return reinterpret_cast<std::uintptr_t>(data) % alignof(Pack<P, Count>) == 0;
}

template <class T, class P, int Width>
PLEAT_KERNEL void __launch_bounds__(leaf_threads)
    muon_momentum_kernel(const optim::MuonPiece* pieces, std::int64_t piece_count, std::int64_t work_elems,
                         const __grid_constant__ optim::MuonOptions options, const optim::StepResult* result) {
  if (!result->applied) return;
  const optim::MuonRule<T> rule(options, *result);
  const auto apply = [&]<int Count>(const optim::MuonPiece& piece, std::int64_t work,
                                    std::integral_constant<int, Count>) {
    const std::int64_t i = work - piece.begin;
    auto* const momentum = static_cast<T*>(piece.momentum) + i;
    auto* const out = static_cast<P*>(piece.exchanged) + i;
    const Pack<T, Count> g = load_pack<Count>(static_cast<const T*>(piece.gradient) + i);
    Pack<T, Count> m = load_pack<Count>(momentum);
    Pack<P, Count> u;
#pragma unroll
    for (int k = 0; k < Count; ++k) u.elem[k] = static_cast<P>(rule.apply(m.elem[k], g.elem[k]));
    store_pack<Count>(momentum, m);
    if (is_pack_aligned<Count>(out)) {
      store_pack<Count>(out, u);
    } else {
#pragma unroll
      for (int k = 0; k < Count; ++k) out[k] = u.elem[k];
    }
  };
  for_each_pack<Width>(pieces, piece_count, work_elems, apply);
}

template <class T, class Compute, class P, int Width>
PLEAT_KERNEL void __launch_bounds__(leaf_threads)
    muon_update_kernel(const optim::MuonPiece* pieces, std::int64_t piece_count, std::int64_t work_elems,
                       optim::LearningRate lr, double weight_decay, const optim::StepResult* result) {
  if (!result->applied) return;
  const double rate = lr.read();
  const auto apply = [&]<int Count>(const optim::MuonPiece& piece, std::int64_t work,
                                    std::integral_constant<int, Count>) {
    const std::int64_t i = work - piece.begin;
    auto* const master = static_cast<T*>(piece.master) + i;
    const auto* const direction = static_cast<const P*>(piece.exchanged) + i;
    const optim::MuonUpdate<T> rule(piece, rate, weight_decay);
    Pack<P, Count> o;
    if (is_pack_aligned<Count>(direction)) {
      o = load_pack<Count>(direction);
    } else {
#pragma unroll
      for (int k = 0; k < Count; ++k) o.elem[k] = direction[k];
    }
    Pack<T, Count> p = load_pack<Count>(master);
    Pack<Compute, Count> copy;
#pragma unroll
    for (int k = 0; k < Count; ++k) {
      p.elem[k] = rule.apply(p.elem[k], static_cast<T>(o.elem[k]));
      copy.elem[k] = static_cast<Compute>(p.elem[k]);
    }
    store_pack<Count>(master, p);
    if (piece.compute != nullptr) store_pack<Count>(static_cast<Compute*>(piece.compute) + i, copy);
  };
  for_each_pack<Width>(pieces, piece_count, work_elems, apply);
}

}  // namespace detail

/// Errors: cuda_error C20; shape_error T01.
template <>
struct muon_leaf<cuda_device> {
  static void preload() {
    for_each_type(AccumulatorTypes{}, [](auto master) {
      for_each_type(optim::ProductTypes{}, [](auto product) {
        using T = typename decltype(master)::type;
        using P = typename decltype(product)::type;
        preload_kernel(detail::muon_momentum_kernel<T, P, width<T>>, "muon_momentum_kernel");
        for_each_type(FloatTypes{}, [](auto compute) {
          using Compute = typename decltype(compute)::type;
          preload_kernel(detail::muon_update_kernel<T, Compute, P, width<T>>, "muon_update_kernel");
        });
      });
    });
  }

  static void momentum(std::span<const optim::MuonPiece> pieces, std::int64_t work_elems, optim::MuonTypes types,
                       const optim::MuonOptions& options, const optim::StepResult* result, cudaStream_t s) {
    if (pieces.empty()) return;
    dispatch_dtype(AccumulatorTypes{}, types.master, [&](auto master) {
      dispatch_dtype(optim::ProductTypes{}, types.product, [&](auto product) {
        using T = typename decltype(master)::type;
        using P = typename decltype(product)::type;
        detail::muon_momentum_kernel<T, P, width<T>><<<grid<T>(work_elems), detail::leaf_threads, 0, s>>>(
            pieces.data(), static_cast<std::int64_t>(pieces.size()), work_elems, options, result);
        check_launch("muon_momentum_kernel");
      });
    });
  }

  static void update(std::span<const optim::MuonPiece> pieces, std::int64_t work_elems, optim::MuonTypes types,
                     const optim::MuonOptions& options, optim::LearningRate lr, const optim::StepResult* result,
                     cudaStream_t s) {
    if (pieces.empty()) return;
    dispatch_dtype(AccumulatorTypes{}, types.master, [&](auto master) {
      dispatch_dtype(FloatTypes{}, types.compute, [&](auto compute) {
        dispatch_dtype(optim::ProductTypes{}, types.product, [&](auto product) {
          using T = typename decltype(master)::type;
          using Compute = typename decltype(compute)::type;
          using P = typename decltype(product)::type;
          detail::muon_update_kernel<T, Compute, P, width<T>><<<grid<T>(work_elems), detail::leaf_threads, 0, s>>>(
              pieces.data(), static_cast<std::int64_t>(pieces.size()), work_elems, lr, options.weight_decay, result);
          check_launch("muon_update_kernel");
        });
      });
    });
  }

 private:
  template <class T>
  static constexpr int width = detail::pack_width(sizeof(T));
  template <class T>
  static unsigned grid(std::int64_t work_elems) {
    return detail::leaf_grid(static_cast<std::size_t>((work_elems + width<T> - 1) / width<T>));
  }
};

}  // namespace pleat::inline v0
