// The executor: all that a schedule may do on a device besides communicating and calling leaves.
#pragma once

#include <concepts>
#include <cstddef>
#include <type_traits>

#include <pleat/core/device.hpp>

namespace pleat::inline v0 {

/// What a schedule does on a device. Copies and zeroing are ordered on the stream; `make_event` runs at bind only.
/// `device()`: where the tensors lie that a schedule makes, the rank's own device.
/// `copy(dst, src, bytes, s)`; `copy_2d(dst, dst_pitch, src, src_pitch, width, height, s)`, all in bytes; `zero(dst,
/// bytes, s)`. Memory, the host's too, is read when the stream gets there and must live until then. Regions must not
/// overlap. Zero bytes do nothing, whatever the pointers.
template <class E>
concept executor = requires(const E& e, typename E::stream_type s, typename E::event_type& event, void* out,
                            const void* in, std::size_t n) {
  typename E::device_type;
  { e.device() } -> std::same_as<Device>;
  { e.make_event() } -> std::same_as<typename E::event_type>;
  e.record(event, s);
  e.wait(s, event);
  e.copy(out, in, n, s);
  e.copy_2d(out, n, in, n, n, n, s);
  e.zero(out, n, s);
};

/// An executor that can tell whether the work on a stream is done, without waiting for it: what `wait` of a
/// communicator polls.
template <class E>
concept polling_executor = executor<E> && requires(const E& e, typename E::stream_type s) {
  { e.is_idle(s) } -> std::same_as<bool>;
};

namespace detail {
template <class>
inline constexpr bool no_device = false;

template <class DeviceType>
struct ExecutorFor {
  static_assert(
      no_device<DeviceType>,
      "pleat[T03]: no executor for this device: include pleat/core/host/executor.hpp or pleat/cuda/executor.hpp");
};
}  // namespace detail

/// The default, stateless executor of a device.
template <class DeviceType>
using executor_for = typename detail::ExecutorFor<DeviceType>::type;

/// What every bind does for the leaves that its calls use. A kernel that is loaded when it is first launched may wait
/// for the device, and so for ever where a peer's signal is awaited there: a leaf with kernels has a static `preload()`
/// that loads all it may launch, on the current device. Others need none.
template <class... Leaves>
void preload_leaves() {
  const auto load = []<class Leaf>(std::type_identity<Leaf>) {
    if constexpr (requires { Leaf::preload(); }) Leaf::preload();
  };
  (load(std::type_identity<Leaves>{}), ...);
}

/// Leaves every template uses; specialized per device. Static members, ordered on the stream:
/// - `cast_copy(out, out_dtype, in, in_dtype, elems, s)`: out[i] = in[i], rounded to nearest even.
/// - `sum_ranks(out, out_dtype, parts, part_dtype, elems, accumulate, s, ctas = 0)`: out[i] = (accumulate ? out[i] : 0)
///   + (((parts[0][i] + parts[1][i]) + ...), the parts added in order in accumulator_t of the wider dtype. `parts` is a
///   span of pointers; `out` may be one of the parts. `ctas` bounds the multiprocessors of the sum, for what runs
///   beside it; 0: as many as are free. The bits are the same.
/// - `sum_of_squares(out, in, dtype, elems, accumulate, scratch, s)`: *out (double on the device) = (accumulate ? *out
///   : 0) + sum of in[i]^2 in float64, in a fixed order; scratch has `sum_of_squares_scratch_bytes`.
template <class DeviceType>
struct core_leaf {
  static_assert(detail::no_device<DeviceType>,
                "pleat[T03]: no leaves for this device: include pleat/core/host/leaf.hpp or pleat/cuda/leaf.cuh");
};

}  // namespace pleat::inline v0
