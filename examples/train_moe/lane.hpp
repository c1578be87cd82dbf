// What every block of the model is given in a call: where its work runs, and the micro-batch in the device's memory.
#pragma once

#include <initializer_list>

#include <pleat/attention.hpp>
#include <pleat/core/streams.hpp>
#include <pleat/tensor/tensor_ref.hpp>

#include "data.hpp"
#include "ops.hpp"

namespace train_moe {

/// The streams of a lane and its kernels.
template <class Backend>
struct Lane {
  using Stream = typename Backend::Stream;

  int index = 0;
  pleat::Streams<Stream> streams{};
  ops<typename Backend::Device>* kernels = nullptr;

  Stream stream() const { return streams.compute; }
};

/// A micro-batch where kernels read it; alive for the step.
struct DeviceBatch {
  MicroBatch host;
  const std::int32_t* tokens = nullptr;
  const std::int32_t* labels = nullptr;
  const std::int32_t* positions = nullptr;
  pleat::ring::Work work;  // of the packing
  pleat::ring::PlacedWork placed;

  std::int64_t rows() const { return host.rows(); }
};

/// `data` as a contiguous tensor on the backend's current device.
template <class Backend, class T>
pleat::TensorRef tensor_of(T* data, std::initializer_list<std::int64_t> extents) {
  return {data, pleat::dtype_of<T>, extents, typename Backend::Executor{}.device()};
}

/// Writes, or adds, a gradient that was made before its turn.
template <class Executor, class Gradient, class A, class Stream>
void write_gradient(Gradient& gradient, int param, const A* made, Stream s) {
  const auto [to, add] = gradient.write(param);
  const void* const terms[] = {made};
  pleat::core_leaf<typename Executor::device_type>::sum_ranks(to.data(), pleat::dtype_of<A>, terms, pleat::dtype_of<A>,
                                                              static_cast<std::size_t>(to.elems()), add, s);
}

/// Rows of `width` one after the other, to read or to write.
template <class T>
Rows<const T> rows_in(const T* data, std::int64_t width) {
  return {data, width};
}
template <class T>
Rows<T> rows_out(T* data, std::int64_t width) {
  return {data, width};
}

}  // namespace train_moe
