// Ring attention on a GPU with a forward kernel of one's own and the library's backward: custom_kernel_cuda [cp]. Ranks
// share GPUs. What it computes must agree with the library's forward. Exit code 77 without a GPU.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include <pleat/attention.hpp>
#include <pleat/attention/cuda/cuda_attention.cuh>
#include <pleat/cuda.hpp>
#include <pleat/cuda/kernel.hpp>
#include <pleat/cuda/leaf.cuh>

/// One thread per query and head: as simple as the contract allows.
template <class T>
PLEAT_KERNEL void plain_forward(const pleat::attention_kernel::Forward<T> a) {
  const auto query = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int batch = blockIdx.z, head = blockIdx.y, kv_head = head / (a.extents.q_heads / a.extents.kv_heads);
  if (query >= a.extents.q_tokens) return;
  float *const o = a.o_acc.at(batch, query, head), &lse = a.lse.at(batch, query, head);
  if (a.first) lse = -INFINITY;
  for (int d = 0; a.first && d < a.extents.v_dim; ++d) o[d] = 0;
  for (int i = 0; i < a.work.count; ++i) {
    const pleat::Rectangle r = a.work.rectangles[i];
    for (auto key = r.k0; r.q0 <= query && query < r.q1 && key < r.keys_end(query); ++key) {
      const T *const q = a.q.at(batch, query, head), *const k = a.k.at(batch, key, kv_head);
      const T* const v = a.v.at(batch, key, kv_head);
      float s = 0;
      for (int d = 0; d < a.extents.qk_dim; ++d) s += static_cast<float>(q[d]) * static_cast<float>(k[d]);
      s *= a.scale;
      const float top = fmaxf(lse, s), merged = top + logf(expf(lse - top) + expf(s - top));
      for (int d = 0; d < a.extents.v_dim; ++d)
        o[d] = expf(lse - merged) * o[d] + expf(s - merged) * static_cast<float>(v[d]);
      lse = merged;
    }
  }
  for (int d = 0; a.last && d < a.extents.v_dim; ++d) a.out.at(batch, query, head)[d] = static_cast<T>(o[d]);
}

/// The library's kernels but for forward.
template <class T, class Dims>
struct OwnKernels : pleat::attention_kernel::KernelTable<T, Dims> {
  static void forward(const pleat::attention_kernel::Forward<T>& a, const pleat::attention_kernel::Alignment&,
                      cudaStream_t s) {
    const dim3 grid(static_cast<unsigned>((a.extents.q_tokens + 63) / 64), a.extents.q_heads, a.extents.batch);
    if (grid.x != 0) plain_forward<T><<<grid, 64, 0, s>>>(a);
    pleat::check_launch("plain_forward");
  }
  static void preload() {
    pleat::attention_kernel::KernelTable<T, Dims>::preload();
    pleat::preload_kernel(plain_forward<T>, "plain_forward");
  }
};

namespace {

constexpr int tokens = 512, heads = 4, kv_heads = 2, dim = 64;
using Dims = pleat::HeadDimsList<pleat::HeadDims<dim, dim>>;
using Types = pleat::TypeList<pleat::bfloat16>;
using OwnLeaf = pleat::CudaAttention<Types, Dims, OwnKernels>;
using LibraryLeaf = pleat::CudaAttention<Types, Dims>;

/// out and dq of this rank with a kernel; `values`: its q, dout, k and v.
template <class Leaf>
std::vector<pleat::bfloat16> attend(pleat::CudaThreadComm& world, const std::vector<pleat::bfloat16>& values,
                                    Leaf leaf) {
  const auto plan = pleat::ring::plan(world.size(), {.tokens = tokens,
                                                     .q_heads = heads,
                                                     .kv_heads = kv_heads,
                                                     .qk_dim = dim,
                                                     .v_dim = dim,
                                                     .dtype = pleat::DType::bf16});
  const pleat::Footprint need = plan.footprint();
  const pleat::CudaStream compute, comm;
  const pleat::Streams<cudaStream_t> s{compute, comm};
  const pleat::CudaBuffer scratch(need.scratch), persistent(need.persistent), lse(need.saved);
  const pleat::PinnedBuffer pinned(need.pinned_host);
  const pleat::Memory<pleat::CudaThreadArena> memory{scratch.block(), persistent.block(), pinned.block()};
  auto op = pleat::ring::bind(plan, pleat::CudaExecutor{}, pleat::GroupComm<pleat::CudaThreadComm>(world), memory,
                              compute, leaf);

  const std::int64_t local = plan.local_tokens(world.rank());
  const std::size_t rows = static_cast<std::size_t>(local) * dim, bytes = rows * sizeof(pleat::bfloat16);
  const pleat::CudaBuffer in(12 * bytes), results(12 * bytes);  // q, dout, k, v and out, dq, dk, dv
  const auto tensor = [&](const pleat::CudaBuffer& buffer, int first_head, int count) {
    return pleat::TensorRef(buffer.data() + static_cast<std::size_t>(first_head) * bytes, pleat::DType::bf16,
                            {1, local, count, dim}, {pleat::DeviceKind::cuda, 0});
  };
  pleat::check_cuda(cudaMemcpyAsync(in.data(), values.data(), 12 * bytes, cudaMemcpyDefault, compute),
                    "cudaMemcpyAsync");
  world.barrier(compute);
  pleat::ring::Saved saved(lse.block());
  op.forward(s, tensor(in, 0, 4), tensor(in, 8, 2), tensor(in, 10, 2), tensor(results, 0, 4), saved);
  op.backward(s, tensor(in, 4, 4), saved, tensor(results, 4, 4), tensor(results, 8, 2), tensor(results, 10, 2));
  world.wait(compute);
  world.barrier(compute);
  std::vector<pleat::bfloat16> host(12 * rows);
  pleat::check_cuda(cudaMemcpy(host.data(), results.data(), 12 * bytes, cudaMemcpyDefault), "cudaMemcpy");
  return host;
}

double relative(const std::vector<pleat::bfloat16>& x, const std::vector<pleat::bfloat16>& y) {
  double off = 0, all = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double a = static_cast<float>(x[i]), b = static_cast<float>(y[i]);
    off += (a - b) * (a - b), all += b * b;
  }
  return std::sqrt(off / all);
}

}  // namespace

int main(int argc, char** argv) {
  const int cp = argc > 1 ? std::atoi(argv[1]) : 2;
  if (argc > 2 || cp < 1 || cp > tokens / 2 || tokens % (2 * cp) != 0) {
    std::fprintf(stderr, "custom_kernel_cuda: cp \"%s\"; valid: one power of two from 1 to %d\n", argv[argc - 1],
                 tokens / 2);
    return 2;
  }
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::puts("skipped: no GPU");
    return 77;
  }
  std::vector<double> apart(static_cast<std::size_t>(cp));
  pleat::run_cuda_ranks(cp, [&](pleat::CudaThreadComm& world) {
    std::mt19937 generator(static_cast<unsigned>(world.rank()));
    std::normal_distribution<float> normal;
    std::vector<pleat::bfloat16> values(static_cast<std::size_t>(12 * tokens / cp * dim));
    for (auto& value : values) value = pleat::bfloat16(normal(generator));
    apart[static_cast<std::size_t>(world.rank())] =
        relative(attend(world, values, OwnLeaf{}), attend(world, values, LibraryLeaf{}));
  });
  bool is_right = true;
  for (const double off : apart) {
    std::printf("results differ from the library's by %.1e (relative L2)\n", off);
    is_right = is_right && off < 1e-2;
  }
  return is_right ? 0 : 1;
}
