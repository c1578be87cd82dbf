// From what travels to keys and values: nothing to do, or the user's expansion of a latent (MLA).
#pragma once

#include <pleat/attention/local_kernel.hpp>
#include <pleat/attention/ring_side.hpp>

namespace pleat::inline v0::ring {

/// What makes keys and values of a latent, on the stream `s` and for any number of rows, 0 included. T is the plan's
/// dtype, A its accumulator; all tensors are contiguous but `latent` and `dlatent`, whose last axis is. Ordered work on
/// `s` only: no transfer, no synchronization. It is called in the same order in every run.
///
/// - `expand(latent, keys, values, s)`: latent [batch, rows, latent_dim] T in; keys [batch, rows, kv_heads, qk_dim] and
///   values [batch, rows, kv_heads, v_dim] T out, each row of one row.
/// - `expand_backward(latent, dkeys, dvalues, dlatent, accumulate, s)`: dkeys and dvalues, shaped as keys and values, A
///   in; dlatent [batch, rows, latent_dim] A: overwritten, or where `accumulate` the finished gradient is added to it,
///   once. It may add to gradients of its own weights: over a backward pass it sees, on every rank, the gradients that
///   this rank's queries give to all keys that they see, so weight gradients are to be summed over the cp group.
/// Both are called once per run of keys that the rank reads, backward for its own block twice (halves of the keys).
template <class E, class Stream>
concept latent_expander = requires(E& e, const TensorRef& t, bool accumulate, Stream s) {
  e.expand(t, t, t, s);
  e.expand_backward(t, t, t, t, accumulate, s);
};

namespace detail {
/// In the place of an expander: keys and values travel.
struct NoExpander {};

/// What the schedule needs to know of how blocks travel, for one pass:
/// - `keys_values(block, s)`: what kernels read of a block.
/// - `backward(leaf, call, block, sums, accumulate, s)`: the leaf's call on it, with `call` complete but for its keys,
///   values and their gradients; the gradient of `block` overwrites `sums` or is added to it.
template <class Expander>
class Expansion {
 public:
  Expansion(Expander& expander, const Plan& plan, Device device, const BlockMemory& expanded,
            const BlockMemory& gradients = {})
      : expander_(&expander), plan_(&plan), device_(device), expanded_(expanded), gradients_(gradients) {}

  template <class Stream>
  KeyValueBlock keys_values(const KeyValueBlock& block, Stream s) const {
    const KeyValueBlock made = in(expanded_, block, plan_->shape.dtype);
    expander_->expand(latent_of(block), made.keys, made.values, s);
    return made;
  }

  template <class Leaf, class Stream>
  void backward(const Leaf& leaf, AttentionBackward& call, const KeyValueBlock& block, const KeyValueBlock& sums,
                bool accumulate, Stream s) const {
    const KeyValueBlock made = keys_values(block, s), gradients = in(gradients_, block, accumulator_of(*plan_));
    call.k = made.keys;
    call.v = made.values;
    call.dk = gradients.keys;
    call.dv = gradients.values;
    call.accumulate_dk = call.accumulate_dv = false;
    leaf.backward(call, s);
    expander_->expand_backward(latent_of(block), gradients.keys, gradients.values, latent_of(sums), accumulate, s);
  }

 private:
  KeyValueBlock in(const BlockMemory& memory, const KeyValueBlock& block, DType dtype) const {
    return block_of(memory, *plan_, key_value_dims(*plan_), block.keys.extent(1), dtype, device_);
  }
  /// [batch, rows, latent_dim] of [batch, rows, 1, latent_dim].
  static TensorRef latent_of(const KeyValueBlock& block) {
    TensorRef latent(block.keys.data(), block.keys.dtype(), {}, block.keys.device());
    for (const int axis : {0, 1, 3}) latent.push_extent(block.keys.extent(axis), block.keys.stride(axis));
    return latent;
  }

  Expander* expander_;
  const Plan* plan_;
  Device device_;
  BlockMemory expanded_, gradients_;
};

template <>
class Expansion<const NoExpander> {
 public:
  Expansion(const NoExpander&, const Plan&, Device, const BlockMemory&, const BlockMemory& = {}) {}

  template <class Stream>
  const KeyValueBlock& keys_values(const KeyValueBlock& block, Stream) const {
    return block;
  }
  template <class Leaf, class Stream>
  void backward(const Leaf& leaf, AttentionBackward& call, const KeyValueBlock& block, const KeyValueBlock& sums,
                bool accumulate, Stream s) const {
    call.k = block.keys;
    call.v = block.values;
    call.dk = sums.keys;
    call.dv = sums.values;
    call.accumulate_dk = call.accumulate_dv = accumulate;
    leaf.backward(call, s);
  }
};
}  // namespace detail

}  // namespace pleat::inline v0::ring
