// The step loop of one rank: forward and backward of every micro-batch over the units, one division, one update.
#pragma once

#include <vector>

#include <pleat/optim.hpp>

#include "attention_block.hpp"
#include "data.hpp"
#include "expert_block.hpp"
#include "groups.hpp"
#include "options.hpp"
#include "parameters.hpp"

namespace train_moe {

/// What a step did; the same on every rank.
struct StepReport {
  double loss = 0;     // mean cross-entropy of the global batch's target tokens
  double balance = 0;  // load-balance loss, summed over layers
  double norm = 0;     // of the gradient of the mean
  double learning_rate = 0;
  std::int64_t tokens = 0;
};

template <class Backend, class T>
class Trainer {
 public:
  using A = pleat::accumulator_t<T>;
  using Comm = typename Backend::Comm;
  using Attention = AttentionBlock<Backend, T>;
  using Experts = ExpertBlock<Backend, T>;
  using kernels = ops<typename Backend::Device>;

  /// Collective over the groups. `text` and `watch` (may be null) must outlive the trainer.
  Trainer(const Groups<Comm>& groups, const Options& options, const Text& text, RoutingWatch* watch)
      : options_(options),
        groups_(groups),
        data_(text, options, groups.mesh.dp, groups.me.dp, groups.mesh.cp, groups.me.cp),
        watch_(watch),
        units_{options.model.layers} {
    bind();
  }

  /// Forward and backward of all micro-batches of a step, counted from 0: leaves the gradients, summed over the mesh,
  /// in the shards.
  StepReport compute_gradients(int step) {
    start_step();
    for (int i = 0; i < options_.micro_batches(); ++i) run_micro_batch(data_.micro_batch(step, i));
    parameters_->finish_gradients();
    experts_->end_step();
    const auto result = Backend::read(norm_->run(parameters_->shards(), options_.clip, stream_), stream_);
    if (result.status != 0) experts_->check(streams());
    pleat::optim::check(result);
    return {result.loss, result.aux_loss, result.norm, learning_rate(step), static_cast<std::int64_t>(result.tokens)};
  }

  /// Applies the gradients of `compute_gradients(step)`.
  void update(int step) {
    adamw_->step(parameters_->shards(), norm_->result(), learning_rate(step), stream_);
    parameters_->changed();
  }

  Parameters<Backend, T>& parameters() { return *parameters_; }
  const Groups<Comm>& groups() const { return groups_; }

 private:
  using Executor = typename Backend::Executor;
  using Arena = typename Backend::Arena;

  void bind() {
    const pleat::RuntimeMesh& mesh = groups_.mesh;
    auto attention = Attention::plan(options_, data_.sequences(), mesh.cp, groups_.me.cp);
    const int balance_ranks = balance_group().size();
    auto experts = Experts::plan(options_, data_.sequences(), attention.tokens(), mesh.ep, balance_ranks);
    const auto parameters = Parameters<Backend, T>::plan(options_, groups_);
    const auto norm = pleat::optim::plan_step_norm(groups_.world.size(), experts.layer.dispatch.status_words());
    const auto adamw = pleat::optim::plan_adamw(parameters.shards.layouts, parameters.shards.master,
                                                {.weight_decay = options_.weight_decay});

    arena_.emplace(groups_.stage,
                   parameters.footprint().symmetric + attention.footprint().symmetric + experts.footprint().symmetric);
    parameters_.emplace(parameters, options_, groups_, memory_for(parameters.footprint()), stream_);
    attention_.emplace(attention, groups_.cp, memory_for(attention.footprint()));
    experts_.emplace(experts, groups_.ep, balance_group(), memory_for(experts.footprint()));
    norm_.emplace(
        pleat::optim::bind(norm, executor_, groups_.world, memory_for(norm.footprint()), experts_->status_words()));
    adamw_.emplace(pleat::optim::bind(adamw, executor_, memory_for(adamw.footprint())));
    arena_->seal(groups_.stage);
    allocate_activations();
  }

  pleat::GroupComm<Comm> balance_group() const {
    return options_.balance == LoadBalance::sequence ? groups_.cp : groups_.stage;
  }

  /// Memory for one operation, as its footprint says; the trainer keeps it.
  pleat::Memory<typename Backend::Arena> memory_for(const pleat::Footprint& need) {
    const auto block = [&](std::size_t bytes) { return buffers_.emplace_back(bytes).block(); };
    return {block(need.scratch), block(need.persistent), block(need.pinned_host), &*arena_};
  }

  void allocate_activations() {
    pleat::Carver measure;
    carve_activations(measure);
    pleat::Carver memory(buffers_.emplace_back(measure.used_bytes()).block());
    carve_activations(memory);
  }
  void carve_activations(pleat::Carver& memory) {
    const auto tokens = static_cast<std::size_t>(attention_->plan().tokens());
    const auto& model = options_.model;
    const auto rows = [&](int width) { return memory.take<T>(tokens * static_cast<std::size_t>(width)); };
    attention_saved_.clear();
    expert_saved_.clear();
    for (int layer = 0; layer < model.layers; ++layer) {
      attention_saved_.push_back(Attention::carve_activations(memory, attention_->plan()));
      expert_saved_.push_back(Experts::carve_activations(memory, experts_->plan()));
    }
    last_ = rows(model.hidden);
    last_normed_ = rows(model.hidden);
    gradient_ = rows(model.hidden);
    dexpert_in_ = rows(model.hidden);
    scores_ = rows(model.vocabulary);
    last_rms_ = memory.take<A>(tokens);
    dlogits_ = memory.take<A>(tokens * static_cast<std::size_t>(model.experts));
  }

  void start_step() {
    std::vector<int> order;
    for (int i = 0; i < options_.micro_batches(); ++i) {
      for (const int unit : units_.order()) order.push_back(unit);
    }
    parameters_->begin(order);
    // Every token of a text is a target and is routed.
    const double tokens = static_cast<double>(options_.batch) * options_.sequence;
    step_tokens_ = {.targets = tokens, .routed = tokens};
  }

  void run_micro_batch(const MicroBatch& batch) {
    const int layers = options_.model.layers;
    forward_embedding(batch);
    for (int layer = 0; layer < layers; ++layer) forward_layer(layer, batch);
    head(batch);
    for (int layer = layers - 1; layer >= 0; --layer) backward_layer(layer, batch);
    backward_embedding(batch);
  }

  /// The input of layer `layer`; of the head after the last.
  T* input(int layer) {
    return layer == options_.model.layers ? last_ : attention_saved_[static_cast<std::size_t>(layer)].x;
  }

  void forward_embedding(const MicroBatch& batch) {
    parameters_->with_unit(units_.embedding(), [&](const auto& w) {
      kernels::embed(batch.tokens.data(), w[0].template as<T>(), input(0), attention_->plan().tokens(),
                     options_.model.hidden, stream_);
    });
  }

  void forward_layer(int layer, const MicroBatch& batch) {
    auto& a = attention_saved_[static_cast<std::size_t>(layer)];
    auto& e = expert_saved_[static_cast<std::size_t>(layer)];
    parameters_->with_unit(units_.attention(layer),
                           [&](const auto& w) { attention_->forward(streams(), batch.positions.data(), w, a); });
    parameters_->with_unit(units_.experts(layer), [&](const auto& w) {
      experts_->forward(streams(), layer, batch, step_tokens_, w, a.middle, a.expert_in, a.logits, e, input(layer + 1),
                        &norm_->sums()->aux_loss, watch_);
    });
  }

  /// Final norm, scores, loss, and their backward: leaves the gradient of the last layer's output.
  void head(const MicroBatch& batch) {
    const auto& model = options_.model;
    const std::int64_t tokens = attention_->plan().tokens(), hidden = model.hidden, classes = model.vocabulary;
    parameters_->with_unit(units_.head(), [&](const auto& w) {
      const T* norm = w[head_param::norm].template as<T>();
      const T* matrix = w[head_param::head].template as<T>();
      kernels::rms_norm(last_, norm, last_normed_, last_rms_, tokens, hidden, model.epsilon, stream_);
      kernels::linear(last_normed_, matrix, scores_, tokens, hidden, classes, false, stream_);
      kernels::cross_entropy(scores_, batch.labels.data(), &norm_->sums()->loss, tokens, classes, stream_);
      kernels::add_constant(&norm_->sums()->tokens, static_cast<double>(tokens), stream_);
      auto gradient = parameters_->gradient(units_.head());
      const auto [dmatrix, add_matrix] = gradient.write(head_param::head);
      kernels::linear_backward(scores_, last_normed_, matrix, gradient_, false, dmatrix.template as<A>(), add_matrix,
                               tokens, hidden, classes, stream_);
      const auto [dnorm, add_norm] = gradient.write(head_param::norm);
      kernels::rms_norm_backward(gradient_, last_, norm, last_rms_, gradient_, false, dnorm.template as<A>(), add_norm,
                                 tokens, hidden, stream_);
    });
    parameters_->reduce(units_.head());
  }

  /// `gradient_` is of the layer's output on entry and of its input on return.
  void backward_layer(int layer, const MicroBatch& batch) {
    auto& a = attention_saved_[static_cast<std::size_t>(layer)];
    auto& e = expert_saved_[static_cast<std::size_t>(layer)];
    parameters_->with_unit(units_.experts(layer), [&](const auto& w) {
      auto gradient = parameters_->gradient(units_.experts(layer));
      experts_->backward(streams(), gradient_, w, gradient, a.logits, e, dexpert_in_, dlogits_);
    });
    parameters_->reduce(units_.experts(layer));
    parameters_->with_unit(units_.attention(layer), [&](const auto& w) {
      auto gradient = parameters_->gradient(units_.attention(layer));
      attention_->backward(streams(), batch.positions.data(), w, gradient, a, gradient_, dexpert_in_, dlogits_);
    });
    parameters_->reduce(units_.attention(layer));
  }

  void backward_embedding(const MicroBatch& batch) {
    auto gradient = parameters_->gradient(units_.embedding());
    kernels::embed_backward(batch.tokens.data(), gradient_, gradient.add_to(0).template as<A>(),
                            attention_->plan().tokens(), options_.model.hidden, stream_);
    parameters_->reduce(units_.embedding());
  }

  double learning_rate(int step) const {
    if (step >= options_.warmup_steps) return options_.learning_rate;
    const double share = static_cast<double>(step) / options_.warmup_steps;
    return options_.warmup_from + share * (options_.learning_rate - options_.warmup_from);
  }

  pleat::Streams<typename Backend::Stream> streams() const { return {stream_, stream_}; }

  Options options_;
  Groups<Comm> groups_;
  DataMap data_;
  RoutingWatch* watch_;
  UnitIndex units_;
  Executor executor_;
  typename Backend::Stream stream_;
  std::vector<typename Backend::Buffer> buffers_;
  std::optional<Arena> arena_;
  std::optional<Parameters<Backend, T>> parameters_;
  std::optional<Attention> attention_;
  std::optional<Experts> experts_;
  std::optional<pleat::optim::StepNorm<Executor, Comm>> norm_;
  std::optional<pleat::optim::Adamw<Executor>> adamw_;

  std::vector<typename Attention::Activations> attention_saved_;  // [layer]
  std::vector<typename Experts::Activations> expert_saved_;       // [layer]
  T *last_, *last_normed_, *gradient_, *dexpert_in_;              // [tokens, hidden]
  T* scores_;                                                     // [tokens, vocabulary]
  A *last_rms_, *dlogits_;                                        // [tokens], [tokens, experts]
  pleat::moe::StepTokens step_tokens_;
};

}  // namespace train_moe
