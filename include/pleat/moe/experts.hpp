// The experts: a SwiGLU MLP per expert over expert-major rows, as grouped products.
#pragma once

#include <utility>

#include <pleat/comm/memory.hpp>
#include <pleat/core/carve.hpp>
#include <pleat/core/footprint.hpp>
#include <pleat/core/streams.hpp>
#include <pleat/moe/leaf.hpp>
#include <pleat/moe/operand.hpp>
#include <pleat/moe/plan_checks.hpp>

namespace pleat::inline v0::moe {

/// The matrices [experts_local, rows, cols] of one kind: matrix e is row-major and starts e * expert_stride elements
/// after the first, so that views into an expert-major parameter unit need no copy; gradients, which are written, take
/// rows * cols at least. T is a float type, const or not.
template <element T>
TensorRef expert_matrix(T* first, std::int64_t experts_local, std::int64_t rows, std::int64_t cols,
                        std::int64_t expert_stride, Device device = {}) {
  TensorRef matrix(const_cast<std::remove_const_t<T>*>(first), dtype_of<T>, {}, device);
  matrix.push_extent(experts_local, expert_stride);
  matrix.push_extent(rows, cols);
  matrix.push_extent(cols, 1);
  return matrix;
}

/// gate and up [experts_local, inner, hidden], down [experts_local, hidden, inner]: weights of the plan's dtype, or
/// their gradients of its accumulator, or of
/// the plan's dtype: half the bytes for bf16, and sums over micro-batches are rounded each time. y = down * (silu(gate
/// * x) * (up * x)). source: arXiv 2002.05202
struct ExpertMatrices {
  TensorRef gate;
  TensorRef up;
  TensorRef down;
};

/// Sizes of the experts of one rank.
struct ExpertShape {
  int experts_local = 0;
  std::int64_t hidden = 0;
  std::int64_t inner = 0;
  /// Rows of the expert-major arrays: DispatchPlan::capacity_rows().
  std::int64_t capacity_rows = 0;
  DType dtype = DType::f32;

  friend constexpr bool operator==(const ExpertShape&, const ExpertShape&) = default;
};
inline void append_to(Message& message, const ExpertShape& shape) {
  message.append(message_of("experts_local=", shape.experts_local, " hidden=", shape.hidden, " inner=", shape.inner,
                            " capacity_rows=", shape.capacity_rows, " dtype=", shape.dtype));
}

/// What a caller may choose of the experts' products.
struct ExpertOptions {
  /// How many CTAs of a grouped product may run at once where the kernel is the tensor cores' own (Hopper, bf16), so
  /// that other kernels find multiprocessors: two at least; 0: as many as fit. The bits do not depend on it.
  int max_ctas = 0;
  /// The activations are saved too, and backward writes its gradients over what it read: no scratch is needed.
  bool in_place = false;
};

/// What the forward pass leaves behind: [capacity_rows, inner] dtype each.
struct ExpertRecord {
  std::byte* gate;
  std::byte* up;
  std::byte* act;  // with in_place
};

/// Made by `plan_experts`; read its members freely.
struct ExpertPlan {
  ExpertShape shape;
  ExpertOptions options;

  PLEAT_HD constexpr DType accumulator() const { return pleat::accumulator(shape.dtype); }
  /// Rows of all experts [capacity_rows, inner], cut out of memory.
  std::byte* take_inner_rows(Carver& memory) const {
    return memory.take_bytes(static_cast<std::size_t>(shape.capacity_rows * shape.inner) * size_bytes(shape.dtype));
  }
  ExpertRecord carve_saved(Carver& memory) const {
    ExpertRecord r{};
    r.gate = take_inner_rows(memory);
    r.up = take_inner_rows(memory);
    if (options.in_place) r.act = take_inner_rows(memory);
    return r;
  }
  /// Activations of the forward pass; of the backward pass with their gradients.
  struct Scratch {
    std::byte* act;
    std::byte* dgate;
    std::byte* dup;
  };
  Scratch carve_scratch(Carver& memory) const {
    Scratch scratch{};
    scratch.act = take_inner_rows(memory);
    scratch.dgate = take_inner_rows(memory);
    scratch.dup = take_inner_rows(memory);
    return scratch;
  }
  Footprint footprint() const {
    Carver saved, scratch;
    carve_saved(saved);
    if (!options.in_place) carve_scratch(scratch);
    return {.scratch = scratch.used_bytes(), .saved = saved.used_bytes()};
  }
};

/// Errors: shape_error T01, E07, E14.
inline ExpertPlan plan(const ExpertShape& shape, const ExpertOptions& options = {}) {
  if (shape.experts_local < 1 || shape.hidden < 1 || shape.inner < 1 || shape.capacity_rows < 1) {
    fail<shape_error>("pleat[E07]: experts_local=", shape.experts_local, " hidden=", shape.hidden,
                      " inner=", shape.inner, " capacity_rows=", shape.capacity_rows, " must each be at least 1");
  }
  const std::int64_t wider = shape.hidden < shape.inner ? shape.inner : shape.hidden;
  if (!fits_product({wider, shape.capacity_rows}) || !fits_product({shape.hidden, shape.inner, shape.experts_local})) {
    fail<shape_error>("pleat[E07]: experts_local=", shape.experts_local, " hidden=", shape.hidden,
                      " inner=", shape.inner, " capacity_rows=", shape.capacity_rows,
                      " are too large: any array of rows or matrices must stay below 2^53 elements");
  }
  check_float(shape.dtype);
  check_number("max_ctas", options.max_ctas, true);
  return {shape, options};
}

/// The saved state of one live micro-batch. `memory` has at least `plan.footprint().saved` bytes, and is borrowed.
class ExpertSaved {
 public:
  /// Errors: shape_error T02.
  ExpertSaved(const ExpertPlan& plan, Block memory) : shape(plan.shape) {
    Carver carver(memory);
    record = plan.carve_saved(carver);
  }
  /// Of arrays that lie elsewhere.
  ExpertSaved(const ExpertPlan& plan, const ExpertRecord& arrays) : shape(plan.shape), record(arrays) {}
  /// Errors: shape_error E15.
  void expect_made_for(const ExpertShape& operation) const {
    if (shape != operation) {
      fail<shape_error>("pleat[E15]: a saved state for the shape ", shape, " was given to experts of the shape ",
                        operation, "; make it from the operation's plan");
    }
  }
  /// Errors: E15; shape_error E16 when no forward call has filled it.
  void expect_filled(const ExpertShape& operation) const {
    expect_made_for(operation);
    if (!is_filled)
      fail<shape_error>("pleat[E16]: backward of experts was given a saved state that no forward has filled");
  }

  ExpertShape shape;
  ExpertRecord record;
  bool is_filled = false;
};

/// An object, whose functions are const or static. Grouped products over expert-major rows; expert e has rows
/// [offsets[e], offsets[e + 1]).
/// - `gate_up`: gate = rows * gate_w^T, up = rows * up_w^T, act = silu(gate) * up; `down`: out = act * down_w^T.
/// - `down_backward`: from dout, dgate and dup, which may be gate and up; act is computed again.
/// - `gate_up_backward`: drows = dgate * gate_w + dup * up_w, rounded once.
/// - `weight_gradient`: dw [d_cols, x_cols] of each expert = (accumulate ? dw : 0) + d^T * x over its rows, in the
///   plan's accumulator or its dtype.
template <class L, class Stream>
concept expert_leaf = requires(const L& leaf, const ExpertPlan& plan, const void* in, const std::int64_t* offsets,
                               const TensorRef& matrices, void* out, std::int64_t cols, Stream s) {
  leaf.gate_up(plan, in, offsets, matrices, matrices, out, out, out, s);
  leaf.down(plan, in, offsets, matrices, out, s);
  leaf.down_backward(plan, in, offsets, matrices, in, in, out, out, out, s);
  leaf.gate_up_backward(plan, in, in, offsets, matrices, matrices, out, s);
  leaf.weight_gradient(plan, in, cols, in, cols, offsets, true, matrices, s);
};

/// The bound experts of one rank; they hold no weights, so one operation serves all layers. Local; ordered on
/// `streams.compute`. `rows` and all arrays like it are [capacity_rows, hidden] dtype with expert e's rows in
/// [offsets[e], offsets[e + 1]), `offsets` [experts_local + 1] i64 on the device; rows past the last offset are neither
/// read nor written. Zero pad rows stay zero. Errors: shape_error T07, E01, E15, E16.
///
/// `Leaf` computes the products: an `expert_leaf`, one of the caller's where `bind` is given it. Errors: E18 (the
/// leaf), while compiling.
template <executor Executor, class Leaf = moe_leaf<typename Executor::device_type>>
class Experts {
  static_assert(expert_leaf<Leaf, typename Executor::stream_type>,
                "pleat[E18]: the leaf of experts needs const gate_up, down, down_backward, gate_up_backward and "
                "weight_gradient: see expert_leaf in pleat/moe/experts.hpp");

 public:
  using device_type = typename Executor::device_type;
  using stream_type = typename Executor::stream_type;
  static constexpr KnownDevice<device_type> kind{};

  /// Errors: shape_error T02.
  Experts(const ExpertPlan& plan, Block scratch, Leaf leaf = {}) : plan_(plan), leaf_(std::move(leaf)) {
    preload_leaves<Leaf>();
    Carver memory(scratch);
    if (!plan.options.in_place) scratch_ = plan.carve_scratch(memory);
  }
  const ExpertPlan& plan() const { return plan_; }

  /// out = experts(rows).
  template <class Rows, class Offsets, class Out>
  void forward(const Streams<stream_type>& streams, const Rows& rows, const Offsets& offsets,
               const ExpertMatrices& weights, ExpertSaved& saved, const Out& out) {
    const TensorRef in = row_array("rows", rows), result = row_array("out", out);
    const std::int64_t* starts = row_starts(offsets);
    check_weights(weights);
    saved.expect_made_for(plan_.shape);
    saved.is_filled = true;
    const stream_type s = streams.compute;
    const ExpertRecord& r = saved.record;
    std::byte* const act = inner_arrays(saved).act;
    leaf_.gate_up(plan_, in.data(), starts, weights.gate, weights.up, r.gate, r.up, act, s);
    leaf_.down(plan_, act, starts, weights.down, result.data(), s);
  }

  /// dout -> drows, overwritten, and dweights (accumulate ? += : =); an expert without rows gets
  /// zeros, or keeps what it has. `rows`, `offsets` and `weights` are those of the forward call. `drows` may be `dout`.
  template <class DOut, class Rows, class Offsets, class DRows>
  void backward(const Streams<stream_type>& streams, const DOut& dout, const Rows& rows, const Offsets& offsets,
                const ExpertMatrices& weights, const ExpertSaved& saved, const DRows& drows,
                const ExpertMatrices& dweights, bool accumulate) {
    const ExpertPlan::Scratch inner = inner_arrays(saved);
    inner_gradients(streams, dout, offsets, weights, saved, inner);
    weight_backward(streams, dout, rows, offsets, inner, dweights, accumulate);
    row_gradients(streams, offsets, weights, inner, drows);
  }
  /// The first half of `backward`: dout -> drows, which is another array. `inner` is memory of the caller's, carved by
  /// `ExpertPlan::carve_scratch`; the second half reads it, and dout.
  template <class DOut, class Offsets, class DRows>
  void input_backward(const Streams<stream_type>& streams, const DOut& dout, const Offsets& offsets,
                      const ExpertMatrices& weights, const ExpertSaved& saved, const ExpertPlan::Scratch& inner,
                      const DRows& drows) {
    inner_gradients(streams, dout, offsets, weights, saved, inner);
    row_gradients(streams, offsets, weights, inner, drows);
  }
  /// In the operation's own scratch: the second half follows before any other call of it.
  template <class DOut, class Offsets, class DRows>
  void input_backward(const Streams<stream_type>& streams, const DOut& dout, const Offsets& offsets,
                      const ExpertMatrices& weights, const ExpertSaved& saved, const DRows& drows) {
    input_backward(streams, dout, offsets, weights, saved, inner_arrays(saved), drows);
  }
  /// The second half, at any later time: dweights.
  template <class DOut, class Rows, class Offsets>
  void weight_backward(const Streams<stream_type>& streams, const DOut& dout, const Rows& rows, const Offsets& offsets,
                       const ExpertPlan::Scratch& inner, const ExpertMatrices& dweights, bool accumulate) {
    const TensorRef gradient = row_array("dout", dout), in = row_array("rows", rows);
    const std::int64_t* starts = row_starts(offsets);
    check_gradients(dweights);
    const auto weight_gradient = [&](const void* d, std::int64_t d_cols, const void* x, std::int64_t x_cols,
                                     const TensorRef& dw) {
      leaf_.weight_gradient(plan_, d, d_cols, x, x_cols, starts, accumulate, dw, streams.compute);
    };
    weight_gradient(gradient.data(), plan_.shape.hidden, inner.act, plan_.shape.inner, dweights.down);
    weight_gradient(inner.dgate, plan_.shape.inner, in.data(), plan_.shape.hidden, dweights.gate);
    weight_gradient(inner.dup, plan_.shape.inner, in.data(), plan_.shape.hidden, dweights.up);
  }
  /// Of the first half that left `inner` in the operation's own scratch.
  template <class DOut, class Rows, class Offsets>
  void weight_backward(const Streams<stream_type>& streams, const DOut& dout, const Rows& rows, const Offsets& offsets,
                       const ExpertSaved& saved, const ExpertMatrices& dweights, bool accumulate) {
    weight_backward(streams, dout, rows, offsets, inner_arrays(saved), dweights, accumulate);
  }

 private:
  ExpertPlan::Scratch inner_arrays(const ExpertSaved& saved) const {
    return plan_.options.in_place ? ExpertPlan::Scratch{saved.record.act, saved.record.gate, saved.record.up}
                                  : scratch_;
  }
  template <class DOut, class Offsets>
  void inner_gradients(const Streams<stream_type>& streams, const DOut& dout, const Offsets& offsets,
                       const ExpertMatrices& weights, const ExpertSaved& saved, const ExpertPlan::Scratch& inner) {
    check_weights(weights);
    saved.expect_filled(plan_.shape);
    leaf_.down_backward(plan_, row_array("dout", dout).data(), row_starts(offsets), weights.down, saved.record.gate,
                        saved.record.up, inner.dgate, inner.dup, inner.act, streams.compute);
  }
  template <class Offsets, class DRows>
  void row_gradients(const Streams<stream_type>& streams, const Offsets& offsets, const ExpertMatrices& weights,
                     const ExpertPlan::Scratch& inner, const DRows& drows) {
    leaf_.gate_up_backward(plan_, inner.dgate, inner.dup, row_starts(offsets), weights.gate, weights.up,
                           row_array("drows", drows).data(), streams.compute);
  }
  template <class T>
  TensorRef row_array(const char* what, const T& t) const {
    return dense(what, t, plan_.shape.dtype, kind, {plan_.shape.capacity_rows, plan_.shape.hidden});
  }
  template <class T>
  const std::int64_t* row_starts(const T& offsets) const {
    return dense("offsets", offsets, DType::i64, kind, {plan_.shape.experts_local + 1}).template as<std::int64_t>();
  }
  void check_weights(const ExpertMatrices& w) const {
    const ExpertShape& shape = plan_.shape;
    check_matrices("weights.gate", w.gate, shape.dtype, shape.inner, shape.hidden);
    check_matrices("weights.up", w.up, shape.dtype, shape.inner, shape.hidden);
    check_matrices("weights.down", w.down, shape.dtype, shape.hidden, shape.inner);
  }
  void check_gradients(const ExpertMatrices& dw) const {
    const ExpertShape& shape = plan_.shape;
    const DType dtype = dw.gate.dtype() == shape.dtype ? shape.dtype : plan_.accumulator();
    const auto check = [&](const char* what, const TensorRef& t, std::int64_t rows, std::int64_t cols) {
      check_matrices(what, t, dtype, rows, cols);
      if (shape.experts_local > 1 && t.stride(0) < rows * cols) {
        fail<shape_error>("pleat[E01]: the experts of ", what, " are ", t.stride(0),
                          " elements apart; an output's matrices must not overlap: give each its own ", rows * cols,
                          " or more");
      }
    };
    check("dweights.gate", dw.gate, shape.inner, shape.hidden);
    check("dweights.up", dw.up, shape.inner, shape.hidden);
    check("dweights.down", dw.down, shape.hidden, shape.inner);
  }
  void check_matrices(const char* what, const TensorRef& t, DType dtype, std::int64_t rows, std::int64_t cols) const {
    with_data(what, expect(what, t, dtype, kind, {plan_.shape.experts_local, rows, cols}));
    if (t.stride(1) != cols || t.stride(2) != 1) {
      fail<shape_error>("pleat[E01]: a matrix of ", what, " is ", t, " with gaps inside; only experts may lie apart");
    }
  }

  ExpertPlan plan_;
  [[no_unique_address]] Leaf leaf_;
  ExpertPlan::Scratch scratch_{};
};

/// Errors: shape_error T02.
template <executor Executor, class Arena, class Leaf = moe_leaf<typename Executor::device_type>>
Experts<Executor, Leaf> bind(const ExpertPlan& plan, const Executor&, const Memory<Arena>& memory, Leaf leaf = {}) {
  return Experts<Executor, Leaf>(plan, memory.scratch, std::move(leaf));
}

}  // namespace pleat::inline v0::moe
