// The experts alone: sizes with 0 and odd rows, strides, accumulation, and what must not be touched.
#include <pleat/moe/experts.hpp>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <pleat/comm/thread_arena.hpp>
#include <pleat/core/host/buffer.hpp>
#include <pleat/core/host/leaf.hpp>
#include <pleat/moe.hpp>

namespace {

using namespace pleat;

constexpr double nan = std::numeric_limits<double>::quiet_NaN();

/// Experts with rows of the given numbers, each padded to `alignment`; the matrices lie in one expert-major unit.
struct Bench {
  Bench(std::vector<std::int64_t> counts, std::int64_t alignment, unsigned seed) : sizes(std::move(counts)) {
    std::mt19937_64 random(seed);
    std::normal_distribution<double> normal;
    const auto draw = [&](std::size_t count) {
      std::vector<double> values(count);
      for (double& value : values) value = normal(random);
      return values;
    };
    offsets = {0};
    for (const std::int64_t size : sizes)
      offsets.push_back(offsets.back() + (size + alignment - 1) / alignment * alignment);
    capacity = offsets.back() + 5;
    rows.assign(static_cast<std::size_t>(capacity * hidden), nan);
    dout = rows;
    for (std::size_t e = 0; e < sizes.size(); ++e) {
      for (std::int64_t i = offsets[e] * hidden; i < offsets[e + 1] * hidden; ++i) {
        const bool is_pad = i >= (offsets[e] + sizes[e]) * hidden;
        rows[static_cast<std::size_t>(i)] = is_pad ? 0 : normal(random);
        dout[static_cast<std::size_t>(i)] = is_pad ? 0 : normal(random);
      }
    }
    weights = draw(sizes.size() * static_cast<std::size_t>(stride));
    dweights.assign(weights.size(), nan);
  }

  std::int64_t experts() const { return static_cast<std::int64_t>(sizes.size()); }
  moe::ExpertMatrices matrices(std::vector<double>& unit) const {
    return {moe::expert_matrix(unit.data(), experts(), inner, hidden, stride),
            moe::expert_matrix(unit.data() + inner * hidden, experts(), inner, hidden, stride),
            moe::expert_matrix(unit.data() + 2 * inner * hidden, experts(), hidden, inner, stride)};
  }
  TensorRef array(std::vector<double>& values) const { return {values.data(), {capacity, hidden}}; }

  /// Forward and backward; `drows` may share memory with dout.
  template <class Leaf = moe_leaf<host_device>>
  void run(bool accumulate, bool in_place = false, Leaf leaf = {}) {
    const auto plan = moe::plan(moe::ExpertShape{static_cast<int>(experts()), hidden, inner, capacity, DType::f64});
    const HostBuffer scratch(plan.footprint().scratch, 0xff), saved_memory(plan.footprint().saved, 0xff);
    auto op = moe::bind(plan, HostExecutor{}, Memory<HostArena>{scratch.block()}, std::move(leaf));
    moe::ExpertSaved saved(plan, saved_memory.block());
    out.assign(rows.size(), nan);
    drows.assign(rows.size(), nan);
    op.forward({}, array(rows), offsets, matrices(weights), saved, array(out));
    if (in_place) drows = dout;
    op.backward({}, array(in_place ? drows : dout), array(rows), offsets, matrices(weights), saved, array(drows),
                matrices(dweights), accumulate);
  }
  /// sum of dout * out over all rows.
  double loss() {
    run(false);
    double sum = 0;
    for (std::int64_t i = 0; i < offsets.back() * hidden; ++i) {
      sum += dout[static_cast<std::size_t>(i)] * out[static_cast<std::size_t>(i)];
    }
    return sum;
  }

  static constexpr std::int64_t hidden = 6, inner = 5, gap = 7, stride = 3 * inner * hidden + gap;
  std::vector<std::int64_t> sizes, offsets;
  std::int64_t capacity = 0;
  std::vector<double> rows, dout, out, drows, weights, dweights;
};

TEST_CASE("group sizes 0 1 44 127 128 129 0 8: results of plain loops, pads zero, nothing past the end") {
  for (const std::int64_t alignment : {1, 128}) {
    Bench bench({0, 1, 44, 127, 128, 129, 0, 8}, alignment, 3);
    bench.run(false);
    for (std::int64_t e = 0; e < bench.experts(); ++e) {
      const double* gate = bench.weights.data() + e * Bench::stride;
      const double *up = gate + Bench::inner * Bench::hidden, *down = up + Bench::inner * Bench::hidden;
      for (std::int64_t row = bench.offsets[static_cast<std::size_t>(e)];
           row < bench.offsets[static_cast<std::size_t>(e + 1)]; ++row) {
        const double* x = bench.rows.data() + row * Bench::hidden;
        std::vector<double> act;
        for (std::int64_t i = 0; i < Bench::inner; ++i) {
          double g = 0, u = 0;
          for (std::int64_t h = 0; h < Bench::hidden; ++h) {
            g += gate[i * Bench::hidden + h] * x[h];
            u += up[i * Bench::hidden + h] * x[h];
          }
          act.push_back(g / (1 + std::exp(-g)) * u);
        }
        for (std::int64_t h = 0; h < Bench::hidden; ++h) {
          double y = 0;
          for (std::int64_t i = 0; i < Bench::inner; ++i)
            y += down[h * Bench::inner + i] * act[static_cast<std::size_t>(i)];
          CHECK(std::abs(bench.out[static_cast<std::size_t>(row * Bench::hidden + h)] - y) <=
                1e-12 * (1 + std::abs(y)));
        }
      }
    }
    for (auto i = static_cast<std::size_t>(bench.offsets.back() * Bench::hidden); i < bench.out.size(); ++i) {
      CHECK(std::isnan(bench.out[i]));
      CHECK(std::isnan(bench.drows[i]));
    }
  }
}

TEST_CASE("gradients equal finite differences; the gaps between experts stay as they are") {
  Bench bench({2, 0, 3}, 2, 8);
  bench.run(false);
  const std::vector<double> drows = bench.drows, dweights = bench.dweights;
  const auto slope = [&](double& value) {
    const double kept = value, step = 1e-6;
    value = kept + step;
    const double above = bench.loss();
    value = kept - step;
    const double below = bench.loss();
    value = kept;
    return (above - below) / (2 * step);
  };
  for (std::size_t i = 0; i < bench.weights.size(); ++i) {
    const bool in_gap = static_cast<std::int64_t>(i) % Bench::stride >= Bench::stride - Bench::gap;
    if (in_gap) {
      CHECK(std::isnan(dweights[i]));
    } else {
      CHECK(std::abs(slope(bench.weights[i]) - dweights[i]) < 1e-7);
      if (static_cast<std::int64_t>(i) / Bench::stride == 1) CHECK(dweights[i] == 0);
    }
  }
  for (std::int64_t row = 0; row < bench.offsets.back(); ++row) {
    for (std::int64_t h = 0; h < Bench::hidden; ++h) {
      const auto at = static_cast<std::size_t>(row * Bench::hidden + h);
      const bool is_pad = row == 5;
      CHECK(std::abs((is_pad ? 0 : slope(bench.rows[at])) - drows[at]) < 1e-7);
    }
  }
}

TEST_CASE("weight gradients accumulate; drows may take dout's place") {
  Bench bench({2, 0, 3}, 4, 9);
  bench.run(false);
  const std::vector<double> once = bench.dweights, drows = bench.drows;
  bench.run(true);
  for (std::size_t i = 0; i < once.size(); ++i) {
    CHECK((std::isnan(once[i]) ? std::isnan(bench.dweights[i]) : bench.dweights[i] == 2 * once[i]));
  }
  bench.run(false, true);
  CHECK(std::memcmp(bench.drows.data(), drows.data(), drows.size() * sizeof(double)) == 0);
  CHECK(std::memcmp(bench.dweights.data(), once.data(), once.size() * sizeof(double)) == 0);
}

TEST_CASE("gradients of weights in the plan's dtype: fp32 ones, rounded, then added") {
  constexpr std::int64_t d_cols = 70, x_cols = 66, rows = 9;
  const auto plan = moe::plan(moe::ExpertShape{2, d_cols, x_cols, rows, DType::bf16});
  std::mt19937 random(11);
  const auto draw = [&](std::int64_t count) {
    std::vector<bfloat16> values;
    for (std::int64_t i = 0; i < count; ++i) values.emplace_back(static_cast<float>(random() % 512) / 256 - 1);
    return values;
  };
  const std::vector<bfloat16> d = draw(rows * d_cols), x = draw(rows * x_cols);
  const std::vector<std::int64_t> offsets = {0, 4, 9};
  std::vector<float> wide(2 * d_cols * x_cols);
  std::vector<bfloat16> narrow(wide.size());
  const auto gradient = [&](auto& to, bool accumulate) {
    moe_leaf<host_device>::weight_gradient(plan, d.data(), d_cols, x.data(), x_cols, offsets.data(), accumulate,
                                           moe::expert_matrix(to.data(), 2, d_cols, x_cols, d_cols * x_cols), {});
  };
  gradient(wide, false);
  for (const bool accumulate : {false, true}) {
    gradient(narrow, accumulate);
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < wide.size(); ++i) {
      const float product = static_cast<float>(bfloat16(wide[i]));
      if (static_cast<float>(narrow[i]) != (accumulate ? 2 * product : product)) ++wrong;
    }
    CHECK(wrong == 0);
  }
}

/// The host's products, counted: an expert leaf of the caller's own, with state.
struct CountingLeaf {
  template <class... Args>
  void gate_up(const Args&... args) const {
    ++*calls, moe_leaf<host_device>::gate_up(args...);
  }
  template <class... Args>
  void down(const Args&... args) const {
    ++*calls, moe_leaf<host_device>::down(args...);
  }
  template <class... Args>
  void down_backward(const Args&... args) const {
    ++*calls, moe_leaf<host_device>::down_backward(args...);
  }
  template <class... Args>
  void gate_up_backward(const Args&... args) const {
    ++*calls, moe_leaf<host_device>::gate_up_backward(args...);
  }
  template <class... Args>
  void weight_gradient(const Args&... args) const {
    ++*calls, moe_leaf<host_device>::weight_gradient(args...);
  }
  int* calls;
};
static_assert(moe::expert_leaf<CountingLeaf, HostStream>);

TEST_CASE("a leaf of the caller's own computes every product") {
  Bench library({2, 0, 3}, 4, 9), own = library;
  library.run(false);
  int calls = 0;
  own.run(false, false, CountingLeaf{&calls});
  CHECK(calls == 7);  // gate and up, down; back through down, three gradients of weights, back through gate and up
  CHECK(std::memcmp(own.drows.data(), library.drows.data(), own.drows.size() * sizeof(double)) == 0);
  CHECK(std::memcmp(own.dweights.data(), library.dweights.data(), own.dweights.size() * sizeof(double)) == 0);
}

TEST_CASE("errors name the values") {
  const auto text = [](auto f) {
    try {
      f();
    } catch (const error& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  CHECK(text([] {
          moe::plan(moe::ExpertShape{2, 4, 0, 8});
        }).find("pleat[E07]: experts_local=2 hidden=4 inner=0") == 0);
  Bench bench({1}, 1, 1);
  const auto plan = moe::plan(moe::ExpertShape{1, Bench::hidden, Bench::inner, bench.capacity, DType::f64});
  const HostBuffer scratch(plan.footprint().scratch), saved_memory(plan.footprint().saved);
  auto op = moe::bind(plan, HostExecutor{}, Memory<HostArena>{scratch.block()});
  moe::ExpertSaved saved(plan, saved_memory.block());
  auto matrices = bench.matrices(bench.weights);
  matrices.up = TensorRef(bench.weights.data(), DType::f64, {});
  matrices.up.push_extent(1, 0);
  matrices.up.push_extent(Bench::inner, 1);
  matrices.up.push_extent(Bench::hidden, Bench::inner);
  bench.out = bench.rows;
  CHECK(text([&] {
          op.forward({}, bench.array(bench.rows), bench.offsets, matrices, saved, bench.array(bench.out));
        }).find("pleat[E01]: a matrix of weights.up is f64 [1, 5, 6]") == 0);
}

TEST_CASE("E01: gradients whose experts overlap; weights that are only read may be one for all experts") {
  constexpr std::int64_t size = Bench::inner * Bench::hidden;
  const auto plan = moe::plan(moe::ExpertShape{2, Bench::hidden, Bench::inner, 4, DType::f64});
  const HostBuffer scratch(plan.footprint().scratch), saved_memory(plan.footprint().saved);
  auto op = moe::bind(plan, HostExecutor{}, Memory<HostArena>{scratch.block()});
  moe::ExpertSaved saved(plan, saved_memory.block());
  std::vector<double> rows(4 * Bench::hidden, 1), out(rows.size()), one(size, 0.5), unit(4 * size);
  const std::vector<std::int64_t> offsets = {0, 2, 4};
  const auto array = [](std::vector<double>& values) { return TensorRef(values.data(), {4, Bench::hidden}); };
  const auto matrices = [](double* at, std::int64_t gate, std::int64_t up, std::int64_t down) {
    return moe::ExpertMatrices{moe::expert_matrix(at, 2, Bench::inner, Bench::hidden, gate),
                               moe::expert_matrix(at, 2, Bench::inner, Bench::hidden, up),
                               moe::expert_matrix(at, 2, Bench::hidden, Bench::inner, down)};
  };
  const auto weights = matrices(one.data(), 0, 0, 0);
  op.forward({}, array(rows), offsets, weights, saved, array(out));
  CHECK(out[0] == out[2 * Bench::hidden]);
  const auto backward = [&](const moe::ExpertMatrices& dweights) {
    op.backward({}, array(rows), array(rows), offsets, weights, saved, array(out), dweights, false);
  };
  const auto refuses = [&](const moe::ExpertMatrices& dweights, const char* text) {
    CHECK_THROWS_WITH_AS(backward(dweights), doctest::Contains(text), shape_error);
  };
  double* const at = unit.data() + 2 * size;
  for (const std::int64_t stride : {std::int64_t{0}, size - 1, -size + 1, -size}) {
    const std::string rest =
        message_of(" are ", stride, " elements apart; an output's matrices must not overlap").c_str();
    refuses(matrices(at, stride, size, size), ("pleat[E01]: the experts of dweights.gate" + rest).c_str());
    refuses(matrices(at, size, stride, size), ("pleat[E01]: the experts of dweights.up" + rest).c_str());
    refuses(matrices(at, size, size, stride), ("pleat[E01]: the experts of dweights.down" + rest).c_str());
  }
  CHECK(unit == std::vector<double>(unit.size()));
  backward(matrices(at, size, size, size));
  CHECK(at[size] != 0);
}

TEST_CASE("T07: which of the matrices does not fit") {
  const auto plan = moe::plan(moe::ExpertShape{2, 4, 3, 4, DType::f32});
  const HostBuffer scratch(plan.footprint().scratch), saved_memory(plan.footprint().saved);
  auto op = moe::bind(plan, HostExecutor{}, Memory<HostArena>{scratch.block()});
  moe::ExpertSaved saved(plan, saved_memory.block());
  std::vector<float> rows(16), values(24);
  const std::vector<std::int64_t> offsets = {0, 2, 4};
  const TensorRef array(rows.data(), {4, 4});
  const auto wide = moe::expert_matrix(values.data(), 2, 3, 4, 12),
             tall = moe::expert_matrix(values.data(), 2, 4, 3, 12),
             wrong = moe::expert_matrix(values.data(), 2, 2, 4, 8);
  const moe::ExpertMatrices right{wide, wide, tall};
  op.forward({}, array, offsets, right, saved, array);
  const auto check = [&](const char* name, const char* wanted, const moe::ExpertMatrices& m) {
    const std::string rest = std::string(name) + " is f32 [2, 2, 4] on host; it must be f32 " + wanted + " on host";
    CHECK_THROWS_WITH_AS(op.forward({}, array, offsets, m, saved, array), ("pleat[T07]: weights." + rest).c_str(),
                         shape_error);
    CHECK_THROWS_WITH_AS(op.backward({}, array, array, offsets, right, saved, array, m, false),
                         ("pleat[T07]: dweights." + rest).c_str(), shape_error);
  };
  check("gate", "[2, 3, 4]", {wrong, wide, tall});
  check("up", "[2, 3, 4]", {wide, wrong, tall});
  check("down", "[2, 4, 3]", {wide, wide, wrong});
}

}  // namespace
