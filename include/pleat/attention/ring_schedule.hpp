// The schedule of ring attention: which block is computed when, and what is handed on, for either transport.
#pragma once

#include <array>

#include <pleat/attention/expansion.hpp>
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

inline constexpr NoExpander no_expander{};

/// Steps 0 .. cp - 1 of a pass over `transport` (a RingHops or RingPushes): at step s this rank meets the block of the
/// rank s places before it, and the transfer of the next block is posted before this step's kernels, one per run of
/// keys that it reads. `expander`: a `latent_expander`, or none where keys and values travel.
template <executor Executor, class Leaf = attention_leaf<typename Executor::device_type>>
class RingSchedule {
  using StreamPair = Streams<typename Executor::stream_type>;

 public:
  RingSchedule(std::shared_ptr<const Plan> plan, const Executor& executor, int rank, Block scratch, Leaf leaf = {})
      : plan_(std::move(plan)), executor_(executor), rank_(rank), scratch_(scratch), leaf_(std::move(leaf)) {}

  template <class AnyTransport, class Expander = const NoExpander>
  void forward(AnyTransport& transport, const StreamPair& s, const PlacedWork& placed, const RingTensors& t,
               Expander& expander = no_expander) const {
    const Work& work = placed.work();
    Carver memory = scratch();
    const ForwardScratch scratch = take_forward_scratch(memory, *plan_);
    const Expansion<Expander> blocks(expander, *plan_, executor_.device(), scratch.expanded);
    AttentionForward call;
    call.q = t.q;
    call.scale = plan_->scale;
    call.o_acc = rows(scratch.o_acc, plan_->shape.v_dim);
    call.lse = t.lse;
    call.out = t.out;
    call.max_ctas = plan_->max_ctas;

    const int last_step = work.last_step(rank_);
    const auto compute = [&](int step, std::size_t part, const KeyValueBlock& arrived) {
      const KeyValueBlock block = blocks.keys_values(arrived, s.compute);
      call.k = block.keys;
      call.v = block.values;
      call.work = placed.part(step, part);
      call.first = step == 0;
      call.last = step == last_step && part + 1 == work.parts(rank_, step).size();
      leaf_.forward(call, s.compute);
    };
    transport.open(work, t.own, s);
    if (plan_->launches == Launches::one) {
      if constexpr (requires { transport.gather(s); }) forward_gathered(transport, s, placed, t.own, call, compute);
    } else {
      for (int step = 0; step < plan_->cp; ++step) {
        if (step + 1 < plan_->cp) transport.post(step + 1, s);
        if (step == 0) {
          compute(0, 0, t.own);
          continue;
        }
        transport.arrive(step, s);
        for (std::size_t part = 0; part < work.parts(rank_, step).size(); ++part) {
          compute(step, part, transport.part(step, work.parts(rank_, step)[part].keys));
        }
        transport.release(step, s);
      }
    }
    transport.close(s);
  }

  /// The gradients of a block are summed in the order of the ranks that meet it, steps 1 .. cp - 1, and its owner's
  /// part is added last; each rank adds its finished part once. So the bits do not depend on transport or timing. They
  /// are handed on slice by slice: the sum of one is on its way while the next is computed.
  /// The own block is computed in two halves of its keys: the first while the first block of another rank is on its
  /// way, the rest while the sum of the others comes back.
  template <class AnyTransport, class Expander = const NoExpander>
  void backward(AnyTransport& transport, const StreamPair& s, const PlacedWork& placed, const RingTensors& t,
                const RingGradients& gradients, Expander& expander = no_expander) const {
    const Work& work = placed.work();
    Carver memory = scratch();
    const BackwardScratch scratch = take_backward_scratch(memory, *plan_);
    const Expansion<Expander> blocks(expander, *plan_, executor_.device(), scratch.expanded,
                                     scratch.expanded_gradients);
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
    const KeyValueBlock own_part =
        block_of(scratch.own_part, *plan_, tokens(), accumulator_of(*plan_), executor_.device());
    const auto compute = [&](const KeyValueBlock& block, const KeyValueBlock& sums, const WorkView& part,
                             bool accumulate) {
      call.work = part;
      blocks.backward(leaf_, call, block, sums, accumulate, s.compute);
      call.accumulate_dq = true;
    };
    const auto compute_half = [&](int half) {
      const TokenSpan keys = work.own_half(rank_, half).keys;
      compute(rows_of(t.own, keys), rows_of(own_part, keys), placed.own_half(half), false);
    };
    leaf_.delta(call.delta, t.out, gradients.dout, s.compute);
    transport.open(work, t.own, s);
    if (cp == 1) {
      compute(t.own, own_part, placed.part(0, 0), false);
    } else {
      transport.post(1, s);
      compute_half(0);
    }
    for (int step = 1; step < cp; ++step) {
      if (step + 1 < cp) transport.post(step + 1, s);
      transport.arrive(step, s);
      const KeyValueBlock sums = transport.sums(step);
      const int owner = work.owner(rank_, step);
      const Runs& summed = work.summed_keys(owner, step - 1);
      const std::span<const BlockWork> parts = work.sliced_parts(rank_, step);
      std::size_t part = 0;
      for (int slice = 0; slice < work.slices(); ++slice) {
        transport.arrive_sums(step, slice, s);
        for (; part < parts.size() && parts[part].keys.end <= work.slice(owner, slice).end; ++part) {
          const TokenSpan keys = parts[part].keys;
          const bool joins = summed.meets(keys);
          if (joins) summed.for_each_gap(keys, [&](TokenSpan gap) { zero(rows_of(sums, gap), s); });
          compute(transport.part(step, keys), rows_of(sums, keys), placed.sliced_part(step, part), joins);
        }
        if (slice + 1 == work.slices()) transport.release(step, s);
        transport.pass(step, slice, s);
      }
    }
    if (cp > 1) compute_half(1);
    leaf_.store(gradients.dq, {&call.dq, 1}, s.compute);
    const Runs& summed = work.summed_keys(rank_, cp - 1);
    summed.for_each_gap({0, tokens()}, [&](TokenSpan rows) { store(gradients.own, {&own_part, 1}, rows, s); });
    if (cp > 1) {
      for (int slice = 0; slice < work.slices(); ++slice) transport.arrive_sums(cp, slice, s);
      const std::array terms{transport.sums(cp), own_part};
      for (const TokenSpan& rows : summed) store(gradients.own, terms, rows, s);
      transport.drop_sums(s);
    }
    transport.close(s);
  }

  /// [batch, q_heads, local_tokens] of accumulators.
  TensorRef statistics(std::byte* data) const {
    return TensorRef(data, accumulator_of(*plan_), {plan_->shape.batch, plan_->shape.q_heads, tokens()},
                     executor_.device());
  }

 private:
  /// All blocks by one kernel; one by one where the kernel does not take them together.
  template <class AnyTransport, class Compute>
  void forward_gathered(AnyTransport& transport, const StreamPair& s, const PlacedWork& placed,
                        const KeyValueBlock& own, const AttentionForward& call, Compute compute) const {
    const Work& work = placed.work();
    transport.gather(s);
    const KeyValueBlock others = transport.gathered();
    AttentionForwardBlocks all{call, others.keys, others.values, work.block_rows(), transport.arrivals(s)};
    all.call.k = own.keys;
    all.call.v = own.values;
    all.call.work = placed.all();
    bool is_done = false;
    if constexpr (requires { is_done = leaf_.forward(all, s.compute); }) is_done = leaf_.forward(all, s.compute);
    transport.end_arrivals(s);
    if (!is_done) {
      compute(0, 0, own);
      for (int step = 1; step < plan_->cp; ++step) {
        for (std::size_t part = 0; part < work.parts(rank_, step).size(); ++part) {
          compute(step, part, transport.gathered_part(step, work.parts(rank_, step)[part].keys));
        }
      }
    }
    transport.release_gathered(s);
  }

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

  void zero(const KeyValueBlock& rows, const StreamPair& s) const {
    for (const TensorRef& part : {rows.keys, rows.values}) {
      for (std::int64_t i = 0; i < run_count(part); ++i) {
        const Run run = run_of(part, i);
        executor_.zero(run.data, run.elems * size_bytes(part.dtype()), s.compute);
      }
    }
  }
  /// The gradients of some rows: what one term holds of them, or the sum of two.
  void store(const KeyValueBlock& out, std::span<const KeyValueBlock> terms, TokenSpan span,
             const StreamPair& s) const {
    const KeyValueBlock to = rows_of(out, span), first = rows_of(terms.front(), span),
                        last = rows_of(terms.back(), span);
    const std::array keys{first.keys, last.keys}, values{first.values, last.values};
    leaf_.store(to.keys, std::span(keys).first(terms.size()), s.compute);
    if (to.values.elems() > 0) leaf_.store(to.values, std::span(values).first(terms.size()), s.compute);
  }

  std::shared_ptr<const Plan> plan_;
  Executor executor_;
  int rank_;
  Block scratch_;
  Leaf leaf_;
};

}  // namespace pleat::inline v0::ring::detail
