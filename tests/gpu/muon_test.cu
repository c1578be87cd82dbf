// Muon on GPUs: Newton-Schulz against float64, the same bits in every batch, and shards on eight ranks that share one
// GPU, or two where there are two, against whole parameters.
#include <random>

#include <pleat/cuda/thread_comm.hpp>

#include "muon_training.cuh"
#include "skip.hpp"
#include "support/json.hpp"

namespace {

using namespace muon_testing;
using testing_support::Json;

/// Newton-Schulz of the first `count` matrices [rows, cols] of `values`, on the GPU or on the host.
template <class P>
std::vector<double> on_gpu(const std::vector<double>& values, std::int64_t rows, std::int64_t cols, std::int64_t count,
                           int iterations = 5) {
  optim::MatrixBatch batch{nullptr, rows, cols, count};
  const auto elems = static_cast<std::size_t>(rows * cols), stride = static_cast<std::size_t>(batch.stride_elems());
  std::vector<P> data(stride * static_cast<std::size_t>(count), static_cast<P>(std::nanf("")));
  for (std::size_t i = 0; i < elems * static_cast<std::size_t>(count); ++i) {
    data[i / elems * stride + i % elems] = static_cast<P>(values[i]);
  }
  const CudaStream s;
  Carver measured;
  batch.carve(measured, dtype_of<P>);
  CudaBuffer device(data.size() * sizeof(P)), work(measured.used_bytes());
  batch.data = device.data();
  check_cuda(cudaMemsetAsync(work.data(), 0xff, work.size_bytes(), s), "cudaMemset");
  const newton_schulz_leaf<cuda_device> leaf({&batch, 1}, {.iterations = iterations, .product = dtype_of<P>},
                                             work.block(), s);
  check_cuda(cudaMemcpyAsync(device.data(), data.data(), data.size() * sizeof(P), cudaMemcpyDefault, s), "cudaMemcpy");
  leaf.run(0, s);
  check_cuda(cudaMemcpyAsync(data.data(), device.data(), data.size() * sizeof(P), cudaMemcpyDefault, s), "cudaMemcpy");
  s.synchronize();
  std::vector<double> result(elems * static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < result.size(); ++i) {
    result[i] = static_cast<double>(data[i / elems * stride + i % elems]);
  }
  return result;
}

std::vector<double> on_host(const std::vector<double>& values, std::int64_t rows, std::int64_t cols, int iterations) {
  std::vector<double> data(static_cast<std::size_t>(optim::MatrixBatch{nullptr, rows, cols, 1}.stride_elems()));
  std::copy_n(values.begin(), rows * cols, data.begin());
  const optim::MatrixBatch batch{data.data(), rows, cols, 1};
  Carver measured;
  batch.carve(measured, DType::f64);
  const HostBuffer work(measured.used_bytes());
  newton_schulz_leaf<host_device>({&batch, 1}, {.iterations = iterations, .product = DType::f64}, work.block(), {})
      .run(0, {});
  data.resize(static_cast<std::size_t>(rows * cols));
  return data;
}

double largest_difference(const std::vector<double>& a, const std::vector<double>& b) {
  double largest = 0;
  for (std::size_t i = 0; i < b.size(); ++i) {
    const double difference = std::abs(a[i] - b[i]);
    largest = difference <= largest ? largest : difference;  // NaN counts
  }
  return largest;
}

std::vector<double> random_values(std::int64_t elems) {
  static_assert(sizeof(unsigned) >= 4);
  std::mt19937_64 random(std::random_device{}());
  std::normal_distribution<double> normal;
  std::vector<double> values(static_cast<std::size_t>(elems));
  for (double& value : values) value = static_cast<double>(static_cast<bfloat16>(normal(random)));
  return values;
}

void check_newton_schulz() {
  struct Shape {
    std::int64_t rows, cols;
  };
  for (const auto& [rows, cols] :
       {Shape{64, 64}, {256, 96}, {96, 256}, {1, 37}, {37, 1}, {33, 65}, {129, 31}, {8, 512}}) {
    const std::int64_t elems = rows * cols, most = 11;
    const std::vector<double> values = random_values(elems * most);
    const std::string shape = std::to_string(rows) + " x " + std::to_string(cols);
    for (const int iterations : {5, 4}) {
      const auto expected = on_host(values, rows, cols, iterations);
      const double f64 = largest_difference(on_gpu<double>(values, rows, cols, 1, iterations), expected);
      const double f32 = largest_difference(on_gpu<float>(values, rows, cols, 1, iterations), expected);
      const double bf16 = largest_difference(on_gpu<bfloat16>(values, rows, cols, 1, iterations), expected);
      std::printf("newton-schulz %s, %d iterations: f64 %.1e f32 %.1e bf16 %.1e\n", shape.c_str(), iterations, f64, f32,
                  bf16);
      expect(f64 < 1e-12 && f32 < 1e-4 && bf16 < 0.06, "Newton-Schulz of " + shape);
    }
    const auto all = on_gpu<bfloat16>(values, rows, cols, most);
    const auto all_f32 = on_gpu<float>(values, rows, cols, most);
    for (const std::int64_t count : {1, 3}) {
      auto some = on_gpu<bfloat16>(values, rows, cols, count);
      auto some_f32 = on_gpu<float>(values, rows, cols, count);
      const auto mine = static_cast<std::size_t>(count * elems);
      expect(std::equal(some.begin(), some.end(), all.begin()) && some.size() == mine,
             "bf16 bits in a batch, " + shape);
      expect(std::equal(some_f32.begin(), some_f32.end(), all_f32.begin()), "f32 bits in a batch, " + shape);
    }
  }
}

void check_facts() {
  const Json facts = Json::facts("muon.json");
  const auto append = [](auto& self, std::vector<double>& numbers, const Json& list) -> void {
    for (const Json& item : list.array()) {
      if (item.is_number()) {
        numbers.push_back(item.number());
      } else {
        self(self, numbers, item);
      }
    }
  };
  for (const Json& fact : facts["cases"].array()) {
    const auto shape = fact["shape"].integers();
    const std::int64_t rows = shape[shape.size() - 2], cols = shape.back(), count = shape.size() == 3 ? shape[0] : 1;
    std::vector<double> input, expected;
    append(append, input, fact["variants"]["keller"][0]["pre_ns"]);
    append(append, expected, fact["variants"]["keller"][0]["ortho"]);
    const double f32 = largest_difference(on_gpu<float>(input, rows, cols, count), expected);
    const double bf16 = largest_difference(on_gpu<bfloat16>(input, rows, cols, count), expected);
    std::printf("facts %s: f32 %.1e bf16 %.1e\n", fact["name"].text().c_str(), f32, bf16);
    expect(f32 < 1e-4 && bf16 < 0.06, "facts, " + fact["name"].text());
  }
}

struct HostSite {
  HostExecutor executor = {};
  HostStream stream = {};
  HostBuffer allocate(std::size_t bytes) const { return HostBuffer(bytes, 0xff); }
  void wait(ThreadComm&) const {}
};
template <class F>
void on_host(int ranks, F f) {
  run_ranks(ranks, [&](ThreadComm& world) { f(HostSite(), world); });
}
/// The ranks share one GPU, or as many as there are.
auto on_gpus(int count) {
  return [count](int ranks, auto f) {
    std::vector<int> devices;
    for (int d = 0; d < count; ++d) devices.push_back(d);
    run_cuda_ranks(ranks, [&](CudaThreadComm& world) { f(CudaSite(), world); }, {.devices = devices});
  };
}

template <class Compute>
void check_products(const optim::MuonOptions& muon) {
  const unsigned seed = std::random_device{}();
  const auto model = optim_testing::small_model();
  const auto whole = trained<Compute>(on_gpus(1), model, {}, {.muon = muon}, seed);
  const auto host = trained<Compute>([](int ranks, auto f) { on_host(ranks, f); }, model, {}, {.muon = muon}, seed);
  double difference = 0;
  for (std::size_t u = 0; u < model.size(); ++u) {
    for (std::size_t p = 0; p < whole[u].size(); ++p) {
      difference = std::max(difference, largest_difference({whole[u][p].begin(), whole[u][p].end()},
                                                           {host[u][p].begin(), host[u][p].end()}));
    }
  }
  const std::string name = std::string("products in ") + name_of(muon.product);
  std::printf("%s: the host differs by %.1e\n", name.c_str(), difference);
  expect(difference < (muon.product == DType::f64 ? 1e-12 : muon.product == DType::f32 ? 1e-4 : 0.06), name + ", host");
  check_meshes<Compute>(name + ", one GPU", on_gpus(1),
                        {{2, 1, 1}, {3, 1, 1}, {5, 1, 1}, {8, 1, 1}, {8, 1, 2}, {8, 2, 4}, {8, 4, 2}, {8, 8, 1}}, muon,
                        seed, whole);
  if (cuda_device_count() < 2) return;
  check_meshes<Compute>(name + ", two GPUs", on_gpus(2), {{2, 1, 1}, {2, 2, 1}, {2, 1, 2}, {4, 2, 2}, {8, 2, 4}}, muon,
                        seed, whole);
}

void check_ceil_chunks() {
  const auto model = optim_testing::rows_of_ceil_chunks();
  auto whole = model;
  whole[0].boundaries.clear();
  expect(trained<bfloat16>(on_gpus(1), model, {8, 1, 1}, {}, 7) == trained<bfloat16>(on_gpus(1), whole, {}, {}, 7),
         "18 rows over 8 ranks");
}

/// A step of one rank in a CUDA graph has the bits of one that is not.
void check_graph() {
  const std::vector<fsdp::ParamSpec> params{{.name = "w", .shape = {3, 64, 128}, .optimizer = fsdp::Optimizer::muon},
                                            {.name = "v", .shape = {128, 96}, .optimizer = fsdp::Optimizer::muon}};
  const fsdp::UnitLayout unit = fsdp::plan_unit(params, 1);
  const Param kind = Param::dense;
  const auto plan = optim::plan_muon({&unit, 1}, {&kind, 1}, DType::f32);
  const auto elems = static_cast<std::size_t>(unit.total_elems());
  const auto gradient = random_values(unit.total_elems());
  std::vector<std::vector<float>> results;
  for (const bool captured : {false, true}) {
    CudaSite site;
    const auto upload = [&](const auto& values) {
      CudaBuffer buffer(values.size() * sizeof(values[0]));
      site.executor.copy(buffer.data(), values.data(), buffer.size_bytes(), site.stream);
      site.stream.synchronize();
      return buffer;
    };
    const CudaBuffer g = upload(std::vector<float>(gradient.begin(), gradient.end()));
    const CudaBuffer master = upload(std::vector<float>(elems, 1.F)), compute(elems * 2);
    const CudaBuffer pieces = upload(fsdp::update_pieces(unit, unit.pieces(0), 1));
    const CudaBuffer result = upload(std::vector<optim::StepResult>{{.grad_scale = 1, .steps = 1, .applied = 1}});
    const fsdp::ShardMemory shard{master.data(),
                                  g.data(),
                                  compute.data(),
                                  DType::f32,
                                  DType::bf16,
                                  unit.total_elems(),
                                  reinterpret_cast<const fsdp::UpdatePiece*>(pieces.data()),
                                  2};
    const CudaBuffer scratch = site.allocate(plan.footprint().scratch);
    const CudaBuffer persistent = site.allocate(plan.footprint().persistent);
    const GroupComm<CudaThreadComm> alone;
    auto muon = optim::bind(plan, CudaExecutor{}, alone, alone, {&shard, 1},
                            Memory<>{Memory<>{scratch.block(), persistent.block()}}, site.stream);
    auto* const step = reinterpret_cast<optim::StepResult*>(result.data());
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t launch = nullptr;
    if (captured) {
      check_cuda(cudaStreamBeginCapture(site.stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
      muon.step(step, 0.02, site.stream);
      check_cuda(cudaStreamEndCapture(site.stream, &graph), "cudaStreamEndCapture");
      check_cuda(cudaGraphInstantiate(&launch, graph, 0), "cudaGraphInstantiate");
    }
    for (int t = 0; t < 3; ++t) {
      if (captured) {
        check_cuda(cudaGraphLaunch(launch, site.stream), "cudaGraphLaunch");
      } else {
        muon.step(step, 0.02, site.stream);
      }
    }
    results.emplace_back(elems);
    site.executor.copy(results.back().data(), master.data(), elems * sizeof(float), site.stream);
    site.stream.synchronize();
    if (captured) {
      check_cuda(cudaGraphExecDestroy(launch), "cudaGraphExecDestroy");
      check_cuda(cudaGraphDestroy(graph), "cudaGraphDestroy");
    }
  }
  expect(results[0] == results[1] && results[0] != std::vector<float>(elems, 1.F), "a captured step");
}

}  // namespace

int main() {
  if (gpu_testing::lacks_gpus(1)) return gpu_testing::skipped;
  try {
    check_facts();
    check_newton_schulz();
    check_products<double>({.product = DType::f64});
    check_products<float>({.form = optim::MuonForm::moonlight, .product = DType::f32});
    check_products<bfloat16>({.product = DType::bf16});
    check_ceil_chunks();
    check_graph();
  } catch (const std::exception& e) {
    expect(false, e.what());
  }
  std::printf("%s\n", failures == 0 ? "passed" : "failed");
  return failures != 0;
}
