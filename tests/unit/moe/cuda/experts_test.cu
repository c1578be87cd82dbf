// The leaves of the experts on the GPU against those of the host in float64, each on the inputs that the GPU had.
#include <pleat/moe/cuda/experts.cuh>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include <pleat/cuda/buffer.hpp>
#include <pleat/cuda/stream.hpp>
#include <pleat/moe/host/experts.hpp>

#include <doctest/doctest.h>

#include <support/copy_now.hpp>

namespace {

using namespace pleat;
using moe::detail::CudaExpertLeaf;
using moe::detail::HostExpertLeaf;
using Doubles = std::vector<double>;

void synchronize() {
  check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

/// Device memory that holds NaN until something is written.
template <class T>
struct Array {
  explicit Array(std::int64_t elems) : elems(static_cast<std::size_t>(elems)), buffer(this->elems * sizeof(T)) {
    poison();
  }
  void poison() { check_cuda(cudaMemset(buffer.data(), 0xff, buffer.size_bytes()), "cudaMemset"); }
  T* data() const { return reinterpret_cast<T*>(buffer.data()); }
  std::vector<T> download() const {
    std::vector<T> values(elems);
    synchronize();
    testing_support::copy_now(values.data(), data(), elems * sizeof(T));
    return values;
  }
  Doubles values() const {
    const std::vector<T> narrow = download();
    return {narrow.begin(), narrow.end()};
  }
  void upload(const Doubles& values) {
    std::vector<T> narrow;
    for (const double value : values) narrow.push_back(static_cast<T>(value));
    testing_support::copy_now(data(), narrow.data(), elems * sizeof(T));
    synchronize();
  }

  std::size_t elems;
  CudaBuffer buffer;
};

struct Extents {
  std::int64_t hidden, inner;
  std::int64_t unit() const { return 3 * hidden * inner + gap; }
  static constexpr std::int64_t gap = 24;
};

/// gate, up and down of each expert, one after the other in a unit with a gap behind it.
template <class T>
moe::ExpertMatrices matrices(T* unit, std::int64_t experts, const Extents& n) {
  const auto at = [&](int index, std::int64_t rows, std::int64_t cols) {
    return moe::expert_matrix(unit + index * n.hidden * n.inner, experts, rows, cols, n.unit());
  };
  return {at(0, n.inner, n.hidden), at(1, n.inner, n.hidden), at(2, n.hidden, n.inner)};
}

/// Every array of one layer's experts on the GPU; gradients of weights are `Sum`.
template <class T, class Sum = accumulator_t<T>>
struct Layer {
  Layer(std::int64_t experts, std::int64_t capacity, const Extents& n, int max_ctas = 0)
      : plan(moe::plan(moe::ExpertShape{static_cast<int>(experts), n.hidden, n.inner, capacity, dtype_of<T>},
                       moe::ExpertOptions{max_ctas})),
        extents(n),
        offsets((experts + 1) * static_cast<std::int64_t>(sizeof(std::int64_t))) {}

  /// Random rows of these sizes, each padded to `alignment` with zeros; NaN follows.
  void draw(const std::vector<std::int64_t>& sizes, std::int64_t alignment, unsigned seed) {
    std::mt19937_64 random(seed);
    std::normal_distribution<double> normal;
    starts = {0};
    Doubles x(rows.elems, std::numeric_limits<double>::quiet_NaN()), dy = x, w(weights.elems);
    for (const std::int64_t size : sizes) {
      const std::int64_t first = starts.back(), end = first + (size + alignment - 1) / alignment * alignment;
      for (std::int64_t i = first * extents.hidden; i < end * extents.hidden; ++i) {
        const bool is_pad = i >= (first + size) * extents.hidden;
        x[static_cast<std::size_t>(i)] = is_pad ? 0 : normal(random);
        dy[static_cast<std::size_t>(i)] = is_pad ? 0 : normal(random);
      }
      starts.push_back(end);
    }
    for (double& value : w) value = normal(random) / std::sqrt(static_cast<double>(extents.hidden));
    rows.upload(x);
    dout.upload(dy);
    weights.upload(w);
    testing_support::copy_now(offsets.data(), starts.data(), offsets.size_bytes());
    synchronize();
  }
  void poison_results() {
    for (Array<T>* array : {&gate, &up, &act, &out, &dgate, &dup, &act_again, &drows}) array->poison();
    dweights.poison();
  }
  const std::int64_t* device_starts() const { return reinterpret_cast<const std::int64_t*>(offsets.data()); }
  moe::ExpertMatrices w() const { return matrices(weights.data(), plan.shape.experts_local, extents); }
  moe::ExpertMatrices dw() const { return matrices(dweights.data(), plan.shape.experts_local, extents); }

  /// Forward and backward.
  void run(bool accumulate, cudaStream_t s) {
    const std::int64_t* o = device_starts();
    const std::int64_t hidden = extents.hidden, inner = extents.inner;
    CudaExpertLeaf::gate_up(plan, rows.data(), o, w().gate, w().up, gate.data(), up.data(), act.data(), s);
    CudaExpertLeaf::down(plan, act.data(), o, w().down, out.data(), s);
    CudaExpertLeaf::down_backward(plan, dout.data(), o, w().down, gate.data(), up.data(), dgate.data(), dup.data(),
                                  act_again.data(), s);
    CudaExpertLeaf::weight_gradient(plan, dout.data(), hidden, act_again.data(), inner, o, accumulate, dw().down, s);
    CudaExpertLeaf::weight_gradient(plan, dgate.data(), inner, rows.data(), hidden, o, accumulate, dw().gate, s);
    CudaExpertLeaf::weight_gradient(plan, dup.data(), inner, rows.data(), hidden, o, accumulate, dw().up, s);
    CudaExpertLeaf::gate_up_backward(plan, dgate.data(), dup.data(), o, w().gate, w().up, drows.data(), s);
  }
  /// The bytes of all results, one array after the other.
  std::vector<unsigned char> results() const {
    std::vector<unsigned char> bytes;
    const auto append = [&](const CudaBuffer& buffer) {
      const std::size_t at = bytes.size();
      bytes.resize(at + buffer.size_bytes());
      testing_support::copy_now(bytes.data() + at, buffer.data(), buffer.size_bytes());
    };
    synchronize();
    for (const Array<T>* array : {&gate, &up, &act, &out, &dgate, &dup, &act_again, &drows}) append(array->buffer);
    append(dweights.buffer);
    return bytes;
  }

  moe::ExpertPlan plan;
  Extents extents;
  CudaBuffer offsets;
  std::vector<std::int64_t> starts;
  std::int64_t wide = plan.shape.capacity_rows * extents.hidden, narrow = plan.shape.capacity_rows * extents.inner;
  Array<T> rows{wide}, dout{wide}, out{wide}, drows{wide}, weights{plan.shape.experts_local * extents.unit()};
  Array<T> gate{narrow}, up{narrow}, act{narrow}, dgate{narrow}, dup{narrow}, act_again{narrow};
  Array<Sum> dweights{plan.shape.experts_local * extents.unit()};
};

/// What is NaN in `expected`, since the host did not write it, is NaN in `got` as well; the rest is close.
void check_close(const char* what, const Doubles& got, const Doubles& expected, double tolerance) {
  double error = 0, norm = 0;
  std::size_t written = 0;
  for (const double value : expected) {
    if (!std::isnan(value)) norm += value * value, ++written;
  }
  const double rms = std::sqrt(norm / static_cast<double>(written == 0 ? 1 : written));
  std::size_t wrong = 0, first = 0;  // an assertion per element would take seconds
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const double off = std::abs(got[i] - expected[i]);
    const bool good =
        std::isnan(expected[i]) ? std::isnan(got[i]) : off <= 4 * tolerance * (rms + std::abs(expected[i]));
    if (!good && wrong++ == 0) first = i;
    if (!std::isnan(expected[i])) error += off * off;
  }
  CAPTURE(what);
  CAPTURE(first);
  CAPTURE(expected[first]);
  CAPTURE(got[first]);
  CHECK(wrong == 0);
  CHECK(std::sqrt(error) <= tolerance * std::sqrt(norm));
}

/// Runs the host's leaves in float64 on what the GPU's leaves were given.
template <class T, class Sum>
void check_against_host(const Layer<T, Sum>& gpu, double times_accumulated) {
  const double rounding = sizeof(T) == 2 ? 3e-3 : sizeof(T) == 4 ? 1e-5 : 1e-13;
  const double sums = sizeof(Sum) == 8 ? 1e-13 : sizeof(Sum) == 4 ? 1e-5 : rounding;
  const std::int64_t hidden = gpu.extents.hidden, inner = gpu.extents.inner;
  moe::ExpertPlan plan = gpu.plan;
  plan.shape.dtype = DType::f64;
  const std::int64_t* o = gpu.starts.data();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  Doubles weights = gpu.weights.values(), dweights(weights.size(), nan);
  const moe::ExpertMatrices w = matrices(weights.data(), plan.shape.experts_local, gpu.extents);
  const moe::ExpertMatrices dw = matrices(dweights.data(), plan.shape.experts_local, gpu.extents);
  const Doubles rows = gpu.rows.values(), dout = gpu.dout.values();
  const Doubles gate = gpu.gate.values(), up = gpu.up.values(), act = gpu.act.values();
  const Doubles dgate = gpu.dgate.values(), dup = gpu.dup.values();

  Doubles first(gate.size(), nan), second = first, third = first, wide(rows.size(), nan);
  HostExpertLeaf::gate_up(plan, rows.data(), o, w.gate, w.up, first.data(), second.data(), third.data(), {});
  check_close("gate", gate, first, rounding);
  check_close("up", up, second, rounding);
  HostExpertLeaf::down_backward(plan, dout.data(), o, w.down, gate.data(), up.data(), first.data(), second.data(),
                                third.data(), {});
  check_close("dgate", dgate, first, rounding);
  check_close("dup", dup, second, rounding);
  check_close("act", act, third, rounding);
  check_close("act again", gpu.act_again.values(), third, rounding);
  HostExpertLeaf::down(plan, act.data(), o, w.down, wide.data(), {});
  check_close("out", gpu.out.values(), wide, rounding);
  HostExpertLeaf::gate_up_backward(plan, dgate.data(), dup.data(), o, w.gate, w.up, wide.data(), {});
  check_close("drows", gpu.drows.values(), wide, rounding);
  const Doubles act_again = gpu.act_again.values();
  HostExpertLeaf::weight_gradient(plan, dout.data(), hidden, act_again.data(), inner, o, false, dw.down, {});
  HostExpertLeaf::weight_gradient(plan, dgate.data(), inner, rows.data(), hidden, o, false, dw.gate, {});
  HostExpertLeaf::weight_gradient(plan, dup.data(), inner, rows.data(), hidden, o, false, dw.up, {});
  for (double& value : dweights) value *= times_accumulated;
  check_close("dweights", gpu.dweights.values(), dweights, sums);
}

const std::vector<std::int64_t> sizes = {0, 1, 44, 127, 128, 129, 0, 300};

template <class T, class Sum = accumulator_t<T>>
void check_sizes(std::int64_t alignment, const Extents& extents) {
  CAPTURE(alignment);
  CAPTURE(extents.inner);
  Layer<T, Sum> layer(static_cast<std::int64_t>(sizes.size()), 1300, extents);
  layer.draw(sizes, alignment, std::random_device{}());
  layer.run(false, nullptr);
  check_against_host(layer, 1);
  layer.run(true, nullptr);
  check_against_host(layer, 2);
}

TEST_CASE("experts on the GPU: sizes 0 to 300, pads zero, nothing past the end, gaps as they were") {
  for (const std::int64_t alignment : {128, 1}) {
    for (const Extents& extents : {Extents{256, 192}, Extents{136, 328}, Extents{70, 45}}) {
      check_sizes<bfloat16>(alignment, extents);
      check_sizes<bfloat16, bfloat16>(alignment, extents);
    }
    check_sizes<float>(alignment, {40, 72});
    check_sizes<double>(alignment, {40, 72});
  }
}

TEST_CASE("experts on the GPU: more experts than lanes, and no rows at all") {
  std::mt19937 random(std::random_device{}());
  std::vector<std::int64_t> many(75);
  for (std::int64_t& size : many) size = random() % 3 == 0 ? 0 : random() % 150;
  for (const bool empty : {false, true}) {
    if (empty) many.assign(many.size(), 0);
    Layer<bfloat16> layer(static_cast<std::int64_t>(many.size()), 75 * 256, {64, 64});
    layer.draw(many, 128, std::random_device{}());
    layer.run(false, nullptr);
    check_against_host(layer, 1);
  }
}

TEST_CASE("experts on the GPU: the same bits in every run and with every budget of CTAs") {
  const unsigned seed = std::random_device{}();
  std::vector<unsigned char> expected;
  for (const int max_ctas : {0, 0, 1, 2, 7, 66}) {
    CAPTURE(max_ctas);
    Layer<bfloat16> layer(static_cast<std::int64_t>(sizes.size()), 1300, {192, 520}, max_ctas);
    layer.draw(sizes, 128, seed);
    layer.run(false, nullptr);
    if (expected.empty()) expected = layer.results();
    CHECK(layer.results() == expected);
  }
}

TEST_CASE("experts on the GPU: a captured graph follows the offsets it finds") {
  const CudaStream s;
  Layer<bfloat16> layer(static_cast<std::int64_t>(sizes.size()), 1300, {128, 256});
  CudaExpertLeaf::preload();
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  check_cuda(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  layer.run(false, s);
  check_cuda(cudaStreamEndCapture(s, &graph), "cudaStreamEndCapture");
  check_cuda(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate");
  std::vector<std::int64_t> rotated = sizes;
  for (const bool empty : {false, false, true, false}) {
    std::rotate(rotated.begin(), rotated.begin() + 3, rotated.end());
    layer.draw(empty ? std::vector<std::int64_t>(sizes.size()) : rotated, 128, std::random_device{}());
    layer.poison_results();
    synchronize();
    check_cuda(cudaGraphLaunch(executable, s), "cudaGraphLaunch");
    check_against_host(layer, 1);
  }
  check_cuda(cudaGraphExecDestroy(executable), "cudaGraphExecDestroy");
  check_cuda(cudaGraphDestroy(graph), "cudaGraphDestroy");
}

}  // namespace
