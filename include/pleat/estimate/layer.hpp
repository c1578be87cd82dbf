// What one layer keeps of a micro-batch and what its operations work in, from the plans that would be bound.
#pragma once

#include <cmath>
#include <span>

#include <pleat/attention/ring_plan.hpp>
#include <pleat/estimate/job.hpp>
#include <pleat/mesh/communicator_plan.hpp>
#include <pleat/moe/layer.hpp>
#include <pleat/moe/losses.hpp>

namespace pleat::inline v0::estimate {

/// Peer access where the group shares an NVLink domain, else collectives.
inline Transport transport_of(const RuntimeMesh& mesh, int domain, std::initializer_list<GroupUse> uses) {
  const bool fits = std::all_of(uses.begin(), uses.end(), [&](GroupUse use) {
    return fits_domain(group_shape(mesh, use), mesh.world_size, domain);
  });
  return fits ? Transport::peer : Transport::collective;
}

/// The plans that all layers of a rank share: every layer is run by the same operations.
struct LayerPlans {
  ring::Plan ring;
  moe::LayerPlan experts;
  moe::LoadBalancePlan balance;

  /// Tokens of a micro-batch on this rank.
  std::int64_t tokens() const { return ring.shape.batch * ring.max_local_tokens(); }
};

/// The plans that a trainer of the job would bind on the mesh: of attention, of a layer of experts.
inline ring::Plan plan_ring(const Job& job, const RuntimeMesh& mesh) {
  const Model& m = job.model;
  return ring::plan(mesh.cp,
                    {.batch = job.micro_batch,
                     .tokens = job.sequence,
                     .q_heads = m.heads,
                     .kv_heads = m.kv_heads,
                     .qk_dim = m.qk_dim,
                     .v_dim = m.v_dim,
                     .latent_dim = m.latent_row(),
                     .dtype = job.compute},
                    {.causal = true, .transport = transport_of(mesh, job.domain, {GroupUse::cp})});
}
inline moe::LayerPlan plan_experts(const Job& job, const RuntimeMesh& mesh) {
  const Model& m = job.model;
  const auto planned = [&](const moe::DispatchOptions& dispatch) {
    return moe::plan(mesh.ep,
                     moe::LayerShape{.max_tokens = job.local_tokens(mesh),
                                     .hidden = m.hidden,
                                     .inner = m.inner,
                                     .experts = m.experts,
                                     .k = m.top_k,
                                     .dtype = job.compute},
                     moe::LayerOptions{.router = {}, .dispatch = dispatch, .experts = {}});
  };
  moe::DispatchOptions options{.transport = transport_of(mesh, job.domain, {GroupUse::ep})};
  options.row_alignment = job.row_alignment;
  const moe::LayerPlan worst_case = planned(options);
  if (job.capacity == 0) return worst_case;
  const double balanced = static_cast<double>(job.local_tokens(mesh)) * m.top_k;
  options.overflow = moe::Overflow::error;
  options.max_rows = std::min(static_cast<std::int64_t>(job.capacity * balanced) + 1, worst_case.dispatch.worst_rows());
  return planned(options);
}
/// Errors: those of the plans: A01, A02, E02, E07, M06, M07.
inline LayerPlans plan_layer(const Job& job, const RuntimeMesh& mesh) {
  const bool by_sequence = job.model.balances_sequences;
  return {plan_ring(job, mesh), plan_experts(job, mesh),
          moe::plan(by_sequence ? mesh.cp : mesh.stage_size,
                    moe::LoadBalanceShape{.experts = job.model.experts,
                                          .k = job.model.top_k,
                                          .dtype = accumulator(job.compute),
                                          .max_sequences = job.micro_batch},
                    {.scope = by_sequence ? moe::BalanceScope::sequence : moe::BalanceScope::global_batch})};
}

/// The arrays of a rank's tokens as a trainer keeps that computes nothing twice. source: examples/train_moe.
class LayerArrays {
 public:
  LayerArrays(const Job& job, const LayerPlans& plans) : m_(job.model), dtype_(job.compute), plans_(plans) {}

  /// What a layer's backward needs of its forward; `owns_input`: whether its input is an array of its own, and not one
  /// that a pipeline brings.
  std::size_t saved_bytes(LayerKind kind, bool owns_input) const {
    Carver memory;
    for (int i = owns_input ? 0 : 1; i < 4; ++i) rows(memory, m_.hidden);  // input, normed, middle, second norm's
    for (int i = 0; i < 2; ++i) {
      per_token(memory, 1);         // of each norm
      gradient(memory, m_.hidden);  // of its weight
    }
    m_.has_latent() ? latent_heads(memory) : grouped_heads(memory);
    memory.take_bytes(plans_.ring.footprint().saved);
    if (kind == LayerKind::moe) {
      for (int i = 0; i < 2; ++i) per_token(memory, m_.experts);  // logits and their gradient
      memory.take_bytes(plans_.experts.footprint().saved);
      gradient(memory, plans_.balance.rows(plans_.balance.shape.max_sequences) * m_.experts);  // of probabilities
    }
    for (int i = 0; i < 3; ++i) rows(memory, m_.mlp_inner(kind));  // gate, up, their product
    return memory.used_bytes();
  }
  /// What the rank with the head keeps of a micro-batch beside its layers: the output of the last one.
  std::size_t last_bytes() const {
    Carver memory;
    rows(memory, m_.hidden);
    return memory.used_bytes();
  }
  /// What weights' gradients that are put off need of a layer beside what is saved.
  std::size_t deferred_bytes(LayerKind kind) const {
    return kind == LayerKind::moe ? plans_.experts.deferred_bytes() : 0;
  }

  /// What attention works in beside the ring's own scratch: gradients of one layer's arrays.
  std::size_t attention_bytes() const {
    Carver memory;
    rows(memory, m_.hidden);
    rows(memory, m_.attended());
    rows(memory, m_.queries());
    if (m_.has_latent()) {
      rows(memory, m_.latent_row());
    } else {
      rows(memory, m_.keys());
      rows(memory, m_.values());
    }
    return memory.used_bytes();
  }
  /// What each lane of an overlapped pipeline works in: the gradient of the second norm's output.
  std::size_t lane_bytes() const { return last_bytes(); }
  /// What the head works in: its norm and that one's gradient, and the scores of some tokens at a time.
  std::size_t head_bytes() const {
    constexpr std::int64_t most_tokens = 4096;
    Carver memory;
    rows(memory, m_.hidden);
    per_token(memory, 1);
    memory.take_bytes(static_cast<std::size_t>(std::min(plans_.tokens(), most_tokens) * m_.vocabulary) *
                      size_bytes(dtype_));
    memory.take_bytes(static_cast<std::size_t>(m_.hidden) * size_bytes(accumulator(dtype_)));
    return memory.used_bytes();
  }
  /// What a micro-batch of text takes: tokens, labels, positions, and the work of its packing.
  std::size_t batch_bytes() const {
    Carver memory;
    for (int i = 0; i < 3; ++i) memory.take<std::int32_t>(static_cast<std::size_t>(plans_.tokens()));
    memory.take_bytes(plans_.ring.most_placed_bytes(1));
    return memory.used_bytes();
  }

 private:
  void rows(Carver& memory, std::int64_t width) const {
    memory.take_bytes(static_cast<std::size_t>(plans_.tokens() * width) * size_bytes(dtype_));
  }
  void gradient(Carver& memory, std::int64_t elems) const {
    memory.take_bytes(static_cast<std::size_t>(elems) * size_bytes(accumulator(dtype_)));
  }
  void per_token(Carver& memory, std::int64_t width) const { gradient(memory, plans_.tokens() * width); }

  void grouped_heads(Carver& memory) const {
    rows(memory, m_.attended());
    const int copies = m_.qk_norm ? 2 : 1;  // before their norm, and after
    for (int i = 0; i < copies; ++i) {
      rows(memory, m_.queries());
      rows(memory, m_.keys());
    }
    rows(memory, m_.values());
    if (!m_.qk_norm) return;
    for (const int heads : {m_.heads, m_.kv_heads}) {
      per_token(memory, heads);
      gradient(memory, m_.qk_dim);
    }
  }
  void latent_heads(Carver& memory) const {
    rows(memory, m_.attended());
    rows(memory, m_.queries());
    for (int i = 0; i < 2; ++i) rows(memory, m_.latent_row());  // as computed; normed and rotated, as it travels
    per_token(memory, 1);
    gradient(memory, m_.latent);  // of the norm, then of what makes keys and values
    gradient(memory, std::int64_t{m_.heads} * (m_.qk_dim - m_.rope_dim) * m_.latent);
    gradient(memory, std::int64_t{m_.heads} * m_.v_dim * m_.latent);
  }

  const Model& m_;
  DType dtype_;
  const LayerPlans& plans_;
};

}  // namespace pleat::inline v0::estimate
