// The leaves of the experts on CUDA: grouped products that read the row offsets on the device.
#pragma once

#include <cstdint>

#include <pleat/moe/cuda/grouped_gemm.cuh>
#include <pleat/moe/cuda/grouped_portable.cuh>
#include <pleat/moe/experts.hpp>

namespace pleat::inline v0::moe::detail {

/// What the tensor cores' kernel takes: bf16 arrays and matrices whose rows and starts are multiples of 16 bytes. Boxes
/// have rows of 128 bytes.
template <Grouped Op>
class GroupedOperands {
  using Traits = GroupedTraits<Op>;

 public:
  GroupedOperands(const ExpertPlan& plan, const std::int64_t* offsets) : capacity_(plan.shape.capacity_rows) {
    args_.offsets = offsets;
    args_.experts = plan.shape.experts_local;
    args_.sources = 1;
  }
  CUtensorMap rows(const void* data, std::int64_t columns, int box_rows = 64) {
    return map<bfloat16, 2>(data, {{columns, capacity_}, {columns * 2}, {64, box_rows}});
  }
  /// [1, rows, columns]
  CUtensorMap rows_as_matrix(const void* data, std::int64_t columns) {
    return map<bfloat16, 3>(data, {{columns, capacity_, 1}, {columns * 2, 0}, {64, Traits::step, 1}});
  }
  CUtensorMap matrices(const TensorRef& m) {
    constexpr int box_rows = Traits::major_b == hopper::Major::k ? 128 : Traits::step;
    return map<bfloat16, 3>(
        m.data(), {{m.extent(2), m.extent(1), m.extent(0)}, {m.stride(1) * 2, m.stride(0) * 2}, {64, box_rows, 1}});
  }
  CUtensorMap gradients(const TensorRef& m) {
    args_.is_narrow = m.dtype() == DType::bf16;
    return args_.is_narrow ? gradients_of<bfloat16>(m) : gradients_of<float>(m);
  }
  void result(int index, void* data, std::int64_t columns) {
    args_.out[index] = rows(data, columns);
    args_.results[index] = static_cast<bfloat16*>(data);
  }
  GroupedArguments& operator*() { return args_; }
  GroupedArguments* operator->() { return &args_; }
  /// Whether all maps asked for exist.
  bool fit() const { return fit_; }

 private:
  template <class T>
  CUtensorMap gradients_of(const TensorRef& m) {
    constexpr std::int64_t bytes = sizeof(T);
    return map<T, 3>(m.data(), {{m.extent(2), m.extent(1), m.extent(0)},
                                {m.stride(1) * bytes, m.stride(0) * bytes},
                                {128 / static_cast<int>(bytes), 64, 1}});
  }
  template <class T, int Axes>
  CUtensorMap map(const void* data, const hopper::TensorBoxes<Axes>& boxes) {
    fit_ = fit_ && hopper::is_mappable(data, boxes);
    return fit_ ? hopper::tensor_map(static_cast<const T*>(data), boxes, hopper::Swizzle::b128) : CUtensorMap{};
  }

  GroupedArguments args_{};
  std::int64_t capacity_;
  bool fit_ = true;
};

/// bf16 on Hopper goes through the tensor cores (grouped_gemm.cuh) wherever the copy engine can read the operands;
/// everything else through grouped_portable.cuh: `run` decides.
struct CudaExpertLeaf {
  /// Errors: cuda_error C20.
  static void preload() {
    const auto load = []<Grouped Op>(std::integral_constant<Grouped, Op>) {
      has_grouped_kernel<Op, ctas<Op>>();
      const auto portable = []<class T>(std::type_identity<T>) {
        preload_kernel(portable_grouped_kernel<Op, T>, "portable_grouped_kernel");
      };
      portable(std::type_identity<double>{});
      portable(std::type_identity<float>{});
      portable(std::type_identity<bfloat16>{});
    };
    load(std::integral_constant<Grouped, Grouped::product>{});
    load(std::integral_constant<Grouped, Grouped::gate_up>{});
    load(std::integral_constant<Grouped, Grouped::down_backward>{});
    load(std::integral_constant<Grouped, Grouped::rows_gradient>{});
    load(std::integral_constant<Grouped, Grouped::weight_gradient>{});
  }

  static void gate_up(const ExpertPlan& plan, const void* rows, const std::int64_t* offsets, const TensorRef& gate_w,
                      const TensorRef& up_w, void* gate, void* up, void* act, cudaStream_t s) {
    const std::int64_t hidden = plan.shape.hidden, inner = plan.shape.inner;
    const auto maps = [&](auto& o) {
      o->a[0] = o.rows(rows, hidden);
      o->b[0] = o.matrices(gate_w);
      o->b[1] = o.matrices(up_w);
      o.result(0, gate, inner);
      o.result(1, up, inner);
      o.result(2, act, inner);
    };
    const auto pointers = [&](auto& args) {
      args.a[0] = rows_of(args, rows, hidden);
      args.b[0] = columns_of(args, gate_w);
      args.b[1] = columns_of(args, up_w);
      set_results(args, gate, up, act);
    };
    run<Grouped::gate_up>(plan, offsets, {inner, 0, hidden}, maps, pointers, s);
  }

  static void down(const ExpertPlan& plan, const void* act, const std::int64_t* offsets, const TensorRef& down_w,
                   void* out, cudaStream_t s) {
    const std::int64_t hidden = plan.shape.hidden, inner = plan.shape.inner;
    const auto maps = [&](auto& o) {
      o->a[0] = o.rows(act, inner);
      o->b[0] = o.matrices(down_w);
      o.result(0, out, hidden);
    };
    const auto pointers = [&](auto& args) {
      args.a[0] = rows_of(args, act, inner);
      args.b[0] = columns_of(args, down_w);
      set_results(args, out);
    };
    run<Grouped::product>(plan, offsets, {hidden, 0, inner}, maps, pointers, s);
  }

  static void down_backward(const ExpertPlan& plan, const void* dout, const std::int64_t* offsets,
                            const TensorRef& down_w, const void* gate, const void* up, void* dgate, void* dup,
                            void* act, cudaStream_t s) {
    const std::int64_t hidden = plan.shape.hidden, inner = plan.shape.inner;
    const auto maps = [&](auto& o) {
      o->a[0] = o.rows(dout, hidden);
      o->b[0] = o.matrices(down_w);
      o->saved[0] = o.rows(gate, inner);
      o->saved[1] = o.rows(up, inner);
      o.result(0, dgate, inner);
      o.result(1, dup, inner);
      o.result(2, act, inner);
    };
    const auto pointers = [&](auto& args) {
      args.a[0] = rows_of(args, dout, hidden);
      args.b[0] = transposed_columns_of(args, down_w);
      using T = std::remove_reference_t<decltype(*args.results[0])>;
      args.saved[0] = static_cast<const T*>(gate);
      args.saved[1] = static_cast<const T*>(up);
      set_results(args, dgate, dup, act);
    };
    run<Grouped::down_backward>(plan, offsets, {inner, 0, hidden}, maps, pointers, s);
  }

  static void gate_up_backward(const ExpertPlan& plan, const void* dgate, const void* dup, const std::int64_t* offsets,
                               const TensorRef& gate_w, const TensorRef& up_w, void* drows, cudaStream_t s) {
    const std::int64_t hidden = plan.shape.hidden, inner = plan.shape.inner;
    const auto maps = [&](auto& o) {
      o->sources = 2;
      o->a[0] = o.rows(dgate, inner);
      o->a[1] = o.rows(dup, inner);
      o->b[0] = o.matrices(gate_w);
      o->b[1] = o.matrices(up_w);
      o.result(0, drows, hidden);
    };
    const auto pointers = [&](auto& args) {
      args.sources = 2;
      args.a[0] = rows_of(args, dgate, inner);
      args.a[1] = rows_of(args, dup, inner);
      args.b[0] = transposed_columns_of(args, gate_w);
      args.b[1] = transposed_columns_of(args, up_w);
      set_results(args, drows);
    };
    run<Grouped::rows_gradient>(plan, offsets, {hidden, 0, inner}, maps, pointers, s);
  }

  static void weight_gradient(const ExpertPlan& plan, const void* d, std::int64_t d_cols, const void* x,
                              std::int64_t x_cols, const std::int64_t* offsets, bool accumulate, const TensorRef& dw,
                              cudaStream_t s) {
    const auto maps = [&](auto& o) {
      o->accumulate = accumulate;
      o->a[0] = o.rows(d, d_cols, GroupedTraits<Grouped::weight_gradient>::step);
      o->b[0] = o.rows_as_matrix(x, x_cols);
      o->out[0] = o.gradients(dw);
    };
    const auto pointers = [&](auto& args) {
      using T = std::remove_reference_t<decltype(*args.results[0])>;
      args.accumulate = accumulate;
      args.a[0] = {static_cast<const T*>(d), 0, 1, d_cols};
      args.b[0] = {static_cast<const T*>(x), 0, 1, x_cols};
      args.is_narrow = dw.dtype() != dtype_of<accumulator_t<T>>;
      args.matrices = dw.data();
      args.matrix_stride = dw.stride(0);
    };
    run<Grouped::weight_gradient>(plan, offsets, {x_cols, d_cols, 0}, maps, pointers, s);
  }

 private:
  /// CTAs of a cluster. Pairs read less; where stores take as long as the products, CTAs had better not wait for
  /// others.
  template <Grouped Op>
  static constexpr int ctas = Op == Grouped::down_backward ? 1 : 2;

  struct Extents {
    std::int64_t columns, rows, depth;
  };

  template <Grouped Op, class Maps, class Pointers>
  static void run(const ExpertPlan& plan, const std::int64_t* offsets, Extents extents, const Maps& maps,
                  const Pointers& pointers, cudaStream_t s) {
    const auto sized = [&](auto& args) {
      args.columns = static_cast<int>(extents.columns);
      args.rows = static_cast<int>(extents.rows);
      args.depth = static_cast<int>(extents.depth);
    };
    if (plan.shape.dtype == DType::bf16 && has_grouped_kernel<Op, ctas<Op>>()) {
      GroupedOperands<Op> operands(plan, offsets);
      maps(operands);
      sized(*operands);
      if (operands.fit()) return launch_grouped<Op, ctas<Op>>(*operands, plan.options.max_ctas, s);
    }
    dispatch_dtype(FloatTypes{}, plan.shape.dtype, [&](auto type) {
      PortableArguments<typename decltype(type)::type> args{};
      args.offsets = offsets;
      args.experts = plan.shape.experts_local;
      args.sources = 1;
      sized(args);
      pointers(args);
      launch_portable<Op>(args, s);
    });
  }

  template <class T>
  static PortableOperand<T> rows_of(const PortableArguments<T>&, const void* data, std::int64_t depth) {
    return {static_cast<const T*>(data), 0, depth, 1};
  }
  /// Column n of the product is row n of the matrix, or column n.
  template <class T>
  static PortableOperand<T> columns_of(const PortableArguments<T>&, const TensorRef& m) {
    return {static_cast<const T*>(m.data()), m.stride(0), m.stride(1), 1};
  }
  template <class T>
  static PortableOperand<T> transposed_columns_of(const PortableArguments<T>&, const TensorRef& m) {
    return {static_cast<const T*>(m.data()), m.stride(0), 1, m.stride(1)};
  }
  template <class T, class... Results>
  static void set_results(PortableArguments<T>& args, Results*... results) {
    int i = 0;
    ((args.results[i++] = static_cast<T*>(results)), ...);
  }
};

}  // namespace pleat::inline v0::moe::detail
