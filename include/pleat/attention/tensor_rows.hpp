// Rows of strided tensors: a part of one as a tensor, and copies between two by the executor's plain copies.
#pragma once

#include <pleat/attention/zigzag.hpp>
#include <pleat/core/executor.hpp>
#include <pleat/tensor/tensor_ref.hpp>

namespace pleat::inline v0::detail {

/// The part `of` of an axis of a tensor, as a view.
inline TensorRef part_of_axis(const TensorRef& t, int axis, TokenSpan of) {
  auto* data = static_cast<std::byte*>(t.data());
  if (t.elems() != 0) data += of.begin * t.stride(axis) * static_cast<std::int64_t>(size_bytes(t.dtype()));
  TensorRef view(data, t.dtype(), {}, t.device());
  for (int i = 0; i < t.rank(); ++i) view.push_extent(i == axis ? of.size() : t.extent(i), t.stride(i));
  return view;
}
/// The tokens `rows` of a tensor [batch, tokens, ...], as a view.
inline TensorRef token_rows(const TensorRef& t, TokenSpan rows) {
  return part_of_axis(t, 1, rows);
}

/// Errors: shape_error A04 when rows of an output lie on one another.
inline void require_distinct_rows(const char* what, const TensorRef& t) {
  for (int axis = 0; axis < t.rank() && t.elems() > 0; ++axis) {
    if (t.extent(axis) > 1 && t.stride(axis) == 0) {
      fail<shape_error>("pleat[A04]: axis ", axis, " of ", what,
                        " has stride 0; an output's rows must not overlap: give it memory of its own");
    }
  }
}

/// A copy between tensors of the same extents, as nested loops: axes that are one run in both are one axis.
struct CopyAxes {
  struct Axis {
    std::int64_t extent, out_stride, in_stride;
  };
  CopyAxes(const TensorRef& out, const TensorRef& in) {
    for (int axis = 0; axis < out.rank(); ++axis) {
      const Axis inner{out.extent(axis), out.stride(axis), in.stride(axis)};
      if (inner.extent == 1) continue;
      if (count > 0 && axes[count - 1].out_stride == inner.out_stride * inner.extent &&
          axes[count - 1].in_stride == inner.in_stride * inner.extent) {
        axes[count - 1] = {axes[count - 1].extent * inner.extent, inner.out_stride, inner.in_stride};
      } else {
        axes[count++] = inner;
      }
    }
  }
  Axis axes[TensorRef::max_rank] = {};
  int count = 0;
};

/// out = in, on `s`. The same extents and dtype; any strides with a contiguous last axis; no overlap.
template <executor Executor>
void copy_tensor(const Executor& executor, const TensorRef& out, const TensorRef& in,
                 typename Executor::stream_type s) {
  if (out.elems() == 0) return;
  const CopyAxes loops(out, in);
  const auto elem_bytes = static_cast<std::int64_t>(size_bytes(out.dtype()));
  int inner = loops.count;  // axes [0, inner) are looped over; the rest is one copy
  std::int64_t width = elem_bytes;
  CopyAxes::Axis rows{1, 0, 0};
  if (inner > 0 && loops.axes[inner - 1].out_stride == 1 && loops.axes[inner - 1].in_stride == 1) {
    width *= loops.axes[--inner].extent;
  }
  if (inner > 0 && loops.axes[inner - 1].out_stride * elem_bytes >= width &&
      loops.axes[inner - 1].in_stride * elem_bytes >= width) {
    rows = loops.axes[--inner];
  }
  const auto copy = [&](auto&& self, int axis, std::int64_t out_at, std::int64_t in_at) -> void {
    if (axis < inner) {
      const CopyAxes::Axis& loop = loops.axes[axis];
      for (std::int64_t i = 0; i < loop.extent; ++i) {
        self(self, axis + 1, out_at + i * loop.out_stride, in_at + i * loop.in_stride);
      }
      return;
    }
    auto* to = static_cast<std::byte*>(out.data()) + out_at * elem_bytes;
    const auto* from = static_cast<const std::byte*>(in.data()) + in_at * elem_bytes;
    const auto bytes = [&](std::int64_t elems) { return static_cast<std::size_t>(elems * elem_bytes); };
    if (rows.extent == 1) return executor.copy(to, from, static_cast<std::size_t>(width), s);
    executor.copy_2d(to, bytes(rows.out_stride), from, bytes(rows.in_stride), static_cast<std::size_t>(width),
                     static_cast<std::size_t>(rows.extent), s);
  };
  copy(copy, 0, 0, 0);
}

}  // namespace pleat::inline v0::detail
