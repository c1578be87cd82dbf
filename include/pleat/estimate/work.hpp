// What a step computes and sends on one rank: FLOPs of each pass, bytes of each use, and how long they take at least.
#pragma once

#include <pleat/estimate/replay.hpp>

namespace pleat::inline v0::estimate {

/// Bytes that a rank sends, by the link that they take; it receives as many.
struct Bytes {
  double nvlink = 0;
  double network = 0;

  /// Over both links.
  double sum() const { return nvlink + network; }
  /// The longer of what both links take, at their ceilings.
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
  Seconds compute = {};
  Seconds attention = {};  ///< the part of `compute` behind which the ring's transfers go
  Bytes ring = {}, experts = {};

  friend Pass operator+(const Pass& a, const Pass& b) {
    return {a.compute + b.compute, a.attention + b.attention, a.ring + b.ring, a.experts + b.experts};
  }
  friend Pass operator*(double x, const Pass& a) { return {x * a.compute, x * a.attention, x * a.ring, x * a.experts}; }
  /// Alone: rows must arrive before experts compute and leave after; the ring's blocks arrive while others are used.
  Seconds seconds(const Machine& m) const {
    const double rows = experts.seconds(m), blocks = ring.seconds(m);
    const auto alone = [&](double all, double hides, double wire) {
      return all + wire + std::max(0.0, blocks - hides);
    };
    return {alone(compute.bound, attention.bound, rows),
            alone(compute.expected, attention.expected, rows * m.nvlink / m.rates.wire)};
  }
};
/// The bound of two passes side by side: what the one sends is behind what the other computes.
inline double overlapped_seconds(const Pass& a, const Pass& b, const Machine& m) {
  const Pass both = a + b;
  return std::max(both.compute.bound, (both.ring + both.experts).seconds(m));
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

/// A unit, and what is computed with it for a micro-batch.
struct UnitWork {
  UnitSize unit;
  Passes passes;
};

/// Counts the work of layers on the rank of a stage that has most.
class LayerWork {
 public:
  LayerWork(const Job& job, const RuntimeMesh& mesh, const LayerPlans& plans)
      : job_(job), m_(job.model), mesh_(mesh), links_(mesh, job.domain), plans_(plans), attention_(attention()) {}

  /// Of the units of a chunk, in forward order; see units_of_layer.
  std::vector<UnitWork> units(const Chunk& chunk, const UnitSizes& sizes) const {
    std::vector<UnitWork> all;
    if (chunk.has_embedding) all.push_back({sizes.embedding, embedding(sizes.embedding.elems)});
    for (const auto& [kind, layers] :
         {std::pair{LayerKind::dense, chunk.dense_layers}, {LayerKind::moe, chunk.moe_layers}}) {
      const std::vector<UnitWork> one = layers > 0 ? layer(kind, sizes) : std::vector<UnitWork>{};
      for (int i = 0; i < layers; ++i) all.insert(all.end(), one.begin(), one.end());
    }
    if (chunk.has_head) all.push_back({sizes.head, head()});
    return all;
  }

  /// Of one micro-batch, on its way between two stages.
  Bytes boundary() const {
    return links_.to_next(GroupUse::pp, tokens() * m_.hidden * static_cast<double>(size_bytes(job_.compute)));
  }

 private:
  std::vector<UnitWork> layer(LayerKind kind, const UnitSizes& sizes) const {
    const std::vector<UnitSize>& size = kind == LayerKind::dense ? sizes.dense_layer : sizes.moe_layer;
    std::vector<UnitWork> all{{size.front(), attention_}};
    if (kind == LayerKind::moe) {
      linear(all.front().passes, m_.hidden, m_.experts);  // the router
      all.push_back({size[1], experts()});
    }
    if (const std::int64_t inner = m_.mlp_inner(kind); inner > 0) {
      all.push_back({size.back(), mlp(static_cast<double>(inner))});
    }
    return all;
  }
  /// All of it at the beginning of the backward pass, since the loss has its scores and their gradient at one time.
  Passes head() const {
    Passes one;
    linear(one, m_.hidden, m_.vocabulary);
    Pass all = one.forward + one.input_gradient + one.weight_gradient;
    rows(all, 2.0 * m_.hidden);
    rows(all, 3.0 * m_.vocabulary);  // scores are read twice, and become their gradient
    rows(all, 3.0 * m_.hidden);
    return {{}, all, {}};
  }
  /// Rows that are looked up; their gradients are added to a matrix of `elems` that was zero.
  Passes embedding(double elems) const {
    Passes passes;
    rows(passes.forward, 2.0 * m_.hidden);
    rows(passes.weight_gradient, 4.0 * m_.hidden);
    passes.weight_gradient.compute.expected += elems * static_cast<double>(size_bytes(job_.gradient)) / rates().shards;
    return passes;
  }
  double tokens() const { return static_cast<double>(plans_.tokens()); }
  double width() const { return static_cast<double>(size_bytes(job_.compute)); }
  const Rates& rates() const { return job_.machine.rates; }

  /// A kernel that reads and writes so many numbers of each token.
  void rows(Pass& pass, double numbers, double rate = 0) const {
    pass.compute.expected += tokens() * numbers * width() / (rate > 0 ? rate : rates().rows) + rates().kernel;
  }
  /// A product of [m, k] and [k, n].
  Seconds product(double m, double n, double k) const {
    return {2 * m * n * k / job_.machine.gemm, rates().product_seconds(m, n, k)};
  }
  /// All tokens times a matrix [in, out], and the gradients of both.
  void linear(Passes& passes, double in, double out) const {
    passes.forward.compute = passes.forward.compute + product(tokens(), out, in);
    passes.input_gradient.compute = passes.input_gradient.compute + product(tokens(), in, out);
    passes.weight_gradient.compute = passes.weight_gradient.compute + product(out, in, tokens());
  }

  Passes mlp(double inner) const {
    Passes passes;
    for (int i = 0; i < 3; ++i) linear(passes, m_.hidden, inner);
    rows(passes.forward, 3 * inner);
    rows(passes.input_gradient, 6 * inner);
    return passes;
  }

  Passes attention() const {
    const auto hidden = static_cast<double>(m_.hidden), queries = static_cast<double>(m_.queries()),
               attended = static_cast<double>(m_.attended()), keys = static_cast<double>(m_.keys()),
               values = static_cast<double>(m_.values());
    Passes passes;
    Pass &forward = passes.forward, &backward = passes.input_gradient;
    for (int i = 0; i < 2; ++i) {  // norms
      rows(forward, 2 * hidden);
      rows(backward, 4 * hidden);
      rows(backward, 2 * hidden, rates().row_sums);
    }
    linear(passes, hidden, queries);
    linear(passes, attended, hidden);
    if (m_.has_latent()) {
      linear(passes, hidden, m_.latent_row());
      expand_latents(passes);
    } else {
      linear(passes, hidden, keys);
      linear(passes, hidden, values);
      rows(backward, 2 * values);
    }
    if (m_.qk_norm) {
      for (const double heads : {queries, keys}) {  // norm and rotation
        rows(forward, 2 * heads), rows(forward, 2 * heads);
        rows(backward, 2 * heads), rows(backward, 3 * heads), rows(backward, 2 * heads, rates().row_sums);
      }
    }
    const ring::Shape& shape = plans_.ring.shape;
    const std::vector<double> all = pairs_of_ranks(plans_.ring.spans, shape.cu_seqlens, plans_.ring.causal);
    const double pairs = static_cast<double>(shape.batch) * m_.heads * *std::max_element(all.begin(), all.end());
    const double forward_flops = 2 * pairs * (m_.qk_dim + m_.v_dim),
                 backward_flops = 2 * pairs * (3 * m_.qk_dim + 2 * m_.v_dim);
    const Machine& machine = job_.machine;
    const AttentionRates& rates_of = m_.qk_dim > 128 ? rates().wide_attention : rates().attention;
    const double local_keys = tokens() * m_.kv_heads;
    add_attention(forward, {forward_flops / machine.attention_forward,
                            forward_flops / rates_of.of_forward(static_cast<double>(job_.sequence)) + rates().kernel});
    add_attention(backward, {backward_flops / machine.attention_backward,
                             backward_flops / rates_of.of_backward(local_keys) + rates().kernel});
    rows(backward, 2 * attended);                   // of each query, the product of output and its gradient
    rows(backward, 2 * queries);                    // zeros for sums in fp32
    rows(backward, 3 * (queries + keys + values));  // from sums in fp32
    // Keys and values, or latents, travel once each way round; their gradients as sums.
    const double row = m_.has_latent() ? m_.latent_row() : keys + values;
    const double elements = tokens() * row;
    const DType type = shape.dtype;
    passes.forward.ring = ring(ring_steps() * elements * static_cast<double>(size_bytes(type)));
    passes.input_gradient.ring =
        passes.forward.ring + ring((mesh_.cp - 1) * elements * static_cast<double>(size_bytes(accumulator(type))));
    return passes;
  }
  static void add_attention(Pass& pass, const Seconds& seconds) {
    pass.compute = pass.compute + seconds;
    pass.attention = pass.attention + seconds;
  }
  /// Keys and values of all heads from the latents; again in backward, and their gradients.
  void expand_latents(Passes& passes) const {
    const double made = static_cast<double>(m_.heads) * (m_.qk_dim - m_.rope_dim + m_.v_dim);
    linear(passes, m_.latent, made);
    rows(passes.forward, 2 * made);
    rows(passes.input_gradient, 6 * made);
    passes.input_gradient.compute.expected += product(tokens(), made, m_.latent).expected;
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

  /// Under balanced routing.
  Passes experts() const {
    const double hidden = m_.hidden, inner = m_.inner, k = m_.top_k;
    Passes passes;
    Pass &forward = passes.forward, &backward = passes.input_gradient;
    const double of_rows = hidden * inner * k;  // multiply-adds of a token with one matrix
    const double weights = hidden * inner * m_.experts / mesh_.ep * static_cast<double>(size_bytes(job_.gradient));
    // `matrices` products whose results are so many numbers of each token's row, or bytes.
    const auto grouped = [&](Pass& pass, int matrices, double numbers, double bytes = 0) {
      const double flops = 2 * tokens() * of_rows * matrices;
      bytes += tokens() * k * numbers * width();
      pass.compute = pass.compute + Seconds{flops / job_.machine.grouped,
                                            flops / rates().product + bytes / rates().stores + rates().kernel};
    };
    grouped(forward, 2, 3 * inner);
    grouped(forward, 1, hidden);
    grouped(backward, 1, 8 * inner);  // gate and up are read, and their gradients and the activation written
    grouped(backward, 2, hidden);
    for (int i = 0; i < 3; ++i) grouped(passes.weight_gradient, 1, 0, weights);
    const double rate = rates().expert_rows;
    rows(forward, 4.0 * m_.experts);                                    // probabilities and choices, in fp32
    forward.compute.expected += 10 * rates().kernel + tokens() * 4e-9;  // plans, headers, losses
    rows(forward, (1 + k) * hidden, rate);                              // placed
    rows(forward, (1 + k) * hidden, rate);                              // summed
    rows(forward, 3 * hidden);
    rows(backward, (2 * k + 1) * hidden, rate);
    rows(backward, (1 + k) * hidden, rate);
    rows(backward, 2 * hidden);
    rows(backward, 10.0 * m_.experts);
    const moe::DispatchPlan& plan = plans_.experts.dispatch;
    const double sent = tokens() * (mesh_.ep - 1) * share_of_rank(m_.experts, mesh_.ep, m_.top_k);
    const auto rows_of = [&](moe::RowKind kind) {
      return links_.to_all(GroupUse::ep, sent * static_cast<double>(plan.format(kind).row_bytes));
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
  Passes attention_;  // of every layer; last, for it asks the others
};

}  // namespace pleat::inline v0::estimate
