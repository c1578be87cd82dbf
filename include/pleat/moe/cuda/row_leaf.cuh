// Launches of the kernels that move rows.
#pragma once

#include <algorithm>
#include <cstdint>

#include <pleat/moe/cuda/rows.cuh>

namespace pleat::inline v0::moe::detail {

/// Launches the kernels of rows.cuh: 16 bytes at a time where rows and arrays are aligned to them, else by elements.
struct CudaRowLeaf {
  static void preload() {
    for_each_unit([](auto unit) {
      using Unit = typename decltype(unit)::type;
      preload_kernel(pack_kernel<Unit>, "pack_kernel");
      preload_kernel(expand_kernel<Unit>, "expand_kernel");
    });
    preload_kernel(pack_headers_kernel<header_threads>, "pack_headers_kernel");
    for_each_type(FloatTypes{}, [](auto type) {
      using T = typename decltype(type)::type;
      const auto load = []<int Width>(std::integral_constant<int, Width>) {
        preload_kernel(expand_gradient_kernel<T, Width>, "expand_gradient_kernel");
        preload_kernel(sum_experts_kernel<T, Width>, "sum_experts_kernel");
        preload_kernel(sum_sources_kernel<T, Width>, "sum_sources_kernel");
      };
      load(std::integral_constant<int, width<T>>{});
      load(std::integral_constant<int, 1>{});
    });
  }

  static void pack_headers(const DispatchPlan& plan, std::int64_t tokens, const std::int32_t* ids, const void* weights,
                           const DispatchRecord& r, const RowTable& out, cudaStream_t s) {
    constexpr int threads = header_threads;
    const std::int64_t words = tokens * static_cast<std::int64_t>(plan.ids_offset_bytes() / 4 + plan.shape.k + 1);
    const auto ctas = static_cast<unsigned>(std::clamp<std::int64_t>((words + threads - 1) / threads, 1, 1024));
    pack_headers_kernel<threads><<<ctas, threads, 0, s>>>(plan, tokens, reinterpret_cast<const std::uint32_t*>(ids),
                                                          static_cast<const std::uint32_t*>(weights), r, out);
    check_launch("pack_headers_kernel");
  }

  /// A few CTAs fill the links, and leave the others to what runs beside the transfer.
  static void pack(const DispatchPlan& plan, int rank, std::int64_t tokens, const void* x, const DispatchRecord& r,
                   const RowTable& out, cudaStream_t s) {
    by_unit(are_wide(plan, x), [&](auto unit) {
      using Unit = typename decltype(unit)::type;
      pack_kernel<Unit><<<std::min(grid(plan, tokens), sending_ctas), row_threads, 0, s>>>(
          plan, rank, tokens, static_cast<const std::byte*>(x), r, out);
      check_launch("pack_kernel");
    });
  }

  static void expand(const DispatchPlan& plan, const SourceRows& in, const DispatchRecord& r, cudaStream_t s) {
    by_unit(are_wide(plan, in.tokens), [&](auto unit) {
      using Unit = typename decltype(unit)::type;
      expand_kernel<Unit><<<grid(plan, plan.max_received()), row_threads, 0, s>>>(plan, in, r);
      check_launch("expand_kernel");
    });
  }

  static void expand_gradient(const DispatchPlan& plan, const SourceRows& in, const void* out, const DispatchRecord& r,
                              void* dout, cudaStream_t s) {
    by_type(plan, are_wide(plan, in.tokens, out, dout),
            [&]<class T, int Width>(std::type_identity<T>, Elements<Width>) {
              expand_gradient_kernel<T, Width><<<grid(plan, plan.max_received()), row_threads, 0, s>>>(
                  plan, in, static_cast<const T*>(out), r, static_cast<T*>(dout));
              check_launch("expand_gradient_kernel");
            });
  }

  static void sum_experts(const DispatchPlan& plan, const void* expert_rows, bool weighted, const DispatchRecord& r,
                          const RowTable& out, cudaStream_t s) {
    by_type(plan, are_wide(plan, expert_rows), [&]<class T, int Width>(std::type_identity<T>, Elements<Width>) {
      sum_experts_kernel<T, Width><<<grid(plan, plan.max_received()), row_threads, 0, s>>>(
          plan, static_cast<const T*>(expert_rows), weighted, r, out);
      check_launch("sum_experts_kernel");
    });
  }

  static void sum_sources(const DispatchPlan& plan, std::int64_t tokens, const RowTable& in, const DispatchRecord& r,
                          const void* residual, void* y, void* dweights, DispatchStatus* status, cudaStream_t s) {
    by_type(plan, are_wide(plan, y, residual), [&]<class T, int Width>(std::type_identity<T>, Elements<Width>) {
      sum_sources_kernel<T, Width><<<grid(plan, tokens), row_threads, 0, s>>>(
          plan, tokens, in, r, static_cast<const T*>(residual), static_cast<T*>(y),
          static_cast<accumulator_t<T>*>(dweights), plan.may_drop() ? status : nullptr);
      check_launch("sum_sources_kernel");
    });
  }

 private:
  static constexpr int header_threads = 256;
  static constexpr unsigned sending_ctas = 64;

  template <int Width>
  using Elements = std::integral_constant<int, Width>;
  template <class T>
  static constexpr int width = static_cast<int>(16 / sizeof(T));

  /// A warp per row; no more CTAs than fill the largest chips twice.
  static unsigned grid(const DispatchPlan& plan, std::int64_t rows) {
    constexpr int row_warps = row_threads / 32;
    constexpr std::int64_t most = 264;
    const std::int64_t limit = plan.options.max_ctas > 0 ? std::min<std::int64_t>(plan.options.max_ctas, most) : most;
    return static_cast<unsigned>(std::clamp<std::int64_t>((rows + row_warps - 1) / row_warps, 1, limit));
  }

  template <class... Pointers>
  static bool are_wide(const DispatchPlan& plan, const Pointers*... arrays) {
    const std::uintptr_t row_bytes = static_cast<std::uintptr_t>(plan.shape.hidden) * size_bytes(plan.shape.dtype);
    return ((row_bytes % 16 == 0) && ... && (reinterpret_cast<std::uintptr_t>(arrays) % 16 == 0));
  }
  /// Rows that are only copied go by 16 or by 2 bytes, whatever their elements are.
  template <class F>
  static void for_each_unit(const F& f) {
    f(std::type_identity<uint4>{});
    f(std::type_identity<std::uint16_t>{});
  }
  template <class F>
  static void by_unit(bool is_wide, const F& f) {
    is_wide ? f(std::type_identity<uint4>{}) : f(std::type_identity<std::uint16_t>{});
  }
  template <class F>
  static void by_type(const DispatchPlan& plan, bool is_wide, const F& f) {
    dispatch_dtype(FloatTypes{}, plan.shape.dtype, [&](auto type) {
      using T = typename decltype(type)::type;
      is_wide ? f(type, Elements<width<T>>{}) : f(type, Elements<1>{});
    });
  }
};

}  // namespace pleat::inline v0::moe::detail
