// Optimizers on one GPU beside their floors: element-wise parts beside a copy of the same run, Newton-Schulz beside
// cuBLAS on the same products, and a step of Muon on as many GPUs as there are.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include <cublas_v2.h>

#include <pleat/cuda/buffer.hpp>
#include <pleat/cuda/thread_comm.hpp>
#include <pleat/optim/cuda/leaf.cuh>
#include <pleat/optim/cuda/muon_leaf.cuh>
#include <pleat/optim/cuda/newton_schulz.cuh>
#include <pleat/optim/optimizer.hpp>

namespace {

using namespace pleat;
using fsdp::Optimizer;

void require(bool holds, const char* what) {
  if (holds) return;
  std::printf("wrong: %s\n", what);
  std::exit(1);
}

/// Median of the launches after the first few, in microseconds.
template <class F>
double measure_us(const F& launch, cudaStream_t s) {
  const CudaEvent begin(true), end(true);
  std::vector<double> times;
  for (int i = 0; i < 14; ++i) {
    check_cuda(cudaEventRecord(begin, s), "cudaEventRecord");
    launch(i);
    check_cuda(cudaEventRecord(end, s), "cudaEventRecord");
    check_cuda(cudaEventSynchronize(end), "cudaEventSynchronize");
    float ms = 0;
    check_cuda(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");
    if (i >= 4) times.push_back(1e3 * ms);
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

/// Values in (-1, 1) times `scale`, without structure.
template <class T>
__global__ void fill_kernel(T* out, std::size_t elems, float scale) {
  for (std::size_t i = blockIdx.x * 512ull + threadIdx.x; i < elems; i += gridDim.x * 512ull) {
    auto x = static_cast<unsigned>(i) * 2654435761u;
    x = (x ^ (x >> 15)) * 2246822519u;
    x = (x ^ (x >> 13)) * 3266489917u;
    out[i] = static_cast<T>(scale * (static_cast<float>(x ^ (x >> 16)) / 2147483648.F - 1));
  }
}
template <class T>
CudaBuffer filled(std::size_t elems, float scale, cudaStream_t s) {
  CudaBuffer buffer(elems * sizeof(T));
  fill_kernel<<<1024, 512, 0, s>>>(reinterpret_cast<T*>(buffer.data()), elems, scale);
  check_launch("fill_kernel");
  return buffer;
}

CudaBuffer upload(const void* data, std::size_t bytes) {
  CudaBuffer buffer(bytes);
  check_cuda(cudaMemcpy(buffer.data(), data, bytes, cudaMemcpyDefault), "cudaMemcpy");
  return buffer;
}
CudaBuffer applied_step() {
  const optim::StepResult result{.grad_scale = 0.5, .steps = 10, .applied = 1};
  return upload(&result, sizeof(result));
}

/// Masters in float, gathered in bfloat16: two shards in turn, so that neither stays in the cache.
void element_wise(std::size_t elems, std::size_t piece_count, cudaStream_t s) {
  constexpr int sets = 2;
  std::vector<CudaBuffer> masters, gradients, first, second, copies;
  std::vector<fsdp::UpdatePiece> pieces;
  const auto piece_elems = static_cast<std::int64_t>(elems / piece_count);
  for (std::int64_t begin = 0; pieces.size() < piece_count; begin += piece_elems) {
    pieces.push_back({begin, piece_elems, 1, true, Optimizer::adamw, begin});
  }
  const CudaBuffer table = upload(pieces.data(), pieces.size() * sizeof(pieces[0])), result = applied_step();
  CudaBuffer partials(optim::square_partials * sizeof(double));
  std::vector<fsdp::ShardMemory> shards;
  for (int i = 0; i < sets; ++i) {
    for (auto* buffers : {&masters, &gradients, &first}) buffers->push_back(filled<float>(elems, 1, s));
    second.emplace_back(elems * sizeof(float));
    check_cuda(cudaMemsetAsync(second.back().data(), 0, second.back().size_bytes(), s), "cudaMemsetAsync");
    copies.emplace_back(elems * sizeof(bfloat16));
    shards.push_back({masters.back().data(), gradients.back().data(), copies.back().data(), DType::f32, DType::bf16,
                      static_cast<std::int64_t>(elems), reinterpret_cast<const fsdp::UpdatePiece*>(table.data()),
                      static_cast<std::int64_t>(piece_count)});
  }
  using leaf = optim_leaf<cuda_device>;
  const auto set = [](int i) { return static_cast<std::size_t>(i % sets); };
  const double copy_us =
      measure_us([&](int i) { CudaExecutor{}.copy(first[set(i)].data(), gradients[set(i)].data(), elems * 4, s); }, s);
  const double adamw_us = measure_us(
      [&](int i) {
        leaf::adamw(shards[set(i)], first[set(i)].data(), second[set(i)].data(), {}, 1e-3,
                    reinterpret_cast<const optim::StepResult*>(result.data()), s);
      },
      s);
  const double squares_us =
      measure_us([&](int i) { leaf::add_squares(reinterpret_cast<double*>(partials.data()), shards[set(i)], s); }, s);
  float master = 0;
  check_cuda(cudaMemcpy(&master, masters[0].data(), sizeof(master), cudaMemcpyDefault), "cudaMemcpy");
  bfloat16 copy;
  check_cuda(cudaMemcpy(&copy, copies[0].data(), sizeof(copy), cudaMemcpyDefault), "cudaMemcpy");
  require(copy.bits == static_cast<bfloat16>(master).bits, "the copy of a master");
  const auto row = [&](const char* name, std::size_t bytes, double us) {
    const double floor_us = copy_us * static_cast<double>(bytes) / 8;
    std::printf("%-16s %9zu %6zu %9.1f %7.0f %9.2f\n", name, elems, piece_count, us,
                static_cast<double>(bytes * elems) / us / 1e3, us / floor_us);
  };
  row("copy", 8, copy_us);
  row("adamw", 30, adamw_us);
  row("sum of squares", 4, squares_us);
}

struct Shape {
  std::int64_t rows, cols, count;
};

/// The three products of an iteration through cuBLAS's own choice of algorithms.
double cublas_us(cublasHandle_t blas, const optim::MatrixBatch& m, const optim::MatrixBatch::Work& work,
                 cudaStream_t s) {
  const auto rows = static_cast<int>(m.rows), cols = static_cast<int>(m.cols), n = static_cast<int>(m.order());
  const bool is_wide = m.rows <= m.cols;
  const auto product = [&](cublasOperation_t op_b, int out_rows, int out_cols, int depth, const void* a, int lda,
                           std::int64_t stride_a, const void* b, int ldb, std::int64_t stride_b, float beta, void* c,
                           int ldc, std::int64_t stride_c, cublasOperation_t op_a = CUBLAS_OP_N) {
    const float one = 1;
    return measure_us(
        [&](int) {
          detail::check_cublas(
              cublasGemmStridedBatchedEx(blas, op_a, op_b, out_rows, out_cols, depth, &one, a, CUDA_R_16BF, lda,
                                         stride_a, b, CUDA_R_16BF, ldb, stride_b, &beta, c, CUDA_R_16BF, ldc, stride_c,
                                         static_cast<int>(m.count), CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
              "cublasGemmStridedBatchedEx");
        },
        s);
  };
  const std::int64_t x = m.stride_elems(), a = m.gram_stride_elems();
  const double gram =
      is_wide ? product(CUBLAS_OP_N, n, n, cols, m.data, cols, x, m.data, cols, x, 0, work.gram, n, a, CUBLAS_OP_T)
              : product(CUBLAS_OP_T, n, n, rows, m.data, cols, x, m.data, cols, x, 0, work.gram, n, a);
  const double poly = product(CUBLAS_OP_N, n, n, n, work.gram, n, a, work.gram, n, a, -1, work.poly, n, a);
  const double next = is_wide
                          ? product(CUBLAS_OP_N, cols, n, n, m.data, cols, x, work.poly, n, a, -1, work.other, cols, x)
                          : product(CUBLAS_OP_N, n, rows, n, work.poly, n, a, m.data, cols, x, -1, work.other, cols, x);
  return gram + poly + next;
}

void newton_schulz(const Shape& shape, cublasHandle_t blas, cudaStream_t s) {
  optim::MatrixBatch batch{nullptr, shape.rows, shape.cols, shape.count};
  const auto elems = static_cast<std::size_t>(batch.count * batch.stride_elems());
  const CudaBuffer input = filled<bfloat16>(elems, 1, s), data(input.size_bytes());
  Carver measured;
  batch.carve(measured, DType::bf16);
  const CudaBuffer memory(measured.used_bytes());
  batch.data = data.data();
  const newton_schulz_leaf<cuda_device> leaf({&batch, 1}, {}, memory.block(), s);
  const auto reset = [&](int) { CudaExecutor{}.copy(data.data(), input.data(), input.size_bytes(), s); };
  const double copy_us = measure_us(reset, s);
  const double us = measure_us(
                        [&](int i) {
                          reset(i);
                          leaf.run(0, s);
                        },
                        s) -
                    copy_us;
  std::vector<bfloat16> result(static_cast<std::size_t>(batch.rows * batch.cols));
  check_cuda(cudaMemcpy(result.data(), data.data(), result.size() * sizeof(bfloat16), cudaMemcpyDefault), "cudaMemcpy");
  double squares = 0;
  for (const bfloat16 value : result) squares += static_cast<double>(value) * static_cast<double>(value);
  const double mean = squares / static_cast<double>(batch.order());  // of the squared singular values
  require(mean > 0.4 && mean < 1.5, "singular values after Newton-Schulz");
  reset(0);
  Carver carver(memory.block());
  const optim::MatrixBatch::Work work = batch.carve(carver, DType::bf16);
  for (auto* part : {work.gram, work.poly}) {
    const auto part_elems = static_cast<std::size_t>(batch.count * batch.gram_stride_elems());
    fill_kernel<<<1024, 512, 0, s>>>(reinterpret_cast<bfloat16*>(part), part_elems, 0.05F);
    check_launch("fill_kernel");
  }
  const double floor_us = optim::MuonOptions{}.iterations * cublas_us(blas, batch, work, s);
  const double flops = 2.0 * optim::MuonOptions{}.iterations * static_cast<double>(batch.count) *
                       optim::MuonMatrix{0, 0, batch.rows, batch.cols, true}.cost();
  std::printf("%4lld x %5lld x %5lld %9.1f %7.0f %9.1f %7.2f\n", static_cast<long long>(batch.count),
              static_cast<long long>(batch.rows), static_cast<long long>(batch.cols), us, flops / us / 1e6, floor_us,
              us / floor_us);
}

/// Seven units of one 4096 x 4096 matrix: over two ranks each matrix is cut, and one rank owns four.
void sharded_step(int ranks) {
  std::vector<double> us(static_cast<std::size_t>(ranks));
  double sent_mib = 0;
  run_cuda_ranks(ranks, [&](CudaThreadComm& world) {
    const CudaStream s;
    const std::vector<fsdp::ParamSpec> matrix{{.name = "w", .shape = {4096, 4096}, .optimizer = Optimizer::muon}};
    const std::vector<fsdp::UnitLayout> units(7, fsdp::plan_unit(matrix, ranks));
    const std::vector<Param> kinds(units.size(), Param::dense);
    const optim::MuonPlan plan = optim::plan_muon(units, kinds, DType::f32);
    std::vector<CudaBuffer> memory;
    std::vector<fsdp::ShardMemory> shards;
    for (const fsdp::UnitLayout& unit : units) {
      const auto elems = static_cast<std::size_t>(unit.shard_elems(world.rank()));
      void* parts[3] = {};
      for (void*& part : parts) {
        memory.push_back(filled<float>(elems, 1, s));
        part = memory.back().data();
      }
      shards.push_back(
          {parts[0], parts[1], parts[2], DType::f32, DType::bf16, unit.shard_elems(world.rank()), nullptr, 0});
    }
    const CudaBuffer scratch(plan.footprint().scratch), persistent(plan.footprint().persistent),
        result = applied_step();
    const GroupComm<CudaThreadComm> group(world), alone;
    auto muon = optim::bind(plan, CudaExecutor{}, group, alone, std::span<const fsdp::ShardMemory>(shards),
                            Memory<>{scratch.block(), persistent.block()}, s);
    us[static_cast<std::size_t>(world.rank())] =
        measure_us([&](int) { muon.step(reinterpret_cast<optim::StepResult*>(result.data()), 1e-3, s); }, s);
    if (world.rank() == 0) sent_mib = static_cast<double>(plan.sent_elems) * sizeof(bfloat16) / (1 << 20);
    world.barrier(s);
    world.wait(s);
  });
  std::printf("%5d %12.1f %10.1f\n", ranks, *std::max_element(us.begin(), us.end()), sent_mib);
}

}  // namespace

int main() {
  if (cuda_device_count() == 0) {
    std::printf("skipped: no GPU\n");
    return 77;
  }
  {
    const CudaStream s;
    std::printf("%-16s %9s %6s %9s %7s %9s\n", "operation", "elements", "pieces", "us", "GB/s", "x copy");
    for (const std::size_t elems : {1u << 20, 1u << 24, 1u << 26}) {
      for (const std::size_t pieces : {1, 256}) element_wise(elems, pieces, s);
    }
    cublasHandle_t blas = nullptr;
    detail::check_cublas(cublasCreate(&blas), "cublasCreate");
    detail::check_cublas(cublasSetStream(blas, s), "cublasSetStream");
    std::printf("\n%-20s %9s %7s %9s %7s\n", "newton-schulz, bf16", "us", "TFLOP/s", "cuBLAS us", "ratio");
    for (const Shape& shape : {Shape{8192, 8192, 1},
                               {4096, 4096, 1},
                               {4096, 4096, 8},
                               {2048, 768, 48},
                               {768, 2048, 48},
                               {2048, 768, 8},
                               {2048, 768, 1},
                               {1024, 4096, 4},
                               {2048, 1408, 16},
                               {2050, 770, 8}}) {
      newton_schulz(shape, blas, s);
    }
    detail::check_cublas(cublasDestroy(blas), "cublasDestroy");
  }
  std::printf("\n7 x 4096 x 4096, a step of Muon\n%5s %12s %10s\n", "GPUs", "slowest, us", "sent, MiB");
  for (int ranks = 1; ranks <= std::min(2, cuda_device_count()); ++ranks) sharded_step(ranks);
}
