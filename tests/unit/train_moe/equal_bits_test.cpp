// What must not change a bit: the mesh's type, the transport, the prefetch; and what one must not change: where a run
// starts.
#include <filesystem>

#include <doctest/doctest.h>

#include "checkpoints.hpp"
#include "small_run.hpp"

using namespace train_moe;

namespace {

void check_equal(const RunResult& a, const RunResult& b) {
  REQUIRE(a.reports.size() == b.reports.size());
  for (std::size_t step = 0; step < a.reports.size(); ++step) {
    CHECK(a.reports[step].loss == b.reports[step].loss);
    CHECK(a.reports[step].balance == b.reports[step].balance);
    CHECK(a.reports[step].norm == b.reports[step].norm);
  }
  CHECK(a.parameters.pages() == b.parameters.pages());
}

template <class T>
void check_mesh() {
  const TextFile text(4000);
  Options o = options_of({"--text",        text.name().c_str(),
                          "--mesh",        "pp1-dp4-cp2-ep4-r2",
                          "--seq",         "16",
                          "--layers",      "2",
                          "--hidden",      "16",
                          "--experts",     "8",
                          "--batch",       "8",
                          "--micro-batch", "1",
                          "--steps",       "3",
                          "--lr",          "0.01"});
  RunResult base;
  run_steps<T>(o.mesh, o, base);
  CHECK(base.reports.size() == 3);
  CHECK(base.reports[0].loss != base.reports[2].loss);

  SUBCASE("a static mesh") {
    RunResult other;
    run_steps<T>(pleat::FoldedMesh<1, 4, 2, 4, 2>{}, o, other);
    check_equal(base, other);
  }
  SUBCASE("collectives") {
    RunResult other;
    o.transport = pleat::Transport::collective;
    run_steps<T>(o.mesh, o, other);
    check_equal(base, other);
  }
  SUBCASE("other prefetches") {
    for (const int prefetch : {0, 3}) {
      RunResult other;
      o.prefetch = prefetch;
      run_steps<T>(o.mesh, o, other);
      check_equal(base, other);
    }
  }
  SUBCASE("another seed is another run") {
    RunResult other;
    o.seed = 2;
    run_steps<T>(o.mesh, o, other);
    CHECK(base.reports[0].loss != other.reports[0].loss);
  }
}

}  // namespace

TEST_CASE("bits do not depend on the type of the mesh, the transport or the prefetch") {
  check_mesh<double>();
}
TEST_CASE("neither in float") {
  check_mesh<float>();
}

namespace {

/// A run of `o` that saves and loads as it says; leaves its parameters and reports.
void resumable_run(const Options& o, const std::string& name, RunResult& result) {
  const Text text(o.text, o.sequence, o.batch);
  pleat::run_ranks(o.mesh.world_size, [&](pleat::ThreadComm& world) {
    const pleat::MeshComms comms(o.mesh, world);
    Trainer<HostBackend, double> trainer(groups_of(comms), o, text, nullptr);
    Checkpoints<HostBackend, double> checkpoints(trainer, o, name);
    if (!o.load.empty()) checkpoints.load();
    while (trainer.progress().step < o.steps) {
      const StepReport report = trainer.compute_gradients();
      if (world.rank() == 0) result.reports.push_back(report);
      checkpoints.before_update();
      trainer.update();
      checkpoints.after_update();
      if (!o.save.empty() && trainer.progress().step % o.every == 0) checkpoints.save();
    }
    checkpoints.finish();
    write_parameters(trainer, result.parameters);
  });
}

}  // namespace

TEST_CASE("a run goes on from a checkpoint: on the same mesh with the same bits, on any other from the same bits") {
  const TextFile text(4000);
  const std::string folder = "train_moe_checkpoints";
  std::filesystem::remove_all(folder);
  const auto options = [&](const char* mesh, const char* micro_batch, const char* steps) {
    return options_of({"--text",        text.name().c_str(),
                       "--mesh",        mesh,
                       "--seq",         "16",
                       "--layers",      "4",
                       "--hidden",      "16",
                       "--experts",     "8",
                       "--batch",       "8",
                       "--micro-batch", micro_batch,
                       "--steps",       steps,
                       "--lr",          "0.01",
                       "--optimizer",   "muon",
                       "--packed"});
  };
  Options o = options("pp2-dp2-cp2-ep2", "2", "4");
  RunResult whole, half, rest;
  resumable_run(o, "whole", whole);
  o.save = folder;
  o.every = 2;
  o.steps = 2;
  resumable_run(o, "half", half);
  o.save.clear();
  o.load = folder;
  o.steps = 4;
  resumable_run(o, "rest", rest);
  REQUIRE(rest.reports.size() == 2);
  for (std::size_t i = 0; i < 2; ++i) CHECK(rest.reports[i].loss == whole.reports[i + 2].loss);
  CHECK(rest.parameters.pages() == whole.parameters.pages());

  for (const auto& [mesh, micro_batch] : {std::pair{"pp1-dp4-cp2-ep8", "1"}, {"pp1-dp1-cp1-ep1", "4"}}) {
    Options other = options(mesh, micro_batch, "2");
    CAPTURE(other.mesh.world_size);
    other.load = folder;
    RunResult loaded, next;
    resumable_run(other, "other", loaded);
    CHECK(loaded.parameters.pages() == half.parameters.pages());
    other.steps = 3;
    resumable_run(other, "other", next);
    REQUIRE(next.reports.size() == 1);
    CHECK(next.reports[0].loss == doctest::Approx(whole.reports[2].loss).epsilon(1e-12));
    CHECK(next.reports[0].norm == doctest::Approx(whole.reports[2].norm).epsilon(1e-9));
  }
  std::filesystem::remove_all(folder);
}
