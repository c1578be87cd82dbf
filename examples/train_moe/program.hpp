// The program on any backend: what all ranks of a run share, what one rank does, and what is printed and logged.
#pragma once

#include <chrono>
#include <cstdio>
#include <functional>
#include <iostream>
#include <optional>
#include <string>

#include <pleat/mesh/text.hpp>

#include "check.hpp"
#include "checkpoints.hpp"
#include "run.hpp"
#include "trainer.hpp"

namespace train_moe {

/// What one rank does.
template <class Backend, class T>
void train(const Groups<typename Backend::Comm>& groups, Run& run) {
  const Options& o = run.options;
  const int rank = groups.world.rank();
  Trainer<Backend, T> trainer(groups, o, run.text, o.check || o.log_routing ? &run.record : nullptr);
  Checkpoints<Backend, T> checkpoints(trainer, o, run.name);
  if (!o.load.empty()) checkpoints.load();
  std::optional<Reference> reference;
  if (o.check && rank == 0) reference.emplace(o, run.text, run.record);

  while (trainer.progress().step < o.steps) {
    const auto start = std::chrono::steady_clock::now();
    const auto step = trainer.progress().step;
    if (rank == o.fail_rank && step + 1 == o.fail_step) {
      throw std::runtime_error("told to fail in step " + std::to_string(step + 1));
    }
    const StepReport report = trainer.compute_gradients();
    if (o.check) {
      write_parameters(trainer, run.parameters);
      write_gradients(trainer, run.gradients);
    }
    checkpoints.before_update();
    trainer.update();
    groups.world.barrier(trainer.stream());
    groups.world.wait(trainer.stream());
    checkpoints.after_update();
    if (o.every > 0 && (step + 1) % o.every == 0) checkpoints.save();
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    if (rank == 0) run.show_step(step + 1, report, trainer.times().read(), seconds.count(), trainer.peak_bytes());
    if (reference) reference->compare_step(static_cast<int>(step), run.parameters, run.gradients, report);
    if (o.check) {  // the next step writes the books anew
      groups.world.barrier(trainer.stream());
      groups.world.wait(trainer.stream());
    }
  }
  if (!o.times.empty()) {
    const auto spans = trainer.pipeline_spans();
    if (rank == 0) run.write_times(spans);
  }
  if (!o.save.empty() && checkpoints.saved_step() != trainer.progress().step) checkpoints.save();
  checkpoints.finish();
  if (reference) {
    run.differences = reference->differences();
    run.ties = reference->ties();
  }
}

/// Calls `f` with the static type of the mesh where it is one of `Meshes`, else with the mesh itself.
template <class... Meshes, class F>
void with_compiled_mesh(const pleat::RuntimeMesh& mesh, bool only_runtime, F f) {
  const bool found = !only_runtime && ((pleat::same_mesh(Meshes{}, mesh) && (f(Meshes{}), true)) || ...);
  if (!found) f(mesh);
}

/// Runs all ranks, each with `train_rank(groups, run)`. `Meshes` are compiled in; others are taken as they come.
template <class Backend, class... Meshes, class TrainRank>
void run_all_ranks(Run& run, TrainRank train_rank) {
  // While rank 0 repeats a step as the reference, the others wait for it.
  const auto deadline = run.options.check ? std::chrono::minutes(30) : std::chrono::minutes(2);
  Backend::run_ranks(run.options.mesh.world_size, deadline, [&](typename Backend::Comm& world) {
    with_compiled_mesh<Meshes...>(run.options.mesh, run.options.runtime_mesh, [&](const auto& mesh) {
      const pleat::MeshComms comms(mesh, world);
      train_rank(groups_of(comms), run);
    });
  });
}
template <class Backend, class T>
void run_mesh(Run& run) {
  run_all_ranks<Backend>(run, train<Backend, T>);
}

/// Prints what `--check` found; the program's exit code.
inline int show_check(const Run& run) {
  const pleat::DType dtype = run.options.dtype;
  if (dtype != pleat::DType::f64) std::printf("router ties within 1e-5: %lld\n", static_cast<long long>(run.ties));
  const Differences& d = run.differences;
  const bool passes = d.within(tolerance(dtype));
  if (!passes) std::printf("largest gradient difference in %s\n", d.worst_gradient.c_str());
  std::printf("every step was repeated on one rank in float64; largest relative differences, tolerance %.0e: %s\n",
              tolerance(dtype), passes ? "passed" : "FAILED");
  std::printf("check: loss %.2e grads %.2e norm %.2e\n", d.loss, d.gradients, d.norm);
  return passes ? 0 : 1;
}

/// The program: `run_dtype(run)` calls run_mesh with the type of the run's dtype, or throws usage_error.
inline int run_program(int argc, char** argv, const std::function<void(Run&)>& run_dtype) {
  try {
    bool help = false;
    const Options options = parse_options(argc, argv, help);
    int code = 0;
    if (help) {
      std::cout << help_text();
    } else {
      Run run(options);
      if (!options.quiet) {
        std::cout << pleat::draw_text(options.mesh) << "\n";
        std::cout << work_text(options) << "; text " << options.text << "\n" << std::endl;
      }
      run_dtype(run);
      if (options.check) code = show_check(run);
    }
    if (!std::cout.flush() || std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
      throw std::runtime_error("the standard output could not be written: is its disk full?");
    }
    return code;
  } catch (const usage_error& e) {
    std::cerr << "train_moe: " << e.what() << "\n";
    return 2;
  } catch (const pleat::mesh_error& e) {
    std::cerr << "train_moe: " << e.what() << "\n";
    return 2;
  } catch (const std::bad_alloc&) {
    std::cerr << "train_moe: there is not enough memory; choose smaller sizes of the model or of the batch\n";
    return 1;
  } catch (const std::exception& e) {
    std::cerr << "train_moe: " << e.what() << "\n";
    return 1;
  }
}

}  // namespace train_moe
