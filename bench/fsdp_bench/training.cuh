// A rank's training of a model whose parameters are sharded, and the same computation without communication.
#pragma once

#include <chrono>
#include <functional>
#include <optional>

#include <pleat/comm/mesh_comms.hpp>
#include <pleat/fsdp/sharder.hpp>
#include <pleat/optim/adamw.hpp>
#include <pleat/optim/cuda/leaf.cuh>
#include <pleat/optim/step_norm.hpp>

#include "../comm_bench/site.cuh"
#include "network.cuh"
#include "trace.cuh"

namespace fsdp_bench {

using comm_bench::Site;
using pleat::check_cuda;
using pleat::NcclArena;
using pleat::NcclComm;
using pleat::Transport;

struct Config {
  DType gradient = DType::f32;
  Transport transport = Transport::peer;
  int prefetch = 1;
  int reduce_ctas = fsdp::Options{}.reduce_ctas;
  int last_reduce_ctas = fsdp::Options{}.last_reduce_ctas;
  bool leaves_sms = false;  // products of the backward pass are made for what the sums leave
  bool with_optimizer = false;
};

/// Medians of one configuration.
struct Measured {
  double step_us = 0, alone_us = 0, host_us = 0;
  std::vector<unsigned long long> wrong;  // [unit]: gradients that were not the expected ones, of all steps and ranks
};

template <class Executor = pleat::CudaExecutor>
class Training {
 public:
  using Sharder = fsdp::Sharder<Executor, NcclComm, NcclArena>;
  using Streams = fsdp::ShardStreams<cudaStream_t>;

  /// `make_executor(streams)`.
  template <class MakeExecutor>
  Training(Site& site, const Cublas& cublas, const fsdp::Groups<NcclComm>& groups, const Model& model,
           const Config& config, MakeExecutor make_executor)
      : site_(site),
        config_(config),
        model_(model),
        plan_(fsdp::plan(std::vector(static_cast<std::size_t>(model.units), model.unit), groups.sizes(),
                         {.compute = DType::bf16,
                          .gradient = config.gradient,
                          .transport = config.transport,
                          .prefetch = config.prefetch,
                          .reduce_ctas = config.reduce_ctas,
                          .last_reduce_ctas = config.last_reduce_ctas})),
        group_(groups.of(model.unit.kind).gather),
        network_(model, cublas, layout(), config.gradient,
                 config.leaves_sms ? multiprocessors() - config.reduce_ctas : 0),
        adamw_plan_(pleat::optim::plan_adamw(plan_.layouts, DType::f32)),
        norm_plan_(pleat::optim::plan_step_norm(site.world.size())),
        alone_plan_(pleat::optim::plan_step_norm(1)),
        persistent_(plan_.footprint().persistent),
        optimizer_memory_(adamw_plan_.footprint().persistent),
        norm_memory_(norm_plan_.footprint().persistent),
        alone_memory_(alone_plan_.footprint().persistent),
        differences_(static_cast<std::size_t>(model.units) * sizeof(unsigned long long)),
        sums_(sizeof(pleat::optim::StepSums)) {
    const std::size_t window = plan_.footprint().symmetric;
    if (config.transport == Transport::peer) {
      arena_.emplace(pleat::GroupComm<NcclComm>(site.world), window);
      auto whole = arena_->open(pleat::GroupComm<NcclComm>(site.world).ranks(), 0, 0);
      window_ = {whole.base(whole.rank()), window};
    }
    const pleat::Memory<NcclArena> memory{.persistent = persistent_.block(), .arena = arena_ ? &*arena_ : nullptr};
    op_.emplace(fsdp::bind(plan_, make_executor(streams()), groups, memory, compute()));
    adamw_.emplace(pleat::optim::bind(adamw_plan_, pleat::CudaExecutor{},
                                      pleat::Memory<>{.persistent = optimizer_memory_.block()}, compute()));
    norm_.emplace(pleat::optim::bind(norm_plan_, pleat::CudaExecutor{}, pleat::GroupComm<NcclComm>(site.world),
                                     pleat::Memory<>{.persistent = norm_memory_.block()}, compute()));
    alone_norm_.emplace(pleat::optim::bind(alone_plan_, pleat::CudaExecutor{}, pleat::GroupComm<NcclComm>(0),
                                           pleat::Memory<>{.persistent = alone_memory_.block()}, compute()));
    for (int u = 0; u < model.units; ++u) order_.push_back(u);
    for (int u = model.units; u-- > 0;) order_.push_back(u);
    check_cuda(cudaMemset(differences_.data(), 0, differences_.size_bytes()), "cudaMemset");
    const pleat::optim::StepSums sums{.loss = 1, .tokens = 1};
    check_cuda(cudaMemcpy(sums_.data(), &sums, sizeof sums, cudaMemcpyDefault), "cudaMemcpy");
    draw_weights();
    expect();
  }
  /// Nobody takes its window away from a peer.
  ~Training() {
    if (std::uncaught_exceptions() == 0) settle();
  }

  const fsdp::Plan& plan() const { return plan_; }
  std::size_t activation_bytes() const { return network_.bytes(); }
  Sharder& op() { return *op_; }
  cudaStream_t compute() const { return site_.s; }
  Streams streams() const { return {compute(), gather_, reduce_, own_}; }

  /// Times of steps with and without communication, in turn; the gradients of every timed step are compared bit by bit.
  Measured measure(int samples) {
    std::vector<double> steps, alone, host;
    constexpr int warm_ups = 2;
    for (int sample = 0; sample < warm_ups + samples; ++sample) {
      alone.push_back(1000 * site_.meet(site_.time_ms(sample, 1, [&](int) { run_alone(); })));
      poison_all();
      double host_us = 0;
      steps.push_back(1000 * site_.meet(site_.time_ms(sample, 1, [&](int) {
        const auto start = std::chrono::steady_clock::now();
        run_step();
        host_us = std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count();
      })));
      host.push_back(site_.meet(host_us));
      compare();
    }
    Measured measured;
    measured.wrong.resize(static_cast<std::size_t>(model_.units));
    check_cuda(cudaMemcpyAsync(measured.wrong.data(), differences_.data(), differences_.size_bytes(),
                               cudaMemcpyDeviceToHost, compute()),
               "cudaMemcpyAsync");
    settle();
    for (auto& count : measured.wrong) count = static_cast<unsigned long long>(site_.meet(static_cast<double>(count)));
    for (auto* times : {&steps, &alone, &host}) times->erase(times->begin(), times->begin() + warm_ups);
    measured.step_us = Site::median(steps);
    measured.alone_us = Site::median(alone);
    measured.host_us = Site::median(host);
    return measured;
  }

  /// One step, as the caller's trainer would write it. `trace`: gets the spans of computation.
  void run_step(Trace* trace = nullptr) {
    op_->begin(order_);
    for (std::size_t use = 0; use < order_.size(); ++use) {
      const int u = order_[use];
      const bool is_forward = use < order_.size() / 2;
      const std::string name = (is_forward ? "F" : "B") + std::to_string(u);
      const Range range(name);
      const fsdp::UnitView weights = op_->acquire(u, streams());
      if (trace != nullptr) trace->begin("compute", name, compute());
      if (is_forward) {
        network_.forward(u, weights, compute());
      } else {
        auto gradient = op_->gradient(u, streams());
        network_.backward(
            u, weights, [&](int p) { return gradient.write(p); }, [&] { op_->reduce(u, streams()); }, compute());
      }
      // A rank alone uses its shard in place, which stays.
      if (!is_kept(use)) poison_slot(group_.size() > 1 ? weights[0].data() : ignored_.data());
      if (trace != nullptr) trace->end("compute", compute());
      op_->release(u, streams());
    }
    const Range range("end of the step");
    op_->finish_gradients(streams());
    if (trace != nullptr) trace->begin("compute", "optimizer", compute());
    if (config_.with_optimizer) optimize(*norm_);
    if (trace != nullptr) trace->end("compute", compute());
    op_->weights_changed(streams());
  }

  /// What `run_step` computes, on weights and gradients of one rank's own.
  void run_alone() {
    for (std::size_t use = 0; use < order_.size(); ++use) {
      const int u = order_[use];
      use < order_.size() / 2 ? network_.forward(u, whole(u), compute()) : backward_alone(u);
      if (!is_kept(use)) poison_slot(ignored_.data());
    }
    if (config_.with_optimizer) optimize(*alone_norm_);
  }

 private:
  using Norm = pleat::optim::StepNorm<pleat::CudaExecutor, NcclComm>;
  static constexpr unsigned grid = 1056, threads = 256;

  static int multiprocessors() {
    int count = 0;
    check_cuda(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, 0), "cudaDeviceGetAttribute");
    return count;
  }
  const fsdp::UnitLayout& layout() const { return plan_.layouts.front(); }
  std::size_t unit_elems() const { return static_cast<std::size_t>(layout().total_elems()); }
  fsdp::UnitView whole(int u) const {
    return {layout(), whole_[static_cast<std::size_t>(u)].data(), DType::bf16, pleat::CudaExecutor{}.device()};
  }
  void backward_alone(int u) const {
    const fsdp::UnitView gradient(layout(), own_gradients_[u % 2].data(), config_.gradient,
                                  pleat::CudaExecutor{}.device());
    const auto overwrite = [&](int p) { return fsdp::GradientTarget{gradient[p], false}; };
    network_.backward(
        u, whole(u), overwrite, [] {}, compute());
  }
  /// Whether the slot is still used as it is: the last units of the forward pass stay for the backward pass.
  bool is_kept(std::size_t use) const {
    return use < order_.size() / 2 && use + 1 + static_cast<std::size_t>(plan_.prefetch) >= order_.size() / 2;
  }
  void poison_slot(void* slot) const {
    poison<<<64, threads, 0, compute()>>>(static_cast<std::uint16_t*>(slot), unit_elems());
    check_launch("poison");
  }
  /// A learning rate of 0 leaves the weights as they are, at the same cost.
  void optimize(Norm& norm) {
    pleat::CudaExecutor{}.copy(norm.sums(), sums_.data(), sums_.size_bytes(), compute());
    adamw_->step(op_->shards(), norm.run(op_->shards(), 1.0, compute()), 0.0, compute());
  }
  void settle() const {
    const Streams all = streams();
    for (const cudaStream_t s : std::array{all.compute, all.gather, all.reduce, all.own}) site_.world.wait(s);
    site_.meet();
  }

  void draw_weights() {
    ignored_ = CudaBuffer(unit_elems() * 2);
    for (CudaBuffer& g : own_gradients_) g = CudaBuffer(unit_elems() * pleat::size_bytes(config_.gradient));
    for (int u = 0; u < model_.units; ++u) {
      whole_.emplace_back(unit_elems() * 2);
      check_cuda(cudaMemsetAsync(whole_.back().data(), 0, whole_.back().size_bytes(), compute()), "cudaMemsetAsync");
      for (const Step& step : model_.steps_of(u)) {
        const float offset = step.out == 0 ? 1.0f : 0.0f;
        const float scale = step.out == 0 ? 0.1f : std::sqrt(3.0f / static_cast<float>(step.in));
        for (int e = 0; e < model_.experts; ++e) {
          const pleat::TensorRef w = whole(u).expert(step.param, e);
          draw<<<grid, threads, 0, compute()>>>(
              static_cast<bfloat16*>(w.data()),
              static_cast<std::uint32_t>((u * 64 + step.param) * 64 + e) * 0x85EBCA77u, offset, scale,
              static_cast<std::size_t>(w.elems()));
          check_launch("draw");
        }
      }
      const fsdp::ShardMemory& shard = op_->shards()[static_cast<std::size_t>(u)];
      const std::byte* const mine = whole_.back().data() + layout().shard_begin(group_.rank()) * 2;
      const auto elems = static_cast<std::size_t>(shard.elems);
      using leaf = pleat::core_leaf<pleat::cuda_device>;
      leaf::cast_copy(shard.master, DType::f32, mine, DType::bf16, elems, compute());
      leaf::cast_copy(shard.compute, DType::bf16, mine, DType::bf16, elems, compute());
    }
    op_->weights_changed(streams());
  }
  /// The sums of gradients, from the computation of every rank here.
  void expect() {
    for (int u = 0; u < model_.units; ++u) {
      expected_.emplace_back(static_cast<std::size_t>(layout().max_shard_elems()) * sizeof(float));
    }
    const int sharers = group_.size();
    for (int r = 0; r < ranks_of_sum(); ++r) {
      network_.draw_inputs(r, compute());
      for (int u = 0; u < model_.units; ++u) network_.forward(u, whole(u), compute());
      for (int u = model_.units; u-- > 0;) {
        backward_alone(u);
        const std::int64_t begin = layout().shard_begin(sharers == 1 ? 0 : group_.rank());
        add(u, begin, r == 0);
      }
    }
    network_.draw_inputs(site_.rank(), compute());
    settle();
  }
  int ranks_of_sum() const { return site_.world.size(); }
  void add(int u, std::int64_t begin, bool is_first) {
    auto* const sum = reinterpret_cast<float*>(expected_[static_cast<std::size_t>(u)].data());
    const std::byte* const term = own_gradients_[u % 2].data();
    const auto elems = static_cast<std::size_t>(layout().shard_elems(group_.rank()));
    if (config_.gradient == DType::f32) {
      add_term<<<grid, threads, 0, compute()>>>(sum, reinterpret_cast<const float*>(term) + begin, is_first, elems);
    } else {
      add_term<<<grid, threads, 0, compute()>>>(sum, reinterpret_cast<const bfloat16*>(term) + begin, is_first, elems);
    }
    check_launch("add_term");
  }

  /// Whatever the next step does not write itself is NaN.
  void poison_all() {
    check_cuda(cudaMemsetAsync(window_.data, 0xff, window_.size_bytes, compute()), "cudaMemsetAsync");
    for (const fsdp::ShardMemory& shard : op_->shards()) {
      check_cuda(cudaMemsetAsync(shard.gradient, 0xff, static_cast<std::size_t>(shard.elems) * 4, compute()),
                 "cudaMemsetAsync");
    }
  }
  void compare() {
    const auto pieces = layout().pieces(group_.rank());
    for (int u = 0; u < model_.units; ++u) {
      const fsdp::ShardMemory& shard = op_->shards()[static_cast<std::size_t>(u)];
      for (const fsdp::Piece& piece : pieces) {
        const bool is_written = std::any_of(model_.steps.begin(), model_.steps.end(),
                                            [&](const Step& step) { return step.param == piece.param; });
        if (!is_written) continue;
        const auto at = [&](const void* data) { return static_cast<const std::uint32_t*>(data) + piece.shard_begin; };
        count_differences<<<grid, threads, 0, compute()>>>(
            at(shard.gradient), at(expected_[static_cast<std::size_t>(u)].data()),
            static_cast<std::size_t>(piece.elems), reinterpret_cast<unsigned long long*>(differences_.data()) + u);
        check_launch("count_differences");
      }
    }
  }

  Site& site_;
  Config config_;
  Model model_;
  fsdp::Plan plan_;
  pleat::GroupComm<NcclComm> group_;
  Network network_;
  pleat::optim::AdamwPlan adamw_plan_;
  pleat::optim::StepNormPlan norm_plan_, alone_plan_;
  CudaBuffer persistent_, optimizer_memory_, norm_memory_, alone_memory_, differences_, sums_, ignored_;
  CudaBuffer own_gradients_[2];
  std::deque<CudaBuffer> whole_, expected_;  // [unit]
  pleat::CudaStream gather_, reduce_{pleat::first_priority()}, own_;
  std::optional<NcclArena> arena_;
  pleat::Block window_{};
  std::optional<Sharder> op_;
  std::optional<pleat::optim::Adamw<pleat::CudaExecutor>> adamw_;
  std::optional<Norm> norm_, alone_norm_;
  std::vector<int> order_;
};

}  // namespace fsdp_bench
