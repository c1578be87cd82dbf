// moe_leaves_bench: the leaves of dispatch and combine on one GPU, which holds the windows of two ranks, by budget of
// multiprocessors; the floor is what the bytes that a leaf reads and writes take at the rate of a copy.
#include <algorithm>
#include <array>
#include <cstdio>
#include <exception>
#include <functional>
#include <string>
#include <vector>

#include <pleat/cuda/buffer.hpp>
#include <pleat/cuda/executor.hpp>
#include <pleat/cuda/stream.hpp>
#include <pleat/moe/cuda/plan.cuh>
#include <pleat/moe/cuda/row_leaf.cuh>
#include <pleat/moe/peer_rows.hpp>

#include "routing.hpp"

namespace moe_bench {

using namespace pleat;

inline constexpr double copy_bytes_per_us = 4153e3;  // read and written

struct Leaf : moe::detail::CudaPlanLeaf, moe::detail::CudaRowLeaf {};

/// Both ranks' windows on one GPU, whose stream orders all their work.
struct LocalPeers {
  using device_type = cuda_device;
  using stream_type = cudaStream_t;
  int own = 0;
  std::array<std::byte*, 2> bases{};
  int rank() const noexcept { return own; }
  int size() const noexcept { return 2; }
  std::byte* base(int peer) const { return bases[static_cast<std::size_t>(peer)]; }
  void signal(int, int, cudaStream_t) {}
  void await(int, int, cudaStream_t) {}
};
static_assert(peer_access<LocalPeers>);

struct Problem {
  const char* name;
  std::int64_t tokens, hidden;
  int experts, k;
};
inline constexpr Problem problems[] = {{"T4096 H7168 E256 k8", 4096, 7168, 256, 8},
                                       {"T16384 H2048 E128 k8", 16384, 2048, 128, 8}};

PLEAT_KERNEL void fill_kernel(bfloat16* out, std::size_t elems, unsigned seed) {
  const std::size_t step = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  for (std::size_t i = blockIdx.x * static_cast<std::size_t>(blockDim.x) + threadIdx.x; i < elems; i += step) {
    const std::uint64_t mixed = (i + seed) * 0x9E3779B97F4A7C15ull;
    out[i] = bfloat16(static_cast<float>(mixed >> 40) * 0x1p-23f - 1);
  }
}
template <class T>
CudaBuffer upload(const std::vector<T>& values) {
  CudaBuffer buffer(values.size() * sizeof(T));
  check_cuda(cudaMemcpy(buffer.data(), values.data(), buffer.size_bytes(), cudaMemcpyDefault), "cudaMemcpy");
  return buffer;
}

struct Rank {
  Rank(const moe::DispatchPlan& plan, const char* routing, const LocalPeers& peers, cudaStream_t stream)
      : plan(plan),
        s(stream),
        persistent(plan.footprint().persistent),
        saved_memory(plan.footprint().saved),
        scratch_memory(plan.footprint().scratch),
        expert_out(static_cast<std::size_t>(plan.capacity_rows() * plan.shape.hidden) * 2),
        drows(expert_out.size_bytes()),
        x(static_cast<std::size_t>(plan.shape.max_tokens * plan.shape.hidden) * 2),
        y(x.size_bytes()),
        dweights(static_cast<std::size_t>(plan.shape.max_tokens * plan.shape.k) * 4),
        ids(upload(draw_ids(routing, plan.shape.max_tokens, plan.shape.experts, plan.shape.k, 2,
                            static_cast<unsigned>(peers.own) + 5))),
        weights(upload(std::vector<float>(static_cast<std::size_t>(plan.shape.max_tokens * plan.shape.k), 0.125f))),
        carver(persistent.block()),
        status(plan.carve_status(carver)),
        rows(plan, CudaExecutor{}, peers, carver, stream),
        saved(plan, saved_memory.block()),
        rank(peers.own) {
    Carver scratch_carver(scratch_memory.block());
    scratch = plan.carve_plan_scratch(scratch_carver);
    saved.tokens = saved.planned_tokens = plan.shape.max_tokens;
    for (const CudaBuffer* buffer : {&expert_out, &x}) {
      fill_kernel<<<1024, 256, 0, s>>>(reinterpret_cast<bfloat16*>(buffer->data()), buffer->size_bytes() / 2, 7);
      check_launch("fill_kernel");
    }
  }

  const std::int32_t* chosen() const { return reinterpret_cast<const std::int32_t*>(ids.data()); }
  moe::RowTable in(moe::RowKind kind) { return rows.receive(kind, saved, s); }
  void plan_sends() {
    Leaf::plan_sends(plan, rank, saved.tokens, saved.tokens, chosen(), saved.record, scratch, status, s);
  }
  void pack_headers() {
    Leaf::pack_headers(plan, saved.tokens, chosen(), weights.data(), saved.record,
                       rows.open(moe::RowKind::token, saved, s), s);
  }
  void pack(const moe::DispatchPlan& budget) {
    Leaf::pack(budget, rank, saved.tokens, x.data(), saved.record, rows.open(moe::RowKind::token, saved, s), s);
  }
  void plan_rows() { Leaf::plan_rows(plan, rank, in(moe::RowKind::token), saved.record, scratch, status, s); }
  moe::SourceRows sources(bool own, moe::RowKind kind) {
    return own ? moe::SourceRows::own(rank, x.data()) : moe::SourceRows::of_others(rank, in(kind));
  }
  void expand(const moe::DispatchPlan& budget, bool own) {
    Leaf::expand(budget, sources(own, moe::RowKind::token), saved.record, s);
  }
  void expand_gradient(const moe::DispatchPlan& budget, bool own) {
    Leaf::expand_gradient(budget, sources(own, moe::RowKind::gradient), expert_out.data(), saved.record, drows.data(),
                          s);
  }
  void sum_experts(const moe::DispatchPlan& budget, bool weighted) {
    const moe::RowKind kind = weighted ? moe::RowKind::result : moe::RowKind::token_gradient;
    Leaf::sum_experts(budget, expert_out.data(), weighted, saved.record, rows.open(kind, saved, s), s);
  }
  void sum_sources(const moe::DispatchPlan& budget, bool weighted) {
    const moe::RowKind kind = weighted ? moe::RowKind::result : moe::RowKind::token_gradient;
    Leaf::sum_sources(budget, saved.tokens, in(kind), saved.record, nullptr, y.data(),
                      weighted ? nullptr : dweights.data(), nullptr, s);
  }

  moe::DispatchPlan plan;
  cudaStream_t s;
  CudaBuffer persistent, saved_memory, scratch_memory, expert_out, drows, x, y, dweights, ids, weights;
  Carver carver;
  moe::DispatchStatus* status;
  moe::PeerRows<CudaExecutor, LocalPeers> rows;
  moe::DispatchSaved saved;
  moe::PlanScratch scratch;
  int rank;
};

/// Microseconds of one call: the median of 9 pairs.
inline double median_us(cudaStream_t s, const std::function<void()>& call) {
  const CudaEvent begin(true), end(true);
  for (int i = 0; i < 2; ++i) call();
  std::array<double, 9> us{};
  for (double& one : us) {
    check_cuda(cudaEventRecord(begin, s), "cudaEventRecord");
    call();
    call();
    check_cuda(cudaEventRecord(end, s), "cudaEventRecord");
    check_cuda(cudaEventSynchronize(end), "cudaEventSynchronize");
    float ms = 0;
    check_cuda(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");
    one = ms * 500;
  }
  std::nth_element(us.begin(), us.begin() + us.size() / 2, us.end());
  return us[us.size() / 2];
}

inline void run(const Problem& p, const char* routing) {
  const moe::DispatchPlan plan =
      moe::plan(2, moe::DispatchShape{p.tokens, p.hidden, p.experts, p.k, DType::bf16}, {.transport = Transport::peer});
  const CudaStream stream;
  const CudaBuffer window_0(plan.footprint().symmetric), window_1(plan.footprint().symmetric);
  const std::array<std::byte*, 2> bases{window_0.data(), window_1.data()};
  Rank a(plan, routing, {0, bases}, stream), b(plan, routing, {1, bases}, stream);
  for (Rank* rank : {&a, &b}) rank->plan_sends(), rank->pack_headers(), rank->pack(plan);
  for (Rank* rank : {&a, &b}) rank->plan_rows(), rank->sum_experts(plan, true);
  std::int64_t sent[2], came[2];
  std::vector<std::int64_t> ends(static_cast<std::size_t>(plan.experts_local())), offsets(ends.size() + 1);
  check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  const auto read = [](auto* to, const auto* from, std::size_t n) {
    check_cuda(cudaMemcpy(to, from, n * sizeof(*to), cudaMemcpyDefault), "cudaMemcpy");
  };
  read(sent, a.saved.record.send_counts, 2);
  read(came, a.saved.record.recv_counts, 2);
  read(ends.data(), a.saved.record.ends, ends.size());
  read(offsets.data(), a.saved.record.offsets, offsets.size());
  double expert_rows = 0;
  for (std::size_t e = 0; e < ends.size(); ++e) expert_rows += static_cast<double>(ends[e] - offsets[e]);
  const double row = static_cast<double>(p.hidden) * 2, token = static_cast<double>(p.tokens),
               out = static_cast<double>(sent[0] + sent[1]), in = static_cast<double>(came[0] + came[1]),
               away = static_cast<double>(sent[1]), home = static_cast<double>(came[0]),
               pads = static_cast<double>(offsets.back()) - expert_rows, own_entries = expert_rows * home / in;
  std::printf("\n%s, %s: %.0f rows of experts\n%-24s %6s %9s %9s %6s\n", p.name, routing, expert_rows, "leaf", "CTAs",
              "us", "floor", "ratio");
  const auto measure = [&](const char* name, int ctas, double rows, const std::function<void()>& call) {
    const double us = median_us(stream, call), floor = rows * row / copy_bytes_per_us;
    std::printf("%-24s %6d %9.1f %9.1f %6.3f\n", name, ctas, us, floor, us / floor);
    std::fflush(stdout);
  };
  measure("cudaMemset", 0, expert_rows, [&] {
    check_cuda(cudaMemsetAsync(a.drows.data(), 0, static_cast<std::size_t>(expert_rows * row), stream),
               "cudaMemsetAsync");
  });
  measure("plan_sends", 0, 0, [&] { a.plan_sends(); });
  measure("pack_headers", 0, 0, [&] { a.pack_headers(); });
  measure("plan_rows", 0, 0, [&] { a.plan_rows(); });
  for (const int ctas : {0, 32, 8}) {
    moe::DispatchPlan budget = plan;
    budget.options.max_ctas = ctas;
    measure("pack to the other", ctas, 2 * away, [&] { a.pack(budget); });
    measure("expand own, pads", ctas, home + own_entries + pads, [&] { a.expand(budget, true); });
    measure("expand others'", ctas, in - home + expert_rows - own_entries, [&] { a.expand(budget, false); });
    measure("sum_experts", ctas, in + expert_rows, [&] { a.sum_experts(budget, true); });
    measure("sum_sources", ctas, token + out, [&] { a.sum_sources(budget, true); });
    if (ctas != 0 && ctas != 32) continue;
    measure("expand_gradient, both", ctas, in + 2 * expert_rows + pads,
            [&] { a.expand_gradient(budget, true), a.expand_gradient(budget, false); });
    measure("sum_experts, plain", ctas, in + expert_rows, [&] { a.sum_experts(budget, false); });
    measure("sum_sources, dweights", ctas, token + out, [&] { a.sum_sources(budget, false); });
  }
  measure("dispatch", 0, 2 * away + in + expert_rows + pads, [&] {
    a.plan_sends(), a.pack_headers(), a.pack(plan), a.plan_rows(), a.expand(plan, true), a.expand(plan, false);
  });
  measure("combine", 0, token + out + in + expert_rows, [&] { a.sum_experts(plan, true), a.sum_sources(plan, true); });
}

}  // namespace moe_bench

int main() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("skipped: no GPU\n");
    return 77;
  }
  try {
    for (const moe_bench::Problem& problem : moe_bench::problems) moe_bench::run(problem, "uniform");
    moe_bench::run(moe_bench::problems[0], "zipf");
    return 0;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
