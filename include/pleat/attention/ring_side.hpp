// What one rank of a ring holds, whichever way blocks travel: its slots, and the call that is under way.
#pragma once

#include <memory>

#include <pleat/attention/ring_plan.hpp>
#include <pleat/attention/tensor_rows.hpp>
#include <pleat/core/executor.hpp>
#include <pleat/core/streams.hpp>

namespace pleat::inline v0::ring {

/// Keys and values of one rank, or their gradients: [batch, tokens, kv_heads, qk_dim] and [.., v_dim]. Where latents
/// travel, `keys` is the latent, [batch, tokens, 1, latent_dim], and `values` has no elements.
struct KeyValueBlock {
  TensorRef keys;
  TensorRef values;
};

namespace detail {
inline KeyValueBlock rows_of(const KeyValueBlock& block, TokenSpan rows) {
  return {pleat::detail::token_rows(block.keys, rows), pleat::detail::token_rows(block.values, rows)};
}
/// Some heads, [begin, end), of keys and values.
inline KeyValueBlock heads_of(const KeyValueBlock& block, TokenSpan heads) {
  return {pleat::detail::part_of_axis(block.keys, 2, heads), pleat::detail::part_of_axis(block.values, 2, heads)};
}

inline TensorRef tensor_of(std::byte* data, const Plan& p, std::int64_t tokens, int heads, int dim, DType dtype,
                           Device device) {
  return TensorRef(data, dtype, {p.shape.batch, tokens, heads, dim}, device);
}
inline KeyValueBlock block_of(const BlockMemory& memory, const Plan& p, const BlockDims& dims, std::int64_t tokens,
                              DType dtype, Device device) {
  return {tensor_of(memory.keys, p, tokens, dims.heads, dims.key_dim, dtype, device),
          tensor_of(memory.values, p, tokens, dims.heads, dims.value_dim, dtype, device)};
}
/// A block as it travels.
inline KeyValueBlock block_of(const BlockMemory& memory, const Plan& p, std::int64_t tokens, DType dtype,
                              Device device) {
  return block_of(memory, p, travelling_dims(p), tokens, dtype, device);
}

/// The rows of a span of tokens of a contiguous [batch, tokens, ...] tensor lie in this many runs without a gap: one,
/// or one per batch entry. It follows from extents alone, so sender and receiver agree.
inline std::int64_t run_count(const TensorRef& rows) {
  return rows.elems() == 0 ? 0 : rows.is_contiguous() ? 1 : rows.extent(0);
}
struct Run {
  void* data;
  std::size_t elems;
};
inline Run run_of(const TensorRef& rows, std::int64_t index) {
  const std::int64_t pitch_bytes = rows.stride(0) * static_cast<std::int64_t>(size_bytes(rows.dtype()));
  return {static_cast<std::byte*>(rows.data()) + index * pitch_bytes,
          static_cast<std::size_t>(rows.elems() / run_count(rows))};
}

/// The part that both transports share. Each of them adds, with the same meaning and in the order of a call:
/// - `open(work, own, s)`: a call begins; `own` are this rank's keys and values, ready on s.compute.
/// - `post(step, s)`: starts moving the blocks of `step`, beside what is on s.compute. Steps 1 .. cp - 1 in order.
/// - `arrive(step, s)`: what follows on s.compute may read the block of `owner(step)`, until `release(step, s)`.
/// - `part(step, keys)`: of that block, the rows `keys`, which lie in one part of `work`.
/// - `sums(step, s)`: the running sum of the gradients of the whole block of `owner(step)`. Its rows
///   `summed_keys(owner, step - 1)` hold what the ranks before this one gave; the caller adds this rank's part.
///   At step cp it is this rank's own block, with the parts of all others.
/// - `arrive_sums(step, slice, s)`: what follows on s.compute may use the rows of a slice of it.
/// - `pass(step, slice, s)`: hands these on to the next rank. Steps 1 .. cp - 1, slices in order.
/// - `drop_sums(s)`: the sum of step cp is used up.
/// - `close(s)`: what follows on s.compute comes after all transfers.
/// Peers can also bring all blocks at once, for a forward pass of one launch, between `open` and `close`:
/// - `gather(s)`: starts moving the blocks of all steps, beside what is on s.compute.
/// - `arrivals(s)`: how a kernel that follows on s.compute sees which have come; where it could not, s.compute waits.
/// - `gathered()`: these blocks, each `Work::block_rows` rows; `gathered_part(step, keys)`: as `part`.
/// - `end_arrivals(s)`: what follows on s.compute comes after all of them; `release_gathered(s)`: no longer read.
/// All ranks make the same calls in the same order; an op has one call under way at a time.
template <executor Executor>
class RingSide {
 public:
  using stream_type = typename Executor::stream_type;
  using StreamPair = Streams<stream_type>;

  void open(const Work& work, const KeyValueBlock& own, const StreamPair& s) {
    work_ = &work;
    own_ = own;
    executor_.record(opened_, s.compute);
    executor_.wait(s.comm, opened_);
  }
  void close(const StreamPair& s) {
    executor_.record(closed_, s.comm);
    executor_.wait(s.compute, closed_);
  }

 protected:
  using Event = typename Executor::event_type;

  RingSide(std::shared_ptr<const Plan> plan, const Executor& executor, int rank, const Slots& slots)
      : plan_(std::move(plan)),
        executor_(executor),
        rank_(rank),
        slots_(slots),
        opened_(executor.make_event()),
        closed_(executor.make_event()) {}

  int cp() const { return plan_->cp; }
  int next() const { return cyclic(rank_, 1, cp()); }
  int previous() const { return cyclic(rank_, -1, cp()); }
  int owner(int step) const { return work_->owner(rank_, step % cp()); }
  /// Slots alternate: what a step needs may arrive while the step before it is computed.
  static constexpr int slot_of(int step) { return step % Slots::count; }

  /// `tokens` rows in the slot of `step`.
  KeyValueBlock block_in(const Slots& slots, int step, std::int64_t tokens) const {
    return block_of(slots.blocks[slot_of(step)], *plan_, tokens, plan_->shape.dtype, executor_.device());
  }
  /// The gradients of the whole block of rank `of` in the slot of `step`.
  KeyValueBlock sums_in(const Slots& slots, int step, int of) const {
    return block_of(slots.sums[slot_of(step)], *plan_, plan_->local_tokens(of), accumulator_of(*plan_),
                    executor_.device());
  }
  void copy(const KeyValueBlock& out, const KeyValueBlock& in, stream_type s) const {
    pleat::detail::copy_tensor(executor_, out.keys, in.keys, s);
    pleat::detail::copy_tensor(executor_, out.values, in.values, s);
  }

  std::shared_ptr<const Plan> plan_;
  Executor executor_;
  int rank_;
  Slots slots_;
  const Work* work_ = nullptr;  // of the call under way, as is own_
  KeyValueBlock own_;

 private:
  Event opened_;
  Event closed_;
};
}  // namespace detail

}  // namespace pleat::inline v0::ring
