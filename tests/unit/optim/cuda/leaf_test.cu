// The optimizer leaves on the GPU against those of the host: elements, sums in float64, edges of pieces,
// skipped steps, and a whole step in a CUDA graph.
#include <pleat/optim/cuda/leaf.cuh>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include <pleat/cuda/buffer.hpp>
#include <pleat/cuda/thread_comm.hpp>
#include <pleat/optim/adamw.hpp>
#include <pleat/optim/host/leaf.hpp>
#include <pleat/optim/step_norm.hpp>

#include <doctest/doctest.h>

#include <support/copy_now.hpp>

#include "../own_shard.hpp"

namespace {

using namespace pleat;
using optim::StepResult;
using optim_testing::OwnShard;
using leaf = optim_leaf<cuda_device>;
using host_leaf = optim_leaf<host_device>;

template <class T>
struct OnDevice {
  explicit OnDevice(const std::vector<T>& values)
      : elems(values.size()), buffer(values.size() * sizeof(T)), data(reinterpret_cast<T*>(buffer.data())) {
    testing_support::copy_now(data, values.data(), elems * sizeof(T));
  }
  std::vector<T> download() const {
    std::vector<T> values(elems);
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    testing_support::copy_now(values.data(), data, elems * sizeof(T));
    return values;
  }
  std::size_t elems;
  CudaBuffer buffer;
  T* data;
};

/// A shard of the host, and its twin on the device.
template <class T, class Compute>
struct Twin {
  explicit Twin(OwnShard<T, Compute>& own)
      : master(own.master),
        gradient(own.gradient),
        first(own.first),
        second(own.second),
        compute(own.compute),
        pieces(own.pieces),
        memory(own.memory()) {
    memory.master = master.data;
    memory.gradient = gradient.data;
    if (memory.compute != nullptr) memory.compute = compute.data;
    memory.pieces = pieces.data;
  }
  OnDevice<T> master, gradient, first, second;
  OnDevice<Compute> compute;
  OnDevice<fsdp::UpdatePiece> pieces;
  fsdp::ShardMemory memory;
};

/// `elems` random values, NaN outside the pieces: small and odd ones that touch or not, one of another optimizer, and
/// the rest.
template <class T, class Compute>
OwnShard<T, Compute> random_shard(std::int64_t elems, unsigned seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal;
  OwnShard<T, Compute> shard(std::vector<T>(static_cast<std::size_t>(elems), std::numeric_limits<T>::quiet_NaN()));
  shard.gradient = shard.first = shard.second = shard.master;
  shard.pieces.clear();
  std::int64_t begin = 0;
  for (const std::int64_t size : {1, 2, 3, 8, 5, 16, 129, 31, 4096, 2047}) {
    shard.pieces.push_back(shard.piece(begin, size, 1.0 / static_cast<double>(size), size % 2 == 0));
    shard.pieces.back().optimizer = size == 31 ? fsdp::Optimizer::muon : fsdp::Optimizer::adamw;
    begin += size + (size % 3 == 0 ? 5 : 0);
  }
  shard.pieces.push_back(shard.piece(begin, elems - begin, 0.5));
  while (shard.pieces.back().elems <= 0) {  // a short shard ends inside a piece
    shard.pieces.pop_back();
    fsdp::UpdatePiece& last = shard.pieces.back();
    last.elems = std::min(last.elems, elems - last.begin);
  }
  for (const fsdp::UpdatePiece& piece : shard.pieces) {
    for (std::int64_t i = piece.begin; i < piece.begin + piece.elems; ++i) {
      const auto at = static_cast<std::size_t>(i);
      shard.master[at] = static_cast<T>(normal(random));
      shard.gradient[at] = static_cast<T>(normal(random));
      shard.first[at] = static_cast<T>(0.1 * normal(random));
      shard.second[at] = static_cast<T>(0.01 * std::abs(normal(random)));
    }
  }
  return shard;
}

/// The largest difference in units of the last place of values near 1; infinite where only one of them is NaN.
template <class T>
double difference(const std::vector<T>& a, const std::vector<T>& b) {
  double largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (std::memcmp(&a[i], &b[i], sizeof(T)) == 0) continue;
    if (std::isnan(a[i]) || std::isnan(b[i])) return std::numeric_limits<double>::infinity();
    const double scale = std::max(1.0, std::abs(static_cast<double>(b[i]))) * std::numeric_limits<T>::epsilon();
    largest = std::max(largest, std::abs(static_cast<double>(a[i] - b[i])) / scale);
  }
  return largest;
}

template <class T, class Compute>
void check_adamw(std::int64_t elems) {
  const unsigned seed = std::random_device{}();
  CAPTURE(seed);
  CAPTURE(elems);
  const CudaStream s;
  auto host = random_shard<T, Compute>(elems, seed);
  const Twin<T, Compute> device(host);
  const optim::AdamwOptions options;
  for (std::int64_t t = 1; t <= 3; ++t) {
    const StepResult scale{.grad_scale = 0.25, .steps = t, .applied = 1};
    const OnDevice<StepResult> device_scale({scale});
    host_leaf::adamw(host.memory(), host.first.data(), host.second.data(), options, 0.01, &scale, {});
    leaf::adamw(device.memory, device.first.data, device.second.data, options, 0.01, device_scale.data, s);
    s.synchronize();
  }
  const auto master = device.master.download();
  CHECK(difference(master, host.master) < 4);
  CHECK(difference(device.first.download(), host.first) == 0);
  CHECK(difference(device.second.download(), host.second) == 0);
  const auto compute = device.compute.download();
  for (const fsdp::UpdatePiece& piece : host.pieces) {
    const bool mine = piece.optimizer == fsdp::Optimizer::adamw && device.memory.compute != nullptr;
    for (auto i = static_cast<std::size_t>(piece.begin); i < static_cast<std::size_t>(piece.begin + piece.elems); ++i) {
      const Compute expected = mine ? static_cast<Compute>(master[i]) : Compute{};
      if (std::memcmp(&compute[i], &expected, sizeof(Compute)) != 0) FAIL("the copy of element ", i, " is no copy");
    }
  }
}

TEST_CASE("AdamW equals the host's up to the powers of its betas, and touches its own pieces only") {
  for (const std::int64_t elems : {1, 3, 40, 6390, 100'003, 700'001}) {
    check_adamw<float, bfloat16>(elems);
    check_adamw<float, float>(elems);
    check_adamw<double, double>(elems);
    check_adamw<double, float>(elems);
  }
}

TEST_CASE("moments lie where a piece says, in a state of their own") {
  const CudaStream s;
  OwnShard<float> host(std::vector<float>(1000, 1.F));
  for (std::size_t i = 0; i < 1000; ++i) host.gradient[i] = static_cast<float>(i % 7) - 3;
  host.pieces = {host.piece(0, 403), host.piece(403, 597)};
  host.pieces[0].optimizer = fsdp::Optimizer::muon;
  host.pieces[1].state_begin = 403 % 8;
  const Twin<float, float> device(host);
  const StepResult scale{.grad_scale = 1, .steps = 1, .applied = 1};
  const OnDevice<StepResult> device_scale({scale});
  host_leaf::adamw(host.memory(), host.first.data(), host.second.data(), {}, 0.01, &scale, {});
  leaf::adamw(device.memory, device.first.data, device.second.data, {}, 0.01, device_scale.data, s);
  CHECK(difference(device.master.download(), host.master) < 4);
  CHECK(difference(device.first.download(), host.first) == 0);
}

TEST_CASE("a step that is skipped writes nothing") {
  const CudaStream s;
  auto host = random_shard<float, bfloat16>(50'000, 1);
  const Twin<float, bfloat16> device(host);
  const OnDevice<StepResult> scale({StepResult{.steps = 3, .skipped = 1, .applied = 0}});
  leaf::adamw(device.memory, device.first.data, device.second.data, {}, 0.01, scale.data, s);
  CHECK(difference(device.master.download(), host.master) == 0);
  CHECK(difference(device.first.download(), host.first) == 0);
  CHECK(difference(device.second.download(), host.second) == 0);
}

template <class T>
void check_squares(std::int64_t elems) {
  CAPTURE(elems);
  const CudaStream s;
  auto host = random_shard<T, T>(elems, std::random_device{}());
  for (T& g : host.gradient) g *= static_cast<T>(1e18);  // squares past the range of float
  const Twin<T, T> device(host);
  std::vector<double> zero(optim::square_partials);
  host_leaf::add_squares(zero.data(), host.memory(), {});
  optim::StepPartial expected;
  host_leaf::finish_partial(&expected, zero.data(), nullptr, 0, {});
  double found[2] = {};
  for (double& f : found) {
    const OnDevice<double> partials(std::vector<double>(optim::square_partials, 0.0));
    const OnDevice<optim::StepPartial> partial({optim::StepPartial{-1, {0, 0, 0, 2}}});
    const OnDevice<std::int64_t> words({0, 5, 3});
    const OnDevice<const std::int64_t*> statuses({words.data, words.data + 1, words.data + 2});
    leaf::add_squares(partials.data, device.memory, s);
    leaf::add_squares(partials.data, device.memory, s);
    leaf::finish_partial(partial.data, partials.data, statuses.data, 3, s);
    s.synchronize();
    f = partial.download()[0].sum_of_squares;
    CHECK(partial.download()[0].sums.status == 5);
  }
  CHECK(found[0] == found[1]);
  CHECK(std::abs(found[0] - 2 * expected.sum_of_squares) <= 1e-12 * expected.sum_of_squares);
}

TEST_CASE("squares are weighed per piece, in float64, with the same bits each time") {
  for (const std::int64_t elems : {1, 3, 40, 6390, 100'003, 700'001}) {
    check_squares<float>(elems);
    check_squares<double>(elems);
  }
}

TEST_CASE("the end of a step has the bits of the host for any number of ranks") {
  const CudaStream s;
  std::mt19937_64 random(std::random_device{}());
  std::uniform_real_distribution<double> uniform(0.1, 2);
  for (const int ranks : {1, 3, 512, 1337}) {
    for (int what = 0; what < 5; ++what) {  // nothing, then something that must not be applied
      std::vector<optim::StepPartial> partials(static_cast<std::size_t>(ranks));
      for (auto& p : partials) p = {uniform(random), {uniform(random), uniform(random), uniform(random), 0}};
      optim::StepPartial& odd = partials[random() % partials.size()];
      if (what == 1) odd.sum_of_squares = std::numeric_limits<double>::infinity();
      if (what == 2) odd.sums.status = std::numeric_limits<double>::quiet_NaN();
      if (what == 3) odd.sums.tokens = -1e9;
      if (what == 4) odd.sums.tokens = std::numeric_limits<double>::infinity();
      StepResult expected{.steps = 4, .skipped = 1};
      const OnDevice<StepResult> step({expected});
      const OnDevice<optim::StepPartial> device(partials);
      host_leaf::finish_step(&expected, partials.data(), ranks, 0.5, {});
      leaf::finish_step(step.data, device.data, ranks, 0.5, s);
      const StepResult found = step.download()[0];
      CHECK(std::memcmp(&found, &expected, sizeof(StepResult)) == 0);
      CHECK(found.applied == (what == 0));
    }
  }
}

TEST_CASE("a learning rate in device memory that cannot be leaves the step out") {
  const CudaStream s;
  const StepResult before{.steps = 3, .skipped = 1, .applied = 1};
  for (const double bad : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity(), -1.0}) {
    const OnDevice<double> rate({bad});
    for (const bool is_first : {true, false}) {
      const OnDevice<StepResult> result({before});
      const optim::LearningRate good = 0.1, in_memory = rate.data;
      leaf::check_rates(result.data, is_first ? in_memory : good, is_first ? good : in_memory, s);
      const StepResult found = result.download()[0];
      CHECK(found.applied == 0);
      CHECK(found.steps == 2);
      CHECK(found.skipped == 2);
      CHECK(found.status == optim::bad_rate);
    }
  }
  const OnDevice<double> rate({0.5});
  const OnDevice<StepResult> result({before});
  leaf::check_rates(result.data, rate.data, 0.0, s);
  CHECK(result.download()[0].applied == 1);
}

TEST_CASE("a step is captured in a CUDA graph, norm and update, and replays") {
  const CudaStream s;
  auto host = random_shard<float, bfloat16>(100'000, 3);
  const Twin<float, bfloat16> eager(host), captured(host);
  const auto norm_plan = optim::plan_step_norm(1);
  const OnDevice<optim::StepSums> sums({optim::StepSums{.loss = 1, .tokens = 4}});
  const OnDevice<double> rate({0.5});
  std::vector<CudaBuffer> blocks;
  const auto norm_of = [&] {
    blocks.emplace_back(norm_plan.footprint().persistent);
    return optim::bind(norm_plan, CudaExecutor{}, GroupComm<CudaThreadComm>(),
                       Memory<>{.persistent = blocks.back().block()}, s);
  };
  auto norm = norm_of(), captured_norm = norm_of();
  const auto step = [&](auto& reduced, const Twin<float, bfloat16>& shard, optim::LearningRate lr) {
    CudaExecutor{}.copy(reduced.sums(), sums.data, sizeof(optim::StepSums), s);
    const StepResult* result = reduced.run({&shard.memory, 1}, 1.0, s);
    leaf::adamw(shard.memory, shard.first.data, shard.second.data, {}, lr, result, s);
  };
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t launch = nullptr;
  check_cuda(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  step(captured_norm, captured, rate.data);
  check_cuda(cudaStreamEndCapture(s, &graph), "cudaStreamEndCapture");
  check_cuda(cudaGraphInstantiate(&launch, graph, 0), "cudaGraphInstantiate");
  for (int t = 0; t < 3; ++t) {
    const double lr = 0.01 * (t + 1);
    check_cuda(cudaMemcpyAsync(rate.data, &lr, sizeof(lr), cudaMemcpyDefault, s), "cudaMemcpyAsync");
    step(norm, eager, lr);
    check_cuda(cudaGraphLaunch(launch, s), "cudaGraphLaunch");
  }
  s.synchronize();
  CHECK(difference(captured.master.download(), eager.master.download()) == 0);
  CHECK(difference(eager.master.download(), host.master) > 0);
  check_cuda(cudaGraphExecDestroy(launch), "cudaGraphExecDestroy");
  check_cuda(cudaGraphDestroy(graph), "cudaGraphDestroy");
}

}  // namespace
