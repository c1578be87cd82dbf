// What a step computes and sends on one rank: FLOPs of each pass, bytes of each use, and how long they take at least.
#pragma once

#include <pleat/estimate/replay.hpp>

namespace pleat::inline v0::estimate {

/// Bytes that a rank sends, by the link that they take; it receives as many.
struct Bytes {
  double nvlink = 0;
  double network = 0;

  double sum() const { return nvlink + network; }
  double seconds(const Machine& m) const { return std::max(nvlink / m.nvlink, network / m.network); }
  friend Bytes operator+(const Bytes& a, const Bytes& b) { return {a.nvlink + b.nvlink, a.network + b.network}; }
  friend Bytes operator-(const Bytes& a, const Bytes& b) { return {a.nvlink - b.nvlink, a.network - b.network}; }
  friend Bytes operator*(double x, const Bytes& a) { return {x * a.nvlink, x * a.network}; }
};

/// The links of one world.
class Links {
 public:
  Links(const RuntimeMesh& mesh, int domain) : mesh_(mesh), domain_(domain) {}

  /// Bytes that go in equal parts to all other ranks of a group: of one that reaches into several domains, those of the
  /// own domain share NVLink.
  Bytes to_all(GroupUse use, double bytes) const {
    const GroupShape shape = group_shape(mesh_, use);
    if (shape.size() == 1) return {};
    const int domains = domains_spanned(shape, mesh_.world_size, domain_);
    const double inside = std::max(1.0, static_cast<double>(shape.size()) / domains);
    const double share = (inside - 1) / (shape.size() - 1);
    return {bytes * share, bytes * (1 - share)};
  }
  /// Bytes that go to the next rank of a group: of the rank whose neighbour is in another domain, if there is one.
  Bytes to_next(GroupUse use, double bytes) const {
    const GroupShape shape = group_shape(mesh_, use);
    if (shape.size() == 1) return {};
    return fits_domain(shape, mesh_.world_size, domain_) ? Bytes{bytes, 0} : Bytes{0, bytes};
  }

 private:
  RuntimeMesh mesh_;
  int domain_;
};

/// The chance that a token has one of its k experts on a certain rank, when all choices are as likely:
/// 1 - C(E - E/ep, k) / C(E, k).
inline double share_of_rank(int experts, int ep, int k) {
  const int elsewhere = experts - experts / ep;
  double none = 1;
  for (int i = 0; i < k; ++i) none *= static_cast<double>(std::max(0, elsewhere - i)) / (experts - i);
  return 1 - none;
}

/// One pass of one micro-batch over layers.
struct Pass {
  double compute = 0;    ///< seconds
  double attention = 0;  ///< the part of `compute` behind which the ring's transfers go
  Bytes ring = {}, experts = {};

  friend Pass operator+(const Pass& a, const Pass& b) {
    return {a.compute + b.compute, a.attention + b.attention, a.ring + b.ring, a.experts + b.experts};
  }
  friend Pass operator*(double x, const Pass& a) { return {x * a.compute, x * a.attention, x * a.ring, x * a.experts}; }
  /// Alone: rows must arrive before experts compute and leave after; the ring's blocks arrive while others are used.
  double seconds(const Machine& m) const {
    return compute + experts.seconds(m) + std::max(0.0, ring.seconds(m) - attention);
  }
};
/// Two passes side by side: what the one sends is behind what the other computes.
inline double overlapped_seconds(const Pass& a, const Pass& b, const Machine& m) {
  const Pass both = a + b;
  return std::max(both.compute, (both.ring + both.experts).seconds(m));
}

/// The passes of one layer, or of a chunk.
struct Passes {
  Pass forward, input_gradient, weight_gradient;
  friend Passes operator+(const Passes& a, const Passes& b) {
    return {a.forward + b.forward, a.input_gradient + b.input_gradient, a.weight_gradient + b.weight_gradient};
  }
  friend Passes operator*(double x, const Passes& a) {
    return {x * a.forward, x * a.input_gradient, x * a.weight_gradient};
  }
};

/// Counts the work of layers on the rank of a stage that has most.
class LayerWork {
 public:
  LayerWork(const Job& job, const RuntimeMesh& mesh, const LayerPlans& plans)
      : job_(job), m_(job.model), mesh_(mesh), links_(mesh, job.domain), plans_(plans) {}

  Passes layer(LayerKind kind) const {
    const Passes own = attention();
    const Passes mlp = products(mlp_elems(static_cast<double>(m_.mlp_inner(kind))), job_.machine.gemm);
    return kind == LayerKind::dense ? own + mlp : own + mlp + experts();
  }
  /// All of it at the beginning of the backward pass, since the loss has its scores and their gradient at one time.
  Passes head() const {
    const Passes one = products(static_cast<double>(m_.hidden) * m_.vocabulary, job_.machine.gemm);
    return {{}, one.forward + one.input_gradient + one.weight_gradient, {}};
  }
  Passes chunk(const Chunk& chunk) const {
    Passes all;
    if (chunk.dense_layers > 0) all = all + static_cast<double>(chunk.dense_layers) * layer(LayerKind::dense);
    if (chunk.moe_layers > 0) all = all + static_cast<double>(chunk.moe_layers) * layer(LayerKind::moe);
    return chunk.has_head ? all + head() : all;
  }

  /// Of one micro-batch, on its way between two stages.
  Bytes boundary() const {
    return links_.to_next(GroupUse::pp, tokens() * m_.hidden * static_cast<double>(size_bytes(job_.compute)));
  }

 private:
  double tokens() const { return static_cast<double>(plans_.tokens()); }
  double mlp_elems(double inner) const { return 3 * static_cast<double>(m_.hidden) * inner; }
  /// Products of all tokens with matrices of so many elements: as much again for each gradient.
  Passes products(double elems, double rate) const {
    const Pass one{.compute = 2 * tokens() * elems / rate};
    return {one, one, one};
  }

  Passes attention() const {
    const double hidden = m_.hidden;
    double elems = hidden * static_cast<double>(m_.queries() + m_.attended());
    if (m_.has_latent()) {
      elems +=
          hidden * m_.latent_row() + static_cast<double>(m_.latent) * m_.heads * (m_.qk_dim - m_.rope_dim + m_.v_dim);
    } else {
      elems += hidden * static_cast<double>(m_.keys() + m_.values());
    }
    Passes passes = products(elems, job_.machine.gemm);
    const ring::Shape& shape = plans_.ring.shape;
    const std::vector<double> all = pairs_of_ranks(plans_.ring.spans, shape.cu_seqlens, plans_.ring.causal);
    const double pairs = static_cast<double>(shape.batch) * m_.heads * *std::max_element(all.begin(), all.end());
    add_attention(passes.forward, 2 * pairs * (m_.qk_dim + m_.v_dim) / job_.machine.attention_forward);
    add_attention(passes.input_gradient, 2 * pairs * (3 * m_.qk_dim + 2 * m_.v_dim) / job_.machine.attention_backward);
    // Keys and values, or latents, travel once each way round; their gradients as sums.
    const double row = m_.has_latent() ? m_.latent_row() : static_cast<double>(m_.keys() + m_.values());
    const double elements = tokens() * row;
    const DType type = shape.dtype;
    passes.forward.ring = ring(ring_steps() * elements * static_cast<double>(size_bytes(type)));
    passes.input_gradient.ring =
        passes.forward.ring + ring((mesh_.cp - 1) * elements * static_cast<double>(size_bytes(accumulator(type))));
    return passes;
  }
  static void add_attention(Pass& pass, double seconds) {
    pass.compute += seconds;
    pass.attention += seconds;
  }
  /// Blocks that a rank is sent: with peer access only the rows that it reads.
  double ring_steps() const {
    if (plans_.ring.transport == Transport::collective || mesh_.cp == 1) return mesh_.cp - 1;
    double most = 0;
    for (const int rank : {0, mesh_.cp / 2, mesh_.cp - 1}) {  // at the ends of the sequence, and between
      double rows = 0;
      for (int step = 1; step < mesh_.cp; ++step) {
        rows += static_cast<double>(plans_.ring.work.travelling_rows(rank, step));
      }
      most = std::max(most, rows / static_cast<double>(plans_.ring.max_local_tokens()));
    }
    return most;
  }
  Bytes ring(double bytes) const {
    return plans_.ring.transport == Transport::peer ? Bytes{bytes, 0} : links_.to_next(GroupUse::cp, bytes);
  }

  /// The router, and its experts under balanced routing.
  Passes experts() const {
    const double router = static_cast<double>(m_.hidden) * m_.experts;
    Passes passes =
        products(router, job_.machine.gemm) + products(m_.top_k * mlp_elems(m_.inner), job_.machine.grouped);
    const moe::DispatchPlan& plan = plans_.experts.dispatch;
    const double rows = tokens() * (mesh_.ep - 1) * share_of_rank(m_.experts, mesh_.ep, m_.top_k);
    const auto rows_of = [&](moe::RowKind kind) {
      return links_.to_all(GroupUse::ep, rows * static_cast<double>(plan.format(kind).row_bytes));
    };
    passes.forward.experts = rows_of(moe::RowKind::token) + rows_of(moe::RowKind::result);
    passes.input_gradient.experts = rows_of(moe::RowKind::gradient) + rows_of(moe::RowKind::token_gradient);
    return passes;
  }

  const Job& job_;
  const Model& m_;
  RuntimeMesh mesh_;
  Links links_;
  const LayerPlans& plans_;
};

}  // namespace pleat::inline v0::estimate
