// The leaves of core_leaf on CUDA: cast-copy, sums in rank order and sums of squares at memory speed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include <pleat/core/dtype.hpp>
#include <pleat/core/executor.hpp>
#include <pleat/cuda/bulk_sum.cuh>
#include <pleat/cuda/executor.hpp>

namespace pleat::inline v0 {

namespace detail {

inline constexpr int leaf_threads = 512;
/// Elements each thread of an element-wise leaf works on, for types of at most `bytes` bytes.
constexpr int pack_width(std::size_t bytes) {
  return static_cast<int>(16 / bytes);
}

/// CTAs for `packs` packs: no more than fill the largest chips twice.
inline unsigned leaf_grid(std::size_t packs) {
  constexpr std::size_t most = 1024;
  const std::size_t needed = (packs + leaf_threads - 1) / leaf_threads;
  return static_cast<unsigned>(std::clamp<std::size_t>(needed, 1, most));
}

template <class T>
bool is_packable(const void* data, int width) {
  return reinterpret_cast<std::uintptr_t>(data) %
             std::min<std::size_t>(16, sizeof(T) * static_cast<std::size_t>(width)) ==
         0;
}

template <class Out, class Part>
bool are_packable(const void* out, std::span<const void* const> parts, int width) {
  return is_packable<Out>(out, width) &&
         std::all_of(parts.begin(), parts.end(), [=](const void* part) { return is_packable<Part>(part, width); });
}

template <class Out, class In, int Width>
PLEAT_KERNEL void __launch_bounds__(leaf_threads) cast_copy_kernel(Out* out, const In* in, std::size_t packs) {
  const std::size_t step = static_cast<std::size_t>(gridDim.x) * leaf_threads;
  for (std::size_t i = blockIdx.x * static_cast<std::size_t>(leaf_threads) + threadIdx.x; i < packs; i += step) {
    const Pack<In, Width> from = reinterpret_cast<const Pack<In, Width>*>(in)[i];
    Pack<Out, Width> to;
#pragma unroll
    for (int k = 0; k < Width; ++k) to.elem[k] = static_cast<Out>(from.elem[k]);
    reinterpret_cast<Pack<Out, Width>*>(out)[i] = to;
  }
}

inline constexpr int sum_batch = 4;
template <class Out, class Part>
inline constexpr int sum_width = pack_width(std::max(sizeof(Out), sizeof(Part)));
/// The sum of the parts from `offset_bytes` on, by all threads of the grid. One thread adds `sum_batch` packs of two
/// ranks at a time: while those of a peer are under way, so are the others.
template <class Out, class Part, int Width, class Parts>
__device__ __forceinline__ void add_parts(Out* out, const Parts& parts, std::size_t offset_bytes, std::size_t packs,
                                          bool accumulate) {
  using Sum = std::common_type_t<accumulator_t<Out>, accumulator_t<Part>>;
  using Terms = Pack<Part, Width>[sum_batch];
  const std::size_t step = static_cast<std::size_t>(gridDim.x) * leaf_threads;
  const std::size_t start = blockIdx.x * static_cast<std::size_t>(leaf_threads) + threadIdx.x;
  for (std::size_t first = start; first < packs; first += step * sum_batch) {
    Sum sum[sum_batch][Width] = {};
    const auto load = [&](Terms& terms, int r) {
      const auto* from = reinterpret_cast<const Pack<Part, Width>*>(parts[r] + offset_bytes);
#pragma unroll
      for (int b = 0; b < sum_batch; ++b) {
        if (first + b * step < packs) terms[b] = from[first + b * step];
      }
    };
    const auto add = [&](const Terms& terms) {
#pragma unroll
      for (int b = 0; b < sum_batch; ++b) {
#pragma unroll
        for (int k = 0; k < Width; ++k) sum[b][k] += static_cast<Sum>(terms[b].elem[k]);
      }
    };
    for (int r = 0; r < parts.count; r += 2) {
      const bool are_two = r + 1 < parts.count;
      Terms one, two;
      load(one, r);
      if (are_two) load(two, r + 1);
      add(one);
      if (are_two) add(two);
    }
    auto* to = reinterpret_cast<Pack<Out, Width>*>(out);
#pragma unroll
    for (int b = 0; b < sum_batch; ++b) {
      if (first + b * step >= packs) continue;
      Pack<Out, Width> result;
      if (accumulate) result = to[first + b * step];
#pragma unroll
      for (int k = 0; k < Width; ++k) {
        result.elem[k] = static_cast<Out>(accumulate ? static_cast<Sum>(result.elem[k]) + sum[b][k] : sum[b][k]);
      }
      to[first + b * step] = result;
    }
  }
}

template <class Out, class Part, int Width>
PLEAT_KERNEL void __launch_bounds__(leaf_threads)
    sum_ranks_kernel(Out* out, const __grid_constant__ RankParts parts, std::size_t packs, bool accumulate) {
  add_parts<Out, Part, Width>(out, parts, 0, packs, accumulate);
}

inline constexpr int square_partials = 512;

/// The sum of a CTA's values in a fixed order; the result is thread 0's.
inline __device__ double sum_of_block(double value) {
  __shared__ double part[leaf_threads / 32];
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_down_sync(0xffffffffu, value, distance);
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = value;
  __syncthreads();
  value = 0;
  if (threadIdx.x == 0) {
    for (const double p : part) value += p;
  }
  return value;
}

/// The grid has `square_partials` CTAs whatever the device, so that the order of the sum, and its bits, are its own. A
/// thread has `batch` packs under way at once.
template <class T, int Width>
PLEAT_KERNEL void __launch_bounds__(leaf_threads) square_kernel(double* partials, const T* in, std::size_t packs) {
  constexpr int batch = 4;
  double sum = 0;
  const std::size_t step = static_cast<std::size_t>(square_partials) * leaf_threads;
  const std::size_t start = blockIdx.x * static_cast<std::size_t>(leaf_threads) + threadIdx.x;
  for (std::size_t first = start; first < packs; first += step * batch) {
    Pack<T, Width> values[batch] = {};
#pragma unroll
    for (int b = 0; b < batch; ++b) {
      if (first + b * step < packs) values[b] = reinterpret_cast<const Pack<T, Width>*>(in)[first + b * step];
    }
#pragma unroll
    for (int b = 0; b < batch; ++b) {
#pragma unroll
      for (int k = 0; k < Width; ++k) {
        const double value = static_cast<double>(values[b].elem[k]);
        sum += value * value;
      }
    }
  }
  sum = sum_of_block(sum);
  if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

template <class T>
PLEAT_KERNEL void __launch_bounds__(leaf_threads)
    square_total_kernel(double* out, const double* partials, const T* tail, int tail_elems, bool accumulate) {
  static_assert(square_partials == leaf_threads);
  double sum = sum_of_block(partials[threadIdx.x]);
  if (threadIdx.x != 0) return;
  for (int i = 0; i < tail_elems; ++i) sum += static_cast<double>(tail[i]) * static_cast<double>(tail[i]);
  *out = accumulate ? *out + sum : sum;
}

}  // namespace detail

/// Pointers may be peer memory. Errors: cuda_error C20; shape_error T01, T09.
template <>
struct core_leaf<cuda_device> {
  static constexpr std::size_t sum_of_squares_scratch_bytes = detail::square_partials * sizeof(double);

  static void preload() {
    for_each_type(FloatTypes{}, [](auto out_type) {
      using Out = typename decltype(out_type)::type;
      for_each_type(FloatTypes{}, [](auto in_type) {
        using In = typename decltype(in_type)::type;
        constexpr int width = detail::pack_width(std::max(sizeof(Out), sizeof(In)));
        if constexpr (!std::is_same_v<Out, In>) {
          preload_kernel(detail::cast_copy_kernel<Out, In, width>, "cast_copy_kernel");
          preload_kernel(detail::cast_copy_kernel<Out, In, 1>, "cast_copy_kernel");
        }
        preload_kernel(detail::sum_ranks_kernel<Out, In, width>, "sum_ranks_kernel");
        preload_kernel(detail::sum_ranks_kernel<Out, In, 1>, "sum_ranks_kernel");
        if constexpr (sums_in_bulk<Out, In>) detail::prepare_bulk_sum<Out, In>();
      });
      preload_kernel(detail::square_kernel<Out, detail::pack_width(sizeof(Out))>, "square_kernel");
      preload_kernel(detail::square_kernel<Out, 1>, "square_kernel");
      preload_kernel(detail::square_total_kernel<Out>, "square_total_kernel");
    });
  }

  static void cast_copy(void* out, DType out_dtype, const void* in, DType in_dtype, std::size_t elems, cudaStream_t s) {
    if (out_dtype == in_dtype) return CudaExecutor{}.copy(out, in, elems * size_bytes(in_dtype), s);
    dispatch_dtype(FloatTypes{}, out_dtype, [&](auto out_type) {
      dispatch_dtype(FloatTypes{}, in_dtype, [&](auto in_type) {
        using Out = typename decltype(out_type)::type;
        using In = typename decltype(in_type)::type;
        if constexpr (!std::is_same_v<Out, In>) {
          constexpr int width = detail::pack_width(std::max(sizeof(Out), sizeof(In)));
          const bool packs = detail::is_packable<Out>(out, width) && detail::is_packable<In>(in, width);
          const std::size_t whole = packs ? elems / width : 0;
          if (whole != 0) launch_cast<Out, In, width>(static_cast<Out*>(out), static_cast<const In*>(in), whole, s);
          launch_cast<Out, In, 1>(static_cast<Out*>(out) + whole * width, static_cast<const In*>(in) + whole * width,
                                  elems - whole * width, s);
        }
      });
    });
  }

  /// At most 256 parts unless they are equally spaced (T09). With a budget, `ctas` multiprocessors suffice for a link.
  static void sum_ranks(void* out, DType out_dtype, std::span<const void* const> parts, DType part_dtype,
                        std::size_t elems, bool accumulate, cudaStream_t s, int ctas = 0) {
    dispatch_dtype(FloatTypes{}, out_dtype, [&](auto out_type) {
      dispatch_dtype(FloatTypes{}, part_dtype, [&](auto part_type) {
        using Out = typename decltype(out_type)::type;
        using Part = typename decltype(part_type)::type;
        constexpr int width = detail::sum_width<Out, Part>;
        const auto are_packable = [&](int elems_at_once) {
          return detail::are_packable<Out, Part>(out, parts, elems_at_once);
        };
        std::size_t done = 0;
        if constexpr (sums_in_bulk<Out, Part>) {
          constexpr int granule = detail::BulkSum::granule<Part>;
          if (ctas > 0 && elems >= granule && are_packable(granule)) {
            done = elems / granule * granule;
            detail::launch_bulk_sum<Out, Part>(static_cast<Out*>(out), detail::rank_parts(parts, 0), done, accumulate,
                                               ctas, s);
          }
        }
        if (done == 0 && elems >= width && are_packable(width)) {
          launch_sum<Out, Part, width>(static_cast<Out*>(out), parts, 0, elems / width, accumulate, ctas, s);
          done = elems / width * width;
        }
        launch_sum<Out, Part, 1>(static_cast<Out*>(out) + done, parts, done * sizeof(Part), elems - done, accumulate,
                                 ctas, s);
      });
    });
  }

  static void sum_of_squares(double* out, const void* in, DType dtype, std::size_t elems, bool accumulate,
                             void* scratch, cudaStream_t s) {
    dispatch_dtype(FloatTypes{}, dtype, [&](auto type) {
      using T = typename decltype(type)::type;
      constexpr int width = detail::pack_width(sizeof(T));
      auto* partials = static_cast<double*>(scratch);
      const auto* values = static_cast<const T*>(in);
      const auto launch = [&]<int Width>(std::integral_constant<int, Width>) {
        const std::size_t packs = elems / Width;
        detail::square_kernel<T, Width>
            <<<detail::square_partials, detail::leaf_threads, 0, s>>>(partials, values, packs);
        check_launch("square_kernel");
        detail::square_total_kernel<T><<<1, detail::leaf_threads, 0, s>>>(
            out, partials, values + packs * Width, static_cast<int>(elems - packs * Width), accumulate);
        check_launch("square_total_kernel");
      };
      if (detail::is_packable<T>(in, width)) {
        launch(std::integral_constant<int, width>{});
      } else {
        launch(std::integral_constant<int, 1>{});
      }
    });
  }

 private:
  /// What gradients are summed from and to.
  template <class Out, class Part>
  static constexpr bool sums_in_bulk = std::is_same_v<Out, Part> || std::is_same_v<Out, accumulator_t<Part>>;

  template <class Out, class In, int Width>
  static void launch_cast(Out* out, const In* in, std::size_t packs, cudaStream_t s) {
    if (packs == 0) return;
    detail::cast_copy_kernel<Out, In, Width><<<detail::leaf_grid(packs), detail::leaf_threads, 0, s>>>(out, in, packs);
    check_launch("cast_copy_kernel");
  }

  template <class Out, class Part, int Width>
  static void launch_sum(Out* out, std::span<const void* const> parts, std::size_t offset_bytes, std::size_t packs,
                         bool accumulate, int ctas, cudaStream_t s) {
    if (packs == 0) return;
    const detail::RankParts table = detail::rank_parts(parts, offset_bytes);
    const unsigned most = detail::leaf_grid((packs + detail::sum_batch - 1) / detail::sum_batch);
    const unsigned grid = ctas > 0 ? std::min(most, static_cast<unsigned>(ctas)) : most;
    detail::sum_ranks_kernel<Out, Part, Width><<<grid, detail::leaf_threads, 0, s>>>(out, table, packs, accumulate);
    check_launch("sum_ranks_kernel");
  }
};

}  // namespace pleat::inline v0
