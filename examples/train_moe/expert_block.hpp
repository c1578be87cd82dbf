// The experts of a layer: route, dispatch, experts, combine, and the load-balance loss.
#pragma once

#include <memory>
#include <optional>

#include <pleat/comm.hpp>
#include <pleat/fsdp.hpp>
#include <pleat/moe.hpp>

#include "lane.hpp"
#include "units.hpp"

namespace train_moe {

template <class Backend, class T>
class ExpertBlock {
 public:
  using A = pleat::accumulator_t<T>;
  using Comm = typename Backend::Comm;
  using Arena = typename Backend::Arena;
  using Executor = typename Backend::Executor;
  using Gradient = pleat::fsdp::GradientView<Executor>;
  using Layer = pleat::moe::Layer<Executor, Comm, Arena>;
  using Balance = pleat::moe::LoadBalance<Executor, Comm>;

  struct Plan {
    ModelShape model;
    std::int64_t sequences = 0;  // of a micro-batch on this rank, as the load-balance loss counts them
    int balanced_layers = 0;     // whose loss this block adds; 0 without one
    pleat::moe::LayerPlan layer;
    pleat::moe::LoadBalancePlan losses;  // of each layer

    pleat::Footprint footprint() const {
      pleat::Footprint need = max_scratch(layer.footprint(), losses.footprint());
      need.saved = 0;
      need.persistent =
          layer.footprint().persistent + static_cast<std::size_t>(balanced_layers) * losses.footprint().persistent;
      return need;
    }
    bool has_balance() const { return losses.options.alpha > 0; }
  };

  /// What a layer keeps of a micro-batch for its backward.
  struct Activations {
    std::unique_ptr<pleat::moe::LayerSaved> saved;
    A* dprobs = nullptr;  // [balance rows, experts], of the load-balance loss
  };

  /// `tokens`: the most of a micro-batch on any rank of the ep group. `layers`: those whose forward passes this block
  /// runs.
  static Plan plan(const Options& o, std::int64_t sequences, std::int64_t tokens, int ep, int balance_ranks,
                   int layers) {
    using namespace pleat::moe;
    const ModelShape& m = o.model;
    LayerOptions options;
    options.router.renormalize = m.renormalize;
    options.router.force_balance = o.force_balance;
    options.dispatch.transport = o.transport;
    options.dispatch.loopback = o.loopback;
    options.dispatch.row_alignment = Backend::row_alignment;
    const LayerShape shape{.max_tokens = std::max<std::int64_t>(tokens, 1),
                           .hidden = m.hidden,
                           .inner = m.inner,
                           .experts = m.experts,
                           .k = m.top_k,
                           .dtype = pleat::dtype_of<T>};
    if (o.capacity > 0) {
      const std::int64_t worst = pleat::moe::plan(ep, shape, options).dispatch.worst_rows();
      const auto room = static_cast<std::int64_t>(o.capacity * static_cast<double>(shape.max_tokens * m.top_k)) + 1;
      options.dispatch.overflow = Overflow::error;
      options.dispatch.max_rows = std::min(room, worst);
    }
    const LoadBalanceShape counted{
        .experts = m.experts, .k = m.top_k, .dtype = pleat::dtype_of<A>, .max_sequences = sequences};
    const LoadBalanceOptions losses{.alpha = o.balance ? o.balance_alpha : 0,
                                    .scope = o.balance.value_or(BalanceScope::micro_batch)};
    return {m, sequences, o.balance ? layers : 0, pleat::moe::plan(ep, shape, options),
            pleat::moe::plan(balance_ranks, counted, losses)};
  }

  static Activations carve_activations(pleat::Carver& memory, const Plan& p) {
    const std::size_t saved_bytes = p.layer.footprint().saved;
    const pleat::Block saved{memory.take_bytes(saved_bytes), saved_bytes};
    Activations a;
    if (saved.data != nullptr) a.saved = std::make_unique<pleat::moe::LayerSaved>(p.layer, saved);
    a.dprobs = memory.take<A>(static_cast<std::size_t>(p.losses.rows(p.sequences) * p.model.experts));
    return a;
  }
  /// What the first half of backward leaves for the second.
  using Deferred = pleat::moe::LayerPlan::Deferred;

  /// `counted_over`: the ranks whose tokens the load-balance loss counts together.
  ExpertBlock(Plan p, const pleat::GroupComm<Comm>& ep, const pleat::GroupComm<Comm>& counted_over,
              const pleat::Memory<Arena>& memory, typename Backend::Stream s)
      : plan_(std::move(p)) {
    pleat::Carver persistent(memory.persistent);
    const auto own = [&](std::size_t bytes) {
      pleat::Memory<Arena> part = memory;
      part.persistent = {persistent.take_bytes(bytes), bytes};
      return part;
    };
    layer_.emplace(pleat::moe::bind(plan_.layer, Executor{}, ep, own(plan_.layer.footprint().persistent), s));
    for (int i = 0; i < plan_.balanced_layers; ++i) {
      balances_.push_back(
          pleat::moe::bind(plan_.losses, Executor{}, counted_over, own(plan_.losses.footprint().persistent), s));
    }
  }

  const Plan& plan() const { return plan_; }

  /// out [rows, hidden] = residual + experts(x), overwritten, in the three parts of moe::Layer. `ids` [rows, top_k]
  /// decide, where they are given. *balance += this rank's part of the load-balance loss of `layer`, one of the
  /// block's: its counts are summed at the end of the third, since NCCL's kernels keep multiprocessors from products
  /// that are made for all of them.
  void forward_send(const Lane<Backend>& lane, std::int64_t rows, T* x, A* logits, std::int32_t* ids, Activations& a) {
    typename Layer::Choice choice;
    if (ids != nullptr) choice.ids = matrix(ids, rows, plan_.model.top_k);
    layer_->forward_send(lane.streams, matrix(x, rows, plan_.model.hidden), matrix(logits, rows, plan_.model.experts),
                         *a.saved, choice);
  }
  void forward_experts(const Lane<Backend>& lane, std::int64_t rows, const pleat::fsdp::UnitView& w, T* x,
                       Activations& a) {
    layer_->forward_experts(lane.streams, matrix(x, rows, plan_.model.hidden), weights(w), *a.saved);
  }
  void forward_receive(const Lane<Backend>& lane, int layer, std::int64_t rows,
                       const pleat::moe::StepTokens* step_tokens, Activations& a, T* residual, T* out,
                       double* balance) {
    layer_->forward_receive(lane.streams, *a.saved, matrix(out, rows, plan_.model.hidden),
                            matrix(residual, rows, plan_.model.hidden));
    if (plan_.balanced_layers == 0) return;
    balances_[static_cast<std::size_t>(layer)].forward(lane.streams, a.saved->ids, a.saved->probs, plan_.sequences,
                                                       step_tokens, dprobs(a), tensor_of<Backend>(balance, {1}));
  }

  /// d [rows, hidden] of the output -> dx [rows, hidden] and dlogits [rows, experts], overwritten, and the gradients of
  /// the experts' parameters, in the three parts of moe::Layer.
  void backward_send(const Lane<Backend>& lane, std::int64_t rows, const T* d, Activations& a) {
    layer_->backward_send(lane.streams, gradients(d, rows), *a.saved);
  }
  void backward_experts(const Lane<Backend>& lane, std::int64_t rows, const T* d, const pleat::fsdp::UnitView& w,
                        Gradient& gradient, Activations& a) {
    const auto [dweights, add] = targets(gradient);
    layer_->backward_experts(lane.streams, gradients(d, rows), weights(w), *a.saved, dweights, add);
  }
  void backward_receive(const Lane<Backend>& lane, std::int64_t rows, A* logits, Activations& a, T* dx, A* dlogits) {
    layer_->backward_receive(lane.streams, matrix(logits, rows, plan_.model.experts), dprobs_or_none(a), *a.saved,
                             matrix(dx, rows, plan_.model.hidden), matrix(dlogits, rows, plan_.model.experts));
  }
  /// The same in two halves, each a whole.
  void input_backward(const Lane<Backend>& lane, std::int64_t rows, const T* d, const pleat::fsdp::UnitView& w,
                      A* logits, Activations& a, const Deferred& deferred, T* dx, A* dlogits) {
    layer_->input_backward(lane.streams, gradients(d, rows), matrix(logits, rows, plan_.model.experts), weights(w),
                           dprobs_or_none(a), *a.saved, deferred, matrix(dx, rows, plan_.model.hidden),
                           matrix(dlogits, rows, plan_.model.experts));
  }
  void weight_backward(const Lane<Backend>& lane, Gradient& gradient, Activations& a, const Deferred& deferred) {
    const auto [dweights, add] = targets(gradient);
    layer_->weight_backward(lane.streams, *a.saved, deferred, dweights, add);
  }

  /// See moe::Layer: what the step's reduction reads, and the error of a rank that failed.
  std::vector<const std::int64_t*> status_words() const { return layer_->status_words(); }
  void check(const Lane<Backend>& lane) const { layer_->check(lane.streams); }

  /// Ends a step: starts the counts of the loss anew.
  void end_step() {
    for (Balance& balance : balances_) balance.reset();
  }

 private:
  struct Targets {
    pleat::moe::ExpertMatrices matrices;
    bool add;
  };
  static Targets targets(Gradient& gradient) {
    const auto gate = gradient.write(mlp_param::gate);
    const auto up = gradient.write(mlp_param::up);
    const auto down = gradient.write(mlp_param::down);
    return {{gate.tensor, up.tensor, down.tensor}, gate.accumulate};
  }
  pleat::TensorRef gradients(const T* d, std::int64_t rows) const {
    return matrix(const_cast<T*>(d), rows, plan_.model.hidden);
  }
  template <class Element>
  static pleat::TensorRef matrix(Element* data, std::int64_t rows, std::int64_t columns) {
    return tensor_of<Backend>(data, {rows, columns});
  }
  pleat::TensorRef dprobs(const Activations& a) const {
    return tensor_of<Backend>(a.dprobs, {plan_.losses.rows(plan_.sequences), plan_.model.experts});
  }
  pleat::TensorRef dprobs_or_none(const Activations& a) const {
    return plan_.has_balance() ? dprobs(a) : pleat::TensorRef{};
  }
  static pleat::moe::ExpertMatrices weights(const pleat::fsdp::UnitView& w) {
    return {w[mlp_param::gate], w[mlp_param::up], w[mlp_param::down]};
  }

  Plan plan_;
  std::optional<Layer> layer_;
  std::vector<Balance> balances_;  // one per layer
};

}  // namespace train_moe
