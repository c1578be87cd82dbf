// The expert half of a layer: route, dispatch, experts, combine, and the load-balance loss.
#pragma once

#include <memory>
#include <optional>

#include <pleat/comm.hpp>
#include <pleat/fsdp.hpp>
#include <pleat/moe.hpp>

#include "data.hpp"
#include "ops.hpp"
#include "options.hpp"
#include "units.hpp"

namespace train_moe {

/// Sees which experts the tokens of a layer take, and may decide it: how a reference follows a mesh's choice at ties.
class RoutingWatch {
 public:
  virtual ~RoutingWatch() = default;
  /// The experts [tokens, top_k] that the tokens shall take, or null for the router's own choice.
  /// `logits` [tokens, experts] are of the model's accumulator.
  virtual const std::int32_t* decide(int layer, const MicroBatch& batch, const pleat::TensorRef& logits) = 0;
  /// The experts [tokens, top_k] that they took.
  virtual void observe(int layer, const MicroBatch& batch, const std::int32_t* ids) = 0;
};

template <class Backend, class T>
class ExpertBlock {
 public:
  using A = pleat::accumulator_t<T>;
  using Comm = typename Backend::Comm;
  using Arena = typename Backend::Arena;
  using Executor = typename Backend::Executor;
  using Streams = pleat::Streams<typename Comm::stream_type>;
  using Gradient = pleat::fsdp::GradientView<Executor>;
  using Layer = pleat::moe::Layer<Executor, Comm, Arena>;
  using Balance = pleat::moe::LoadBalance<Executor, Comm>;

  struct Plan {
    ModelShape model;
    std::int64_t sequences = 0;  // of a micro-batch on this rank
    std::int64_t tokens = 0;
    LoadBalance balance{};
    pleat::moe::LayerPlan layer;
    pleat::moe::LoadBalancePlan losses;  // of each layer

    pleat::Footprint footprint() const {
      pleat::Footprint need = max_scratch(layer.footprint(), losses.footprint());
      need.persistent =
          layer.footprint().persistent + static_cast<std::size_t>(model.layers) * losses.footprint().persistent;
      return need;
    }
  };

  /// What a layer keeps of a micro-batch for its backward.
  struct Activations {
    std::unique_ptr<pleat::moe::LayerSaved> saved;
    A* dprobs = nullptr;  // [balance rows, experts], of the load-balance loss
  };

  static Plan plan(const Options& o, std::int64_t sequences, std::int64_t tokens, int ep, int balance_ranks) {
    const ModelShape& m = o.model;
    const auto scope = o.balance == LoadBalance::sequence      ? pleat::moe::BalanceScope::sequence
                       : o.balance == LoadBalance::micro_batch ? pleat::moe::BalanceScope::micro_batch
                                                               : pleat::moe::BalanceScope::global_batch;
    return {m,
            sequences,
            tokens,
            o.balance,
            pleat::moe::plan(
                ep,
                pleat::moe::LayerShape{.max_tokens = tokens,
                                       .hidden = m.hidden,
                                       .inner = m.inner,
                                       .experts = m.experts,
                                       .k = m.top_k,
                                       .dtype = pleat::dtype_of<T>},
                pleat::moe::LayerOptions{.router = {}, .dispatch = {.transport = o.transport, .row_alignment = 1}}),
            pleat::moe::plan(
                balance_ranks,
                pleat::moe::LoadBalanceShape{
                    .experts = m.experts, .k = m.top_k, .dtype = pleat::dtype_of<A>, .max_sequences = sequences},
                {.alpha = o.balance_alpha, .scope = scope})};
  }

  static Activations carve_activations(pleat::Carver& memory, const Plan& p) {
    const std::size_t saved_bytes = p.layer.footprint().saved;
    const pleat::Block saved{memory.take_bytes(saved_bytes), saved_bytes};
    Activations a;
    if (saved.data != nullptr) a.saved = std::make_unique<pleat::moe::LayerSaved>(p.layer, saved);
    a.dprobs = memory.take<A>(static_cast<std::size_t>(p.losses.rows(p.sequences) * p.model.experts));
    return a;
  }

  /// `counted_over`: the ranks whose tokens the load-balance loss counts together.
  ExpertBlock(Plan p, pleat::GroupComm<Comm> ep, pleat::GroupComm<Comm> counted_over, pleat::Memory<Arena> memory)
      : plan_(std::move(p)) {
    pleat::Carver persistent(memory.persistent);
    const auto own = [&](std::size_t bytes) {
      pleat::Memory<Arena> part = memory;
      part.persistent = {persistent.take_bytes(bytes), bytes};
      return part;
    };
    layer_.emplace(pleat::moe::bind(plan_.layer, Executor{}, ep, own(plan_.layer.footprint().persistent)));
    for (int i = 0; i < plan_.model.layers; ++i) {
      balances_.push_back(
          pleat::moe::bind(plan_.losses, Executor{}, counted_over, own(plan_.losses.footprint().persistent)));
    }
  }

  const Plan& plan() const { return plan_; }

  /// out [tokens, hidden] = middle + experts(expert_in). `watch` may be null. `*balance` += this rank's part of the
  /// layer's load-balance loss.
  void forward(Streams streams, int layer, const MicroBatch& batch, const pleat::moe::StepTokens& step_tokens,
               const pleat::fsdp::UnitView& w, const T* middle, T* expert_in, A* logits, Activations& a, T* out,
               double* balance, RoutingWatch* watch) {
    const pleat::TensorRef scores = matrix(logits, plan_.model.experts);
    const std::int32_t* ids = watch == nullptr ? nullptr : watch->decide(layer, batch, scores);
    typename Layer::Choice choice;
    if (ids != nullptr) choice.ids = matrix(const_cast<std::int32_t*>(ids), plan_.model.top_k);
    layer_->forward(streams, matrix(expert_in, plan_.model.hidden), scores, weights(w), *a.saved,
                    matrix(out, plan_.model.hidden), choice);
    if (watch != nullptr) watch->observe(layer, batch, a.saved->ids.template as<std::int32_t>());
    if (plan_.balance != LoadBalance::none) {
      balances_[static_cast<std::size_t>(layer)].forward(streams, a.saved->ids, a.saved->probs, plan_.sequences,
                                                         &step_tokens, dprobs(a), Backend::tensor(balance, {1}));
    }
    ops<typename Backend::Device>::add(out, middle, plan_.tokens * plan_.model.hidden, streams.compute);
  }

  /// `d` [tokens, hidden]: the gradient of `out`, which also passes on to `middle` unchanged. Writes the gradients of
  /// the experts' input, of the logits, and of the experts' parameters.
  void backward(Streams streams, const T* d, const pleat::fsdp::UnitView& w, Gradient& gradient, A* logits,
                Activations& a, T* dexpert_in, A* dlogits) {
    namespace param = expert_param;
    const auto gate = gradient.write(param::gate);
    const auto up = gradient.write(param::up);
    const auto down = gradient.write(param::down);
    const pleat::TensorRef none;
    layer_->backward(streams, matrix(const_cast<T*>(d), plan_.model.hidden), matrix(logits, plan_.model.experts),
                     weights(w), plan_.balance == LoadBalance::none ? none : dprobs(a), *a.saved,
                     matrix(dexpert_in, plan_.model.hidden), matrix(dlogits, plan_.model.experts),
                     {gate.tensor, up.tensor, down.tensor}, gate.accumulate);
  }

  /// See moe::Layer: what the step's reduction reads, and the error of a rank that failed.
  std::vector<const std::int64_t*> status_words() const { return layer_->status_words(); }
  void check(Streams streams) const { layer_->check(streams); }

  /// Ends a step: starts the counts of the loss anew.
  void end_step() {
    for (Balance& balance : balances_) balance.reset();
  }

 private:
  template <class Element>
  pleat::TensorRef matrix(Element* data, std::int64_t columns) const {
    return Backend::tensor(data, {plan_.tokens, columns});
  }
  pleat::TensorRef dprobs(const Activations& a) const {
    return Backend::tensor(a.dprobs, {plan_.losses.rows(plan_.sequences), plan_.model.experts});
  }
  static pleat::moe::ExpertMatrices weights(const pleat::fsdp::UnitView& w) {
    return {w[expert_param::gate], w[expert_param::up], w[expert_param::down]};
  }

  Plan plan_;
  std::optional<Layer> layer_;
  std::vector<Balance> balances_;  // one per layer
};

}  // namespace train_moe
