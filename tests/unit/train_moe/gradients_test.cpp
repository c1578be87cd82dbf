// The model's own gradients against finite differences of its loss.
#include <array>
#include <cmath>
#include <map>
#include <optional>
#include <random>

#include <doctest/doctest.h>

#include "small_run.hpp"
#include "validate/unfolded_mesh.hpp"

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
  const StepReport report = trainer.compute_gradients();
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
    const bool is_norm = trainer.parameters()
                             .units()[static_cast<std::size_t>(unit)]
                             .params[static_cast<std::size_t>(param)]
                             .shape.size() == 1;
    for (double& x : v) x = 0.3 * normal(random) + (is_norm ? 1 : 0);
    trainer.parameters().load(unit, param, v.data());
  });
  const StepReport report = trainer.compute_gradients();
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
TEST_CASE(
    "of latent attention, a dense layer and shared experts too, over packed documents and two chunks of a schedule") {
  check_gradients({"--balance",      "micro",    "--lora",        "6",  "--nope-dim", "4", "--rope-dim",    "2",
                   "--value-dim",    "3",        "--heads",       "2",  "--kv-heads", "2", "--shared",      "1",
                   "--dense-layers", "1",        "--dense-inner", "10", "--batch",    "2", "--micro-batch", "1",
                   "--packed",       "--ragged", "--schedule",    "zbv"});
}
TEST_CASE("with the load-balance loss of each scope, over accumulated micro-batches") {
  for (const char* scope : {"micro", "global", "sequence"}) {
    CAPTURE(scope);
    check_gradients({"--balance", scope, "--batch", "4", "--micro-batch", "2"});
  }
}

namespace {

/// Trains a step or two of a small model over a mesh, and compares with one rank on all of its tokens.
void check_against_one_rank(std::vector<const char*> arguments, bool unfolded = false) {
  const TextFile text(64 * 64);
  arguments.insert(arguments.end(), {"--text", text.name().c_str(), "--layers", "4", "--hidden", "16", "--experts", "4",
                                     "--inner", "8", "--steps", "2", "--micro-batch", "1"});
  const Options o = options_of(arguments);
  const Text bytes(o.text, o.sequence, o.batch);
  RoutingRecord record(o, o.micro_batches());
  Book parameters, gradients;
  Differences found;
  pleat::run_ranks(o.mesh.world_size, [&](pleat::ThreadComm& world) {
    std::optional<pleat::MeshComms<pleat::RuntimeMesh, pleat::ThreadComm>> folded_comms;
    std::optional<validate::UnfoldedComms<pleat::ThreadComm>> unfolded_comms;
    if (unfolded) {
      unfolded_comms.emplace(validate::UnfoldedMesh::like(o.mesh), world);
    } else {
      folded_comms.emplace(o.mesh, world);
    }
    OneRank trainer(unfolded ? unfolded_comms->groups() : groups_of(*folded_comms), o, bytes, &record);
    std::optional<Reference> reference;
    if (world.rank() == 0) reference.emplace(o, bytes, record);
    for (int step = 0; step < o.steps; ++step) {
      const StepReport report = trainer.compute_gradients();
      write_parameters(trainer, parameters);
      write_gradients(trainer, gradients);
      trainer.update();
      world.barrier();
      if (reference) reference->compare_step(step, parameters, gradients, report);
      world.barrier();
    }
    if (reference) found = reference->differences();
  });
  CAPTURE(found.worst_gradient);
  CHECK(found.loss < 1e-9);
  CHECK(found.gradients < 1e-9);
  CHECK(found.norm < 1e-9);
}

}  // namespace

TEST_CASE("loss, every gradient and the norm of a pipeline over a folded mesh are those of one rank") {
  struct Data {
    bool packed, ragged;
  };
  int turn = 0;
  for (const char* mesh : {"pp2-dp2-cp1-ep2", "pp2-dp1-cp2-ep2", "pp2-dp1-cp4-ep2"}) {
    for (const Data data : {Data{false, false}, Data{true, false}, Data{false, true}, Data{true, true}}) {
      const char* const schedule = std::array{"zbv", "dualpipev", "1f1b"}[static_cast<std::size_t>(turn++ % 3)];
      CAPTURE(mesh);
      CAPTURE(schedule);
      CAPTURE(data.packed);
      CAPTURE(data.ragged);
      std::vector<const char*> arguments = {"--mesh", mesh, "--schedule", schedule, "--seq", "32", "--batch", "8"};
      if (data.packed) arguments.push_back("--packed");
      if (data.ragged) arguments.push_back("--ragged");
      if (turn % 2 == 0) {
        arguments.insert(arguments.end(), {"--lora", "6", "--nope-dim", "4", "--rope-dim", "2", "--value-dim", "3",
                                           "--heads", "2", "--kv-heads", "2", "--shared", "1", "--dense-layers", "1"});
      }
      check_against_one_rank(arguments);
    }
  }
}

TEST_CASE("so are those of the mesh before folding") {
  const validate::UnfoldedMesh mesh =
      validate::UnfoldedMesh::like(pleat::RuntimeMesh({.pp = 2, .dp = 4, .cp = 2, .ep = 2}));
  CHECK(mesh.dp == 2);
  CHECK(mesh.data_ranks() == 4);
  check_against_one_rank({"--mesh", "pp2-dp4-cp2-ep2", "--seq", "16", "--batch", "8"}, true);
  CHECK_THROWS_WITH_AS(validate::UnfoldedMesh::like(pleat::RuntimeMesh({.pp = 1, .dp = 2, .cp = 4, .ep = 8})),
                       doctest::Contains("pp=1 cp=4 ep=8 on 8 ranks"), usage_error);
}

TEST_CASE("both optimizers have the bits of one rank, given the same gradients") {
  for (const char* mesh : {"pp1-dp2-cp1-ep1", "pp1-dp2-cp1-ep2", "pp1-dp2-cp2-ep2", "pp2-dp2-cp1-ep2"}) {
    CAPTURE(mesh);
    const TextFile text(64 * 64);
    Options o = options_of({"--text",        text.name().c_str(),
                            "--mesh",        mesh,
                            "--seq",         "16",
                            "--layers",      "4",
                            "--hidden",      "16",
                            "--experts",     "4",
                            "--optimizer",   "muon",
                            "--clip",        "0",
                            "--warmup",      "0",
                            "--batch",       "4",
                            "--micro-batch", "1"});
    const Text bytes(o.text, o.sequence, o.batch);
    Book before, gradients, after;
    pleat::run_ranks(o.mesh.world_size, [&](pleat::ThreadComm& world) {
      const pleat::MeshComms comms(o.mesh, world);
      OneRank trainer(groups_of(comms), o, bytes, nullptr);
      write_parameters(trainer, before);
      trainer.compute_gradients();
      write_gradients(trainer, gradients);
      trainer.update();
      write_parameters(trainer, after);
    });
    o.micro_batch *= o.mesh.dp;
    o.mesh = {};
    o.schedule.reset();
    pleat::ThreadComm self = pleat::single_rank();
    const pleat::MeshComms comms(pleat::FoldedMesh<1, 1, 1, 1>{}, self);
    OneRank one(groups_of(comms), o, bytes, nullptr);
    one.compute_gradients();
    for_each_parameter(one.parameters(), [&](int unit, int param, std::int64_t first, std::int64_t,
                                             const std::string& name) {
      // One rank's shard is the whole unit.
      const auto& layout = one.parameters().plan().layouts[static_cast<std::size_t>(unit)];
      const auto& place = layout.place(param);
      const std::vector<double>& page = gradients.at(name);
      auto* const gradient = static_cast<double*>(one.parameters().shards()[static_cast<std::size_t>(unit)].gradient);
      std::copy(page.begin(), page.end(), gradient + place.offset + first / place.elems * layout.expert_stride);
    });
    Book one_before, one_after;
    write_parameters(one, one_before);
    CHECK(one_before.pages() == before.pages());
    one.update();
    write_parameters(one, one_after);
    CHECK(one_after.pages() == after.pages());
    CHECK(one_after.pages() != before.pages());
  }
}
