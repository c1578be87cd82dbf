// What a rank computes of its layers, in steps: each begins with what it awaits of other ranks and ends with what it
// sends them, so that another pass may stand between two steps.
#pragma once

#include <deque>
#include <optional>
#include <vector>

#include <pleat/optim.hpp>

#include "parameters.hpp"
#include "stage_memory.hpp"
#include "watched_routing.hpp"

namespace train_moe {

/// A forward pass takes each layer in three steps. A backward pass takes each of its own steps, of which the first is
/// the head's where there is one, in four; the head is done in the first of them.
template <class Backend, class T>
class LayerSteps {
 public:
  using A = pleat::accumulator_t<T>;
  using Comm = typename Backend::Comm;
  using Arena = typename Backend::Arena;
  using Executor = typename Backend::Executor;
  using Attention = AttentionBlock<Backend, T>;
  using Experts = ExpertBlock<Backend, T>;
  using Mlp = MlpBlock<Backend, T>;
  using Plan = StagePlan<Backend, T>;
  using Memory = StageMemory<Backend, T>;
  using Pass = StagePass<Backend, T>;

  /// See StageModel.
  template <class MemoryFor>
  LayerSteps(const Plan& plan, const Groups<Comm>& groups, const Options& o, const Backend& backend,
             std::deque<ops<typename Backend::Device>>& kernels, Parameters<Backend, T>& parameters,
             RoutingWatch* watch, MemoryFor memory_for)
      : plan_(plan),
        parameters_(&parameters),
        routing_(watch, plan.model, plan.attention.tokens, groups.world, memory_for),
        attention_turn_(executor_.make_event()) {
    const typename Backend::Stream s = backend.compute(0);
    attention_.emplace(plan.attention, groups.cp, memory_for(plan.attention.footprint()), s);
    const pleat::GroupComm<Comm> counted = o.balance ? groups.counted_over(*o.balance) : groups.stage;
    for (int lane = 0; lane < plan.lanes; ++lane) {
      lanes_.push_back({lane, {backend.compute(lane), backend.comm(lane)}, &kernels[static_cast<std::size_t>(lane)]});
      experts_.emplace_back(plan.experts_of(lane), groups.ep, counted, memory_for(plan.experts_of(lane).footprint()),
                            s);
    }
    pleat::Carver measure;
    Memory(measure, plan);
    pleat::Carver memory(memory_for(pleat::Footprint{.persistent = measure.used_bytes()}).persistent);
    memory_ = Memory(memory, plan);
  }
  const Plan& plan() const { return plan_; }
  const Attention& attention() const { return *attention_; }
  const Lane<Backend>& lane(int i) const { return lanes_[static_cast<std::size_t>(i)]; }
  Memory& memory() { return memory_; }

  std::vector<const std::int64_t*> status_words() const {
    std::vector<const std::int64_t*> words;
    for (const Experts& experts : experts_) {
      const auto own = experts.status_words();
      words.insert(words.end(), own.begin(), own.end());
    }
    return words;
  }
  void check() const {
    for (std::size_t lane = 0; lane < experts_.size(); ++lane) experts_[lane].check(lanes_[lane]);
  }
  void begin_step(const pleat::moe::StepTokens* tokens, pleat::optim::StepSums* sums) {
    step_tokens_ = tokens;
    sums_ = sums;
  }
  void end_step() {
    for (Experts& experts : experts_) experts.end_step();
  }

  /// Attention, the router and, in the first layer, the embedding; sends the tokens.
  void forward_attention(const Pass& pass, int i) {
    const ModelShape& m = plan_.model;
    const Lane<Backend>& lane = *pass.lane;
    const LayerUnits& units = pass.layer_units(i);
    LayerActivations& a = pass.layer(i);
    const bool routes = units.experts >= 0;
    if (i == 0 && pass.units->embedding >= 0) {
      parameters_->with_unit(lane.index, pass.units->embedding, [&](const auto& w) {
        lane.kernels->embed(pass.batch->tokens, w[0].template as<T>(), a.attention.x, pass.rows(), m.hidden,
                            lane.stream());
      });
    }
    parameters_->with_unit(lane.index, units.attention, [&](const auto& w) {
      in_turn(lane, [&](const Lane<Backend>& own) { attention_->forward(own, *pass.batch, w, a.attention, routes); });
    });
    if (!routes) return;
    std::int32_t* const ids = routing_.decided(units.layer, pass.batch->host, a.attention.logits, lane.stream());
    experts_of(lane).forward_send(lane, pass.rows(), a.attention.second_in, a.attention.logits, ids, a.experts);
    routing_.observe(units.layer, pass.batch->host, a.experts.saved->ids.data(), lane.stream());
  }
  /// Experts of the tokens that came; sends their results.
  void forward_experts(const Pass& pass, int i) {
    const Lane<Backend>& lane = *pass.lane;
    const LayerUnits& units = pass.layer_units(i);
    LayerActivations& a = pass.layer(i);
    if (units.experts < 0) return;
    parameters_->with_unit(lane.index, units.experts, [&](const auto& w) {
      experts_of(lane).forward_experts(lane, pass.rows(), w, a.attention.second_in, a.experts);
    });
  }
  /// Sums the results that came, and adds what all tokens take.
  void forward_output(const Pass& pass, int i) {
    const ModelShape& m = plan_.model;
    const Lane<Backend>& lane = *pass.lane;
    const LayerUnits& units = pass.layer_units(i);
    LayerActivations& a = pass.layer(i);
    T* const out = pass.output_of(i);
    const bool routes = units.experts >= 0;
    if (routes) {
      experts_of(lane).forward_receive(lane, pass.first_layer + i, pass.rows(), step_tokens_, a.experts,
                                       a.attention.middle, out, &sums_->aux_loss);
    }
    if (units.mlp >= 0) {
      parameters_->with_unit(lane.index, units.mlp, [&](const auto& w) {
        Mlp::forward(lane, pass.rows(), m.hidden, m.mlp_inner(units.layer), w, a.attention.second_in,
                     routes ? out : a.attention.middle, a.mlp, out);
      });
    }
  }

  /// The head and its gradients, or sends the gradients of results, which the layer above has made.
  void backward_output(const Pass& pass, int step) {
    if (pass.is_head(step)) return head(pass);
    const int i = pass.units->backward_layer(step);
    if (pass.layer_units(i).experts < 0 || pass.deferred != nullptr) return;
    experts_of(*pass.lane).backward_send(*pass.lane, pass.rows(), pass.output_gradient_of(i), pass.layer(i).experts);
  }
  /// Experts; sends the gradients of their tokens. Gradients of weights that are not put off, too.
  void backward_experts(const Pass& pass, int step) {
    if (pass.is_head(step)) return;
    const int i = pass.units->backward_layer(step);
    const Lane<Backend>& lane = *pass.lane;
    const LayerUnits& units = pass.layer_units(i);
    LayerActivations& a = pass.layer(i);
    const T* const d = pass.output_gradient_of(i);
    if (units.experts < 0) return;
    parameters_->with_unit(lane.index, units.experts, [&](const auto& w) {
      if (pass.deferred != nullptr) {
        return experts_of(lane).input_backward(lane, pass.rows(), d, w, a.attention.logits, a.experts,
                                               (*pass.deferred)[static_cast<std::size_t>(i)], dsecond_of(lane),
                                               a.attention.dlogits);
      }
      parameters_->with_gradient(lane.index, units.experts, [&](auto& gradient) {
        experts_of(lane).backward_experts(lane, pass.rows(), d, w, gradient, a.experts);
      });
    });
  }
  /// Sums what came: the gradient of the layer's input.
  void backward_attention(const Pass& pass, int step) {
    if (pass.is_head(step)) return;
    const int i = pass.units->backward_layer(step);
    const ModelShape& m = plan_.model;
    const Lane<Backend>& lane = *pass.lane;
    const LayerUnits& units = pass.layer_units(i);
    LayerActivations& a = pass.layer(i);
    const T* const d = pass.output_gradient_of(i);
    T* const dsecond = dsecond_of(lane);
    const bool routes = units.experts >= 0;
    if (routes && pass.deferred == nullptr) {
      experts_of(lane).backward_receive(lane, pass.rows(), a.attention.logits, a.experts, dsecond, a.attention.dlogits);
    }
    if (units.mlp >= 0) {
      parameters_->with_unit(lane.index, units.mlp, [&](const auto& w) {
        Mlp::input_backward(lane, pass.rows(), m.hidden, m.mlp_inner(units.layer), w, d, a.mlp, dsecond, routes);
      });
    }
    parameters_->with_unit(lane.index, units.attention, [&](const auto& w) {
      in_turn(lane, [&](const Lane<Backend>& own) {
        attention_->input_backward(own, *pass.batch, w, a.attention, routes, d, dsecond, pass.input_gradient_of(i));
      });
    });
  }
  /// The other weights' gradients, and those of the experts that were put off. Awaits nothing.
  void backward_weights(const Pass& pass, int step) {
    if (pass.is_head(step)) return;
    const int i = pass.units->backward_layer(step);
    const ModelShape& m = plan_.model;
    const Lane<Backend>& lane = *pass.lane;
    const LayerUnits& units = pass.layer_units(i);
    LayerActivations& a = pass.layer(i);
    if (units.experts >= 0 && pass.deferred != nullptr) {
      parameters_->with_gradient(lane.index, units.experts, [&](auto& gradient) {
        experts_of(lane).weight_backward(lane, gradient, a.experts, (*pass.deferred)[static_cast<std::size_t>(i)]);
      });
    }
    if (units.mlp >= 0) {
      parameters_->with_gradient(lane.index, units.mlp, [&](auto& gradient) {
        Mlp::weight_backward(lane, pass.rows(), m.hidden, m.mlp_inner(units.layer), gradient,
                             pass.output_gradient_of(i), a.attention.second_in, a.mlp);
      });
    }
    parameters_->with_gradient(lane.index, units.attention, [&](auto& gradient) {
      attention_->weight_backward(lane, *pass.batch, gradient, a.attention, units.experts >= 0);
    });
    if (i == 0 && pass.units->embedding >= 0) {
      parameters_->with_gradient(lane.index, pass.units->embedding, [&](auto& gradient) {
        const T* const d = a.attention.x;
        lane.kernels->embed_backward(pass.batch->tokens, d, gradient.add_to(0).template as<A>(), pass.rows(), m.hidden,
                                     m.vocabulary, lane.stream());
      });
    }
  }

 private:
  using LayerActivations = typename Memory::LayerActivations;

  void head(const Pass& pass) {
    const Lane<Backend>& lane = *pass.lane;
    parameters_->with_unit(lane.index, pass.units->head, [&](const auto& w) {
      parameters_->with_gradient(lane.index, pass.units->head, [&](auto& gradient) {
        memory_.head.run(lane, *pass.batch, w, gradient, pass.slot->last, sums_);
      });
    });
  }

  /// Attention of both lanes, one call after the other: they share the ring and its streams of transfers.
  template <class F>
  void in_turn(const Lane<Backend>& lane, F f) {
    Lane<Backend> own = lane;
    own.streams.comm = lanes_[0].streams.comm;
    if (plan_.lanes > 1) executor_.wait(lane.stream(), attention_turn_);
    f(own);
    if (plan_.lanes > 1) executor_.record(attention_turn_, lane.stream());
  }
  T* dsecond_of(const Lane<Backend>& lane) const { return memory_.dsecond[static_cast<std::size_t>(lane.index)]; }
  Experts& experts_of(const Lane<Backend>& lane) { return experts_[static_cast<std::size_t>(lane.index)]; }

  Plan plan_;
  Parameters<Backend, T>* parameters_;
  WatchedRouting<Backend, A> routing_;
  Executor executor_;
  typename Executor::event_type attention_turn_;
  std::vector<Lane<Backend>> lanes_;
  std::optional<Attention> attention_;
  std::deque<Experts> experts_;  // [lane]
  Memory memory_;

  const pleat::moe::StepTokens* step_tokens_ = nullptr;
  pleat::optim::StepSums* sums_ = nullptr;
};

}  // namespace train_moe
