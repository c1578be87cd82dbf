// What a rank computes of the pipeline: forward and backward of its chunks on a micro-batch, layer by layer.
#pragma once

#include <deque>
#include <vector>

#include <pleat/optim.hpp>
#include <pleat/pipeline.hpp>

#include "parameters.hpp"
#include "stage_memory.hpp"
#include "watched_routing.hpp"

namespace train_moe {

/// A model as pleat::pipeline runs it. Each backward is two halves, of the inputs and of the weights; `backward` runs
/// both of one layer before the next layer. The head is no part of the forward pass: scores, loss and their gradients
/// are made at one time, at the beginning of the backward pass, so that scores exist of a few tokens only.
template <class Backend, class T>
class StageModel {
 public:
  using A = pleat::accumulator_t<T>;
  using Comm = typename Backend::Comm;
  using Arena = typename Backend::Arena;
  using Executor = typename Backend::Executor;
  using Stream = typename Backend::Stream;
  using Attention = AttentionBlock<Backend, T>;
  using Experts = ExpertBlock<Backend, T>;
  using Mlp = MlpBlock<Backend, T>;
  using Plan = StagePlan<Backend, T>;
  using ForwardCall = pleat::pipeline::ForwardCall;
  using BackwardCall = pleat::pipeline::BackwardCall;

  /// `memory_for(footprint)` gives memory of the caller's, for as long as this lives. `kernels` [lanes].
  template <class MemoryFor>
  StageModel(const Plan& plan, const Groups<Comm>& groups, const Options& o, const Backend& backend,
             std::deque<ops<typename Backend::Device>>& kernels, Parameters<Backend, T>& parameters,
             const RankUnits& units, RoutingWatch* watch, MemoryFor memory_for)
      : plan_(plan),
        parameters_(&parameters),
        units_(units),
        routing_(watch, plan.model, plan.attention.tokens, groups.world, memory_for),
        attention_turn_(executor_.make_event()),
        forked_(executor_.make_event()),
        joined_(executor_.make_event()) {
    const Stream s = backend.compute(0);
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

  const Attention& attention() const { return *attention_; }

  /// Before a step: its micro-batches, the numbers of its tokens in device memory, and where it adds its losses up.
  void begin_step(std::vector<DeviceBatch>& batches, const pleat::moe::StepTokens* tokens,
                  pleat::optim::StepSums* sums) {
    batches_ = &batches;
    step_tokens_ = tokens;
    sums_ = sums;
  }
  void end_step() {
    for (Experts& experts : experts_) experts.end_step();
  }

  void forward(Stream, const ForwardCall& call) {
    const Pass pass = forward_pass(call, 0);
    for (int step = 0; step < pass.units->forward_steps(); ++step) forward_step(pass, step);
  }
  void backward(Stream, const BackwardCall& call) {
    const Pass pass = backward_pass(call, 0, nullptr);
    for (int step = 0; step < pass.units->backward_steps(); ++step) both_backward_steps(pass, step);
  }
  void input_backward(Stream, const BackwardCall& call) {
    const Pass pass = backward_pass(call, 0, deferred_of(call));
    for (int step = 0; step < pass.units->backward_steps(); ++step) input_backward_step(pass, step);
  }
  void weight_backward(Stream, const BackwardCall& call) {
    const Pass pass = backward_pass(call, 0, deferred_of(call));
    for (int step = 0; step < pass.units->backward_steps(); ++step) weight_backward_step(pass, step);
  }
  /// The two share no memory, and only attention, whose calls stand in one order, and parameters are used by both.
  void overlapped(Stream s, const ForwardCall& f, const BackwardCall& b) {
    const Pass forward = forward_pass(f, 0), backward = backward_pass(b, 1, nullptr);
    executor_.record(forked_, s);
    executor_.wait(lanes_[1].stream(), forked_);
    const int forward_steps = forward.units->forward_steps(), backward_steps = backward.units->backward_steps();
    for (int step = 0; step < std::max(forward_steps, backward_steps); ++step) {
      if (step < forward_steps) forward_step(forward, step);
      if (step < backward_steps) both_backward_steps(backward, step);
    }
    executor_.record(joined_, lanes_[1].stream());
    executor_.wait(s, joined_);
  }

 private:
  using Memory = StageMemory<Backend, T>;
  using Pass = StagePass<Backend, T>;
  using LayerActivations = typename Memory::LayerActivations;
  using DeferredLayers = typename Memory::DeferredLayers;

  const ChunkUnits& chunk_units(int chunk) const { return units_.chunks[static_cast<std::size_t>(chunk)]; }

  Pass pass_of(int chunk, int micro_batch, int lane, const pleat::TensorRef& input) {
    const auto c = static_cast<std::size_t>(chunk), i = static_cast<std::size_t>(micro_batch);
    Pass pass{};
    pass.lane = &lanes_[static_cast<std::size_t>(lane)];
    pass.units = &chunk_units(chunk);
    pass.stage = &plan_.chunks[c];
    pass.first_layer = chunk == 0 ? 0 : plan_.chunks[0].count;
    pass.slot = &memory_.chunks[c].slots[static_cast<std::size_t>(plan_.activations.of[c][i])];
    pass.batch = &(*batches_)[i];
    if (!pass.stage->has_embedding) pass.layer(0).attention.x = input.template as<T>();
    return pass;
  }
  Pass forward_pass(const ForwardCall& call, int lane) {
    Pass pass = pass_of(call.chunk, call.micro_batch, lane, call.input);
    if (!pass.stage->has_head) pass.output = call.output.template as<T>();
    return pass;
  }
  Pass backward_pass(const BackwardCall& call, int lane, const DeferredLayers* deferred) {
    Pass pass = pass_of(call.chunk, call.micro_batch, lane, call.input);
    pass.deferred = deferred;
    if (!pass.stage->has_head) pass.output_gradient = call.output_gradient.template as<T>();
    if (!pass.stage->has_embedding && call.input_gradient.data() != nullptr)
      pass.input_gradient = call.input_gradient.template as<T>();
    return pass;
  }
  const DeferredLayers* deferred_of(const BackwardCall& call) const {
    const auto c = static_cast<std::size_t>(call.chunk);
    return &memory_.chunks[c]
                .deferred[static_cast<std::size_t>(plan_.deferred.of[c][static_cast<std::size_t>(call.micro_batch)])];
  }
  void both_backward_steps(const Pass& pass, int step) {
    input_backward_step(pass, step);
    weight_backward_step(pass, step);
  }

  void forward_step(const Pass& pass, int i) {
    const ModelShape& m = plan_.model;
    const Lane<Backend>& lane = *pass.lane;
    const LayerUnits& units = pass.layer_units(i);
    LayerActivations& a = pass.layer(i);
    T* const out = pass.output_of(i);
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
    if (routes) {
      parameters_->with_unit(lane.index, units.experts, [&](const auto& w) {
        std::int32_t* const ids = routing_.decided(units.layer, pass.batch->host, a.attention.logits, lane.stream());
        experts_of(lane).forward(lane, pass.first_layer + i, pass.rows(), step_tokens_, w, a.attention.second_in,
                                 a.attention.logits, ids, a.experts, a.attention.middle, out, &sums_->aux_loss);
        routing_.observe(units.layer, pass.batch->host, a.experts.saved->ids.data(), lane.stream());
      });
    }
    if (units.mlp >= 0) {
      parameters_->with_unit(lane.index, units.mlp, [&](const auto& w) {
        Mlp::forward(lane, pass.rows(), m.hidden, m.mlp_inner(units.layer), w, a.attention.second_in,
                     routes ? out : a.attention.middle, a.mlp, out);
      });
    }
  }

  void input_backward_step(const Pass& pass, int step) {
    if (pass.units->head >= 0 && step == 0) return head(pass);
    const int i = pass.units->backward_layer(step);
    const ModelShape& m = plan_.model;
    const Lane<Backend>& lane = *pass.lane;
    const LayerUnits& units = pass.layer_units(i);
    LayerActivations& a = pass.layer(i);
    const T* const d = pass.output_gradient_of(i);
    T* const dsecond = memory_.dsecond[static_cast<std::size_t>(lane.index)];
    const bool routes = units.experts >= 0;
    if (routes) {
      parameters_->with_unit(lane.index, units.experts, [&](const auto& w) {
        if (pass.deferred != nullptr) {
          return experts_of(lane).input_backward(lane, pass.rows(), d, w, a.attention.logits, a.experts,
                                                 (*pass.deferred)[static_cast<std::size_t>(i)], dsecond,
                                                 a.attention.dlogits);
        }
        parameters_->with_gradient(lane.index, units.experts, [&](auto& gradient) {
          experts_of(lane).backward(lane, pass.rows(), d, w, gradient, a.attention.logits, a.experts, dsecond,
                                    a.attention.dlogits);
        });
      });
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

  void weight_backward_step(const Pass& pass, int step) {
    if (pass.units->head >= 0 && step == 0) return;  // done
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
  Experts& experts_of(const Lane<Backend>& lane) { return experts_[static_cast<std::size_t>(lane.index)]; }

  Plan plan_;
  Parameters<Backend, T>* parameters_;
  RankUnits units_;
  WatchedRouting<Backend, A> routing_;
  Executor executor_;
  typename Executor::event_type attention_turn_, forked_, joined_;
  std::vector<Lane<Backend>> lanes_;
  std::optional<Attention> attention_;
  std::deque<Experts> experts_;  // [lane]
  Memory memory_;

  std::vector<DeviceBatch>* batches_ = nullptr;
  const pleat::moe::StepTokens* step_tokens_ = nullptr;
  pleat::optim::StepSums* sums_ = nullptr;
};

}  // namespace train_moe
