// cuDNN as a local kernel: the cases of the contract that it can do, against float64; in a ring beside the own kernels;
// and what it refuses (A13, A14, C31). Exit code 77 without a GPU.
#include <atomic>
#include <chrono>

#include <pleat/attention/cuda/cudnn_attention.cuh>
#include <pleat/attention/ring.hpp>
#include <pleat/cuda/leaf.cuh>
#include <pleat/cuda/thread_comm.hpp>

#include <unit/attention/cuda_leaf_cases.cuh>

#include <support/copy_now.hpp>

#include "skip.hpp"

namespace {

using namespace attention_testing;

std::vector<LeafCase> cases() {
  const auto causal = [](std::int64_t n) { return Calls{{{0, n, 0, n, 0}}}; };
  return {
      {"causal, whole", 1, 192, 192, 1, 1, 128, 128, causal(192)},
      {"causal, GQA, a batch", 2, 113, 113, 4, 2, 128, 128, causal(113)},
      {"a ring of two steps, first block",
       1,
       256,
       256,
       4,
       2,
       128,
       128,
       {{{0, 256, 0, 128, 0}}, {{128, 256, 128, 256, 0}}}},
      {"a ring of two steps, a later rank",
       1,
       256,
       256,
       4,
       4,
       64,
       64,
       {{{0, 128, 0, 128, 0}}, {{0, 128, 128, 192}, {64, 128, 192, 256}}}},
      {"last corner", 1, 64, 160, 2, 1, 64, 64, {{{0, 64, 0, 160, 96}}}},
      {"rows that no rectangle covers", 1, 96, 160, 2, 2, 64, 64, {{{16, 80, 32, 128}}, {}}, Rows::aligned, 1, true},
      {"large logits", 1, 128, 128, 2, 1, 64, 64, {{{0, 128, 0, 64}}, {{0, 128, 64, 128, 0}}}, Rows::contiguous, 60},
      {"MLA", 1, 128, 128, 2, 2, 192, 128, causal(128)},
      {"documents", 1, 120, 120, 2, 1, 64, 64, {{{0, 40, 0, 40, 0}, {40, 120, 40, 120, 0}}}, Rows::aligned}};
}

template <class T>
int check(const char* dtype, const CudnnAttention& leaf, std::size_t first_cases) {
  int failed = 0;
  std::vector<LeafCase> all = cases();
  all.resize(std::min(all.size(), first_cases));
  for (const LeafCase& c : all) {
    const unsigned seed = std::random_device{}();
    const auto start = std::chrono::steady_clock::now();
    LeafResult r;
    try {
      r = check_leaf<T>(c, seed, leaf, 2);
    } catch (const std::exception& e) {
      r.failure = e.what();
    }
    failed += !r.failure.empty();
    std::printf("%-6s %-4s %-36s %.1e %.1e %.1e %.1e %.1e  %5.2f s%s%s\n", r.failure.empty() ? "ok" : "FAILED", dtype,
                c.name.c_str(), r.out.relative_l2, r.lse.relative_l2, r.dq.relative_l2, r.dk.relative_l2,
                r.dv.relative_l2, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(),
                r.failure.empty() ? "" : " ", r.failure.c_str());
    if (cudaPeekAtLastError() != cudaSuccess && cudaDeviceSynchronize() != cudaSuccess) std::exit(1);
  }
  return failed;
}

template <class F>
int refuses(const char* id, const char* what, F f) {
  std::string said = "nothing";
  try {
    f();
  } catch (const error& e) {
    said = e.what();
  }
  const bool is_right = said.find(id) != std::string::npos;
  std::printf("%-6s refuses %s: %s\n", is_right ? "ok" : "FAILED", what, said.c_str());
  return !is_right;
}

int check_refusals(const CudnnAttention& leaf) {
  const CudaBuffer memory(1 << 20);
  AttentionForward a;
  a.q = a.k = a.v = a.o_acc = a.out = TensorRef(memory.data(), DType::bf16, {1, 72, 2, 64});
  a.lse = TensorRef(memory.data(), DType::f32, {1, 2, 72});
  std::vector<Rectangle> work{{0, 72, 0, 72, 0}};
  a.work = work;
  int failed = refuses("pleat[A14]", "what was not prepared", [&] { leaf.forward(a, nullptr); });
  work[0].causal_offset = 5;
  failed += refuses("pleat[A13]", "a diagonal through no corner", [&] { leaf.prepare(a); });
  work[0].causal_offset = 0;
  a.max_ctas = 8;
  failed += refuses("pleat[A13]", "a budget", [&] { leaf.prepare(a); });
  a.max_ctas = 0;
  failed += refuses("pleat[C31]", "to run without tensors", [&] {
    const cudnn::Handle handle;
    cudnn::Graph(cudnn::call_of(a, work.front()), handle).run(handle, {}, memory.data(), nullptr);
  });
  return failed;
}

/// Ring attention of this rank with a kernel: its output and dq, in bf16.
template <class Leaf>
std::vector<bfloat16> ring_results(CudaThreadComm& world, const Leaf& leaf, const std::vector<bfloat16>& values) {
  constexpr int tokens = 512, heads = 4, dim = 128;
  const auto plan = ring::plan(
      world.size(),
      {.tokens = tokens, .q_heads = heads, .kv_heads = heads, .qk_dim = dim, .v_dim = dim, .dtype = DType::bf16});
  const Footprint need = plan.footprint();
  const CudaStream compute, comm;
  const Streams<cudaStream_t> s{compute, comm};
  const CudaBuffer scratch(need.scratch), persistent(need.persistent), saved_memory(need.saved);
  const PinnedBuffer pinned(need.pinned_host);
  auto op =
      ring::bind(plan, CudaExecutor{}, GroupComm<CudaThreadComm>(world),
                 Memory<CudaThreadArena>{scratch.block(), persistent.block(), pinned.block(), nullptr}, compute, leaf);
  const std::int64_t local = plan.local_tokens(world.rank());
  const std::size_t elems = static_cast<std::size_t>(local) * heads * dim, bytes = elems * sizeof(bfloat16);
  const CudaBuffer in(4 * bytes), results(4 * bytes);
  check_cuda(cudaMemset(results.data(), 0xff, 4 * bytes), "cudaMemset");
  testing_support::copy_now(in.data(), values.data() + 4 * elems * static_cast<std::size_t>(world.rank()), 4 * bytes);
  const auto tensor = [&](const CudaBuffer& buffer, std::size_t i) {
    return TensorRef(buffer.data() + i * bytes, DType::bf16, {1, local, heads, dim}, {DeviceKind::cuda, 0});
  };
  if constexpr (requires { leaf.workspace_bytes(); }) {
    op.prepare(tensor(in, 0), tensor(in, 1), tensor(in, 2), tensor(results, 0), tensor(in, 3));
  }
  world.barrier(compute);
  ring::Saved saved(saved_memory.block());
  op.forward(s, tensor(in, 0), tensor(in, 1), tensor(in, 2), tensor(results, 0), saved);
  op.backward(s, tensor(in, 3), saved, tensor(results, 1), tensor(results, 2), tensor(results, 3));
  check_cuda(cudaStreamSynchronize(compute), "ring");
  world.barrier(compute);
  std::vector<bfloat16> host(4 * elems);
  testing_support::copy_now(host.data(), results.data(), 4 * bytes);
  return host;
}

/// The own kernel and cuDNN in the same ring.
int check_ring(int cp) {
  std::mt19937 random(std::random_device{}());
  std::normal_distribution<float> normal;
  std::vector<bfloat16> values(4 * 512 * 4 * 128);
  for (bfloat16& value : values) value = bfloat16(normal(random));
  using Own = CudaAttention<TypeList<bfloat16>, HeadDimsList<HeadDims<128, 128>>, attention_kernel::Portable>;
  std::atomic<int> failed = 0;
  run_cuda_ranks(cp, [&](CudaThreadComm& world) {
    const std::vector<bfloat16> own = ring_results(world, Own{}, values);
    const std::vector<bfloat16> other = ring_results(world, CudnnAttention{}, values);
    const char* const names[] = {"out", "dq", "dk", "dv"};
    for (std::size_t part = 0; part < 4; ++part) {
      double off = 0, all = 0;
      for (std::size_t i = part * own.size() / 4; i < (part + 1) * own.size() / 4; ++i) {
        const double x = static_cast<float>(own[i]), y = static_cast<float>(other[i]);
        off += (x - y) * (x - y), all += x * x;
      }
      const double relative = std::sqrt(off / all);
      failed += !(relative < 0.01);  // both round to bf16, cuDNN once per rectangle
      std::printf("%-6s ring cp=%d rank %d %-4s cuDNN against the own kernel %.1e\n", relative < 0.01 ? "ok" : "FAILED",
                  cp, world.rank(), names[part], relative);
    }
  });
  return failed;
}

}  // namespace

int main() {
  if (gpu_testing::lacks_gpus(1)) return gpu_testing::skipped;
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  std::printf("cuDNN %zu\n%49sout, lse, dq, dk, dv: relative L2\n", cudnnGetVersion(), "");
  const CudnnAttention leaf;
  CudnnAttention::preload();
  // A new shape takes cuDNN some tenths of a second.
  int failed = check_refusals(leaf) + check<bfloat16>("bf16", leaf, 100) + check_ring(2) + check_ring(1) +
               check<float16>("f16", leaf, 3) + check_ring(4);
  std::printf("workspace %zu bytes\n", leaf.workspace_bytes());
  std::printf(failed == 0 ? "all passed\n" : "%d FAILED\n", failed);
  return failed == 0 ? 0 : 1;
}
