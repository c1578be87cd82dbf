// The leaves of optim_leaf on CUDA: one kernel per unit shard at memory speed, and a step that never leaves the device.
#pragma once

#include <pleat/optim/cuda/piece_walk.cuh>
#include <pleat/optim/update_rules.hpp>

namespace pleat::inline v0 {

namespace detail {

/// Elements a thread updates at a time: the gradient, the master and both moments as 16-byte words.
template <class T>
inline constexpr int update_width = pack_width(sizeof(T));

template <class T, class Compute, int Width>
PLEAT_KERNEL void __launch_bounds__(leaf_threads)
    adamw_kernel(const __grid_constant__ fsdp::ShardMemory shard, T* first, T* second,
                 const __grid_constant__ optim::AdamwOptions options, optim::LearningRate lr,
                 const optim::StepResult* result) {
  if (!result->applied) return;
  __shared__ optim::AdamwRule<T> rule;  // its powers take as long as the search for the first piece, by other warps
  if (threadIdx.x == leaf_threads - 1) rule = optim::AdamwRule<T>(options, lr.read(), *result);
  auto* const master = static_cast<T*>(shard.master);
  const auto* const gradient = static_cast<const T*>(shard.gradient);
  auto* const compute = static_cast<Compute*>(shard.compute);
  for_each_pack<Width>(
      shard.pieces, shard.piece_count, shard.elems,
      [&]<int Count>(const fsdp::UpdatePiece& piece, std::int64_t i, std::integral_constant<int, Count>) {
        if (piece.optimizer != fsdp::Optimizer::adamw) return;
        const std::int64_t state = i - piece.begin + piece.state_begin;
        const Pack<T, Count> g = load_pack<Count>(gradient + i);
        Pack<T, Count> p = load_pack<Count>(master + i);
        Pack<T, Count> m = load_pack<Count>(first + state);
        Pack<T, Count> v = load_pack<Count>(second + state);
#pragma unroll
        for (int k = 0; k < Count; ++k) rule.apply(p.elem[k], m.elem[k], v.elem[k], g.elem[k], piece.weight_decay);
        store_pack<Count>(master + i, p);
        store_pack<Count>(first + state, m);
        store_pack<Count>(second + state, v);
        if (compute == nullptr) return;
        Pack<Compute, Count> copy;
#pragma unroll
        for (int k = 0; k < Count; ++k) copy.elem[k] = static_cast<Compute>(p.elem[k]);
        store_pack<Count>(compute + i, copy);
      });
}

/// One CTA per partial, whatever the device, so that the order of the sum, and its bits, are its own.
template <class T, int Width>
PLEAT_KERNEL void __launch_bounds__(leaf_threads)
    add_squares_kernel(double* partials, const __grid_constant__ fsdp::ShardMemory shard) {
  const auto* const gradient = static_cast<const T*>(shard.gradient);
  double sum = 0;
  for_each_pack<Width>(
      shard.pieces, shard.piece_count, shard.elems,
      [&]<int Count>(const fsdp::UpdatePiece& piece, std::int64_t i, std::integral_constant<int, Count>) {
        const Pack<T, Count> g = load_pack<Count>(gradient + i);
        double squares = 0;
#pragma unroll
        for (int k = 0; k < Count; ++k) squares += static_cast<double>(g.elem[k]) * static_cast<double>(g.elem[k]);
        sum += piece.norm_weight * squares;
      });
  sum = sum_of_block(sum);
  if (threadIdx.x == 0) partials[blockIdx.x] += sum;
}

template <int Threads>
PLEAT_KERNEL void __launch_bounds__(Threads)
    finish_partial_kernel(optim::StepPartial* partial, const double* squares, const std::int64_t* const* statuses,
                          int status_words) {
  static_assert(optim::square_partials == Threads && leaf_threads == Threads);
  const double total = sum_of_block(squares[threadIdx.x]);
  if (threadIdx.x != 0) return;
  partial->sum_of_squares = total;
  for (int i = 0; i < status_words; ++i) optim::add_status(*partial, *statuses[i]);
}

template <int Threads>
PLEAT_KERNEL void __launch_bounds__(Threads)
    finish_step_kernel(optim::StepResult* result, const optim::StepPartial* partials, int ranks, double max_norm) {
  __shared__ double staged[Threads * sizeof(optim::StepPartial) / sizeof(double)];
  auto* const terms = reinterpret_cast<optim::StepPartial*>(staged);
  optim::StepPartial total;
  for (int first = 0; first < ranks; first += Threads) {
    const int count = ranks - first < Threads ? ranks - first : Threads;
    if (threadIdx.x < count) terms[threadIdx.x] = partials[first + threadIdx.x];
    __syncthreads();
    for (int r = 0; threadIdx.x == 0 && r < count; ++r) optim::add_partial(total, terms[r]);
    __syncthreads();
  }
  if (threadIdx.x == 0) optim::finish_step(*result, total, max_norm);
}

template <int Threads>
PLEAT_KERNEL void __launch_bounds__(Threads)
    check_rates_kernel(optim::StepResult* result, optim::LearningRate first, optim::LearningRate second) {
  optim::check_rate(*result, first.read());
  optim::check_rate(*result, second.read());
}

}  // namespace detail

/// Wide accesses need what a plan's memory has: shards and states whose addresses are multiples of 16 bytes.
/// Errors: cuda_error C20; shape_error T01.
template <>
struct optim_leaf<cuda_device> {
  static void preload() {
    for_each_type(AccumulatorTypes{}, [](auto master) {
      using T = typename decltype(master)::type;
      for_each_type(FloatTypes{}, [](auto compute) {
        using Compute = typename decltype(compute)::type;
        preload_kernel(detail::adamw_kernel<T, Compute, detail::update_width<T>>, "adamw_kernel");
      });
      preload_kernel(detail::add_squares_kernel<T, detail::update_width<T>>, "add_squares_kernel");
    });
    preload_kernel(detail::finish_partial_kernel<detail::leaf_threads>, "finish_partial_kernel");
    preload_kernel(detail::finish_step_kernel<detail::leaf_threads>, "finish_step_kernel");
    preload_kernel(detail::check_rates_kernel<1>, "check_rates_kernel");
  }

  static void add_squares(double* partials, const fsdp::ShardMemory& shard, cudaStream_t s) {
    if (shard.piece_count == 0) return;
    dispatch_dtype(AccumulatorTypes{}, shard.master_dtype, [&](auto master) {
      using T = typename decltype(master)::type;
      detail::add_squares_kernel<T, detail::update_width<T>>
          <<<optim::square_partials, detail::leaf_threads, 0, s>>>(partials, shard);
      check_launch("add_squares_kernel");
    });
  }

  static void finish_partial(optim::StepPartial* partial, const double* squares, const std::int64_t* const* statuses,
                             int status_words, cudaStream_t s) {
    detail::finish_partial_kernel<detail::leaf_threads>
        <<<1, detail::leaf_threads, 0, s>>>(partial, squares, statuses, status_words);
    check_launch("finish_partial_kernel");
  }

  static void finish_step(optim::StepResult* result, const optim::StepPartial* partials, int ranks, double max_norm,
                          cudaStream_t s) {
    detail::finish_step_kernel<detail::leaf_threads>
        <<<1, detail::leaf_threads, 0, s>>>(result, partials, ranks, max_norm);
    check_launch("finish_step_kernel");
  }

  static void check_rates(optim::StepResult* result, optim::LearningRate first, optim::LearningRate second,
                          cudaStream_t s) {
    detail::check_rates_kernel<1><<<1, 1, 0, s>>>(result, first, second);
    check_launch("check_rates_kernel");
  }

  static void adamw(const fsdp::ShardMemory& shard, void* m, void* v, const optim::AdamwOptions& options,
                    optim::LearningRate lr, const optim::StepResult* result, cudaStream_t s) {
    if (shard.piece_count == 0) return;
    dispatch_dtype(AccumulatorTypes{}, shard.master_dtype, [&](auto master) {
      dispatch_dtype(FloatTypes{}, shard.compute_dtype, [&](auto compute) {
        using T = typename decltype(master)::type;
        using Compute = typename decltype(compute)::type;
        constexpr int width = detail::update_width<T>;
        const unsigned grid = detail::leaf_grid(static_cast<std::size_t>((shard.elems + width - 1) / width));
        detail::adamw_kernel<T, Compute, width>
            <<<grid, detail::leaf_threads, 0, s>>>(shard, static_cast<T*>(m), static_cast<T*>(v), options, lr, result);
        check_launch("adamw_kernel");
      });
    });
  }
};

}  // namespace pleat::inline v0
