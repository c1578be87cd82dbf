// What a rank computes of the pipeline: forward and backward of its chunks on a micro-batch, layer by layer.
#pragma once

#include <algorithm>
#include <deque>
#include <vector>

#include <pleat/optim.hpp>
#include <pleat/pipeline.hpp>

#include "layer_steps.hpp"

namespace train_moe {

/// A model as pleat::pipeline runs it. Each backward is two halves, of the inputs and of the weights; `backward` runs
/// both of one layer before the next layer. The head is no part of the forward pass: scores, loss and their gradients
/// are made at one time, at the beginning of the backward pass, so that scores exist of a few tokens only.
template <class Backend, class T>
class StageModel {
 public:
  using Comm = typename Backend::Comm;
  using Executor = typename Backend::Executor;
  using Stream = typename Backend::Stream;
  using Steps = LayerSteps<Backend, T>;
  using Plan = StagePlan<Backend, T>;
  using ForwardCall = pleat::pipeline::ForwardCall;
  using BackwardCall = pleat::pipeline::BackwardCall;

  /// `memory_for(footprint)` gives memory of the caller's, for as long as this lives. `kernels` [lanes].
  template <class MemoryFor>
  StageModel(const Plan& plan, const Groups<Comm>& groups, const Options& o, const Backend& backend,
             std::deque<ops<typename Backend::Device>>& kernels, Parameters<Backend, T>& parameters,
             const RankUnits& units, RoutingWatch* watch, MemoryFor memory_for)
      : units_(units),
        forked_(executor_.make_event()),
        joined_(executor_.make_event()),
        steps_(plan, groups, o, backend, kernels, parameters, watch, memory_for) {}
  std::vector<const std::int64_t*> status_words() const { return steps_.status_words(); }
  void check() const { steps_.check(); }
  const typename Steps::Attention& attention() const { return steps_.attention(); }

  /// Before a step: its micro-batches, the numbers of its tokens in device memory, and where it adds its losses up.
  void begin_step(std::vector<DeviceBatch>& batches, const pleat::moe::StepTokens* tokens,
                  pleat::optim::StepSums* sums) {
    batches_ = &batches;
    steps_.begin_step(tokens, sums);
  }
  void end_step() { steps_.end_step(); }

  void forward(Stream, const ForwardCall& call) {
    const Pass pass = forward_pass(call, 0);
    for (int step = 0; step < pass.units->forward_steps(); ++step) forward_layer(pass, step);
  }
  void backward(Stream, const BackwardCall& call) {
    const Pass pass = backward_pass(call, 0, nullptr);
    for (int step = 0; step < pass.units->backward_steps(); ++step) backward_layer(pass, step);
  }
  void input_backward(Stream, const BackwardCall& call) {
    const Pass pass = backward_pass(call, 0, deferred_of(call));
    for (int step = 0; step < pass.units->backward_steps(); ++step) {
      steps_.backward_output(pass, step);
      steps_.backward_experts(pass, step);
      steps_.backward_attention(pass, step);
    }
  }
  void weight_backward(Stream, const BackwardCall& call) {
    const Pass pass = backward_pass(call, 0, deferred_of(call));
    for (int step = 0; step < pass.units->backward_steps(); ++step) steps_.backward_weights(pass, step);
  }
  /// The two share no memory, and only attention, whose calls stand in one order, and parameters are used by both.
  void overlapped(Stream s, const ForwardCall& f, const BackwardCall& b) {
    const Pass forward = forward_pass(f, 0), backward = backward_pass(b, 1, nullptr);
    const Stream beside = backward.lane->stream();
    executor_.record(forked_, s);
    executor_.wait(beside, forked_);
    const int forward_steps = forward.units->forward_steps(), backward_steps = backward.units->backward_steps();
    for (int step = 0; step < std::max(forward_steps, backward_steps); ++step) {
      if (step < forward_steps) forward_layer(forward, step);
      if (step < backward_steps) backward_layer(backward, step);
    }
    executor_.record(joined_, beside);
    executor_.wait(s, joined_);
  }

 private:
  using Pass = StagePass<Backend, T>;
  using DeferredLayers = typename Steps::Memory::DeferredLayers;

  const Plan& plan() const { return steps_.plan(); }
  Pass pass_of(int chunk, int micro_batch, int lane, const pleat::TensorRef& input) {
    const auto c = static_cast<std::size_t>(chunk), i = static_cast<std::size_t>(micro_batch);
    Pass pass{};
    pass.lane = &steps_.lane(lane);
    pass.units = &units_.chunks[c];
    pass.stage = &plan().chunks[c];
    pass.first_layer = chunk == 0 ? 0 : plan().chunks[0].count;
    pass.slot = &steps_.memory().chunks[c].slots[static_cast<std::size_t>(plan().activations.of[c][i])];
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
  const DeferredLayers* deferred_of(const BackwardCall& call) {
    const auto c = static_cast<std::size_t>(call.chunk);
    return &steps_.memory()
                .chunks[c]
                .deferred[static_cast<std::size_t>(plan().deferred.of[c][static_cast<std::size_t>(call.micro_batch)])];
  }

  void forward_layer(const Pass& pass, int i) {
    steps_.forward_attention(pass, i);
    steps_.forward_experts(pass, i);
    steps_.forward_output(pass, i);
  }
  /// What the layer below needs of other ranks is sent before the gradients of weights, beside which it travels.
  void backward_layer(const Pass& pass, int step) {
    if (step == 0) steps_.backward_output(pass, step);
    steps_.backward_experts(pass, step);
    steps_.backward_attention(pass, step);
    if (step + 1 < pass.units->backward_steps()) steps_.backward_output(pass, step + 1);
    steps_.backward_weights(pass, step);
  }

  RankUnits units_;
  Executor executor_;
  typename Executor::event_type forked_, joined_;
  Steps steps_;
  std::vector<DeviceBatch>* batches_ = nullptr;
};

}  // namespace train_moe
