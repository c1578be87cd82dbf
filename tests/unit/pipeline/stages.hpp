// A model of layers y = tanh(x w) for tests of pipelines: on one rank, and as the stages of a rank.
#pragma once

#include <doctest/doctest.h>
#include <cmath>
#include <functional>
#include <map>
#include <random>
#include <vector>

#include <pleat/comm/run_ranks.hpp>
#include <pleat/comm/thread_arena.hpp>
#include <pleat/core/host/buffer.hpp>
#include <pleat/pipeline.hpp>

#include "support/deferred_device.hpp"

namespace pipeline_testing {

using namespace pleat::pipeline;
using pleat::DType;
using testing_support::DeferredStream;

inline constexpr int hidden = 5;

/// A step of layers y = tanh(x w), one per stage, with the loss sum of c * y of the last.
struct Problem {
  std::vector<std::vector<double>> weights;  // [stages][hidden, hidden]
  std::vector<std::vector<double>> inputs;   // [micro_batches][rows, hidden]
  std::vector<std::vector<double>> targets;  // c, the same
  std::vector<std::int64_t> rows;

  Problem(int stages, std::vector<std::int64_t> rows_of, unsigned seed) : rows(std::move(rows_of)) {
    std::mt19937 random(seed);
    std::uniform_real_distribution<double> any(-1, 1);
    const auto draw = [&](std::int64_t n) {
      std::vector<double> values(static_cast<std::size_t>(n));
      for (double& v : values) v = any(random);
      return values;
    };
    for (int s = 0; s < stages; ++s) weights.push_back(draw(hidden * hidden));
    for (const std::int64_t n : rows) {
      inputs.push_back(draw(n * hidden));
      targets.push_back(draw(n * hidden));
    }
  }
};

struct Result {
  double loss = 0;
  std::map<int, std::vector<double>> gradients;  // by stage
};

// y = tanh(x w), x [rows, hidden]
inline void layer_forward(std::int64_t rows, const double* x, const double* w, double* y) {
  for (std::int64_t r = 0; r < rows; ++r) {
    for (int j = 0; j < hidden; ++j) {
      double sum = 0;
      for (int i = 0; i < hidden; ++i) sum += x[r * hidden + i] * w[i * hidden + j];
      y[r * hidden + j] = std::tanh(sum);
    }
  }
}
// dz = dy (1 - y^2)
inline std::vector<double> through_tanh(std::int64_t rows, const double* dy, const double* y) {
  std::vector<double> dz(static_cast<std::size_t>(rows * hidden));
  for (std::size_t i = 0; i < dz.size(); ++i) dz[i] = dy[i] * (1 - y[i] * y[i]);
  return dz;
}
inline void layer_input_gradient(std::int64_t rows, const std::vector<double>& dz, const double* w, double* dx) {
  for (std::int64_t r = 0; r < rows; ++r) {
    for (int i = 0; i < hidden; ++i) {
      double sum = 0;
      for (int j = 0; j < hidden; ++j) sum += dz[static_cast<std::size_t>(r * hidden + j)] * w[i * hidden + j];
      dx[r * hidden + i] = sum;
    }
  }
}
inline void layer_weight_gradient(std::int64_t rows, const double* x, const std::vector<double>& dz, double* dw) {
  for (std::int64_t r = 0; r < rows; ++r) {
    for (int i = 0; i < hidden; ++i) {
      for (int j = 0; j < hidden; ++j) {
        dw[i * hidden + j] += x[r * hidden + i] * dz[static_cast<std::size_t>(r * hidden + j)];
      }
    }
  }
}

inline Result on_one_rank(const Problem& p) {
  Result result;
  const std::size_t stages = p.weights.size();
  for (std::size_t s = 0; s < stages; ++s) result.gradients[static_cast<int>(s)].resize(hidden * hidden);
  for (std::size_t m = 0; m < p.rows.size(); ++m) {
    std::vector<std::vector<double>> x{p.inputs[m]};
    for (std::size_t s = 0; s < stages; ++s) {
      x.emplace_back(x.back().size());
      layer_forward(p.rows[m], x[s].data(), p.weights[s].data(), x[s + 1].data());
    }
    for (std::size_t i = 0; i < x.back().size(); ++i) result.loss += p.targets[m][i] * x.back()[i];
    std::vector<double> dy = p.targets[m];
    for (std::size_t s = stages; s-- > 0;) {
      const std::vector<double> dz = through_tanh(p.rows[m], dy.data(), x[s + 1].data());
      layer_weight_gradient(p.rows[m], x[s].data(), dz, result.gradients[static_cast<int>(s)].data());
      layer_input_gradient(p.rows[m], dz, p.weights[s].data(), dy.data());
    }
  }
  return result;
}

/// Work of the model: at once on the host, when the stream gets there on the deferred device.
inline void enqueue(pleat::HostStream, const std::function<void()>& work) {
  work();
}
inline void enqueue(DeferredStream s, std::function<void()> work) {
  s.run(std::move(work));
}

/// The stages of one rank. Keeps its own outputs; refers to inputs and output gradients, as it may.
class Stages {
 public:
  Stages(const Problem& p, int stages) : p_(p), last_(stages - 1) {}

  template <class Stream>
  void forward(Stream s, const ForwardCall& f) {
    const auto m = static_cast<std::size_t>(f.micro_batch);
    REQUIRE((f.stage == 0) == (f.input.data() == nullptr));
    REQUIRE((f.stage == last_) == (f.output.data() == nullptr));
    REQUIRE(f.output.extent(0) == (f.stage == last_ ? 0 : p_.rows[m]));
    enqueue(s, [=, this] {
      const double* x = f.stage == 0 ? p_.inputs[m].data() : f.input.template as<double>();
      std::vector<double>& y = outputs_[{f.stage, f.micro_batch}];
      y.resize(static_cast<std::size_t>(p_.rows[m] * hidden));
      layer_forward(p_.rows[m], x, p_.weights[static_cast<std::size_t>(f.stage)].data(), y.data());
      if (f.stage != last_) {
        std::copy(y.begin(), y.end(), f.output.template as<double>());
      } else {
        for (std::size_t i = 0; i < y.size(); ++i) result.loss += p_.targets[m][i] * y[i];
      }
    });
  }
  template <class Stream>
  void backward(Stream s, const BackwardCall& b) {
    input_backward(s, b);
    weight_backward(s, b);
  }
  template <class Stream>
  void input_backward(Stream s, const BackwardCall& b) {
    REQUIRE((b.stage == 0) == (b.input_gradient.data() == nullptr));
    if (b.stage == 0) return;
    enqueue(s, [=, this] {
      layer_input_gradient(rows(b), dz(b), p_.weights[static_cast<std::size_t>(b.stage)].data(),
                           b.input_gradient.template as<double>());
    });
  }
  template <class Stream>
  void weight_backward(Stream s, const BackwardCall& b) {
    enqueue(s, [=, this] {
      std::vector<double>& dw = result.gradients[b.stage];
      dw.resize(hidden * hidden);
      const double* x =
          b.stage == 0 ? p_.inputs[static_cast<std::size_t>(b.micro_batch)].data() : b.input.template as<double>();
      layer_weight_gradient(rows(b), x, dz(b), dw.data());
    });
  }

  Result result;

 private:
  std::int64_t rows(const BackwardCall& b) const { return p_.rows[static_cast<std::size_t>(b.micro_batch)]; }
  std::vector<double> dz(const BackwardCall& b) const {
    const double* dy = b.stage == last_ ? p_.targets[static_cast<std::size_t>(b.micro_batch)].data()
                                        : b.output_gradient.template as<double>();
    return through_tanh(rows(b), dy, outputs_.at({b.stage, b.micro_batch}).data());
  }

  const Problem& p_;
  int last_;
  std::map<std::pair<int, int>, std::vector<double>> outputs_;
};

/// The same with a hook for pairs.
struct PairedStages : Stages {
  using Stages::Stages;
  template <class Stream>
  void overlapped(Stream s, const ForwardCall& f, const BackwardCall& b) {
    ++pairs;
    input_backward(s, b);  // in an order of its own
    forward(s, f);
    weight_backward(s, b);
  }
  int pairs = 0;
};

inline void check_same(const Result& got, const Result& want) {
  CHECK(std::abs(got.loss - want.loss) <= 1e-9 * (1 + std::abs(want.loss)));
  REQUIRE(got.gradients.size() == want.gradients.size());
  for (const auto& gradient : want.gradients) {
    const int stage = gradient.first;
    const std::vector<double>& expected = gradient.second;
    double difference = 0, size = 0;
    for (std::size_t i = 0; i < expected.size(); ++i) {
      difference += std::pow(got.gradients.at(stage)[i] - expected[i], 2);
      size += expected[i] * expected[i];
    }
    CAPTURE(stage);
    CHECK(std::sqrt(difference) <= 1e-9 * std::sqrt(size));
  }
}
inline void merge(Result& all, const Result& one) {
  all.loss += one.loss;
  for (const auto& [stage, gradient] : one.gradients) CHECK(all.gradients.emplace(stage, gradient).second);
}

inline std::vector<std::int64_t> ragged(int micro_batches, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::int64_t> rows;
  for (int m = 0; m < micro_batches; ++m) rows.push_back(static_cast<std::int64_t>(1 + random() % 60));
  rows[1] = 0;
  return rows;
}

inline pleat::Memory<pleat::HostArena> scratch_of(const pleat::HostBuffer& buffer) {
  return {.scratch = buffer.block()};
}

/// A step planned for `p`, and one of `again` by the same operation. Both results, of all ranks together.
template <class Model>
std::vector<Result> run_on_ranks(const Schedule& schedule, const Problem& p, const Problem* again = nullptr) {
  std::vector<std::vector<Result>> results(schedule.programs.size());
  pleat::run_ranks(schedule.placement.ranks, [&](pleat::ThreadComm& world) {
    const Plan planned = plan(schedule, {hidden, DType::f64, p.rows});
    const pleat::HostBuffer scratch(planned.footprint().scratch, 0xff);
    auto op = bind(planned, pleat::HostExecutor(), pleat::GroupComm(world), scratch_of(scratch));
    Model model(p, schedule.placement.stages());
    op.run({}, model);
    op.check();
    auto& mine = results[static_cast<std::size_t>(world.rank())];
    mine.push_back(model.result);
    if (again != nullptr) {
      Model second(*again, schedule.placement.stages());
      op.run({}, again->rows, second);
      mine.push_back(second.result);
    }
  });
  std::vector<Result> all(results[0].size());
  for (const auto& rank : results) {
    for (std::size_t i = 0; i < all.size(); ++i) merge(all[i], rank[i]);
  }
  return all;
}

}  // namespace pipeline_testing
