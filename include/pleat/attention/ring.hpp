// Ring attention: exact attention over a sequence that is split over the cp group. What a user binds and calls.
#pragma once

#include <utility>
#include <variant>

#include <pleat/attention/ring_hops.hpp>
#include <pleat/attention/ring_pushes.hpp>
#include <pleat/attention/ring_rehearsal.hpp>
#include <pleat/attention/ring_saved.hpp>
#include <pleat/attention/ring_schedule.hpp>
#include <pleat/comm/memory.hpp>
#include <pleat/comm/peer_window.hpp>
#include <pleat/comm/plan_digest.hpp>
#include <pleat/core/streams.hpp>
#include <pleat/tensor/tensor_traits.hpp>

namespace pleat::inline v0::ring {

namespace detail {
template <class Executor, class Comm, class Arena>
struct Transports {
  using type = std::variant<RingHops<Executor, Comm>, RingPushes<Executor, pleat::detail::peers_of<Arena>>>;
};
template <class Executor, class Comm>
struct Transports<Executor, Comm, void> {
  using type = std::variant<RingHops<Executor, Comm>>;
};
}  // namespace detail

/// Attention over the cp group of `bind`. Every rank of the group makes the same calls in the same order, with its own
/// tokens, `plan.spans[rank]`, in sequence order. Results have the same bits from run to run and for both transports.
///
/// Per step a rank moves at most `batch * local_tokens * kv_heads * (qk_dim + v_dim)` elements one way in forward, and
/// in backward as many elements of accumulator_t in addition; `batch * local_tokens * latent_dim` where latents travel:
/// 576 numbers a token instead of 5120 for 16 heads of 192/128. By peer transport only those keys travel that the
/// receiver reads; of packed documents these are the keys of documents of which both ranks hold a part. Sums travel by
/// either transport only where there are any.
/// One that was moved from may be assigned to and destroyed; all else is A20.
/// `Arena` is that of the Memory given to bind; void, as in `Memory<>`, for plans with Transport::collective.
/// source: Ring Attention, arXiv 2310.01889; the zigzag split, github.com/zhuzilin/ring-flash-attention.
template <executor Executor, communicator Comm, optional_arena Arena,
          class Leaf = attention_leaf<typename Executor::device_type>>
class RingAttention {
  static_assert(local_attention<Leaf, typename Executor::stream_type>,
                "pleat[A11]: the kernel of a ring needs forward, delta, backward and store: see local_kernel.hpp");

 public:
  using device_type = typename Executor::device_type;
  using StreamPair = Streams<typename Executor::stream_type>;

  /// See `bind`.
  RingAttention(Plan plan, const Executor& executor, const GroupComm<Comm>& group, const Memory<Arena>& memory,
                typename Executor::stream_type s, Leaf leaf = {})
      : plan_(agreed(std::move(plan), group, memory.scratch, s)),
        tokens_(plan_->local_tokens(group.rank())),
        executor_(executor),
        group_(group),
        rank_(group.rank()),
        scratch_(memory.scratch),
        leaf_(std::move(leaf)),
        schedule_(plan_, executor, rank_, scratch_, leaf_),
        transport_(make_transport(executor, group, memory, s)),
        work_(plan_->work, rank_, memory.pinned_host, memory.persistent, executor, s) {
    preload_leaves<core_leaf<device_type>, Leaf>();
  }

  /// Errors: shape_error A20 on an operation that was moved from.
  const Plan& plan() const {
    if (plan_ == nullptr) {
      fail<shape_error>("pleat[A20]: a ring is used after it was moved from; use what it was moved to");
    }
    return *plan_;
  }

  /// Puts `work`, made by `plan().documents(..)`, where this rank's kernels read it: one copy on `s`, from `staging` in
  /// pinned host memory to `memory` on the device, each of `work.placed_bytes()`. All three are borrowed, until nothing
  /// uses the result. With `Options::compares_documents` every rank calls it at once, on the stream of the calls
  /// before. Errors: shape_error T02; A08 when `work` was made by another plan; comm_error C36.
  PlacedWork place(const Work& work, Block staging, Block memory, typename Executor::stream_type s) const {
    if (work.ranks() != plan().cp || work.launches() != plan_->launches) {
      fail<shape_error>("pleat[A08]: work for ", work.ranks(), " ranks and ", name_of(work.launches()),
                        " was given to an operation of cp=", plan_->cp, " and ", name_of(plan_->launches),
                        "; make it by documents() of the operation's plan");
    }
    if (plan_->compares_documents) {
      agree_on("documents of ring attention",
               std::array<PlanField, 1>{PlanField{"hash of documents and split", work.hash()}}, group_, scratch_, s);
    }
    return PlacedWork(work, rank_, staging, memory, executor_, s);
  }
  /// A temporary would be gone when a call reads it.
  PlacedWork place(Work&& work, Block staging, Block memory, typename Executor::stream_type s) const = delete;

  /// Tells a kernel that plans ahead (`Leaf::prepare`) of all that forward and backward will ask for on tensors with
  /// these extents and strides. This rank alone; touches no data. Errors: as forward and backward, and the kernel's.
  template <class Q, class K, class V, class Out, class DOut>
  void prepare(const Q& q, const K& k, const V& v, const Out& out, const DOut& dout) const {
    prepare(work_, q, k, v, out, dout);
  }
  /// The same for a packing of its own.
  template <class Q, class K, class V, class Out, class DOut>
  void prepare(const PlacedWork& work, const Q& q, const K& k, const V& v, const Out& out, const DOut& dout) const {
    detail::RingTensors tensors = call_tensors(q, keys_values(k, v), out);
    tensors.lse = schedule_.statistics(scratch_.data);
    const detail::RingGradients gradients{input("dout", dout, plan_->shape.q_heads, plan_->shape.v_dim), tensors.q,
                                          tensors.own};
    detail::rehearse<Executor>(plan_, executor_.device(), rank_, scratch_, leaf_, work, tensors, gradients);
  }

  /// out = attention of the local queries over the keys of all ranks. q [batch, local_tokens, q_heads, qk_dim],
  /// k [batch, local_tokens, kv_heads, qk_dim], v [.., kv_heads, v_dim], out [batch, local_tokens, q_heads, v_dim]; the
  /// plan's dtype; any strides with a contiguous last axis (views of one packed qkv buffer will do). `out` overlaps
  /// none of the others. Errors: shape_error T07 (extents, no data), T12 (a read-only output), A04 (strides).
  template <class Q, class K, class V, class Out>
  void forward(const StreamPair& s, const Q& q, const K& k, const V& v, const Out& out, Saved& saved) {
    forward(s, work_, q, k, v, out, saved);
  }
  /// The same for a packing of its own: the result of `place`, of the same packing on every rank.
  template <class Q, class K, class V, class Out>
  void forward(const StreamPair& s, const PlacedWork& work, const Q& q, const K& k, const V& v, const Out& out,
               Saved& saved) {
    const KeyValueBlock own = keys_values(k, v);
    run_forward(s, work, q, own, out, saved, detail::no_expander);
  }

  /// The same where latents travel (a plan with `latent_dim`): latent [batch, local_tokens, latent_dim], from which
  /// `expander`, a `latent_expander` of this device, makes the keys and values of each block when it has arrived, in
  /// scratch. It is borrowed for the call, as are its weights until the call is done on its stream. Errors: shape_error
  /// T07, T12, A04; A16 when the plan has no latents, as `forward` where it has.
  template <class Expander, class Q, class Latent, class Out>
  void forward_latent(const StreamPair& s, Expander& expander, const Q& q, const Latent& latent, const Out& out,
                      Saved& saved) {
    forward_latent(s, work_, expander, q, latent, out, saved);
  }
  template <class Expander, class Q, class Latent, class Out>
  void forward_latent(const StreamPair& s, const PlacedWork& work, Expander& expander, const Q& q, const Latent& latent,
                      const Out& out, Saved& saved) {
    require_expander<Expander>();
    require_latents(true);
    run_forward(s, work, q, latents(input("latent", latent)), out, saved, expander);
  }

  /// The Saved of an earlier forward, for frameworks that keep residuals as tensors of their own: `memory` holds the
  /// bytes that forward left in its Saved's memory, q, k, v and out the values of that call, wherever they are now. All
  /// are borrowed. Errors: as forward.
  template <class Q, class K, class V, class Out>
  Saved restore(Block memory, const Q& q, const K& k, const V& v, const Out& out) const {
    return restore(work_, memory, q, k, v, out);
  }
  template <class Q, class K, class V, class Out>
  Saved restore(const PlacedWork& work, Block memory, const Q& q, const K& k, const V& v, const Out& out) const {
    Saved saved(memory);
    fill(saved, work, q, keys_values(k, v), out);
    return saved;
  }

  /// Gradients of the same call: dq, dk and dv, shaped as q, k and v, are overwritten; dout is shaped as out.
  /// Errors: shape_error T07, T12, A04; A07 when `saved` holds no forward of this operation, A21 when a later forward
  /// has overwritten it.
  template <class DOut, class DQ, class DK, class DV>
  void backward(const StreamPair& s, const DOut& dout, const Saved& saved, const DQ& dq, const DK& dk, const DV& dv) {
    const Shape& shape = plan().shape;
    require_latents(false);
    const KeyValueBlock own{output("dk", dk, shape.kv_heads, shape.qk_dim),
                            output("dv", dv, shape.kv_heads, shape.v_dim)};
    run_backward(s, dout, saved, dq, own, detail::no_expander);
  }

  /// Gradients of a `forward_latent`: dq and dlatent, shaped as q and latent, are overwritten. Only the gradient of the
  /// latent travels, in accumulator_t; blocks are expanded anew. Errors: shape_error T07, T12, A04, A07, A21, A16.
  template <class Expander, class DOut, class DQ, class DLatent>
  void backward_latent(const StreamPair& s, Expander& expander, const DOut& dout, const Saved& saved, const DQ& dq,
                       const DLatent& dlatent) {
    require_expander<Expander>();
    require_latents(true);
    run_backward(s, dout, saved, dq, latents(output("dlatent", dlatent)), expander);
  }

  /// Throws what a call could not: nothing here depends on data, so there is no sticky status and this never throws.
  void check() const noexcept {}

 private:
  using Hops = detail::RingHops<Executor, Comm>;
  using Transports = typename detail::Transports<Executor, Comm, Arena>::type;
  static constexpr KnownDevice<device_type> device{};

  /// The plan, once all ranks of the group have shown that they have the same.
  static std::shared_ptr<const Plan> agreed(Plan plan, const GroupComm<Comm>& group, Block scratch,
                                            typename Executor::stream_type s) {
    if (group.size() != plan.cp) {
      fail<shape_error>("pleat[A05]: a plan for cp=", plan.cp, " was bound to a group of ", group.size(), " ranks");
    }
    agree_on("ring attention", detail::agreement_of(plan), group, scratch, s);
    return std::make_shared<const Plan>(std::move(plan));
  }
  Transports make_transport(const Executor& executor, const GroupComm<Comm>& group, const Memory<Arena>& memory,
                            typename Executor::stream_type s) const {
    if (plan_->transport == Transport::collective || plan_->cp == 1) {
      Carver scratch(memory.scratch);
      return Transports(std::in_place_type<Hops>, plan_, executor, group, detail::take_slots(scratch, *plan_));
    }
    if constexpr (std::is_void_v<Arena>) {
      fail<comm_error>("pleat[C29]: ring attention planned with Transport::peer was bound without an arena; give one, ",
                       "or plan with Transport::collective");
    } else {
      auto peers = pleat::detail::open_window("ring attention", plan_->cp, group, memory, plan_->footprint().symmetric,
                                              detail::push_channels(*plan_));
      return Transports(std::in_place_type<detail::RingPushes<Executor, decltype(peers)>>, plan_, executor,
                        std::move(peers), s);
    }
  }

  template <class Q, class Out, class Expander>
  void run_forward(const StreamPair& s, const PlacedWork& work, const Q& q, const KeyValueBlock& own, const Out& out,
                   Saved& saved, Expander& expander) {
    fill(saved, work, q, own, out);
    saved.forward_ = log_.fill(saved.memory_.data);
    std::visit([&](auto& transport) { schedule_.forward(transport, s, work, saved.tensors_, expander); }, transport_);
  }
  /// All of a Saved but the bytes of its memory.
  template <class Q, class Out>
  void fill(Saved& saved, const PlacedWork& work, const Q& q, const KeyValueBlock& own, const Out& out) const {
    Carver memory(saved.memory_);
    saved.tensors_ = call_tensors(q, own, out);
    require_data("q", saved.tensors_.q);
    require_data(own, "k", "v", "latent");
    require_data("out", saved.tensors_.out);
    saved.tensors_.lse = schedule_.statistics(detail::take_saved(memory, *plan_));
    saved.work_ = work;
    saved.plan_ = plan_;
  }
  template <class DOut, class DQ, class Expander>
  void run_backward(const StreamPair& s, const DOut& dout, const Saved& saved, const DQ& dq, const KeyValueBlock& own,
                    Expander& expander) {
    const Shape& shape = plan().shape;
    if (saved.plan_ != plan_) {
      fail<shape_error>("pleat[A07]: backward got a Saved that no forward of this operation has filled");
    }
    if (saved.tensors_.lse.elems() > 0 && log_.is_overwritten(saved.memory_.data, saved.forward_)) {
      fail<shape_error>(
          "pleat[A21]: backward got a Saved whose memory a later forward has overwritten; give each forward ",
          "that waits for its backward a Saved with memory of its own");
    }
    const detail::RingGradients gradients{input("dout", dout, shape.q_heads, shape.v_dim),
                                          output("dq", dq, shape.q_heads, shape.qk_dim), own};
    require_data("dout", gradients.dout);
    require_data("dq", gradients.dq);
    require_data(own, "dk", "dv", "dlatent");
    std::visit(
        [&](auto& transport) { schedule_.backward(transport, s, saved.work_, saved.tensors_, gradients, expander); },
        transport_);
  }

  template <class Expander>
  static constexpr void require_expander() {
    static_assert(latent_expander<Expander, typename Executor::stream_type>,
                  "pleat[A17]: an expander needs expand(latent, keys, values, stream) and expand_backward(latent, "
                  "dkeys, dvalues, dlatent, accumulate, stream), for TensorRefs and the executor's stream");
  }
  void require_latents(bool travel) const {
    if ((plan().shape.latent_dim > 0) != travel) {
      fail<shape_error>("pleat[A16]: a plan with latent_dim=", plan_->shape.latent_dim,
                        travel ? " moves keys and values: call forward and backward, or plan with a latent_dim"
                               : " moves latents: call forward_latent and backward_latent");
    }
  }

  /// All but the LSE.
  template <class Q, class Out>
  detail::RingTensors call_tensors(const Q& q, const KeyValueBlock& own, const Out& out) const {
    const Shape& shape = plan().shape;
    return {input("q", q, shape.q_heads, shape.qk_dim), own, output("out", out, shape.q_heads, shape.v_dim), {}};
  }
  static void require_data(const char* what, const TensorRef& t) {
    if (t.elems() > 0 && t.data() == nullptr) fail<shape_error>("pleat[T07]: ", what, " is ", t, ", which has no data");
  }
  void require_data(const KeyValueBlock& block, const char* keys, const char* values, const char* latent) const {
    require_data(plan_->shape.latent_dim > 0 ? latent : keys, block.keys);
    require_data(values, block.values);
  }

  template <class K, class V>
  KeyValueBlock keys_values(const K& k, const V& v) const {
    require_latents(false);
    const Shape& shape = plan().shape;
    return {input("k", k, shape.kv_heads, shape.qk_dim), input("v", v, shape.kv_heads, shape.v_dim)};
  }

  template <class T>
  TensorRef input(const char* what, const T& t, int heads, int dim) const {
    return strided(what, expect(what, t, plan_->shape.dtype, device, {plan_->shape.batch, tokens_, heads, dim}));
  }
  template <class T>
  TensorRef input(const char* what, const T& t) const {
    return strided(what,
                   expect(what, t, plan_->shape.dtype, device, {plan_->shape.batch, tokens_, plan_->shape.latent_dim}));
  }
  template <class T, class... Dims>
  TensorRef output(const char* what, const T& t, Dims... dims) const {
    const TensorRef ref = input(what, as_writable(what, t, device), dims...);
    pleat::detail::require_distinct_rows(what, ref);
    return ref;
  }
  static TensorRef strided(const char* what, const TensorRef& ref) {
    const int last = ref.rank() - 1;
    if (ref.extent(last) > 1 && ref.stride(last) != 1) {
      fail<shape_error>("pleat[A04]: the last axis of ", what, " has stride ", ref.stride(last),
                        "; it must be contiguous (stride 1): copy an expanded or transposed tensor first");
    }
    return ref;
  }
  /// [batch, local_tokens, latent_dim] as the block that travels.
  KeyValueBlock latents(const TensorRef& t) const {
    TensorRef keys(t.data(), t.dtype(), {}, t.device());
    keys.push_extent(t.extent(0), t.stride(0));
    keys.push_extent(t.extent(1), t.stride(1));
    keys.push_extent(1, 0);
    keys.push_extent(t.extent(2), t.stride(2));
    return {keys, detail::tensor_of(nullptr, *plan_, tokens_, 1, 0, t.dtype(), t.device())};
  }

  std::shared_ptr<const Plan> plan_;
  std::int64_t tokens_;
  Executor executor_;
  GroupComm<Comm> group_;
  int rank_;
  Block scratch_;
  Leaf leaf_;
  detail::RingSchedule<Executor, Leaf> schedule_;
  Transports transport_;
  PlacedWork work_;  // of the plan
  detail::SavedLog log_;
};

/// Binds a plan to the cp group and the memory that `plan.footprint()` asks for. The ranks of the group compare their
/// plans, in scratch and on `s`, which is waited for; every rank of the arena binds the same operations in the same
/// order. `group` and what `memory` names must outlive the operation. `s`: the first credits are given on it too; from
/// then on peers write to the arena.
/// Errors: shape_error A05 (the group's size), T02 (a block too small); comm_error C36 (ranks have planned
/// differently), C29 (no arena that reaches the group), C08 (arena used up); static T10 without a stream where there
/// are several, A11 (the kernel). `leaf`: the local kernel, by default that of the device; copied, so one with state is
/// a handle to it.
template <executor Executor, communicator Comm, optional_arena Arena,
          class Leaf = attention_leaf<typename Executor::device_type>>
RingAttention<Executor, Comm, Arena, Leaf> bind(
    Plan plan, const Executor& executor, const GroupComm<Comm>& group, const Memory<Arena>& memory,
    typename Executor::stream_type s = only_stream<typename Executor::stream_type>(), Leaf leaf = {}) {
  return RingAttention<Executor, Comm, Arena, Leaf>(std::move(plan), executor, group, memory, s, std::move(leaf));
}

}  // namespace pleat::inline v0::ring
