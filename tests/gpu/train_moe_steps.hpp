// Steps of the trainer on batches of a text, as GPUs take them, and as one host rank in float64 does.
#pragma once

#include <chrono>
#include <deque>
#include <functional>
#include <stdexcept>
#include <vector>

#include <train_moe/check.hpp>

namespace train_moe_testing {

using train_moe::Book;
using train_moe::Options;
using train_moe::RoutingFollower;
using train_moe::RoutingRecord;
using train_moe::StepReport;

/// What a step on each of some batches leaves, and the parameters that an update then makes of the last.
struct Outcome {
  struct Step {
    StepReport report;
    Book gradients;
  };
  std::deque<Step> steps;
  Book parameters;
};

/// A watch for each batch of the text.
template <class Watch>
class BatchWatches final : public train_moe::RoutingWatch {
 public:
  /// `make(batch)` adds one to the list.
  template <class Make>
  BatchWatches(const Options& o, int batches, Make make) : batch_(o.batch) {
    for (int i = 0; i < batches; ++i) make(watches_, i);
  }

  Watch& operator[](int batch) { return watches_[static_cast<std::size_t>(batch)]; }
  bool decides() const override { return watches_.front().decides(); }
  const std::int32_t* decide(int layer, const train_moe::MicroBatch& batch, const pleat::TensorRef& logits) override {
    return of(batch).decide(layer, batch, logits);
  }
  void observe(int layer, const train_moe::MicroBatch& batch, const std::int32_t* ids) override {
    of(batch).observe(layer, batch, ids);
  }

 private:
  Watch& of(const train_moe::MicroBatch& batch) { return (*this)[static_cast<int>(batch.first / batch_)]; }

  std::int64_t batch_;
  std::deque<Watch> watches_;
};
using Records = BatchWatches<RoutingRecord>;

/// Each loads code when it is first used, which a step must not.
template <class TrainerType>
std::size_t chosen_algorithms(const TrainerType& trainer) {
  std::size_t count = 0;
  for (const auto& kernels : trainer.kernels()) {
    if constexpr (requires { kernels.chosen_algorithms(); }) count += kernels.chosen_algorithms();
  }
  return count;
}

/// All batches on one trainer, from its initial parameters.
template <class Backend, class T>
void run(const Options& o, train_moe::RoutingWatch& watch, const std::vector<int>& batches, Outcome& outcome) {
  const train_moe::Text text(o.text, o.sequence, o.batch);
  outcome.steps.resize(batches.size());
  Backend::run_ranks(o.mesh.world_size, std::chrono::seconds(30), [&](typename Backend::Comm& world) {
    const pleat::MeshComms comms(o.mesh, world);
    train_moe::Trainer<Backend, T> trainer(train_moe::groups_of(comms), o, text, &watch);
    const std::size_t rehearsed = chosen_algorithms(trainer);
    for (std::size_t i = 0; i < batches.size(); ++i) {
      trainer.resume({.position = static_cast<std::int64_t>(batches[i]) * o.batch});
      const StepReport report = trainer.compute_gradients();
      if (chosen_algorithms(trainer) != rehearsed) throw std::runtime_error("a product was not rehearsed");
      if (world.rank() == 0) outcome.steps[i].report = report;
      train_moe::write_gradients(trainer, outcome.steps[i].gradients);
    }
    trainer.update();
    train_moe::write_parameters(trainer, outcome.parameters);
  });
}

/// `run` of a kind of ranks and a dtype.
using RunSteps = void (*)(const Options& o, train_moe::RoutingWatch& watch, const std::vector<int>& batches,
                          Outcome& outcome);

/// Calls f(batch, step of one host rank in float64) for each batch of `records`, one call at a time; works on as many
/// threads as there are processors. The rank takes the experts of the records where scores differ by less than `tie`.
/// Returns how often.
std::int64_t run_references(Options o, Records& records, int batches, double tie,
                            const std::function<void(int, const Outcome::Step&)>& f);

}  // namespace train_moe_testing
