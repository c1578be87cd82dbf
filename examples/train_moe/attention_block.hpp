// The attention half of a layer: norm, attention of either kind, output, then the second norm and the router's logits.
#pragma once

#include <optional>
#include <variant>
#include <vector>

#include <pleat/attention.hpp>
#include <pleat/comm.hpp>
#include <pleat/fsdp.hpp>

#include "grouped_heads.hpp"
#include "latent_heads.hpp"

namespace train_moe {

template <class Backend, class T>
class AttentionBlock {
 public:
  using A = pleat::accumulator_t<T>;
  using Comm = typename Backend::Comm;
  using Arena = typename Backend::Arena;
  using Executor = typename Backend::Executor;
  using Gradient = pleat::fsdp::GradientView<Executor>;
  using Ring = pleat::ring::RingAttention<Executor, Comm, Arena>;
  using Grouped = GroupedHeads<Backend, T>;
  using Latent = LatentHeads<Backend, T>;

  struct Plan {
    ModelShape model;
    std::int64_t streams = 0;              // of a micro-batch on this rank
    std::int64_t tokens = 0;               // the most of a micro-batch on any rank of the cp group
    std::vector<pleat::ring::Plan> rings;  // of each length
    std::size_t placed_bytes = 0;          // of a micro-batch's packing

    std::size_t ring_saved() const {
      std::size_t most = 0;
      for (const pleat::ring::Plan& ring : rings) most = std::max(most, ring.footprint().saved);
      return most;
    }
    pleat::Footprint footprint() const {
      pleat::Footprint need;
      for (const pleat::ring::Plan& ring : rings) need = max_scratch(need, ring.footprint());
      need.saved = 0;
      pleat::Carver own;
      carve_scratch(own, *this);
      need.persistent += own.used_bytes();
      return need;
    }
  };

  /// What a layer keeps of a micro-batch from forward to the gradients of its weights. The first half of backward
  /// replaces what it read for the last time by what the second half reads: `x` by its gradient, where it is this
  /// stage's own, and `middle` by the gradient of the attention's output.
  struct Activations {
    T* x = nullptr;  // [tokens, hidden]: the block's input, the caller's
    T *normed, *middle, *second_in;
    A *rms, *second_rms;
    A *logits, *dlogits;  // [tokens, experts]; of a layer that routes
    A *dnorm, *dsecond_norm;
    std::variant<typename Grouped::Activations, typename Latent::Activations> heads;
  };

  static Plan plan(const Options& o, const DataMap& data, int cp) {
    Plan made;
    made.model = o.model;
    made.streams = data.streams();
    for (int length = 0; length < static_cast<int>(data.lengths().size()); ++length) {
      pleat::ring::Shape shape{
          .batch = made.streams, .tokens = data.stream_tokens(length), .dtype = pleat::dtype_of<T>};
      o.model.has_latents() ? Latent::shape_ring(o.model, shape) : Grouped::shape_ring(o.model, shape);
      if (o.packed) shape.cu_seqlens = {0, shape.tokens};
      pleat::ring::Options options;
      options.transport = o.transport;
      options.layout = pleat::ring::Layout::zigzag;
      made.rings.push_back(pleat::ring::plan(cp, shape, options));
      made.tokens = std::max(made.tokens, made.streams * made.rings.back().max_local_tokens());
    }
    made.placed_bytes = made.rings.front().most_placed_bytes(data.most_documents());
    return made;
  }

  static Activations carve_activations(pleat::Carver& memory, const Plan& p, bool routes) {
    const auto rows = [&] { return memory.take<T>(static_cast<std::size_t>(p.tokens * p.model.hidden)); };
    const auto numbers = [&](std::int64_t count) { return memory.take<A>(static_cast<std::size_t>(count)); };
    Activations a{};
    for (T** wide : {&a.normed, &a.middle, &a.second_in}) *wide = rows();
    for (A** per_row : {&a.rms, &a.second_rms}) *per_row = numbers(p.tokens);
    for (A** logits : {&a.logits, &a.dlogits}) *logits = numbers(routes ? p.tokens * p.model.experts : 0);
    for (A** norm : {&a.dnorm, &a.dsecond_norm}) *norm = numbers(p.model.hidden);
    if (p.model.has_latents()) {
      a.heads = Latent::carve_activations(memory, p.model, p.tokens);
    } else {
      a.heads = Grouped::carve_activations(memory, p.model, p.tokens);
    }
    const std::size_t saved_bytes = p.ring_saved();
    const pleat::Block saved{memory.take_bytes(saved_bytes), saved_bytes};
    std::visit([&](auto& heads) { heads.ring = pleat::ring::Saved{saved}; }, a.heads);
    return a;
  }

  AttentionBlock(Plan p, const pleat::GroupComm<Comm>& cp, const pleat::Memory<Arena>& memory,
                 typename Backend::Stream s)
      : plan_(std::move(p)), heads_(make_heads(plan_.model)) {
    pleat::Carver persistent(memory.persistent), pinned(memory.pinned_host);
    scratch_ = carve_scratch(persistent, plan_);
    for (const pleat::ring::Plan& ring : plan_.rings) {
      const pleat::Footprint need = ring.footprint();
      pleat::Memory<Arena> own = memory;
      own.persistent = {persistent.take_bytes(need.persistent), need.persistent};
      own.pinned_host = {pinned.take_bytes(need.pinned_host), need.pinned_host};
      rings_.push_back(pleat::ring::bind(ring, Executor{}, cp, own, s));
    }
  }

  const Plan& plan() const { return plan_; }

  /// Makes the packing of a micro-batch, and enqueues its way to `memory`; both blocks have plan().placed_bytes and are
  /// in use as long as `batch` is.
  void place(DeviceBatch& batch, pleat::Block staging, pleat::Block memory, typename Backend::Stream s) const {
    const Ring& ring = rings_[static_cast<std::size_t>(batch.host.length)];
    batch.work = ring.plan().documents(batch.host.cu_seqlens);
    batch.placed = ring.place(batch.work, staging, memory, s);
  }

  /// a.x -> a.middle, a.second_in, and a.logits where the layer routes.
  void forward(const Lane<Backend>& lane, const DeviceBatch& batch, const pleat::fsdp::UnitView& w, Activations& a,
               bool routes) {
    auto& kernels = *lane.kernels;
    const auto s = lane.stream();
    const ModelShape& m = plan_.model;
    const std::int64_t rows = batch.rows(), hidden = m.hidden;
    kernels.rms_norm(rows_in(a.x, hidden), weight(w, param::norm), rows_out(a.normed, hidden), a.rms, rows, hidden,
                     m.epsilon, s);
    T* const attended = visit(a, [&](const auto& heads, auto& kept) {
      heads.forward(lane, ring_of(batch), plan_.streams, batch, w, a.normed, kept);
      return kept.attended;
    });
    kernels.linear(rows_in(attended, m.attended()), weight(w, param::output), a.middle, rows, m.attended(), hidden, a.x,
                   s);
    kernels.rms_norm(rows_in(a.middle, hidden), weight(w, param::second_norm), rows_out(a.second_in, hidden),
                     a.second_rms, rows, hidden, m.epsilon, s);
    if (routes)
      kernels.linear(rows_in(a.second_in, hidden), weight(w, param::router), a.logits, rows, hidden, m.experts, nullptr,
                     s);
  }

  /// `d` [rows, hidden]: the gradient of the layer's output. `dsecond` [rows, hidden]: that of second_in from behind
  /// it, used up; a.dlogits that of the logits. Writes `dx`, the gradient of a.x, which may be a.x itself.
  void input_backward(const Lane<Backend>& lane, const DeviceBatch& batch, const pleat::fsdp::UnitView& w,
                      Activations& a, bool routes, const T* d, T* dsecond, T* dx) {
    auto& kernels = *lane.kernels;
    const auto s = lane.stream();
    const ModelShape& m = plan_.model;
    const std::int64_t rows = batch.rows(), hidden = m.hidden;
    if (routes)
      kernels.linear_input_gradient(a.dlogits, weight(w, param::router), dsecond, true, rows, hidden, m.experts, s);
    kernels.rms_norm_backward(rows_in(dsecond, hidden), rows_in(a.middle, hidden), weight(w, param::second_norm),
                              a.second_rms, rows_in(d, hidden), rows_out(a.middle, hidden), a.dsecond_norm, rows,
                              hidden, s);
    visit(a, [&](const auto& heads, auto& kept) {
      const auto& scratch = std::get<typename std::decay_t<decltype(heads)>::Scratch>(scratch_.heads);
      kernels.linear_input_gradient(a.middle, weight(w, param::output), scratch.dattended, false, rows, m.attended(),
                                    hidden, s);
      heads.input_backward(lane, ring_of(batch), plan_.streams, batch, w, scratch, kept, scratch_.dnormed);
    });
    kernels.rms_norm_backward(rows_in(scratch_.dnormed, hidden), rows_in(a.x, hidden), weight(w, param::norm), a.rms,
                              rows_in(a.middle, hidden), rows_out(dx, hidden), a.dnorm, rows, hidden, s);
  }

  void weight_backward(const Lane<Backend>& lane, const DeviceBatch& batch, Gradient& gradient, Activations& a,
                       bool routes) {
    const ModelShape& m = plan_.model;
    const auto product = [&](int p, const auto* d, const T* x, std::int64_t in, std::int64_t out) {
      const auto [dweight, add] = gradient.write(p);
      lane.kernels->linear_weight_gradient(d, rows_in(x, in), dweight.template as<A>(), add, batch.rows(), in, out,
                                           lane.stream());
    };
    visit(a, [&](const auto& heads, const auto& kept) {
      heads.weight_backward(lane, batch, gradient, a.normed, kept);
      product(param::output, a.middle, kept.attended, m.attended(), m.hidden);
    });
    if (routes) product(param::router, a.dlogits, a.second_in, m.hidden, m.experts);
    write_gradient<Executor>(gradient, param::norm, a.dnorm, lane.stream());
    write_gradient<Executor>(gradient, param::second_norm, a.dsecond_norm, lane.stream());
  }

 private:
  /// Of either kind of heads.
  struct param {
    enum : int { norm = attention_param::norm, output = attention_param::output, second_norm, router };
  };
  static_assert(int(param::output) == latent_param::output && int(param::router) == latent_param::router &&
                int(param::router) == attention_param::router && int(param::norm) == latent_param::norm);
  struct Scratch {
    T* dnormed;
    std::variant<typename Grouped::Scratch, typename Latent::Scratch> heads;
  };
  static Scratch carve_scratch(pleat::Carver& memory, const Plan& p) {
    Scratch scratch{};
    scratch.dnormed = memory.take<T>(static_cast<std::size_t>(p.tokens * p.model.hidden));
    if (p.model.has_latents()) {
      scratch.heads = Latent::carve_scratch(memory, p.model, p.tokens);
    } else {
      scratch.heads = Grouped::carve_scratch(memory, p.model, p.tokens);
    }
    return scratch;
  }
  static std::variant<Grouped, Latent> make_heads(const ModelShape& m) {
    if (m.has_latents()) return Latent(m);
    return Grouped(m);
  }
  static const T* weight(const pleat::fsdp::UnitView& w, int p) { return w[p].template as<T>(); }
  Ring& ring_of(const DeviceBatch& batch) { return rings_[static_cast<std::size_t>(batch.host.length)]; }
  template <class Kept, class F>
  auto visit(Kept& a, F f) {
    return std::visit(
        [&](const auto& heads) {
          return f(heads, std::get<typename std::decay_t<decltype(heads)>::Activations>(a.heads));
        },
        heads_);
  }

  Plan plan_;
  std::variant<Grouped, Latent> heads_;
  Scratch scratch_{};
  std::vector<Ring> rings_;  // of each length
};

}  // namespace train_moe
