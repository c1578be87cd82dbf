// train_moe: trains a small Mixture-of-Experts transformer over a folded mesh, and proves it against one rank.
#include <chrono>
#include <cstdio>
#include <fstream>
#include <iostream>

#include <pleat/mesh/text.hpp>

#include "check.hpp"
#include "host/backend.hpp"
#include "trainer.hpp"

extern const char train_moe_commit[];

namespace train_moe {
namespace {

/// What all ranks of a run share. Rank 0 alone prints and logs.
struct Run {
  Options options;
  Text text;
  std::ofstream json;
  RoutingRecord record;
  Book parameters, gradients;
  Differences differences;
  std::int64_t ties = 0;

  explicit Run(const Options& o) : options(o), text(o.text, o.sequence, o.batch), record(o, o.micro_batches()) {
    if (!o.json.empty()) {
      json.open(o.json);
      if (!json) throw usage_error("--json " + o.json + " cannot be written; name a file in a folder that exists");
    }
  }
};

void show_step(Run& run, int step, const StepReport& report, double seconds) {
  const double speed = static_cast<double>(report.tokens) / seconds;
  if (!run.options.quiet) {
    std::printf("step %3d/%d  loss %.6f  balance %.6f  norm %.6f  lr %.2e  %8.0f tokens/s\n", step + 1,
                run.options.steps, report.loss, report.balance, report.norm, report.learning_rate, speed);
    std::fflush(stdout);
  }
  if (run.json.is_open()) {
    char line[512];
    std::snprintf(line, sizeof(line),
                  "{\"step\": %d, \"loss\": %.17g, \"balance\": %.17g, \"norm\": %.17g, \"lr\": %.17g, "
                  "\"tokens\": %lld, \"tokens_per_second\": %.1f, \"commit\": \"%s\"}\n",
                  step + 1, report.loss, report.balance, report.norm, report.learning_rate,
                  static_cast<long long>(report.tokens), speed, train_moe_commit);
    run.json << line << std::flush;
    if (!run.json) throw std::runtime_error("--json " + run.options.json + " could not be written: is its disk full?");
  }
}

/// What one rank does.
template <class T, pleat::folded_mesh Mesh>
void train(const Mesh& mesh, pleat::ThreadComm& world, Run& run) {
  const Options& o = run.options;
  const pleat::MeshComms comms(mesh, world);
  Trainer<HostBackend, T> trainer(groups_of(comms), o, run.text, &run.record);
  std::optional<Reference> reference;
  if (o.check && world.rank() == 0) reference.emplace(o, run.text, run.record);

  for (int step = 0; step < o.steps; ++step) {
    const auto start = std::chrono::steady_clock::now();
    if (world.rank() == o.fail_rank && step + 1 == o.fail_step) {
      throw std::runtime_error("told to fail in step " + std::to_string(step + 1));
    }
    const StepReport report = trainer.compute_gradients(step);
    if (o.check) {
      write_parameters(trainer, run.parameters);
      write_gradients(trainer, run.gradients);
    }
    trainer.update(step);
    world.barrier();
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    if (world.rank() == 0) show_step(run, step, report, seconds.count());
    if (reference) reference->compare_step(step, run.parameters, run.gradients, report);
    if (o.check) world.barrier();  // the next step writes the books anew
  }
  if (reference) {
    run.differences = reference->differences();
    run.ties = reference->ties();
  }
}

/// Calls `f` with the static type of the mesh where it is compiled in, else with the mesh itself.
template <class... Meshes, class F>
void with_compiled_mesh(const pleat::RuntimeMesh& mesh, bool only_runtime, F f) {
  const bool found = !only_runtime && ((pleat::same_mesh(Meshes{}, mesh) && (f(Meshes{}), true)) || ...);
  if (!found) f(mesh);
}

template <class T>
void run_mesh(Run& run) {
  // While rank 0 repeats a step as the reference, the others wait for it.
  const auto deadline = run.options.check ? std::chrono::minutes(30) : std::chrono::minutes(2);
  pleat::run_ranks(run.options.mesh.world_size,
                   [&](pleat::ThreadComm& world) {
                     with_compiled_mesh<pleat::FoldedMesh<1, 8, 4, 8>
#if !defined(PLEAT_TRAIN_MOE_DEMO)
                                        ,
                                        pleat::FoldedMesh<1, 1, 1, 1>, pleat::FoldedMesh<1, 2, 4, 2>,
                                        pleat::FoldedMesh<1, 4, 2, 8>, pleat::FoldedMesh<1, 4, 4, 4, 2>
#endif
                                        >(run.options.mesh, run.options.runtime_mesh,
                                          [&](const auto& mesh) { train<T>(mesh, world, run); });
                   },
                   {.deadline = deadline});
}

void run_dtype(Run& run) {
  if (run.options.dtype == pleat::DType::f64) return run_mesh<double>(run);
#if !defined(PLEAT_TRAIN_MOE_DEMO)
  if (run.options.dtype == pleat::DType::f32) return run_mesh<float>(run);
#endif
  throw usage_error("this build of train_moe has --dtype f64 alone");
}

int train_and_check(const Options& o) {
  Run run(o);
  if (!o.quiet) {
    std::cout << pleat::draw_text(o.mesh) << "\n";
    std::cout << work_text(o) << "; text " << o.text << "\n" << std::endl;
  }
  run_dtype(run);
  if (!o.check) return 0;
  if (o.dtype != pleat::DType::f64) std::printf("router ties within 1e-5: %lld\n", static_cast<long long>(run.ties));
  const Differences& d = run.differences;
  const bool passes = d.within(tolerance(o.dtype));
  if (!passes) std::printf("largest gradient difference in %s\n", d.worst_gradient.c_str());
  std::printf("every step was repeated on one rank in float64; largest relative differences, tolerance %.0e: %s\n",
              tolerance(o.dtype), passes ? "passed" : "FAILED");
  std::printf("check: loss %.2e grads %.2e norm %.2e\n", d.loss, d.gradients, d.norm);
  return passes ? 0 : 1;
}

}  // namespace
}  // namespace train_moe

int main(int argc, char** argv) {
  using namespace train_moe;
  try {
    bool help = false;
    const Options options = parse_options(argc, argv, help);
    if (help) std::cout << help_text();
    const int code = help ? 0 : train_and_check(options);
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
