// DLPack's rules of streams: how a consumer names the stream that it reads on, and how its work comes after ours.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>

#include <pleat/cuda/executor.hpp>
#include <pleat/tensor/dlpack.hpp>

namespace pleat::inline v0 {

/// The stream of a number that `__dlpack__(stream=...)` was given: empty and 1 are the legacy default stream, 2 the
/// per-thread one, -1 none (nothing is to be ordered), all others a cudaStream_t.
/// Errors: shape_error T08 for 0, which the rules leave ambiguous, and other negative numbers.
/// source: dmlc.github.io/dlpack, Python specification.
inline std::optional<cudaStream_t> dlpack_stream(std::optional<std::int64_t> number) {
  const std::int64_t value = number.value_or(1);
  if (value == -1) return std::nullopt;
  if (value == 0 || value < -1) {
    fail<shape_error>("pleat[T08]: DLPack stream ", value,
                      "; valid: 1 (legacy default), 2 (per-thread default), -1 (none), or a cudaStream_t");
  }
  if (value == 1) return cudaStreamLegacy;
  if (value == 2) return cudaStreamPerThread;
  return reinterpret_cast<cudaStream_t>(value);
}

/// What `after` is given from now on waits, on the device, for what `before` was given so far. Errors: C20.
inline void order_streams(cudaStream_t before, cudaStream_t after) {
  if (before == after) return;
  const CudaExecutor executor;
  const CudaEvent event = executor.make_event();
  executor.record(event, before);
  executor.wait(after, event);
}

/// Out, see tensor/dlpack.hpp: what the consumer enqueues on its stream comes after what `producer` was given so far.
/// Going in it is the other way about: pass the number of the stream that pleat will read on to the framework's
/// `__dlpack__`. Errors: T08, T12, C20.
template <dl_managed_tensor Managed, class T, class Owner>
[[nodiscard]] Managed* to_dlpack(T&& tensor, Owner owner, cudaStream_t producer, std::optional<std::int64_t> consumer) {
  if (const auto stream = dlpack_stream(consumer)) order_streams(producer, *stream);
  return to_dlpack<Managed>(tensor, std::move(owner));
}

}  // namespace pleat::inline v0
