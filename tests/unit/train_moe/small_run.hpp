// A small training run for tests: options, a text, and the state of every parameter after some steps.
#pragma once

#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

#include <pleat/mesh/text.hpp>

#include "check.hpp"
#include "host/backend.hpp"
#include "trainer.hpp"

/// A text file that goes with the test; bytes follow from the seed.
class TextFile {
 public:
  explicit TextFile(int bytes, unsigned seed = 7) : name_("train_moe_text_" + std::to_string(seed) + ".bin") {
    std::ofstream out(name_, std::ios::binary);
    for (int i = 0; i < bytes; ++i) out.put(static_cast<char>((seed = seed * 1664525u + 1013904223u) >> 24));
  }
  ~TextFile() { std::remove(name_.c_str()); }
  const std::string& name() const { return name_; }

 private:
  std::string name_;
};

/// Parses a command line as the program does.
inline train_moe::Options options_of(std::vector<const char*> arguments) {
  arguments.insert(arguments.begin(), "train_moe");
  bool help = false;
  return train_moe::parse_options(static_cast<int>(arguments.size()), arguments.data(), help);
}

/// What a run leaves: its reports, and its parameters by name.
struct RunResult {
  std::vector<train_moe::StepReport> reports;
  train_moe::Book parameters;
};

/// Trains `o.steps` steps of `o` with the mesh given by value, which may be static.
template <class T, pleat::folded_mesh Mesh>
void run_steps(const Mesh& mesh, const train_moe::Options& o, RunResult& result) {
  const train_moe::Text text(o.text, o.sequence, o.batch);
  pleat::run_ranks(mesh.world_size, [&](pleat::ThreadComm& world) {
    const pleat::MeshComms comms(mesh, world);
    train_moe::Trainer<train_moe::HostBackend, T> trainer(train_moe::groups_of(comms), o, text, nullptr);
    for (int step = 0; step < o.steps; ++step) {
      const train_moe::StepReport report = trainer.compute_gradients();
      if (world.rank() == 0) result.reports.push_back(report);
      trainer.update();
    }
    train_moe::write_parameters(trainer, result.parameters);
  });
}
