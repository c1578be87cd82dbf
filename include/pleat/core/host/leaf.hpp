// The leaves of core_leaf on the host.
#pragma once

#include <span>

#include <pleat/core/dtype.hpp>
#include <pleat/core/executor.hpp>
#include <pleat/core/host/executor.hpp>

namespace pleat::inline v0 {

/// See the primary template for what each does.
template <>
struct core_leaf<host_device> {
  static constexpr std::size_t sum_of_squares_scratch_bytes = 0;

  static void cast_copy(void* out, DType out_dtype, const void* in, DType in_dtype, std::size_t elems, HostStream s) {
    if (out_dtype == in_dtype) return HostExecutor{}.copy(out, in, elems * size_bytes(in_dtype), s);
    dispatch_dtype(FloatTypes{}, out_dtype, [&](auto out_type) {
      dispatch_dtype(FloatTypes{}, in_dtype, [&](auto in_type) {
        using Out = typename decltype(out_type)::type;
        using In = typename decltype(in_type)::type;
        auto* to = static_cast<Out*>(out);
        const auto* from = static_cast<const In*>(in);
        for (std::size_t i = 0; i < elems; ++i) to[i] = static_cast<Out>(from[i]);
      });
    });
  }

  static void sum_ranks(void* out, DType out_dtype, std::span<const void* const> parts, DType part_dtype,
                        std::size_t elems, bool accumulate, HostStream, int = 0) {
    dispatch_dtype(FloatTypes{}, out_dtype, [&](auto out_type) {
      dispatch_dtype(FloatTypes{}, part_dtype, [&](auto part_type) {
        using Out = typename decltype(out_type)::type;
        using Part = typename decltype(part_type)::type;
        using Sum = std::common_type_t<accumulator_t<Out>, accumulator_t<Part>>;
        auto* to = static_cast<Out*>(out);
        for (std::size_t i = 0; i < elems; ++i) {
          Sum sum = 0;
          for (const void* part : parts) sum += static_cast<Sum>(static_cast<const Part*>(part)[i]);
          to[i] = static_cast<Out>(accumulate ? static_cast<Sum>(to[i]) + sum : sum);
        }
      });
    });
  }

  static void sum_of_squares(double* out, const void* in, DType dtype, std::size_t elems, bool accumulate, void*,
                             HostStream) {
    double sum = 0;
    dispatch_dtype(FloatTypes{}, dtype, [&](auto type) {
      const auto* values = static_cast<const typename decltype(type)::type*>(in);
      for (std::size_t i = 0; i < elems; ++i) sum += static_cast<double>(values[i]) * static_cast<double>(values[i]);
    });
    *out = accumulate ? *out + sum : sum;
  }
};

}  // namespace pleat::inline v0
