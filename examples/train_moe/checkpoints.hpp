// A trainer's checkpoints: what the model is on every mesh, saves beside the steps, and going on from one.
#pragma once

#include <future>
#include <map>
#include <string>
#include <utility>

#include <pleat/checkpoint.hpp>

#include "trainer.hpp"

namespace train_moe {

/// Of one rank. All ranks make it, save and load alike.
template <class Backend, class T>
class Checkpoints {
 public:
  /// `run`: see checkpoint::Saver. `trainer` must outlive it.
  Checkpoints(Trainer<Backend, T>& trainer, const Options& options, std::string run)
      : trainer_(&trainer), options_(options), model_(model_of(trainer, options)) {
    if (options.save.empty()) return;
    saver_.emplace(model_, mesh(), rank(), options.save, std::move(run));
    snapshot_ = typename Backend::PinnedBuffer(saver_->footprint().pinned_host);
  }
  ~Checkpoints() {
    if (write_.valid()) write_.wait();
  }

  /// Goes on from the newest checkpoint of `options.load`. Errors: usage_error when there is none, checkpoint_error.
  void load() {
    namespace ck = pleat::checkpoint;
    const auto step = ck::latest(options_.load);
    if (!step) throw usage_error("--load " + options_.load + ": there is no checkpoint");
    const ck::Catalog catalog = ck::open(ck::step_folder(options_.load, *step));
    const typename Backend::PinnedBuffer staging(std::size_t{1} << 22);
    ck::load(catalog, model_, mesh(), rank(), memory(), staging.block(), Executor{}, trainer_->stream());
    const auto value = [&](const char* name) { return catalog.values.at(name); };
    trainer_->resume({value("step"), value("position"), value("applied"), value("skipped")});
  }

  /// Saves the state between two steps: its copies run beside the next one. What a save keeps that step from is the
  /// part of them that it does not hide, and the save before where that is not written yet. Errors: of that save.
  void save() {
    finish();
    saving_ = trainer_->progress();
    saver_->snapshot(memory(), snapshot_.block(), Executor{}, trainer_->snapshots());
    Executor{}.record(copied_, trainer_->snapshots());
    is_copying_ = true;
  }
  /// Before the stream of the trainer changes masters and states: what is being saved has been copied.
  void before_update() {
    if (is_copying_) Executor{}.wait(trainer_->stream(), copied_);
  }
  /// After an update that was waited for: writes what was copied, beside the steps that follow.
  void after_update() {
    if (!is_copying_) return;
    is_copying_ = false;
    write_ = std::async(std::launch::async, [this, progress = saving_] {
      saver_->write(progress.step, snapshot_.block());
      if (rank() != 0) return;
      // nvcc takes a list of pairs only with a name.
      const std::map<std::string, std::int64_t> values{
          {"position", progress.position}, {"applied", progress.applied}, {"skipped", progress.skipped}};
      saver_->commit(progress.step, values);
    });
  }
  /// Of the last save; -1 before the first.
  std::int64_t saved_step() const { return saving_.step; }
  /// Waits until the last save is written. Errors: its.
  void finish() {
    if (is_copying_) trainer_->groups().world.wait(trainer_->snapshots());
    after_update();
    if (write_.valid()) write_.get();
  }

 private:
  using Executor = typename Backend::Executor;

  static pleat::checkpoint::Model model_of(Trainer<Backend, T>& trainer, const Options& o) {
    const auto& groups = trainer.groups();
    const auto& placement = trainer.schedule().placement;
    const auto split = split_layers(o.model.layers, placement.stages());
    pleat::checkpoint::Model model;
    for (int pp = 0; pp < placement.ranks; ++pp) {
      std::vector<StageLayers> chunks;
      for (int chunk = 0; chunk < placement.chunks_per_rank; ++chunk) {
        chunks.push_back(split[static_cast<std::size_t>(placement.stage(pp, chunk))]);
      }
      const RankUnits units = make_units(o, groups.mesh.ep, chunks);
      const pleat::fsdp::Plan plan = Parameters<Backend, T>::plan(o, groups, units);
      auto& stage = model.stages.emplace_back();
      for (std::size_t u = 0; u < plan.layouts.size(); ++u) {
        stage.push_back({plan.names[u], plan.kinds[u], plan.layouts[u], plan.master});
      }
    }
    return model;
  }
  std::vector<pleat::checkpoint::UnitMemory> memory() const {
    return pleat::checkpoint::unit_memory(trainer_->parameters().shards(), trainer_->optimizer().adamw().moments(),
                                          trainer_->optimizer().muon().momentum());
  }
  const pleat::RuntimeMesh& mesh() const { return trainer_->groups().mesh; }
  int rank() const { return trainer_->groups().world.rank(); }

  Trainer<Backend, T>* trainer_;
  Options options_;
  pleat::checkpoint::Model model_;
  std::optional<pleat::checkpoint::Saver> saver_;
  typename Backend::PinnedBuffer snapshot_;
  Progress saving_{.step = -1};
  bool is_copying_ = false;
  typename Executor::event_type copied_ = Executor{}.make_event();
  std::future<void> write_;
};

}  // namespace train_moe
