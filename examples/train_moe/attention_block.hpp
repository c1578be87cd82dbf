// The attention half of a layer: RMSNorm, ring attention with rotary positions, output, then the experts' norm and
// router.
#pragma once

#include <optional>

#include <pleat/attention.hpp>
#include <pleat/comm.hpp>
#include <pleat/fsdp.hpp>

#include "ops.hpp"
#include "options.hpp"
#include "units.hpp"

namespace train_moe {

template <class Backend, class T>
class AttentionBlock {
 public:
  using A = pleat::accumulator_t<T>;
  using Comm = typename Backend::Comm;
  using Streams = pleat::Streams<typename Comm::stream_type>;
  using Gradient = pleat::fsdp::GradientView<typename Backend::Executor>;
  using kernels = ops<typename Backend::Device>;
  using Ring = pleat::ring::RingAttention<typename Backend::Executor, Comm, typename Backend::Arena>;

  struct Plan {
    ModelShape model;
    std::int64_t sequences = 0;  // of a micro-batch on this rank
    std::int64_t local = 0;      // tokens of each on this rank
    pleat::ring::Plan ring;

    std::int64_t tokens() const { return sequences * local; }
    std::int64_t queries() const { return static_cast<std::int64_t>(model.heads) * model.head_dim; }
    std::int64_t keys() const { return static_cast<std::int64_t>(model.kv_heads) * model.head_dim; }
    pleat::Footprint footprint() const {
      pleat::Footprint need = ring.footprint();
      pleat::Carver own;
      carve_scratch(own, *this);
      need.persistent += own.used_bytes();
      return need;
    }
  };

  /// What a layer keeps of a micro-batch for its backward; rows are this rank's tokens. The layer below writes `x`;
  /// forward writes the rest: `middle` is the block's output, `expert_in` and `logits` are what the experts read.
  struct Activations {
    T *x, *normed, *query_raw, *key_raw, *query, *key, *value, *attended, *middle, *expert_in;
    A *rms, *query_rms, *key_rms, *expert_rms, *logits;
    pleat::ring::Saved ring;
  };

  static Plan plan(const Options& o, std::int64_t sequences, int cp, int cp_rank) {
    const ModelShape& m = o.model;
    auto ring = pleat::ring::plan(cp,
                                  {.batch = sequences,
                                   .tokens = o.sequence,
                                   .q_heads = m.heads,
                                   .kv_heads = m.kv_heads,
                                   .qk_dim = m.head_dim,
                                   .v_dim = m.head_dim,
                                   .dtype = pleat::dtype_of<T>},
                                  {.causal = true, .transport = o.transport});
    const std::int64_t local = ring.local_tokens(cp_rank);
    return {m, sequences, local, std::move(ring)};
  }

  /// The memory of one layer's activations; with a measuring Carver, their size.
  static Activations carve_activations(pleat::Carver& memory, const Plan& p) {
    const auto rows = [&](std::int64_t width) { return memory.take<T>(static_cast<std::size_t>(p.tokens() * width)); };
    const auto statistics = [&](std::int64_t width) {
      return memory.take<A>(static_cast<std::size_t>(p.tokens() * width));
    };
    const std::int64_t hidden = p.model.hidden;
    Activations a;
    for (T** wide : {&a.x, &a.normed, &a.middle, &a.expert_in}) *wide = rows(hidden);
    for (T** query : {&a.query_raw, &a.query, &a.attended}) *query = rows(p.queries());
    for (T** key : {&a.key_raw, &a.key, &a.value}) *key = rows(p.keys());
    for (A** per_token : {&a.rms, &a.expert_rms}) *per_token = statistics(1);
    a.query_rms = statistics(p.model.heads);
    a.key_rms = statistics(p.model.kv_heads);
    a.logits = statistics(p.model.experts);
    const std::size_t saved_bytes = p.ring.footprint().saved;
    a.ring = pleat::ring::Saved{pleat::Block{memory.take_bytes(saved_bytes), saved_bytes}};
    return a;
  }

  AttentionBlock(Plan p, pleat::GroupComm<Comm> cp, pleat::Memory<typename Backend::Arena> memory)
      : plan_(std::move(p)) {
    pleat::Carver persistent(memory.persistent);
    scratch_ = carve_scratch(persistent, plan_);
    const std::size_t ring_bytes = plan_.ring.footprint().persistent;
    memory.persistent = {persistent.take_bytes(ring_bytes), ring_bytes};
    ring_.emplace(pleat::ring::bind(plan_.ring, typename Backend::Executor{}, cp, memory));
  }

  const Plan& plan() const { return plan_; }

  /// `positions` [tokens]: where each token stands in its sequence.
  void forward(Streams streams, const std::int32_t* positions, const pleat::fsdp::UnitView& w, Activations& a) {
    namespace param = attention_param;
    const ModelShape& m = plan_.model;
    const auto s = streams.compute;
    const std::int64_t tokens = plan_.tokens(), hidden = m.hidden, queries = plan_.queries(), keys = plan_.keys();
    const auto weight = [&](int p) { return w[p].template as<T>(); };

    kernels::rms_norm(a.x, weight(param::norm), a.normed, a.rms, tokens, hidden, m.epsilon, s);
    kernels::linear(a.normed, weight(param::query), a.query_raw, tokens, hidden, queries, false, s);
    kernels::linear(a.normed, weight(param::key), a.key_raw, tokens, hidden, keys, false, s);
    kernels::linear(a.normed, weight(param::value), a.value, tokens, hidden, keys, false, s);
    kernels::rms_norm(a.query_raw, weight(param::query_norm), a.query, a.query_rms, tokens * m.heads, m.head_dim,
                      m.epsilon, s);
    kernels::rms_norm(a.key_raw, weight(param::key_norm), a.key, a.key_rms, tokens * m.kv_heads, m.head_dim, m.epsilon,
                      s);
    kernels::rotate(a.query, positions, tokens, m.heads, m.head_dim, m.rope_theta, 1, s);
    kernels::rotate(a.key, positions, tokens, m.kv_heads, m.head_dim, m.rope_theta, 1, s);

    ring_->forward(streams, heads_of(a.query, m.heads), heads_of(a.key, m.kv_heads), heads_of(a.value, m.kv_heads),
                   heads_of(a.attended, m.heads), a.ring);

    Backend::copy(a.middle, a.x, tokens * hidden, s);
    kernels::linear(a.attended, weight(param::output), a.middle, tokens, queries, hidden, true, s);
    kernels::rms_norm(a.middle, weight(param::expert_norm), a.expert_in, a.expert_rms, tokens, hidden, m.epsilon, s);
    kernels::linear(a.expert_in, weight(param::router), a.logits, tokens, hidden, m.experts, false, s);
  }

  /// `d` [tokens, hidden]: on entry the gradient of the layer's output, on return that of `a.x`. `dexpert_in`
  /// [tokens, hidden] is the experts' gradient of their input and is used up; `dlogits` [tokens, experts] the router's.
  void backward(Streams streams, const std::int32_t* positions, const pleat::fsdp::UnitView& w, Gradient& gradient,
                Activations& a, T* d, T* dexpert_in, const A* dlogits) {
    namespace param = attention_param;
    const ModelShape& m = plan_.model;
    const auto s = streams.compute;
    const std::int64_t tokens = plan_.tokens(), hidden = m.hidden, queries = plan_.queries(), keys = plan_.keys();
    const auto weight = [&](int p) { return w[p].template as<T>(); };
    const auto linear_backward = [&](int p, const auto* dy, const T* x, T* dx, bool add_dx, std::int64_t in,
                                     std::int64_t out) {
      const auto [dweight, add] = gradient.write(p);
      kernels::linear_backward(dy, x, weight(p), dx, add_dx, dweight.template as<A>(), add, tokens, in, out, s);
    };
    const auto norm_backward = [&](int p, const T* dy, const T* x, const A* rms, T* dx, bool add_dx, std::int64_t rows,
                                   std::int64_t dim) {
      const auto [dweight, add] = gradient.write(p);
      kernels::rms_norm_backward(dy, x, weight(p), rms, dx, add_dx, dweight.template as<A>(), add, rows, dim, s);
    };

    linear_backward(param::router, dlogits, a.expert_in, dexpert_in, true, hidden, m.experts);
    norm_backward(param::expert_norm, dexpert_in, a.middle, a.expert_rms, d, true, tokens, hidden);
    linear_backward(param::output, d, a.attended, scratch_.dattended, false, queries, hidden);

    ring_->backward(streams, heads_of(scratch_.dattended, m.heads), a.ring, heads_of(scratch_.dquery, m.heads),
                    heads_of(scratch_.dkey, m.kv_heads), heads_of(scratch_.dvalue, m.kv_heads));

    kernels::rotate(scratch_.dquery, positions, tokens, m.heads, m.head_dim, m.rope_theta, -1, s);
    kernels::rotate(scratch_.dkey, positions, tokens, m.kv_heads, m.head_dim, m.rope_theta, -1, s);
    norm_backward(param::query_norm, scratch_.dquery, a.query_raw, a.query_rms, scratch_.dquery, false,
                  tokens * m.heads, m.head_dim);
    norm_backward(param::key_norm, scratch_.dkey, a.key_raw, a.key_rms, scratch_.dkey, false, tokens * m.kv_heads,
                  m.head_dim);
    linear_backward(param::query, scratch_.dquery, a.normed, scratch_.dnormed, false, hidden, queries);
    linear_backward(param::key, scratch_.dkey, a.normed, scratch_.dnormed, true, hidden, keys);
    linear_backward(param::value, scratch_.dvalue, a.normed, scratch_.dnormed, true, hidden, keys);
    norm_backward(param::norm, scratch_.dnormed, a.x, a.rms, d, true, tokens, hidden);
  }

 private:
  struct Scratch {
    T *dattended, *dquery, *dkey, *dvalue, *dnormed;
  };
  static Scratch carve_scratch(pleat::Carver& memory, const Plan& p) {
    const auto rows = [&](std::int64_t width) { return memory.take<T>(static_cast<std::size_t>(p.tokens() * width)); };
    return {rows(p.queries()), rows(p.queries()), rows(p.keys()), rows(p.keys()), rows(p.model.hidden)};
  }
  /// x [tokens, heads * dim] as [sequences, local, heads, dim].
  pleat::TensorRef heads_of(T* x, int heads) const {
    return Backend::tensor(x, {plan_.sequences, plan_.local, heads, plan_.model.head_dim});
  }

  Plan plan_;
  Scratch scratch_{};
  std::optional<Ring> ring_;
};

}  // namespace train_moe
