// Experts of the caller's own: cuBLASLt's products in the layer, and a kernel between dispatch and combine alone. Exit
// code 77 where there is no GPU.
#define DOCTEST_CONFIG_DISABLE  // the backends of the conformance suites serve here without the suites
#include <pleat/moe/cuda/cublaslt_experts.cuh>

#include <conformance/cuda_threads.hpp>

#include <memory>
#include <mutex>

#include "moe_cases.cuh"
#include "skip.hpp"

namespace moe_gpu_testing {

/// The layer with cuBLASLt's products, against one rank in float64.
template <class Backend, class T>
Outcome check_cublaslt(int ranks) {
  const Problem<T> p({.hidden = 72, .inner = 40, .experts = 3 * ranks, .k = 3}, uneven_tokens(ranks),
                     std::random_device{}());
  const moe::LayerPlan plan =
      plan_of(p.sizes, ranks, most_tokens(p.tokens), dtype_of<T>, {.transport = Transport::peer});
  Answer<T> answer = poisoned(p);
  Backend::run(ranks, 60s, [&](typename Backend::comm_type& world) {
    const PinnedBuffer pinned(moe::CublasLtExperts::pinned_bytes(plan.experts));
    const CudaBuffer workspace(moe::CublasLtExperts::workspace_bytes);
    LayerRank<Backend, T, moe::CublasLtExperts> rank(
        world, plan, p, {}, 1, moe::CublasLtExperts(plan.experts, pinned.block(), workspace.block()));
    for (int step = 0; step < 2; ++step) rank.run();
    rank.wait();
    rank.download(answer);
  });
  const double off = moe_testing::worst(answer, moe_testing::solve(p));
  require(off < gpu_tolerance<T>(), "off by ", std::to_string(off).c_str());
  return {1, off};
}

/// Expert e multiplies by e + 1. One CTA per row there may be.
PLEAT_KERNEL void scale_kernel(const float* rows, const std::int64_t* offsets, int first_expert, int experts,
                               std::int64_t hidden, float* out) {
  const std::int64_t row = blockIdx.x;
  for (int e = 0; e < experts; ++e) {
    if (row < offsets[e] || row >= offsets[e + 1]) continue;
    for (std::int64_t h = threadIdx.x; h < hidden; h += blockDim.x) {
      out[row * hidden + h] = rows[row * hidden + h] * static_cast<float>(first_expert + e + 1);
    }
  }
}

/// Dispatch, a kernel, combine: y = x * sum of weight * (expert + 1).
template <class Backend>
Outcome check_own_kernel(int ranks) {
  using Buffer = typename Backend::Buffer;
  using Arena = typename Backend::arena_type;
  constexpr std::int64_t tokens = 96, hidden = 40;
  constexpr int k = 4;
  const int experts = 6 * ranks;
  const moe::DispatchPlan plan =
      moe::plan(ranks, moe::DispatchShape{tokens, hidden, experts, k, DType::f32}, {.transport = Transport::peer});
  Outcome outcome{ranks, 0};
  std::mutex mutex;
  Backend::run(ranks, 60s, [&](typename Backend::comm_type& world) {
    std::mt19937 random(std::random_device{}());
    std::vector<float> x(tokens * hidden), weights(tokens * k), y(x.size());
    std::vector<std::int32_t> ids(tokens * k);
    for (float& value : x) value = static_cast<float>(random() % 1000) / 500 - 1;
    for (float& weight : weights) weight = static_cast<float>(random() % 1000) / 1000;
    for (std::size_t t = 0; t < tokens; ++t) {
      const auto first = static_cast<std::int32_t>(random() % static_cast<unsigned>(experts));
      for (std::size_t j = 0; j < k; ++j) ids[t * k + j] = (first + static_cast<int>(j)) % experts;
    }
    const auto upload = [](const auto& values) {
      auto buffer = std::make_unique<Buffer>(values.size() * sizeof values[0]);
      buffer->upload(reinterpret_cast<const std::byte*>(values.data()));
      return buffer;
    };
    const auto gx = upload(x), gweights = upload(weights), gids = upload(ids), gy = upload(y);
    const Footprint need = plan.footprint();
    Buffer scratch(need.scratch), persistent(need.persistent), saved_memory(need.saved),
        out(static_cast<std::size_t>(plan.capacity_rows() * hidden) * sizeof(float));
    const GroupComm<typename Backend::comm_type> ep(world);
    Arena arena(ep, need.symmetric);
    typename Backend::Stream stream, side;
    const Streams<cudaStream_t> streams{stream.get(), side.get()};
    const CudaExecutor executor;
    auto dispatch =
        moe::bind(plan, executor, ep, Memory<Arena>{scratch.block(), persistent.block(), {}, &arena}, stream.get());
    moe::DispatchSaved saved(plan, saved_memory.block());
    const auto tensor = [&](const Buffer& b, DType dtype, std::int64_t rows, std::int64_t columns) {
      return TensorRef(b.block().data, dtype, {rows, columns}, executor.device());
    };
    const moe::ExpertRows rows =
        dispatch.dispatch(streams, tensor(*gx, DType::f32, tokens, hidden), tensor(*gids, DType::i32, tokens, k),
                          tensor(*gweights, DType::f32, tokens, k), saved);
    scale_kernel<<<static_cast<unsigned>(plan.capacity_rows()), 64, 0, stream.get()>>>(
        rows.rows.template as<float>(), rows.offsets.template as<std::int64_t>(), world.rank() * plan.experts_local(),
        plan.experts_local(), hidden, reinterpret_cast<float*>(out.block().data));
    check_launch("scale_kernel");
    dispatch.combine(streams, tensor(out, DType::f32, plan.capacity_rows(), hidden), saved,
                     tensor(*gy, DType::f32, tokens, hidden));
    world.wait(stream.get());
    gy->download(reinterpret_cast<std::byte*>(y.data()));
    std::vector<double> expected(y.size());
    for (std::size_t t = 0; t < tokens; ++t) {
      double factor = 0;
      for (std::size_t j = 0; j < k; ++j) factor += static_cast<double>(weights[t * k + j]) * (ids[t * k + j] + 1);
      for (std::size_t h = 0; h < hidden; ++h) {
        expected[t * hidden + h] = factor * static_cast<double>(x[t * hidden + h]);
      }
    }
    const double off = moe_testing::relative(y, expected);
    require(off < 1e-6, "off by ", std::to_string(off).c_str());
    const std::lock_guard lock(mutex);
    outcome.worst = std::max(outcome.worst, off);
  });
  return outcome;
}

}  // namespace moe_gpu_testing

int main() {
  // A kernel that is loaded at its first launch may wait for the device, and so for a peer.
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  if (gpu_testing::lacks_gpus(1)) return gpu_testing::skipped;
  using namespace moe_gpu_testing;
  using OneGpu = conformance::CudaThreads<1>;
  int failed = 0;
  for (const int ranks : {1, 3}) {
    failed += fails("threads on one GPU", "cuBLASLt f64", ranks, [&] { return check_cublaslt<OneGpu, double>(ranks); });
    failed += fails("threads on one GPU", "cuBLASLt f32", ranks, [&] { return check_cublaslt<OneGpu, float>(ranks); });
    failed +=
        fails("threads on one GPU", "cuBLASLt bf16", ranks, [&] { return check_cublaslt<OneGpu, bfloat16>(ranks); });
    failed += fails("threads on one GPU", "own kernel", ranks, [&] { return check_own_kernel<OneGpu>(ranks); });
  }
  std::printf("%s\n", failed == 0 ? "all passed" : "some FAILED");
  return failed == 0 ? 0 : 1;
}
