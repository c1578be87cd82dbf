// The model's own gradients against finite differences of its loss.
#include <cmath>
#include <map>
#include <random>

#include <doctest/doctest.h>

#include "small_run.hpp"

using namespace train_moe;

namespace {

using OneRank = Trainer<HostBackend, double>;

/// Parameters of a trainer by (unit, param).
using Values = std::map<std::pair<int, int>, std::vector<double>>;

template <class F>
void for_each(OneRank& trainer, F f) {
  for (int unit = 0; unit < static_cast<int>(trainer.parameters().units().size()); ++unit) {
    const auto params = static_cast<int>(trainer.parameters().units()[static_cast<std::size_t>(unit)].params.size());
    for (int param = 0; param < params; ++param) f(unit, param);
  }
}

/// The loss that the step's gradient is the gradient of, at `values` + step * `direction`.
double loss_at(OneRank& trainer, const Values& values, const Values& direction, double step) {
  for_each(trainer, [&](int unit, int param) {
    std::vector<double> moved = values.at({unit, param});
    const std::vector<double>& along = direction.at({unit, param});
    for (std::size_t i = 0; i < moved.size(); ++i) moved[i] += step * along[i];
    trainer.parameters().load(unit, param, moved.data());
  });
  const StepReport report = trainer.compute_gradients(0);
  return report.loss + report.balance;
}

void check_gradients(const std::vector<const char*>& arguments) {
  const TextFile text(600);
  std::vector<const char*> all = {
      "--text", text.name().c_str(), "--seq", "12", "--layers", "2", "--hidden", "16", "--experts",
      "4",      "--balance-alpha",   "0.5"};
  all.insert(all.end(), arguments.begin(), arguments.end());
  const Options o = options_of(all);
  const Text bytes(o.text, o.sequence, o.batch);
  pleat::ThreadComm self = pleat::single_rank();
  const pleat::MeshComms comms(pleat::FoldedMesh<1, 1, 1, 1>{}, self);
  OneRank trainer(groups_of(comms), o, bytes, nullptr);

  std::mt19937_64 random(11);
  std::normal_distribution<double> normal;
  Values values, gradient;
  for_each(trainer, [&](int unit, int param) {
    auto& v = values[{unit, param}];
    v.resize(static_cast<std::size_t>(trainer.parameters().elems(unit, param)));
    for (double& x : v) x = 0.3 * normal(random) + (v.size() <= 16 ? 1 : 0);
    trainer.parameters().load(unit, param, v.data());
  });
  const StepReport report = trainer.compute_gradients(0);
  double squares = 0;
  for_each(trainer, [&](int unit, int param) {
    auto& g = gradient[{unit, param}];
    g.resize(values.at({unit, param}).size());
    trainer.parameters().export_gradient(unit, param, g.data());
    for (double& x : g) {
      x /= static_cast<double>(report.tokens);
      squares += x * x;
    }
  });
  CHECK(report.norm == doctest::Approx(std::sqrt(squares)).epsilon(1e-12));

  // One direction per parameter, so that no parameter hides behind another.
  for_each(trainer, [&](int unit, int param) {
    Values direction;
    for_each(trainer, [&](int u, int p) { direction[{u, p}].resize(values.at({u, p}).size()); });
    double slope = 0, length = 0;
    auto& d = direction.at({unit, param});
    for (std::size_t i = 0; i < d.size(); ++i) {
      d[i] = normal(random);
      slope += d[i] * gradient.at({unit, param})[i];
      length += d[i] * d[i];
    }
    const double h = 1e-5 / std::sqrt(length / static_cast<double>(d.size()));
    const double measured =
        (loss_at(trainer, values, direction, h) - loss_at(trainer, values, direction, -h)) / (2 * h);
    CAPTURE(parameter_name(trainer.parameters().units()[static_cast<std::size_t>(unit)], param));
    CHECK(std::abs(measured - slope) <= 1e-6 * std::abs(slope) + 1e-8);
  });
}

}  // namespace

TEST_CASE("the gradient of every parameter is the slope of the loss") {
  check_gradients({"--balance", "none"});
}
TEST_CASE("with the load-balance loss of each scope, over accumulated micro-batches") {
  for (const char* scope : {"micro", "global", "sequence"}) {
    CAPTURE(scope);
    check_gradients({"--balance", scope, "--batch", "4", "--micro-batch", "2"});
  }
}
