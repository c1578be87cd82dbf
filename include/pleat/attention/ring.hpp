// Ring attention: exact attention over a sequence that is split over the cp group; the schedule, written once.
#pragma once

#include <variant>

#include <pleat/attention/local_kernel.hpp>
#include <pleat/attention/ring_hops.hpp>
#include <pleat/attention/ring_pushes.hpp>
#include <pleat/comm/memory.hpp>
#include <pleat/tensor/tensor_traits.hpp>

namespace pleat::inline v0::ring {

/// What backward needs of one forward; one per live micro-batch and layer. It owns no memory: `memory` is
/// `footprint().saved` bytes of the caller's and holds the LSE; q, k, v and out are the caller's tensors, which must
/// stay alive and unchanged until backward, as must a `Work` given to forward. A new forward overwrites it.
class Saved {
 public:
  Saved() = default;
  explicit Saved(Block memory) : memory_(memory) {}

 private:
  template <executor Executor, communicator Comm, symmetric_arena Arena>
  friend class RingAttention;

  Block memory_;
  TensorRef q_, k_, v_, out_;
  const Work* work_ = nullptr;
  const Plan* plan_ = nullptr;  // of the op that filled it
};

/// Attention over the cp group of `bind`. Every rank of the group makes the same calls in the same order, with its own
/// tokens, `plan.spans[rank]`, in sequence order. Results have the same bits from run to run and for both transports.
///
/// Per step a rank moves at most `2 * tokens * kv_heads * (qk_dim + v_dim)` elements one way in forward, and in
/// backward as many elements of accumulator_t in addition. source: Ring Attention, arXiv 2310.01889; the zigzag split,
/// github.com/zhuzilin/ring-flash-attention.
template <executor Executor, communicator Comm, symmetric_arena Arena>
class RingAttention {
 public:
  using device_type = typename Executor::device_type;
  using StreamPair = Streams<typename Executor::stream_type>;

  /// See `bind`.
  RingAttention(Plan plan, const Executor& executor, const GroupComm<Comm>& group, const Memory<Arena>& memory,
                typename Executor::stream_type s)
      : plan_(std::make_shared<const Plan>(std::move(plan))),
        executor_(executor),
        rank_(group.rank()),
        scratch_(memory.scratch),
        transport_(make_transport(group, memory.arena, s)) {}

  const Plan& plan() const { return *plan_; }

  /// out = attention of the local queries over the keys of all ranks. q [batch, local_tokens, q_heads, qk_dim],
  /// k [batch, local_tokens, kv_heads, qk_dim], v [.., kv_heads, v_dim], out [batch, local_tokens, q_heads, v_dim]; the
  /// plan's dtype; any strides with a contiguous last axis (views of one packed qkv buffer will do). `out` overlaps
  /// none of the others. Errors: shape_error T07 (extents), A04 (strides).
  template <class Q, class K, class V, class Out>
  void forward(const StreamPair& s, const Q& q, const K& k, const V& v, const Out& out, Saved& saved) {
    forward(s, plan_->work, q, k, v, out, saved);
  }
  /// The same for a packing of its own, `plan.documents(cu_seqlens)`; the same on every rank.
  template <class Q, class K, class V, class Out>
  void forward(const StreamPair& s, const Work& work, const Q& q, const K& k, const V& v, const Out& out,
               Saved& saved) {
    const Shape& shape = plan_->shape;
    saved.plan_ = plan_.get();
    saved.work_ = &work;
    saved.q_ = input("q", q, shape.q_heads, shape.qk_dim);
    saved.k_ = input("k", k, shape.kv_heads, shape.qk_dim);
    saved.v_ = input("v", v, shape.kv_heads, shape.v_dim);
    saved.out_ = output("out", out, shape.q_heads, shape.v_dim);
    std::visit([&](auto& transport) { forward_steps(transport, s, saved); }, transport_);
  }

  /// Gradients of the same call: dq, dk and dv, shaped as q, k and v, are overwritten; dout is shaped as out.
  /// Errors: shape_error T07, A04; A07 when `saved` holds no forward of this operation.
  template <class DOut, class DQ, class DK, class DV>
  void backward(const StreamPair& s, const DOut& dout, const Saved& saved, const DQ& dq, const DK& dk, const DV& dv) {
    const Shape& shape = plan_->shape;
    if (saved.plan_ != plan_.get()) {
      fail<shape_error>("pleat[A07]: backward got a Saved that no forward of this operation has filled");
    }
    const Gradients gradients{
        input("dout", dout, shape.q_heads, shape.v_dim),
        output("dq", dq, shape.q_heads, shape.qk_dim),
        {output("dk", dk, shape.kv_heads, shape.qk_dim), output("dv", dv, shape.kv_heads, shape.v_dim)}};
    std::visit([&](auto& transport) { backward_steps(transport, s, saved, gradients); }, transport_);
  }

  /// Throws what a call could not: nothing here depends on data, so there is no sticky status and this never throws.
  void check() const noexcept {}

 private:
  using Leaf = attention_leaf<device_type>;
  using Peers = decltype(std::declval<Arena&>().open(std::declval<const Group&>(), std::size_t{}, int{}));
  using Hops = detail::RingHops<Executor, Comm>;
  using Pushes = detail::RingPushes<Executor, Peers>;
  using Transports = std::variant<Hops, Pushes>;
  static constexpr DeviceKind device = device_kind<device_type>;

  struct Gradients {
    TensorRef dout, dq;
    KeyValueBlock dkv;
  };

  Transports make_transport(const GroupComm<Comm>& group, Arena* arena, typename Executor::stream_type s) {
    if (group.size() != plan_->cp) {
      fail<shape_error>("pleat[A05]: a plan for cp=", plan_->cp, " was bound to a group of ", group.size(), " ranks");
    }
    if (plan_->transport == Transport::collective || plan_->cp == 1) {
      Carver memory(scratch_);
      return Transports(std::in_place_type<Hops>, plan_, executor_, group, detail::take_slots(memory, *plan_));
    }
    if (arena == nullptr || !arena->reachable(group.ranks())) {
      fail<shape_error>("pleat[A05]: a plan with peer transport needs an arena that reaches the cp group ",
                        group.ranks(), "; plan with Transport::collective where there is none");
    }
    return Transports(std::in_place_type<Pushes>, plan_, executor_,
                      arena->open(group.ranks(), plan_->footprint().symmetric, Pushes::channels), s);
  }

  std::int64_t tokens() const { return plan_->local_tokens(rank_); }

  template <class T>
  TensorRef input(const char* what, const T& t, int heads, int dim) const {
    const TensorRef ref = expect(what, t, plan_->shape.dtype, device, {plan_->shape.batch, tokens(), heads, dim});
    if (ref.extent(3) > 1 && ref.stride(3) != 1) {
      fail<shape_error>("pleat[A04]: the last axis of ", what, " has stride ", ref.stride(3),
                        "; it must be contiguous (stride 1): copy an expanded or transposed tensor first");
    }
    return ref;
  }
  template <class T>
  TensorRef output(const char* what, const T& t, int heads, int dim) const {
    const TensorRef ref = input(what, t, heads, dim);
    for (int axis = 0; axis < 3; ++axis) {
      if (ref.extent(axis) > 1 && ref.stride(axis) == 0) {
        fail<shape_error>("pleat[A04]: axis ", axis, " of ", what,
                          " has stride 0; an output's rows must not overlap: give it memory of its own");
      }
    }
    return ref;
  }

  /// What is left of scratch when the transport has taken its part.
  Carver scratch() const {
    Carver memory(scratch_);
    if (plan_->transport == Transport::collective) detail::take_slots(memory, *plan_);
    return memory;
  }
  TensorRef rows(std::byte* data, int heads, int dim) const {
    return detail::tensor_of(data, *plan_, tokens(), heads, dim, detail::accumulator_of(*plan_), device);
  }
  TensorRef statistics(std::byte* data) const {
    return TensorRef(data, detail::accumulator_of(*plan_), {plan_->shape.batch, plan_->shape.q_heads, tokens()},
                     Device{device, 0});
  }
  TensorRef lse(const Saved& saved) const {
    Carver memory(saved.memory_);
    return statistics(detail::take_saved(memory, *plan_));
  }

  template <class TransportOfPlan>
  void forward_steps(TransportOfPlan& transport, const StreamPair& s, const Saved& saved) {
    Carver memory = scratch();
    AttentionForward call;
    call.q = saved.q_;
    call.scale = plan_->scale;
    call.o_acc = rows(detail::take_forward_scratch(memory, *plan_), plan_->shape.q_heads, plan_->shape.v_dim);
    call.lse = lse(saved);
    call.out = saved.out_;

    const KeyValueBlock own{saved.k_, saved.v_};
    const Work& work = *saved.work_;
    const int last_step = work.last_step(rank_);
    transport.open(work, own, s);
    for (int step = 0; step < plan_->cp; ++step) {
      if (step + 1 < plan_->cp) transport.post(step + 1, s);
      const KeyValueBlock block = step == 0 ? own : transport.arrive(step, s);
      call.k = block.keys;
      call.v = block.values;
      call.work = work.at(rank_, step).rectangles;
      call.first = step == 0;
      call.last = step == last_step;
      if (call.first || !call.work.empty()) Leaf::forward(call, s.compute);
      if (step > 0) transport.release(step, s);
    }
    transport.close(s);
  }

  /// Gradients of a block's keys are summed in the order of the ranks that meet it, steps 1 .. cp - 1, and its owner's
  /// part is added last; each rank adds its finished part once.
  template <class TransportOfPlan>
  void backward_steps(TransportOfPlan& transport, const StreamPair& s, const Saved& saved, const Gradients& out) {
    Carver memory = scratch();
    const detail::BackwardScratch scratch = detail::take_backward_scratch(memory, *plan_);
    AttentionBackward call;
    call.q = saved.q_;
    call.dout = out.dout;
    call.lse = lse(saved);
    call.delta = statistics(scratch.delta);
    call.scale = plan_->scale;
    call.deterministic = plan_->deterministic;
    call.dq = rows(scratch.dq, plan_->shape.q_heads, plan_->shape.qk_dim);

    const KeyValueBlock own{saved.k_, saved.v_};
    const KeyValueBlock own_part =
        detail::block_of(scratch.dkv, *plan_, tokens(), detail::accumulator_of(*plan_), device);
    const Work& work = *saved.work_;
    Leaf::delta(call.delta, saved.out_, out.dout, s.compute);
    transport.open(work, own, s);
    for (int step = 0; step < plan_->cp; ++step) {
      if (step + 1 < plan_->cp) transport.post(step + 1, s);
      if (step == 0) {
        run(call, own, own_part, work.at(rank_, 0), false, s);
      } else {
        const KeyValueBlock block = transport.arrive(step, s);
        add_part(call, block, transport.sums(step, s), step, work, s);
        transport.release(step, s);
        transport.pass(step, s);
      }
    }
    Leaf::store(out.dq, call.dq, s.compute);
    if (plan_->cp > 1) {
      const TokenSpan summed = work.summed_keys(rank_, plan_->cp - 1);
      const KeyValueBlock others = detail::rows_of(transport.sums(plan_->cp, s), summed);
      const KeyValueBlock mine = detail::rows_of(own_part, summed);
      add_after(mine.keys, others.keys, s);
      add_after(mine.values, others.values, s);
      transport.drop_sums(s);
    }
    Leaf::store(out.dkv.keys, own_part.keys, s.compute);
    Leaf::store(out.dkv.values, own_part.values, s.compute);
    transport.close(s);
  }

  void run(AttentionBackward& call, const KeyValueBlock& block, const KeyValueBlock& gradients, const BlockWork& work,
           bool accumulate, const StreamPair& s) const {
    call.k = block.keys;
    call.v = block.values;
    call.dk = gradients.keys;
    call.dv = gradients.values;
    call.work = work.rectangles;
    call.accumulate_dk = accumulate;
    call.accumulate_dv = accumulate;
    Leaf::backward(call, s.compute);
    call.accumulate_dq = true;
  }

  /// Adds this rank's part to the running sum of the block of `step`. Rows that join the sum start from 0.
  void add_part(AttentionBackward& call, const KeyValueBlock& block, const KeyValueBlock& sums, int step,
                const Work& work, const StreamPair& s) const {
    const BlockWork& mine = work.at(rank_, step);
    if (mine.rectangles.empty()) return;
    const int owner = work.owner(rank_, step);
    const TokenSpan before = work.summed_keys(owner, step - 1);
    const TokenSpan after = work.summed_keys(owner, step);
    if (!before.empty()) {
      zero(detail::rows_of(sums, {after.begin, before.begin}), s);
      zero(detail::rows_of(sums, {before.end, after.end}), s);
    }
    run(call, block, detail::rows_of(sums, mine.keys), mine, !before.empty(), s);
  }

  void zero(const KeyValueBlock& rows, const StreamPair& s) const {
    for (const TensorRef& part : {rows.keys, rows.values}) {
      for (std::int64_t i = 0; i < detail::run_count(part); ++i) {
        const detail::Run run = detail::run_of(part, i);
        executor_.zero(run.data, run.elems * size_bytes(part.dtype()), s.compute);
      }
    }
  }
  /// mine = sum + mine
  void add_after(const TensorRef& mine, const TensorRef& sum, const StreamPair& s) const {
    for (std::int64_t i = 0; i < detail::run_count(mine); ++i) {
      const detail::Run run = detail::run_of(mine, i);
      const void* const terms[] = {detail::run_of(sum, i).data, run.data};
      core_leaf<device_type>::sum_ranks(run.data, mine.dtype(), terms, mine.dtype(), run.elems, false, s.compute);
    }
  }

  std::shared_ptr<const Plan> plan_;
  Executor executor_;
  int rank_;
  Block scratch_;
  Transports transport_;
};

/// Binds a plan to the cp group and the memory that `plan.footprint()` asks for. No communication beyond signals in the
/// arena; every rank of the arena binds the same operations in the same order. `group` and what `memory` names must
/// outlive the operation. `s`: the stream on which the first credits are given.
/// Errors: shape_error A05 (the group's size, no arena), T02 (a block too small); comm_error C08 (arena used up).
template <executor Executor, communicator Comm, symmetric_arena Arena>
RingAttention<Executor, Comm, Arena> bind(Plan plan, const Executor& executor, const GroupComm<Comm>& group,
                                          const Memory<Arena>& memory, typename Executor::stream_type s = {}) {
  return RingAttention<Executor, Comm, Arena>(std::move(plan), executor, group, memory, s);
}

}  // namespace pleat::inline v0::ring
