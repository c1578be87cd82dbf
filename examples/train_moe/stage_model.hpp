// What a rank computes of the pipeline: forward and backward of its chunks on a micro-batch, layer by layer.
#pragma once

#include <deque>
#include <vector>

#include <pleat/optim.hpp>
#include <pleat/pipeline.hpp>

#include "attention_block.hpp"
#include "expert_block.hpp"
#include "head_block.hpp"
#include "mlp_block.hpp"
#include "parameters.hpp"
#include "places.hpp"

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
  using ForwardCall = pleat::pipeline::ForwardCall;
  using BackwardCall = pleat::pipeline::BackwardCall;

  /// Of one rank.
  struct Plan {
    ModelShape model;
    std::vector<StageLayers> chunks;
    Places activations, deferred;
    int lanes = 1;
    typename Attention::Plan attention;
    typename Experts::Plan experts;  // lane 0's; the others' have no loss
    bool watched = false;

    typename Experts::Plan experts_of(int lane) const {
      typename Experts::Plan own = experts;
      if (lane > 0) own.balanced_layers = 0;
      return own;
    }
    OpsShape ops_shape() const {
      const std::int64_t widest = std::max({std::int64_t{model.hidden}, model.queries(), model.attended(),
                                            std::int64_t{model.dense_inner}, std::int64_t{model.shared} * model.inner});
      return {attention.tokens, model.hidden, model.vocabulary, widest, pleat::dtype_of<T>};
    }
  };

  static Plan plan(const Options& o, const Groups<Comm>& groups, const DataMap& data,
                   const pleat::pipeline::Schedule& schedule, bool watched) {
    Plan made;
    made.model = o.model;
    const int rank = groups.me.pp;
    const auto split = split_layers(o.model.layers, schedule.placement.stages());
    for (int chunk = 0; chunk < schedule.placement.chunks_per_rank; ++chunk) {
      made.chunks.push_back(split[static_cast<std::size_t>(schedule.placement.stage(rank, chunk))]);
    }
    made.activations = activation_places(schedule, rank);
    made.deferred = deferred_places(schedule, rank);
    for (const pleat::pipeline::Op& op : schedule.programs[static_cast<std::size_t>(rank)].ops) {
      if (op.kind == pleat::pipeline::OpKind::overlapped) made.lanes = 2;
    }
    made.attention = Attention::plan(o, data, groups.mesh.cp);
    int layers = 0;
    for (const StageLayers& chunk : made.chunks) layers += chunk.count;
    const int counted = o.balance ? groups.counted_over(*o.balance).size() : 1;
    made.experts = Experts::plan(o, data.streams(), made.attention.tokens, groups.mesh.ep, counted, layers);
    made.watched = watched;
    return made;
  }

  /// `memory_for(footprint)` gives memory of the caller's, for as long as this lives. `kernels` [lanes].
  template <class MemoryFor>
  StageModel(const Plan& plan, const Groups<Comm>& groups, const Options& o, const Backend& backend,
             std::deque<ops<typename Backend::Device>>& kernels, Parameters<Backend, T>& parameters,
             const RankUnits& units, RoutingWatch* watch, MemoryFor memory_for)
      : plan_(plan),
        parameters_(&parameters),
        units_(units),
        watch_(watch),
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
    carve(measure);
    pleat::Carver memory(memory_for(pleat::Footprint{.persistent = measure.used_bytes()}).persistent);
    carve(memory);
    if (plan.watched) {
      const std::int64_t tokens = plan.attention.tokens;
      pleat::Carver pinned_size;
      take_watched(pinned_size, tokens);
      pleat::Carver pinned(memory_for(pleat::Footprint{.pinned_host = pinned_size.used_bytes()}).pinned_host);
      take_watched(pinned, tokens);
      world_ = groups.world;
    }
  }
  /// What the arena needs of a rank's stages, beside the parameters'.
  static std::size_t symmetric_bytes(const Plan& p) {
    return p.attention.footprint().symmetric + static_cast<std::size_t>(p.lanes) * p.experts.footprint().symmetric;
  }
  static int status_words(const Plan& p) { return p.lanes * p.experts.layer.dispatch.status_words(); }
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

  /// The units that a step acquires, in order.
  std::vector<int> unit_order(const pleat::pipeline::Program& program) const {
    std::vector<int> order;
    for (const pleat::pipeline::Op& op : program.ops) {
      const int forward = op.has_forward() ? chunk_units(op.forward.chunk).forward_steps() : 0;
      const int backward = op.has_input_gradient() ? chunk_units(op.backward.chunk).backward_steps() : 0;
      for (int step = 0; step < std::max(forward, backward); ++step) {
        if (step < forward) chunk_units(op.forward.chunk).append_forward(step, order);
        if (step < backward) chunk_units(op.backward.chunk).append_backward(step, order);
      }
    }
    return order;
  }

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
  struct LayerActivations {
    typename Attention::Activations attention;
    typename Experts::Activations experts;
    typename Mlp::Activations mlp{};
  };
  /// Of a micro-batch on a chunk.
  struct Slot {
    std::vector<LayerActivations> layers;
    T* last = nullptr;  // [tokens, hidden]: the output of the last layer, then its gradient; with a head
  };
  using DeferredLayers = std::vector<typename Experts::Deferred>;
  struct Chunk {
    std::vector<Slot> slots;
    std::vector<DeferredLayers> deferred;
  };
  struct LaneScratch {
    T* dsecond;  // [tokens, hidden]
  };
  /// One pass over a chunk.
  struct Pass {
    const Lane<Backend>* lane;
    const ChunkUnits* units;
    const StageLayers* stage;
    int first_layer;  // among the rank's
    Slot* slot;
    const DeferredLayers* deferred;  // null: the weights' gradients follow at once
    const DeviceBatch* batch;
    T* output;  // forward, of a stage without a head
    const T* output_gradient;
    T* input_gradient;

    std::int64_t rows() const { return batch->rows(); }
    int layers() const { return static_cast<int>(slot->layers.size()); }
    LayerActivations& layer(int i) const { return slot->layers[static_cast<std::size_t>(i)]; }
    const LayerUnits& layer_units(int i) const { return units->layers[static_cast<std::size_t>(i)]; }
    /// Where layer i puts its output.
    T* output_of(int i) const {
      if (i + 1 < layers()) return layer(i + 1).attention.x;
      return stage->has_head ? slot->last : output;
    }
    /// Where the gradient of the output of layer i is, and where that of its input goes: in the places of the values.
    const T* output_gradient_of(int i) const {
      if (i + 1 < layers()) return layer(i + 1).attention.x;
      return stage->has_head ? slot->last : output_gradient;
    }
    T* input_gradient_of(int i) const { return i > 0 || stage->has_embedding ? layer(i).attention.x : input_gradient; }
  };

  const ChunkUnits& chunk_units(int chunk) const { return units_.chunks[static_cast<std::size_t>(chunk)]; }

  Pass pass_of(int chunk, int micro_batch, int lane, const pleat::TensorRef& input) {
    const auto c = static_cast<std::size_t>(chunk), i = static_cast<std::size_t>(micro_batch);
    Pass pass{};
    pass.lane = &lanes_[static_cast<std::size_t>(lane)];
    pass.units = &chunk_units(chunk);
    pass.stage = &plan_.chunks[c];
    pass.first_layer = chunk == 0 ? 0 : plan_.chunks[0].count;
    pass.slot = &chunks_[c].slots[static_cast<std::size_t>(plan_.activations.of[c][i])];
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
    return &chunks_[c]
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
        std::int32_t* const ids = decided(pass, units.layer, a);
        experts_of(lane).forward(lane, pass.first_layer + i, pass.rows(), step_tokens_, w, a.attention.second_in,
                                 a.attention.logits, ids, a.experts, out, &sums_->aux_loss);
        observe(pass, units.layer, a);
      });
      lane.kernels->add(out, a.attention.middle, pass.rows() * m.hidden, lane.stream());
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
    T* const dsecond = scratch_[static_cast<std::size_t>(lane.index)].dsecond;
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
        head_.run(lane, *pass.batch, w, gradient, pass.slot->last, sums_);
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

  /// What the watch decides, in device memory, or null.
  std::int32_t* decided(const Pass& pass, int layer, LayerActivations& a) {
    if (watch_ == nullptr || !watch_->decides()) return nullptr;
    const Stream s = pass.lane->stream();
    const std::int64_t experts = plan_.model.experts, k = plan_.model.top_k;
    executor_.copy(watched_logits_, a.attention.logits, static_cast<std::size_t>(pass.rows() * experts) * sizeof(A), s);
    world_.wait(s);
    const std::int32_t* const ids =
        watch_->decide(layer, pass.batch->host, pleat::TensorRef{watched_logits_, {pass.rows(), experts}});
    std::copy_n(ids, pass.rows() * k, watched_ids_);
    executor_.copy(decided_ids_, watched_ids_, static_cast<std::size_t>(pass.rows() * k) * sizeof(std::int32_t), s);
    return decided_ids_;
  }
  void observe(const Pass& pass, int layer, LayerActivations& a) {
    if (watch_ == nullptr) return;
    const Stream s = pass.lane->stream();
    executor_.copy(watched_ids_, a.experts.saved->ids.data(),
                   static_cast<std::size_t>(pass.rows() * plan_.model.top_k) * sizeof(std::int32_t), s);
    world_.wait(s);
    watch_->observe(layer, pass.batch->host, watched_ids_);
  }
  void take_watched(pleat::Carver& pinned, std::int64_t tokens) {
    watched_logits_ = pinned.take<A>(static_cast<std::size_t>(tokens * plan_.model.experts));
    watched_ids_ = pinned.take<std::int32_t>(static_cast<std::size_t>(tokens * plan_.model.top_k));
  }

  void carve(pleat::Carver& memory) {
    const auto tokens = static_cast<std::size_t>(plan_.attention.tokens);
    const auto rows = [&](std::int64_t width) { return memory.take<T>(tokens * static_cast<std::size_t>(width)); };
    chunks_.clear();
    bool has_head = false;
    for (std::size_t c = 0; c < plan_.chunks.size(); ++c) {
      const StageLayers& stage = plan_.chunks[c];
      has_head = has_head || stage.has_head;
      Chunk& chunk = chunks_.emplace_back();
      for (int place = 0; place < plan_.activations.count[c]; ++place) chunk.slots.push_back(carve_slot(memory, stage));
      for (int place = 0; place < plan_.deferred.count[c]; ++place) {
        DeferredLayers& layers = chunk.deferred.emplace_back(static_cast<std::size_t>(stage.count));
        for (int i = 0; i < stage.count; ++i) {
          if (plan_.model.routes(stage.first + i))
            layers[static_cast<std::size_t>(i)] = plan_.experts.layer.carve_deferred(memory);
        }
      }
    }
    scratch_.clear();
    for (int lane = 0; lane < plan_.lanes; ++lane) scratch_.push_back({rows(plan_.model.hidden)});
    if (has_head) head_ = HeadBlock<Backend, T>(memory, plan_.model, plan_.attention.tokens);
    decided_ids_ = memory.take<std::int32_t>(plan_.watched ? tokens * static_cast<std::size_t>(plan_.model.top_k) : 0);
  }
  Slot carve_slot(pleat::Carver& memory, const StageLayers& stage) {
    const auto rows = [&] {
      return memory.take<T>(static_cast<std::size_t>(plan_.attention.tokens * plan_.model.hidden));
    };
    Slot slot;
    for (int i = 0; i < stage.count; ++i) {
      const int layer = stage.first + i;
      const bool routes = plan_.model.routes(layer);
      LayerActivations a;
      a.attention = Attention::carve_activations(memory, plan_.attention, routes);
      if (i > 0 || stage.has_embedding) a.attention.x = rows();
      if (routes) a.experts = Experts::carve_activations(memory, plan_.experts);
      if (const int inner = plan_.model.mlp_inner(layer); inner > 0)
        a.mlp = Mlp::carve_activations(memory, plan_.attention.tokens, inner);
      slot.layers.push_back(std::move(a));
    }
    if (stage.has_head) slot.last = rows();
    return slot;
  }

  Plan plan_;
  Parameters<Backend, T>* parameters_;
  RankUnits units_;
  RoutingWatch* watch_;
  Executor executor_;
  typename Executor::event_type attention_turn_, forked_, joined_;
  std::vector<Lane<Backend>> lanes_;
  std::optional<Attention> attention_;
  std::deque<Experts> experts_;  // [lane]
  std::vector<Chunk> chunks_;
  std::vector<LaneScratch> scratch_;  // [lane]
  HeadBlock<Backend, T> head_;        // of the stage that ends the model

  std::vector<DeviceBatch>* batches_ = nullptr;
  const pleat::moe::StepTokens* step_tokens_ = nullptr;
  pleat::optim::StepSums* sums_ = nullptr;

  pleat::GroupComm<Comm> world_;  // that waits for the watch's copies
  A* watched_logits_ = nullptr;
  std::int32_t *watched_ids_ = nullptr, *decided_ids_ = nullptr;
};

}  // namespace train_moe
