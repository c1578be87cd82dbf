// The training of one rank: a step is one run of the pipeline over all micro-batches, one division, one update.
#pragma once

#include <algorithm>
#include <deque>
#include <optional>
#include <vector>

#include <pleat/optim.hpp>
#include <pleat/pipeline.hpp>

#include "data.hpp"
#include "flops.hpp"
#include "groups.hpp"
#include "options.hpp"
#include "parameters.hpp"
#include "rehearsal.hpp"
#include "stage_model.hpp"
#include "step_times.hpp"

namespace train_moe {

/// What a step did; the same on every rank.
struct StepReport {
  double loss = 0;     // mean cross-entropy of the global batch's target tokens
  double balance = 0;  // load-balance loss, summed over layers
  double norm = 0;     // of the gradient of the mean
  double learning_rate = 0;
  std::int64_t tokens = 0;  // targets
  double flops = 0;         // of the model, on all ranks
};

/// Where a run stands between two steps.
struct Progress {
  std::int64_t step = 0;      // steps done
  std::int64_t position = 0;  // sequences read
  std::int64_t applied = 0;   // updates made
  std::int64_t skipped = 0;   // updates left out
};

template <class Backend, class T>
class Trainer {
 public:
  using A = pleat::accumulator_t<T>;
  using Comm = typename Backend::Comm;
  using Executor = typename Backend::Executor;
  using Arena = typename Backend::Arena;
  using Kernels = ops<typename Backend::Device>;
  using Optimizer = pleat::optim::ShardOptimizer<Executor, Comm>;

  /// Collective over the groups. `text` and `watch` (may be null) must outlive the trainer.
  Trainer(const Groups<Comm>& groups, const Options& options, const Text& text, RoutingWatch* watch)
      : options_(options),
        groups_(groups),
        data_(text, options, groups.mesh.dp, groups.me.dp, groups.mesh.cp, groups.me.cp) {
    bind(watch);
  }

  /// Forward and backward of all micro-batches of the next step: leaves the gradients, summed over the mesh, in the
  /// shards.
  StepReport compute_gradients() {
    times_->begin(stream());
    load_batches();
    parameters_->begin(unit_order_);
    stages_->begin_step(batches_, step_tokens_, norm_->sums());
    std::vector<std::int64_t> rows;
    for (const DeviceBatch& batch : batches_) rows.push_back(batch.rows());
    pipeline_->run({stream(), backend_.transfers()}, rows, *stages_, *times_);
    parameters_->finish_gradients();
    stages_->end_step();
    const pleat::optim::StepResult* const norm = norm_->run(parameters_->shards(), options_.clip, stream());
    times_->norm_is_known(stream());
    const pleat::optim::StepResult result = read(norm);
    if (result.status != 0) stages_->check();
    pleat::optim::check(result);
    progress_.applied = result.steps;
    progress_.skipped = result.skipped;
    return {result.loss,
            result.aux_loss,
            result.norm,
            learning_rate(options_.learning_rate),
            static_cast<std::int64_t>(result.tokens),
            training_flops(options_.model, data_.step_tokens(progress_.position).routed,
                           data_.step_pairs(progress_.position))};
  }

  /// Applies the gradients of `compute_gradients`, and goes on to the next step.
  void update() {
    optimizer_->step(norm_->result(), {learning_rate(options_.learning_rate), learning_rate(options_.muon_rate)},
                     stream());
    parameters_->changed();
    times_->end(stream());
    ++progress_.step;
    progress_.position += options_.batch;
  }

  const Progress& progress() const { return progress_; }
  /// Goes on from here; parameters and the optimizer's state have been loaded.
  void resume(const Progress& progress) {
    progress_ = progress;
    norm_->resume(progress.applied, progress.skipped, stream());
    parameters_->changed();
  }

  Parameters<Backend, T>& parameters() { return *parameters_; }
  const Optimizer& optimizer() const { return *optimizer_; }
  const Groups<Comm>& groups() const { return groups_; }
  const pleat::pipeline::Schedule& schedule() const { return pipeline_->plan().schedule; }
  typename Backend::Stream stream() const { return backend_.compute(0); }
  typename Backend::Stream snapshots() const { return backend_.snapshots(); }
  /// Where the time of the step before went on this rank; the stream was waited for.
  const StepTimes<Backend>& times() const { return *times_; }
  /// The times of all its operations, pipeline rank after rank; collective over the pp group.
  std::vector<std::vector<pleat::pipeline::Span>> pipeline_spans() {
    std::vector<std::vector<pleat::pipeline::Span>> all;
    std::size_t most = 0;
    for (const auto& program : schedule().programs) all.emplace_back(program.ops.size());
    for (const auto& rank : all) most = std::max(most, rank.size());
    std::vector<double> own;
    for (const pleat::pipeline::Span& span : times_->spans()) own.insert(own.end(), {span.start, span.finish});
    own.resize(2 * most);
    const std::vector<double> gathered = gather(groups_.pp, own);
    for (std::size_t r = 0; r < all.size(); ++r) {
      for (std::size_t i = 0; i < all[r].size(); ++i) {
        const double* const at = gathered.data() + 2 * (r * most + i);
        all[r][i] = {at[0], at[1]};
      }
    }
    return all;
  }
  /// The kernels of each lane.
  const std::deque<Kernels>& kernels() const { return kernels_; }
  /// Device memory of the rank that has most, all of it taken before the first step, but for what exports are staged
  /// in.
  std::int64_t peak_bytes() const { return peak_bytes_ + parameters_->staging_bytes(); }

 private:
  using Stages = StageModel<Backend, T>;
  using Memory = pleat::Memory<Arena>;

  void bind(RoutingWatch* watch) {
    const auto schedule = pleat::pipeline::make_schedule(options_.kind(), groups_.mesh.pp, options_.micro_batches());
    const auto stages = Stages::Plan::make(options_, groups_, data_, schedule);
    const RankUnits units = make_units(options_, groups_.mesh.ep, stages.chunks);
    unit_order_ = unit_order(units, schedule.programs[static_cast<std::size_t>(groups_.me.pp)]);
    const auto shards = Parameters<Backend, T>::plan(options_, groups_, units);
    const auto norm = pleat::optim::plan_step_norm(groups_.world.size(), stages.status_words());
    const auto optimizer =
        pleat::optim::plan_optimizer(shards.layouts, shards.kinds, shards.master,
                                     {.adamw = {.weight_decay = options_.weight_decay},
                                      .muon = {.weight_decay = options_.weight_decay, .product = pleat::dtype_of<T>}});
    const std::vector<std::int64_t> rows(static_cast<std::size_t>(options_.micro_batches()),
                                         data_.streams() * data_.local_tokens(0));
    const auto pipeline = pleat::pipeline::plan(schedule, {options_.model.hidden, pleat::dtype_of<T>, rows});

    const auto memory_for = [this](const pleat::Footprint& need) { return this->memory_for(need); };
    for (int lane = 0; lane < stages.lanes; ++lane) {
      const std::size_t bytes = Kernels::workspace_bytes(stages.ops_shape());
      kernels_.emplace_back(stages.ops_shape(), block(bytes), stream());
    }
    if constexpr (Backend::loads_late) rehearse(units, stages.attention.tokens);
    const pleat::Footprint symmetric = shards.footprint() + stages.symmetric();
    arena_.emplace(groups_.stage, counted(symmetric.symmetric), symmetric.channels);
    parameters_.emplace(shards, units, options_, groups_, backend_, kernels_.front(), memory_for(shards.footprint()));
    stages_.emplace(stages, groups_, options_, backend_, kernels_, *parameters_, units, watch, memory_for);
    norm_.emplace(pleat::optim::bind(norm, Executor{}, groups_.world, memory_for(norm.footprint()),
                                     stages_->status_words(), stream()));
    optimizer_.emplace(pleat::optim::bind(optimizer, Executor{}, groups_.shards.dense.reduce,
                                          groups_.shards.expert.reduce, parameters_->shards(),
                                          memory_for(optimizer.footprint()), stream()));
    times_.emplace(schedule.programs[static_cast<std::size_t>(groups_.me.pp)].ops);
    pipeline_.emplace(
        pleat::pipeline::bind(pipeline, Executor{}, groups_.pp, memory_for(pipeline.footprint()), stream()));
    arena_->seal(groups_.stage);
    allocate_batches();
    const std::vector<double> all = gather(groups_.world, {static_cast<double>(bytes_)});
    peak_bytes_ = static_cast<std::int64_t>(*std::max_element(all.begin(), all.end()));
  }

  /// Before the memory of the run is taken, and before any rank waits for another.
  void rehearse(const RankUnits& units, std::int64_t tokens) {
    const Rehearsal<Backend, T> rehearsal(options_.model, units, tokens, stream());
    for (Kernels& kernels : kernels_) rehearsal.run(kernels);
    groups_.world.wait(stream());
  }

  pleat::Block block(std::size_t bytes) { return buffers_.emplace_back(counted(bytes)).block(); }
  /// `bytes`, which the device will have less.
  std::size_t counted(std::size_t bytes) {
    bytes_ += static_cast<std::int64_t>(bytes);
    return bytes;
  }
  /// Memory for one operation, as its footprint says; the trainer keeps it.
  Memory memory_for(const pleat::Footprint& need) {
    const pleat::Block scratch = block(need.scratch), persistent = block(need.persistent);
    return {scratch, persistent, pinned_.emplace_back(need.pinned_host).block(), &*arena_};
  }

  /// What a step uploads, in pinned memory and in the device's: the same places in both.
  struct StepBlock {
    pleat::moe::StepTokens* tokens;
    std::vector<std::int32_t*> ids, labels, positions;  // [micro_batches], each [tokens]
    std::size_t copied_bytes;                           // all of the above
    std::vector<pleat::Block> work;                     // [micro_batches]: of the packing
  };
  StepBlock carve_step(pleat::Carver& memory) const {
    const auto& attention = stages_->attention().plan();
    const auto tokens = static_cast<std::size_t>(attention.tokens),
               batches = static_cast<std::size_t>(options_.micro_batches());
    StepBlock step{};
    step.tokens = memory.take<pleat::moe::StepTokens>(1);
    for (std::vector<std::int32_t*>* list : {&step.ids, &step.labels, &step.positions}) {
      for (std::size_t i = 0; i < batches; ++i) list->push_back(memory.take<std::int32_t>(tokens));
    }
    step.copied_bytes = memory.used_bytes();
    for (std::size_t i = 0; i < batches; ++i) {
      step.work.push_back({memory.take_bytes(attention.placed_bytes), attention.placed_bytes});
    }
    return step;
  }
  void allocate_batches() {
    pleat::Carver measure;
    carve_step(measure);
    const pleat::Block on_host = pinned_.emplace_back(measure.used_bytes()).block(),
                       on_device = block(measure.used_bytes());
    pleat::Carver host_memory(on_host), device_memory(on_device);
    host_step_ = carve_step(host_memory);
    device_step_ = carve_step(device_memory);
    step_tokens_ = device_step_.tokens;
    batches_.resize(static_cast<std::size_t>(options_.micro_batches()));
    result_ =
        reinterpret_cast<pleat::optim::StepResult*>(pinned_.emplace_back(sizeof(pleat::optim::StepResult)).data());
  }
  /// Nothing of the step before is under way: its result was waited for.
  void load_batches() {
    *host_step_.tokens = data_.step_tokens(progress_.position);
    for (std::size_t i = 0; i < batches_.size(); ++i) {
      DeviceBatch& batch = batches_[i];
      batch.host = data_.micro_batch(progress_.position, static_cast<int>(i));
      std::copy(batch.host.tokens.begin(), batch.host.tokens.end(), host_step_.ids[i]);
      std::copy(batch.host.labels.begin(), batch.host.labels.end(), host_step_.labels[i]);
      std::copy(batch.host.positions.begin(), batch.host.positions.end(), host_step_.positions[i]);
      batch.tokens = device_step_.ids[i];
      batch.labels = device_step_.labels[i];
      batch.positions = device_step_.positions[i];
      stages_->attention().place(batch, host_step_.work[i], device_step_.work[i], stream());
    }
    Executor{}.copy(device_step_.tokens, host_step_.tokens, device_step_.copied_bytes, stream());
  }

  pleat::optim::StepResult read(const pleat::optim::StepResult* on_device) {
    Executor{}.copy(result_, on_device, sizeof(*result_), stream());
    groups_.world.wait(stream());
    return *result_;
  }
  /// Values of all ranks of a group, as many of each; waits.
  std::vector<double> gather(const pleat::GroupComm<Comm>& group, const std::vector<double>& own) const {
    const std::size_t bytes = own.size() * sizeof(double);
    std::vector<double> all(own.size() * static_cast<std::size_t>(group.size()));
    const typename Backend::Buffer buffer(bytes + all.size() * sizeof(double));
    std::byte* const gathered = buffer.data() + bytes;
    Executor{}.copy(buffer.data(), own.data(), bytes, stream());
    group.all_gather(buffer.data(), gathered, own.size(), pleat::DType::f64, stream());
    Executor{}.copy(all.data(), gathered, all.size() * sizeof(double), stream());
    groups_.world.wait(stream());
    return all;
  }

  double learning_rate(double full) const {
    if (progress_.step >= options_.warmup_steps) return full;
    const double share = static_cast<double>(progress_.step) / options_.warmup_steps;
    return options_.warmup_from + share * (full - options_.warmup_from);
  }

  Options options_;
  Groups<Comm> groups_;
  DataMap data_;
  Backend backend_;
  Progress progress_;
  std::int64_t bytes_ = 0, peak_bytes_ = 0;
  std::deque<typename Backend::Buffer> buffers_;
  std::deque<typename Backend::PinnedBuffer> pinned_;
  std::optional<Arena> arena_;
  std::deque<Kernels> kernels_;  // [lane]
  std::optional<Parameters<Backend, T>> parameters_;
  std::optional<Stages> stages_;
  std::optional<pleat::optim::StepNorm<Executor, Comm>> norm_;
  std::optional<Optimizer> optimizer_;
  std::optional<pleat::pipeline::Pipeline<Executor, Comm>> pipeline_;

  std::optional<StepTimes<Backend>> times_;

  std::vector<int> unit_order_;  // of a step
  StepBlock host_step_{}, device_step_{};
  pleat::moe::StepTokens* step_tokens_ = nullptr;  // on the device
  std::vector<DeviceBatch> batches_;
  pleat::optim::StepResult* result_ = nullptr;  // pinned
};

}  // namespace train_moe
