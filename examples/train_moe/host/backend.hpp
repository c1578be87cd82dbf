// The host backend: ranks are threads, memory is plain, work is done when a call returns.
#pragma once

#include <initializer_list>

#include <pleat/comm.hpp>
#include <pleat/tensor.hpp>

#include "ops.hpp"

namespace train_moe {

/// What the trainer needs of a device besides kernels.
struct HostBackend {
  using Device = pleat::host_device;
  using Executor = pleat::HostExecutor;
  using Comm = pleat::ThreadComm;
  using Arena = pleat::HostArena;
  using Buffer = pleat::HostBuffer;
  using Stream = pleat::HostStream;

  template <class T>
  static pleat::TensorRef tensor(T* data, std::initializer_list<std::int64_t> extents) {
    return {data, extents};
  }
  /// out [elems] = in.
  template <class T>
  static void copy(T* out, const T* in, std::int64_t elems, Stream s) {
    Executor{}.copy(out, in, static_cast<std::size_t>(elems) * sizeof(T), s);
  }
  /// The value that the work on `s` leaves at `value`; blocks until it is there.
  template <class V>
  static V read(const V* value, Stream) {
    return *value;
  }
};

}  // namespace train_moe
