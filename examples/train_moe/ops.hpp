// The trainer's own kernels: norms, rotary positions, embedding, loss. What pleat's templates do is not here.
#pragma once

namespace train_moe {

/// The kernels of a transformer besides attention and experts, per device. Activations are `T`, gradients of parameters
/// and statistics are its accumulator `A`. All arrays are contiguous; work is ordered on the stream.
template <class Device>
struct ops;

}  // namespace train_moe
