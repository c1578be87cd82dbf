// The schedule of ring attention: which block is computed when, and what is handed on, for either transport.
#pragma once

#include <array>

#include <pleat/attention/local_kernel.hpp>
#include <pleat/attention/ring_side.hpp>

namespace pleat::inline v0::ring::detail {

/// The tensors of one call on one rank: q, own keys and values, out [batch, local_tokens, heads, dim] of the plan's
/// dtype, `lse` [batch, q_heads, local_tokens] of its accumulator.
struct RingTensors {
  TensorRef q;
  KeyValueBlock own;
  TensorRef out, lse;
};
/// dout in; dq and the gradients of the own block out.
struct RingGradients {
  TensorRef dout, dq;
  KeyValueBlock own;
};

/// Steps 0 .. cp - 1 of a pass over `transport` (a RingHops or RingPushes): at step s this rank meets the block of the
/// rank s places before it, and the transfer of the next block is posted before this step's kernel.
template <executor Executor, class Leaf = attention_leaf<typename Executor::device_type>>
class RingSchedule {
  using StreamPair = Streams<typename Executor::stream_type>;

 public:
  RingSchedule(std::shared_ptr<const Plan> plan, const Executor& executor, int rank, Block scratch, Leaf leaf = {})
      : plan_(std::move(plan)), executor_(executor), rank_(rank), scratch_(scratch), leaf_(std::move(leaf)) {}

  template <class AnyTransport>
  void forward(AnyTransport& transport, const StreamPair& s, const PlacedWork& placed, const RingTensors& t) const {
    const Work& work = placed.work();
    Carver memory = scratch();
    AttentionForward call;
    call.q = t.q;
    call.scale = plan_->scale;
    call.o_acc = rows(take_forward_scratch(memory, *plan_), plan_->shape.v_dim);
    call.lse = t.lse;
    call.out = t.out;
    call.max_ctas = plan_->max_ctas;

    const int last_step = work.last_step(rank_);
    transport.open(work, t.own, s);
    for (int step = 0; step < plan_->cp; ++step) {
      if (step + 1 < plan_->cp) transport.post(step + 1, s);
      const KeyValueBlock block = step == 0 ? t.own : transport.arrive(step, s);
      call.k = block.keys;
      call.v = block.values;
      call.work = placed.at(step);
      call.first = step == 0;
      call.last = step == last_step;
      if (call.first || !call.work.empty()) leaf_.forward(call, s.compute);
      if (step > 0) transport.release(step, s);
    }
    transport.close(s);
  }

  /// The gradients of a block are summed in the order of the ranks that meet it, steps 1 .. cp - 1, and its owner's
  /// part is added last; each rank adds its finished part once. So the bits do not depend on transport or timing.
  /// The own block is computed in two halves of its keys: the first while the first block of another rank is on its
  /// way, the rest while the sum of the others comes back.
  template <class AnyTransport>
  void backward(AnyTransport& transport, const StreamPair& s, const PlacedWork& placed, const RingTensors& t,
                const RingGradients& gradients) const {
    const Work& work = placed.work();
    Carver memory = scratch();
    const BackwardScratch scratch = take_backward_scratch(memory, *plan_);
    AttentionBackward call;
    call.q = t.q;
    call.out = t.out;
    call.dout = gradients.dout;
    call.lse = t.lse;
    call.delta = statistics(scratch.delta);
    call.scale = plan_->scale;
    call.deterministic = plan_->deterministic;
    call.max_ctas = plan_->max_ctas;
    call.workspace = scratch.workspace;
    call.dq = rows(scratch.dq, plan_->shape.qk_dim);

    const int cp = plan_->cp;
    const KeyValueBlock own_part = block_of(scratch.dkv, *plan_, tokens(), accumulator_of(*plan_), executor_.device());
    const auto compute_half = [&](int half) {
      const TokenSpan keys = work.own_half(rank_, half).keys;
      compute(call, rows_of(t.own, keys), rows_of(own_part, keys), placed.own_half(half), false, s);
    };
    leaf_.delta(call.delta, t.out, gradients.dout, s.compute);
    transport.open(work, t.own, s);
    if (cp == 1) {
      compute(call, t.own, own_part, placed.at(0), false, s);
    } else {
      transport.post(1, s);
      compute_half(0);
    }
    for (int step = 1; step < cp; ++step) {
      if (step + 1 < cp) transport.post(step + 1, s);
      const KeyValueBlock block = transport.arrive(step, s);
      add_part(call, block, transport.sums(step, s), step, placed, s);
      transport.release(step, s);
      transport.pass(step, s);
    }
    if (cp > 1) compute_half(1);
    leaf_.store(gradients.dq, {&call.dq, 1}, s.compute);
    if (cp > 1) {
      const TokenSpan summed = work.summed_keys(rank_, cp - 1);
      store(gradients.own, own_part, {0, summed.begin}, s);
      store_sum(gradients.own, transport.sums(cp, s), own_part, summed, s);
      store(gradients.own, own_part, {summed.end, tokens()}, s);
      transport.drop_sums(s);
    } else {
      store(gradients.own, own_part, {0, tokens()}, s);
    }
    transport.close(s);
  }

  /// [batch, q_heads, local_tokens] of accumulators.
  TensorRef statistics(std::byte* data) const {
    return TensorRef(data, accumulator_of(*plan_), {plan_->shape.batch, plan_->shape.q_heads, tokens()},
                     executor_.device());
  }

 private:
  std::int64_t tokens() const { return plan_->local_tokens(rank_); }
  /// [batch, local_tokens, q_heads, dim] of accumulators.
  TensorRef rows(std::byte* data, int dim) const {
    return tensor_of(data, *plan_, tokens(), plan_->shape.q_heads, dim, accumulator_of(*plan_), executor_.device());
  }
  /// What is left of scratch when the transport has taken its part.
  Carver scratch() const {
    Carver memory(scratch_);
    if (plan_->transport == Transport::collective) take_slots(memory, *plan_);
    return memory;
  }

  void compute(AttentionBackward& call, const KeyValueBlock& block, const KeyValueBlock& sums, const WorkView& work,
               bool accumulate, const StreamPair& s) const {
    call.k = block.keys;
    call.v = block.values;
    call.dk = sums.keys;
    call.dv = sums.values;
    call.work = work;
    call.accumulate_dk = accumulate;
    call.accumulate_dv = accumulate;
    leaf_.backward(call, s.compute);
    call.accumulate_dq = true;
  }

  /// Adds this rank's part to the running sum of the block of `step`. Rows that join the sum start from 0.
  void add_part(AttentionBackward& call, const KeyValueBlock& block, const KeyValueBlock& sums, int step,
                const PlacedWork& placed, const StreamPair& s) const {
    const Work& work = placed.work();
    const BlockWork& mine = work.at(rank_, step);
    if (mine.rectangles.empty()) return;
    const int owner = work.owner(rank_, step);
    const TokenSpan before = work.summed_keys(owner, step - 1);
    const TokenSpan after = work.summed_keys(owner, step);
    if (!before.empty()) {
      zero(rows_of(sums, {after.begin, before.begin}), s);
      zero(rows_of(sums, {before.end, after.end}), s);
    }
    compute(call, block, rows_of(sums, mine.keys), placed.at(step), !before.empty(), s);
  }

  void zero(const KeyValueBlock& rows, const StreamPair& s) const {
    for (const TensorRef& part : {rows.keys, rows.values}) {
      for (std::int64_t i = 0; i < run_count(part); ++i) {
        const Run run = run_of(part, i);
        executor_.zero(run.data, run.elems * size_bytes(part.dtype()), s.compute);
      }
    }
  }
  /// The gradients of some rows are what the own part holds, or the sum of the others' and that.
  void store(const KeyValueBlock& out, const KeyValueBlock& own, TokenSpan span, const StreamPair& s) const {
    const KeyValueBlock to = rows_of(out, span), from = rows_of(own, span);
    leaf_.store(to.keys, {&from.keys, 1}, s.compute);
    leaf_.store(to.values, {&from.values, 1}, s.compute);
  }
  void store_sum(const KeyValueBlock& out, const KeyValueBlock& others, const KeyValueBlock& own, TokenSpan span,
                 const StreamPair& s) const {
    const KeyValueBlock to = rows_of(out, span), first = rows_of(others, span), last = rows_of(own, span);
    leaf_.store(to.keys, std::array{first.keys, last.keys}, s.compute);
    leaf_.store(to.values, std::array{first.values, last.values}, s.compute);
  }

  std::shared_ptr<const Plan> plan_;
  Executor executor_;
  int rank_;
  Block scratch_;
  Leaf leaf_;
};

}  // namespace pleat::inline v0::ring::detail
