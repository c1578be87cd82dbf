// The rows of fsdp_bench: gathers and sums of one unit, and steps of whole models, beside their floors and bars.
#pragma once

#include "../comm_bench/operations.cuh"
#include "../comm_bench/report.hpp"
#include "training.cuh"

namespace fsdp_bench {

using comm_bench::Bar;
using comm_bench::mib;
using comm_bench::Operation;
using comm_bench::Report;
using comm_bench::Shape;

class Rows {
 public:
  Rows(NcclComm& world, Report& report, std::string only, std::string trace)
      : report_(report),
        only_(std::move(only)),
        trace_(std::move(trace)),
        site_(world, most_block_bytes, 0),
        comms_(pleat::RuntimeMesh::fold({.world = world.size()}), world),
        replicas_(pleat::RuntimeMesh::fold({.world = world.size(), .replicas = world.size()}), world) {}

  /// Whether all data were right.
  bool run() {
    if (site_.ranks() > 1) {
      if (wants("gather")) gathers();
      if (wants("reduce")) sums();
      if (wants("wire")) wires();
    }
    if (wants("small")) small_steps();
    if (wants("large")) large_steps();
    if (wants("models")) models();
    if (wants("sweep")) sweep();
    if (wants("replicas")) replica_steps();
    if (!trace_.empty()) {
      write_trace(squares(8192), trace_);
      write_trace(squares(16), trace_ + ".small");
    }
    return is_right_;
  }

 private:
  static constexpr std::size_t most_block_bytes = 128 * mib;

  /// Words of --only, or all but the sweep.
  bool wants(const std::string& rows) const {
    return only_.empty() ? rows != "sweep" : only_.find(rows) != std::string::npos;
  }
  fsdp::Groups<NcclComm> groups() { return fsdp::groups_of(comms_); }
  static auto plain() {
    return [](const auto&) { return pleat::CudaExecutor{}; };
  }
  static double gb_per_s(std::size_t bytes, double us) { return static_cast<double>(bytes) / us / 1000; }
  double add(const char* operation, const std::string& way, std::size_t bytes, double us, double floor_us,
             const std::vector<Bar>& bars = {}) {
    report_.add({operation, way, bytes, us, bytes == 0 ? 0 : gb_per_s(bytes, us), floor_us}, bars);
    return us;
  }
  double measure(const char* operation, const std::string& way, const Operation& what, std::size_t bytes,
                 double floor_us, const std::vector<Bar>& bars = {}) {
    return add(operation, way, bytes, site_.measure(std::string(operation) + ", " + way, what, bytes), floor_us, bars);
  }

  void gathers() {
    report_.title("gather of a unit of 128 MiB; bytes: a rank's shard; floor: the bare copy engine");
    const std::size_t bytes = 128 * mib / site_.blocks();
    const double copy_us = measure("transfer", "copy engine", comm_bench::bare_copy(site_, bytes), bytes, 0);
    measure("gather", "NCCL", comm_bench::nccl_all_gather(site_, bytes), bytes, copy_us);
    for (const Transport transport : {Transport::collective, Transport::peer}) {
      const Model model = squares(16);
      Training training(site_, cublas_, groups(), model, {.transport = transport}, plain());
      auto& op = training.op();
      const auto streams = training.streams();
      const Operation gather{Shape::gather,
                             [&](int, const std::byte*) {
                               op.weights_changed(streams);
                               op.begin({});
                               const auto view = op.acquire(0, streams);
                               op.release(0, streams);
                               return static_cast<const std::byte*>(view[0].data());
                             },
                             [&](int) { return static_cast<std::byte*>(op.shards()[0].compute); }, 1};
      std::vector<Bar> bars;
      if (transport == Transport::peer) {
        bars = {{"1.10 (floor + 10)", 1.10 * (copy_us + 10)}, {"goal 1.05", 1.05 * (copy_us + 10)}};
      }
      measure("gather", std::string("pleat, ") + pleat::name_of(transport), gather, bytes, copy_us, bars);
    }
  }

  void sums() {
    report_.title("fp32 sum of a unit of 256 MiB; bytes: what each rank keeps; floor: the bare pull-and-add");
    const std::size_t bytes = 256 * mib / site_.blocks();
    double floor_us = 0;
    for (const unsigned ctas : {8u, 32u, 132u}) {
      const double us =
          measure("sum", "bare, " + std::to_string(ctas) + " CTAs", comm_bench::bare_sum(site_, bytes, ctas), bytes, 0);
      floor_us = floor_us == 0 ? us : std::min(floor_us, us);
    }
    measure("sum", "NCCL", comm_bench::nccl_reduce_scatter(site_, bytes), bytes, floor_us);
    for (const int ctas : {6, 8, 10, 12, 16, 0}) {
      sum("pleat, peer, " + std::to_string(ctas) + " CTAs", {.reduce_ctas = ctas}, bytes, floor_us);
    }
    sum("pleat, collective", {.transport = Transport::collective}, bytes, floor_us);
  }
  void sum(const std::string& way, const Config& config, std::size_t bytes, double floor_us) {
    Model model = squares(16);
    model.units = 1;  // a step leaves zero what it does not sum
    Training training(site_, cublas_, groups(), model, config, plain());
    auto& op = training.op();
    const auto streams = training.streams();
    const Operation reduce{Shape::sum,
                           [&](int, const std::byte*) {
                             op.reduce(0, streams);
                             op.finish_gradients(streams);
                             return static_cast<const std::byte*>(op.shards()[0].gradient);
                           },
                           [&](int) { return static_cast<std::byte*>(op.gradient(0, streams).write(0).tensor.data()); },
                           1};
    std::vector<Bar> bars;
    if (config.transport == Transport::peer && config.reduce_ctas >= 10) {  // that fill the link
      bars = {{"1.10 floor", 1.10 * floor_us}};
    }
    measure("sum", way, reduce, bytes, floor_us, bars);
  }

  /// The leaf on bf16 terms: half of the bytes of the sums above, for as many elements.
  void wires() {
    report_.title("bf16 terms summed into fp32; bytes: what each rank reads of each other one");
    const std::size_t elems = 64 * mib / site_.blocks();
    const pleat::CudaBuffer out(elems * 4);
    std::vector<const void*> terms;
    for (int r = 0; r < site_.ranks(); ++r) terms.push_back(site_.window_in(r));
    for (const int ctas : {4, 6, 8, 12, 16, 24, 0}) {
      const double us = site_.measure_plain(2, [&](int) {
        pleat::core_leaf<pleat::cuda_device>::sum_ranks(out.data(), DType::f32, terms, DType::bf16, elems, false,
                                                        site_.s, ctas);
      });
      add("sum of bf16", std::to_string(ctas) + " CTAs", elems * 2, us, 0);
    }
  }

  struct Bounds {
    double of_alone = 0;     // a bar as a multiple of the computation alone
    double absolute_us = 0;  // or in time
    double goal = 0;         // in the unit of the bar
  };
  Measured step(const Model& model, const std::string& way, const Config& config) {
    return step(model, way, config, Bounds{});
  }
  Measured step(const Model& model, const std::string& way, const Config& config, const Bounds& bounds) {
    return step(model, way, config, groups(), bounds);
  }
  Measured step(const Model& model, const std::string& way, const Config& config,
                const fsdp::Groups<NcclComm>& of_groups, const Bounds& bounds) {
    Training training(site_, cublas_, of_groups, model, config, plain());
    const Measured m = training.measure(samples_);
    std::vector<Bar> bars;
    if (bounds.of_alone != 0) {
      bars = {{number(bounds.of_alone) + " alone", bounds.of_alone * m.alone_us},
              {"goal " + number(bounds.goal), bounds.goal * m.alone_us}};
    } else if (bounds.absolute_us != 0) {
      bars = {{"bar", bounds.absolute_us}, {"goal", bounds.goal}};
    }
    add("step", way, 0, m.step_us, m.alone_us, bars);
    for (std::size_t u = 0; u < m.wrong.size(); ++u) {
      if (m.wrong[u] == 0) continue;
      report_.line("  WRONG: %llu gradients of unit %zu", m.wrong[u], u);
      is_right_ = false;
    }
    add("", "host's part of it", 0, m.host_us, 0);
    if (shows_memory_) memory(training);
    return m;
  }
  static std::string number(double value) {
    char text[16];
    std::snprintf(text, sizeof text, "%.2f", value);
    return text;
  }

  /// What a step takes: all of it is there from the start.
  void memory(const Training<>& training) {
    const fsdp::Plan& plan = training.plan();
    std::size_t shards = 0, units = 0;
    for (const fsdp::UnitLayout& layout : plan.layouts) {
      shards += static_cast<std::size_t>(layout.max_shard_elems()) * (4 + 2 + 4);
    }
    for (const fsdp::KindPlan& kind : plan.per_kind) {
      units += static_cast<std::size_t>(kind.unit_elems) *
               (static_cast<std::size_t>(kind.slots) * 2 +
                static_cast<std::size_t>(kind.gradient_units) * pleat::size_bytes(plan.gradient));
    }
    const pleat::Footprint all = plan.footprint();
    report_.line(
        "  memory: %zu MiB of shards, %zu MiB of slots and gradient units, %zu KiB more; with activations %zu MiB",
        shards / mib, units / mib, (all.persistent + all.symmetric - shards - units) / 1024,
        (all.persistent + all.symmetric + training.activation_bytes()) / mib);
  }

  void small_steps() {
    report_.title("step of 8 units of 8192^2, 16 tokens; floor: the computation alone");
    const Model model = squares(16);
    bare_nccl(model);
    shows_memory_ = true;
    step(model, "fp32 wire", {});
    step(model, "bf16 wire", {.gradient = DType::bf16});
    shows_memory_ = false;
    // Nothing computes for long: transfers may have more multiprocessors, and another slot.
    step(model, "fp32 wire, 16 CTAs", {.reduce_ctas = 16});
    step(model, "bf16 wire, 16 CTAs", {.gradient = DType::bf16, .reduce_ctas = 16});
    step(model, "fp32, 16 CTAs, prefetch 2", {.prefetch = 2, .reduce_ctas = 16}, {.absolute_us = 6500, .goal = 5700});
    step(model, "bf16, 16 CTAs, prefetch 2", {.gradient = DType::bf16, .prefetch = 2, .reduce_ctas = 16},
         {.absolute_us = 5000, .goal = 4400});
    step(model, "fp32 wire, collective", {.transport = Transport::collective});
    step(model, "fp32 wire, norm and AdamW", {.with_optimizer = true});
    step(model, "bf16 wire, norm and AdamW", {.gradient = DType::bf16, .with_optimizer = true});
  }
  /// With what is planned by default, and with 4 multiprocessors for sums, which the products of the backward pass
  /// leave to them.
  void steps_beside_sums(const Model& model, const Bounds& of_f32, const Bounds& of_bf16) {
    for (const DType wire : {DType::f32, DType::bf16}) {
      for (const bool leaves_sms : {false, true}) {
        Config config{.gradient = wire, .leaves_sms = leaves_sms};
        if (leaves_sms) config.reduce_ctas = 4;
        step(model,
             std::string(model.name) + (wire == DType::f32 ? ", fp32" : ", bf16") + (leaves_sms ? ", 4 SMs left" : ""),
             config, wire == DType::f32 ? of_f32 : of_bf16);
      }
    }
  }
  void large_steps() {
    report_.title("step of 8 units of 8192^2, 8192 tokens; floor: the computation alone");
    const Model model = squares(8192);
    steps_beside_sums(model, {.of_alone = 1.04, .goal = 1.03}, {.of_alone = 1.03, .goal = 1.02});
    step(model, "fp32 wire, collective", {.transport = Transport::collective});
    step(model, "fp32 wire, norm and AdamW", {.with_optimizer = true});
    step(model, "bf16 wire, norm and AdamW", {.gradient = DType::bf16, .with_optimizer = true});
  }
  void models() {
    report_.title("step of a transformer's layers and of experts; floor: the computation alone");
    shows_memory_ = true;
    const Bounds bounds{.of_alone = 1.06, .goal = 1.03};
    for (const Model& model : {layers(8192), experts(4096), half_experts(4096)}) {
      steps_beside_sums(model, bounds, bounds);
    }
    shows_memory_ = false;
  }
  void sweep() {
    report_.title("multiprocessors of sums beside products; floor: the computation alone");
    samples_ = 3;
    for (const Model& model : {squares(8192), experts(4096), layers(8192)}) {
      for (const DType wire : {DType::f32, DType::bf16}) {
        for (const int ctas : {4, 6, 8}) {
          for (const bool leaves_sms : {false, true}) {
            if (leaves_sms && ctas != 4) continue;
            step(model,
                 std::string(model.name) + (wire == DType::f32 ? ", fp32, " : ", bf16, ") + std::to_string(ctas) +
                     " CTAs" + (leaves_sms ? ", left to them" : ""),
                 {.gradient = wire, .reduce_ctas = ctas, .leaves_sms = leaves_sms});
          }
        }
      }
    }
    samples_ = 5;
  }
  void replica_steps() {
    report_.title("two replicas in place of two shards; floor: the computation alone");
    shows_memory_ = true;
    for (const std::int64_t tokens : {16, 8192}) {
      step(squares(tokens), std::to_string(tokens) + " tokens, fp32 wire", {}, fsdp::groups_of(replicas_), {});
    }
    shows_memory_ = false;
  }

  /// The collectives of a step, one after the other, on NCCL itself.
  void bare_nccl(const Model& model) {
    const std::size_t elems = 8192 * 8192, of_shard = elems / site_.blocks();
    const pleat::CudaBuffer unit(elems * 2), shard(of_shard * 2), gradient(elems * 4), sum(of_shard * 4);
    check_cuda(cudaMemset(gradient.data(), 0, gradient.size_bytes()), "cudaMemset");
    check_cuda(cudaMemset(shard.data(), 0, shard.size_bytes()), "cudaMemset");
    const double us = site_.measure_plain(1, [&](int) {
      for (int i = 0; i < 2 * model.units - 2; ++i) {
        site_.world.settle(
            ncclAllGather(shard.data(), unit.data(), of_shard, ncclBfloat16, site_.world.native(), site_.s),
            "ncclAllGather");
      }
      for (int i = 0; i < model.units; ++i) {
        site_.world.settle(ncclReduceScatter(gradient.data(), sum.data(), of_shard, ncclFloat32, ncclSum,
                                             site_.world.native(), site_.s),
                           "ncclReduceScatter");
      }
    });
    add("collectives", "bare NCCL, fp32 wire", 0, us, 0);
  }

  /// One step of the last of several, in which nothing is loaded any more.
  void write_trace(const Model& model, const std::string& path) {
    auto trace = std::make_shared<Trace>();
    Training<TracingExecutor> training(site_, cublas_, groups(), model, {},
                                       [&](const auto& streams) { return TracingExecutor(trace, streams.reduce); });
    for (int i = 0; i < 3; ++i) {
      site_.world.wait(site_.s);
      site_.meet();
      trace->clear();
      training.run_step(trace.get());
    }
    site_.world.wait(site_.s);
    if (site_.rank() == 0) trace->write(path);
    site_.meet();
  }

  Report& report_;
  std::string only_, trace_;
  Site site_;
  Cublas cublas_;
  pleat::MeshComms<pleat::RuntimeMesh, NcclComm> comms_, replicas_;
  int samples_ = 5;
  bool shows_memory_ = false, is_right_ = true;
};

}  // namespace fsdp_bench
