// The rows of moe_bench: dispatch and combine, their gradients, their parts, and a whole layer, beside what the bytes
// take on the wire and in memory.
#pragma once

#include <numeric>
#include <optional>

#include <pleat/moe.hpp>
#include <pleat/moe/cuda/leaf.cuh>
#include <pleat/nccl/arena.cuh>

#include "../comm_bench/report.hpp"
#include "../comm_bench/site.cuh"
#include "routing.hpp"

namespace moe_bench {

using namespace pleat;
using comm_bench::Bar;
using comm_bench::Report;
using comm_bench::Site;
using leaf = moe_leaf<cuda_device>;

/// What the machine does: stores to the peer, and a copy's reads and writes.
inline constexpr double wire_gb_per_s = 340, memory_gb_per_s = 4150;

struct Problem {
  const char* name;
  std::int64_t tokens, hidden, inner;
  int experts, k;
  double dispatch_bar_us, combine_bar_us;
};
inline constexpr Problem problems[] = {
    {"T4096 H7168 E256 k8", 4096, 7168, 2048, 256, 8, 420, 350},
    {"T16384 H2048 E128 k8", 16384, 2048, 768, 128, 8, 480, 390},
};

/// Device memory with values of a normal distribution, or the given ones.
class Array {
 public:
  Array(DType dtype, std::initializer_list<std::int64_t> extents)
      : buffer_(TensorRef(nullptr, dtype, extents).elems() * size_bytes(dtype)),
        tensor_(buffer_.data(), dtype, extents, CudaExecutor{}.device()) {}
  Array& random(std::uint32_t key, double scale, cudaStream_t s);
  template <class T>
  Array& copy(const std::vector<T>& values) {
    check_cuda(cudaMemcpy(buffer_.data(), values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice),
               "cudaMemcpy");
    return *this;
  }
  const TensorRef& operator*() const { return tensor_; }
  std::byte* data() const { return buffer_.data(); }

 private:
  CudaBuffer buffer_;
  TensorRef tensor_;
};

PLEAT_KERNEL void fill_bf16(bfloat16* out, std::uint32_t key, float scale, std::size_t elems) {
  for (std::size_t i = comm_bench::first_index(); i < elems; i += comm_bench::index_step()) {
    out[i] = bfloat16(scale * comm_bench::value_of(key, i));
  }
}
PLEAT_KERNEL void fill_f32(float* out, std::uint32_t key, float scale, std::size_t elems) {
  for (std::size_t i = comm_bench::first_index(); i < elems; i += comm_bench::index_step()) {
    out[i] = scale * comm_bench::value_of(key, i);
  }
}
inline Array& Array::random(std::uint32_t key, double scale, cudaStream_t s) {
  const auto elems = static_cast<std::size_t>(tensor_.elems());
  if (tensor_.dtype() == DType::bf16) {
    fill_bf16<<<1024, 256, 0, s>>>(tensor_.as<bfloat16>(), key, static_cast<float>(scale), elems);
  } else {
    fill_f32<<<1024, 256, 0, s>>>(tensor_.as<float>(), key, static_cast<float>(scale), elems);
  }
  check_launch("fill");
  return *this;
}

/// An operation bound to memory of its own.
template <class Plan>
struct Bound {
  Bound(Site& site, const Plan& plan)
      : scratch(plan.footprint().scratch),
        persistent(plan.footprint().persistent),
        pinned(plan.footprint().pinned_host),
        saved_memory(plan.footprint().saved),
        op(moe::bind(plan, CudaExecutor{}, GroupComm<NcclComm>(site.world),
                     Memory<NcclArena>{scratch.block(), persistent.block(), pinned.block(), &site.arena}, site.s)) {}
  CudaBuffer scratch, persistent;
  PinnedBuffer pinned;
  CudaBuffer saved_memory;
  decltype(moe::bind(std::declval<Plan>(), CudaExecutor{}, std::declval<GroupComm<NcclComm>>(),
                     std::declval<Memory<NcclArena>>(), cudaStream_t{})) op;
};

class Rows {
 public:
  Rows(NcclComm& world, Report& report, std::string only)
      : report_(report), only_(std::move(only)), site_(world, comm_bench::mib, window_bytes(world.size())) {}

  void run() {
    for (const Problem& p : problems) {
      if (wants("ops")) {
        const moe::DispatchOptions peer{.transport = Transport::peer};
        const Times uniform = operations(p, "uniform", peer, {});
        operations(p, "zipf", peer, uniform);
        operations(p, "balanced", peer, {});
        operations(p, "uniform", {.transport = Transport::peer, .send_by = moe::SendBy::stores}, {});
        operations(p, "uniform", {.transport = Transport::collective}, {});
      }
      if (wants("budgets")) budgets(p);
      if (wants("parts")) parts(p);
    }
    for (const char* routing : {"uniform", "zipf", "balanced"}) {
      if (wants("layer")) layer(problems[1], routing);
    }
  }

 private:
  static moe::DispatchPlan plan_of(int ranks, const Problem& p, const moe::DispatchOptions& options) {
    return moe::plan(ranks, moe::DispatchShape{p.tokens, p.hidden, p.experts, p.k, DType::bf16}, options);
  }
  /// Every bind takes a window of its own.
  std::size_t window_bytes(int ranks) const {
    const std::size_t binds = (wants("ops") ? 4 : 0) + (wants("budgets") ? 2 * std::size(bounded) : 0) +
                              (wants("parts") ? 1 : 0) + (wants("layer") ? 3 : 0);
    std::size_t bytes = 0;
    for (const Problem& p : problems) {
      bytes += binds * (plan_of(ranks, p, {.transport = Transport::peer}).footprint().symmetric + 128);
    }
    return bytes;
  }
  static constexpr int bounded[] = {8, 16, 32, 64, 132};
  bool wants(const std::string& rows) const { return only_.empty() || only_.find(rows) != std::string::npos; }

  static double floor_us(double wire_bytes, double memory_bytes) {
    return (wire_bytes / wire_gb_per_s + memory_bytes / memory_gb_per_s) / 1000;
  }
  /// `way`, or where it is empty the bytes that go through local memory.
  template <class F>
  double measure(const char* operation, const std::string& way, double wire_bytes, double memory_bytes, const F& f,
                 const std::vector<Bar>& bars = {}, int count = 3) {
    const double us = site_.measure_plain(
        count, [&](int) { f(); }, 7);
    const double most = wire_bytes > 0 ? wire_bytes : memory_bytes;
    const std::string memory = "HBM " + std::to_string(static_cast<long>(memory_bytes / 1e6)) + " MB";
    report_.add({operation, way.empty() && memory_bytes > 0 ? memory : way, static_cast<std::size_t>(most), us,
                 most / us / 1000, floor_us(wire_bytes, memory_bytes)},
                bars);
    return us;
  }

  /// Inputs of one rank.
  struct Inputs {
    Inputs(Site& site, const Problem& p, const char* routing)
        : x(DType::bf16, {p.tokens, p.hidden}),
          ids(DType::i32, {p.tokens, p.k}),
          weights(DType::f32, {p.tokens, p.k}),
          y(DType::bf16, {p.tokens, p.hidden}),
          dweights(DType::f32, {p.tokens, p.k}) {
      x.random(static_cast<std::uint32_t>(site.rank()) + 1, 1, site.s);
      weights.random(static_cast<std::uint32_t>(site.rank()) + 3, 1, site.s);
      ids.copy(draw_ids(routing, p.tokens, p.experts, p.k, site.ranks(), static_cast<unsigned>(site.rank()) + 5));
      site.world.wait(site.s);
    }
    Array x, ids, weights, y, dweights;
  };

  /// Rows that this rank sends to and gets from the others, and all that its experts have.
  struct Counts {
    double sent, came, all, expert_rows;
  };
  Counts counts(const moe::DispatchPlan& plan, const moe::DispatchSaved& saved) {
    std::vector<std::int64_t> send(site_.blocks()), recv(site_.blocks());
    std::vector<std::int64_t> offsets(static_cast<std::size_t>(plan.experts_local()) + 1), ends(offsets.size() - 1);
    const auto read = [](auto* to, const auto* from, std::size_t n) {
      check_cuda(cudaMemcpy(to, from, n * sizeof(*to), cudaMemcpyDefault), "cudaMemcpy");
    };
    read(send.data(), saved.record.send_counts, send.size());
    read(recv.data(), saved.record.recv_counts, recv.size());
    read(offsets.data(), saved.record.offsets, offsets.size());
    read(ends.data(), saved.record.ends, ends.size());
    double rows = 0;
    for (std::size_t e = 0; e < ends.size(); ++e) rows += static_cast<double>(ends[e] - offsets[e]);
    const auto sum = [](const std::vector<std::int64_t>& values) {
      return static_cast<double>(std::accumulate(values.begin(), values.end(), std::int64_t{0}));
    };
    const auto own = static_cast<std::size_t>(site_.rank());
    return {site_.meet(sum(send) - static_cast<double>(send[own])),
            site_.meet(sum(recv) - static_cast<double>(recv[own])), site_.meet(sum(recv)), site_.meet(rows)};
  }

  struct Times {
    double dispatch_us = 0, combine_us = 0, rows = 0;
  };
  /// `uniform`: what Zipf's routing is held to, at equal rows; 0 for others.
  Times operations(const Problem& p, const char* routing, const moe::DispatchOptions& options, const Times& uniform) {
    const moe::DispatchPlan plan = plan_of(site_.ranks(), p, options);
    Bound<moe::DispatchPlan> bound(site_, plan);
    moe::DispatchSaved saved(plan, bound.saved_memory.block());
    Inputs in(site_, p, routing);
    Array out(DType::bf16, {plan.capacity_rows(), p.hidden}), drows(DType::bf16, {plan.capacity_rows(), p.hidden});
    out.random(9, 1, site_.s);
    auto& op = bound.op;
    const Streams<cudaStream_t> s{site_.s, side_};
    op.dispatch(s, *in.x, *in.ids, *in.weights, saved);
    site_.world.wait(site_.s);
    const Counts n = counts(plan, saved);
    report_.title((std::string(p.name) + ", " + routing + ", " + name_of(options.transport) + " " +
                   name_of(plan.options.send_by) + ", rows of experts " +
                   std::to_string(static_cast<long>(n.expert_rows)) + "; bytes: on the wire")
                      .c_str());
    const double row = static_cast<double>(p.hidden) * 2,
                 token = static_cast<double>(plan.format(moe::RowKind::token).row_bytes);
    const bool is_uniform = options.transport == Transport::peer && std::string(routing) == "uniform";
    const auto bar = [&](double us, double uniform_us) {
      if (is_uniform) return std::vector<Bar>{{"bar", us}};
      if (uniform.rows == 0) return std::vector<Bar>{};
      return std::vector<Bar>{{"1.25 uniform", 1.25 * uniform_us * n.expert_rows / uniform.rows}};
    };
    const double expansion = row * (n.all + n.expert_rows);
    Times times{.rows = n.expert_rows};
    times.dispatch_us = measure(
        "dispatch", "", n.sent * token, expansion, [&] { op.dispatch(s, *in.x, *in.ids, *in.weights, saved); },
        bar(p.dispatch_bar_us, uniform.dispatch_us));
    times.combine_us = measure(
        "combine", "", n.came * row, expansion, [&] { op.combine(s, *out, saved, *in.y); },
        bar(p.combine_bar_us, uniform.combine_us));
    measure("combine_backward", "", n.sent * row, row * (n.all + 2 * n.expert_rows),
            [&] { op.combine_backward(s, *in.x, *out, saved, *drows); });
    measure("dispatch_backward", "", n.came * row, expansion,
            [&] { op.dispatch_backward(s, *drows, saved, *in.y, *in.dweights); });
    op.check(s);
    return times;
  }

  /// Dispatch and combine with fewer and fewer multiprocessors.
  void budgets(const Problem& p) {
    report_.title((std::string(p.name) + ", uniform, by budget of CTAs").c_str());
    Inputs in(site_, p, "uniform");
    const Streams<cudaStream_t> s{site_.s, side_};
    for (const moe::SendBy send_by : {moe::SendBy::stores, moe::SendBy::copies}) {
      for (const int ctas : bounded) {
        const moe::DispatchPlan plan =
            plan_of(site_.ranks(), p, {.transport = Transport::peer, .send_by = send_by, .max_ctas = ctas});
        Bound<moe::DispatchPlan> bound(site_, plan);
        moe::DispatchSaved saved(plan, bound.saved_memory.block());
        auto& op = bound.op;
        moe::ExpertRows rows = op.dispatch(s, *in.x, *in.ids, *in.weights, saved);
        site_.world.wait(site_.s);
        const Counts n = counts(plan, saved);
        const std::string way = std::to_string(ctas) + " CTAs, " + name_of(send_by);
        const double row = static_cast<double>(p.hidden) * 2, expansion = row * (n.all + n.expert_rows);
        measure("dispatch", way, n.sent * row, expansion, [&] { op.dispatch(s, *in.x, *in.ids, *in.weights, saved); });
        measure("combine", way, n.came * row, expansion, [&] { op.combine(s, rows.rows, saved, *in.y); });
      }
    }
  }

  /// Each leaf alone, the wire with its signals, and how these depend on the budget of CTAs.
  void parts(const Problem& p) {
    const moe::DispatchPlan plan =
        plan_of(site_.ranks(), p, {.transport = Transport::peer, .send_by = moe::SendBy::stores});
    const CudaBuffer persistent(plan.footprint().persistent), saved_memory(plan.footprint().saved),
        scratch_memory(plan.footprint().scratch);
    Carver carver(persistent.block()), scratch_carver(scratch_memory.block());
    auto* const status = plan.carve_status(carver);
    moe::PeerRows<CudaExecutor, MappedPeers> rows(
        plan, CudaExecutor{}, site_.arena.open(site_.everybody(), plan.footprint().symmetric, plan.channels()), carver,
        site_.s);
    const moe::PlanScratch scratch = plan.carve_plan_scratch(scratch_carver);
    moe::DispatchSaved saved(plan, saved_memory.block());
    saved.tokens = saved.planned_tokens = p.tokens;
    const moe::DispatchRecord& r = saved.record;
    Inputs in(site_, p, "uniform");
    Array out(DType::bf16, {plan.capacity_rows(), p.hidden});
    out.random(9, 1, site_.s);
    const cudaStream_t s = site_.s;
    const auto* const ids = (*in.ids).as<std::int32_t>();
    const int rank = site_.rank();
    const auto plan_sends = [&] { leaf::plan_sends(plan, rank, p.tokens, p.tokens, ids, r, scratch, status, s); };
    const auto transfer = [&](moe::RowKind kind, const auto& write) {
      write(rows.open(kind, saved, s));
      rows.send(kind, s);
      const moe::RowTable came = rows.receive(kind, saved, s);
      rows.release(kind, s);
      return came;
    };
    const auto headers = [&](const moe::RowTable& table) {
      leaf::pack_headers(plan, p.tokens, ids, in.weights.data(), r, table, s);
      rows.send_headers(s);
      return rows.receive_headers(saved, s);
    };
    plan_sends();
    moe::RowTable came{};
    const auto send_tokens = [&](const moe::DispatchPlan& budget) {
      came = transfer(moe::RowKind::token, [&](const moe::RowTable& table) {
        leaf::pack(budget, rank, p.tokens, in.x.data(), r, table, s);
      });
    };
    const auto send_results = [&](const moe::DispatchPlan& budget) {
      return transfer(moe::RowKind::result,
                      [&](const moe::RowTable& table) { leaf::sum_experts(budget, out.data(), true, r, table, s); });
    };
    came = transfer(moe::RowKind::token, headers);
    const auto plan_rows = [&] { leaf::plan_rows(plan, rank, came, r, scratch, status, s); };
    plan_rows();
    send_tokens(plan);
    const moe::RowTable results = send_results(plan);
    site_.world.wait(s);
    const Counts n = counts(plan, saved);
    report_.title((std::string(p.name) + ", parts").c_str());
    const double row = static_cast<double>(p.hidden) * 2,
                 token = static_cast<double>(plan.format(moe::RowKind::token).row_bytes);
    measure("plan_sends", "", 0, static_cast<double>(p.tokens * p.k) * 4, plan_sends, {}, 10);
    measure("plan_rows", "", 0, n.all * 128, plan_rows, {}, 10);
    measure(
        "headers and signals", "", n.sent * 128, 0, [&] { transfer(moe::RowKind::token, headers); }, {}, 10);
    measure(
        "signals alone", "", 0, 0, [&] { transfer(moe::RowKind::gradient, [](const moe::RowTable&) {}); }, {}, 10);
    measure("copies and signals", "copy engine", static_cast<double>((site_.ranks() - 1) * p.tokens) * row, 0, [&] {
      rows.open(moe::RowKind::gradient, saved, s);
      rows.copy_all(moe::RowKind::gradient, in.x.data(), p.tokens, s);
      rows.send(moe::RowKind::gradient, s);
      rows.receive(moe::RowKind::gradient, saved, s);
      rows.release(moe::RowKind::gradient, s);
    });
    for (const int ctas : {8, 16, 32, 64, 132, 0}) {
      moe::DispatchPlan budget = plan;
      budget.options.max_ctas = ctas;
      const std::string way = ctas == 0 ? "all" : std::to_string(ctas) + " CTAs";
      const double wire_us = n.sent * token / 300e3;
      measure("pack and signals", way, n.sent * token, 0, [&] { send_tokens(budget); }, {{"300 GB/s", wire_us}});
      measure("expand", way, 0, row * (n.all + n.expert_rows), [&] {
        leaf::expand(budget, moe::SourceRows::own(rank, in.x.data()), r, s);
        leaf::expand(budget, moe::SourceRows::of_others(rank, came), r, s);
      });
      measure("sum_experts, signals", way, n.came * row, 0, [&] { send_results(budget); });
      measure("sum_sources", way, 0, row * 3 * static_cast<double>(p.tokens),
              [&] { leaf::sum_sources(budget, p.tokens, results, r, nullptr, (*in.y).data(), nullptr, status, s); });
    }
  }

  /// Forward and backward of the whole layer.
  void layer(const Problem& p, const char* routing) {
    const moe::LayerPlan plan =
        moe::plan(site_.ranks(), moe::LayerShape{p.tokens, p.hidden, p.inner, p.experts, p.k, DType::bf16},
                  {.router = {}, .dispatch = {.transport = Transport::peer}, .experts = {}});
    Bound<moe::LayerPlan> bound(site_, plan);
    moe::LayerSaved saved(plan, bound.saved_memory.block());
    Inputs in(site_, p, routing);
    const std::int64_t local = plan.dispatch.experts_local();
    Array logits(DType::f32, {p.tokens, p.experts}), dlogits(DType::f32, {p.tokens, p.experts}),
        dx(DType::bf16, {p.tokens, p.hidden});
    logits.random(static_cast<std::uint32_t>(site_.rank()) + 21, 1, site_.s);
    const auto matrices = [&](DType dtype) {
      return std::array<Array, 3>{Array(dtype, {local, p.inner, p.hidden}), Array(dtype, {local, p.inner, p.hidden}),
                                  Array(dtype, {local, p.hidden, p.inner})};
    };
    auto w = matrices(DType::bf16), dw = matrices(DType::f32);
    for (Array& matrix : w) matrix.random(31, 0.02, site_.s);
    const moe::ExpertMatrices weights{*w[0], *w[1], *w[2]}, dweights{*dw[0], *dw[1], *dw[2]};
    auto& op = bound.op;
    const Streams<cudaStream_t> s{site_.s, side_};
    report_.title(
        (std::string(p.name) + ", " + routing + ", the whole layer, inner " + std::to_string(p.inner)).c_str());
    const auto forward = [&] { op.forward(s, *in.x, *logits, weights, saved, *in.y, {.ids = *in.ids}); };
    const auto backward = [&] {
      op.backward(s, *in.x, *logits, weights, TensorRef{}, saved, *dx, *dlogits, dweights, false);
    };
    forward();
    site_.world.wait(site_.s);
    const Counts n = counts(plan.dispatch, saved.dispatch);
    const double rows = n.expert_rows, row = static_cast<double>(p.hidden) * 2;
    const double wire = n.sent * row, moved = row * (n.all + rows);
    const double flops = 6.0 * rows * static_cast<double>(p.hidden * p.inner);  // of the forward products
    const double product_bytes = flops / 783e12 * memory_gb_per_s * 1e9;        // what the time at 783 TFLOP/s is worth
    const auto bytes = [&](int exchanges, double more, int products) {
      return exchanges * moved + more + products * product_bytes;
    };
    const double both = bytes(4, 2 * row * rows, 3);
    const double matrix_bytes = static_cast<double>(3 * local * p.inner * p.hidden);
    report_.line(
        "of each rank, MB: rows in or out %.0f, on the wire %.0f each way, rows of experts %.0f, weights %.0f, fp32 "
        "gradients %.0f",
        static_cast<double>(p.tokens) * row / 1e6, wire / 1e6, rows * row / 1e6, 2 * matrix_bytes / 1e6,
        4 * matrix_bytes / 1e6);
    measure("layer forward", "products as bytes too", 2 * wire, bytes(2, 0, 1), forward, {}, 1);
    measure(
        "layer forward, backward", "products as bytes too", 4 * wire, both, [&] { forward(), backward(); },
        {{"1.5 floors", 1.5 * floor_us(4 * wire, both)}}, 1);
    op.check(s);
  }

  Report& report_;
  std::string only_;
  Site site_;
  CudaStream side_;
};

}  // namespace moe_bench
