// --check: the same steps on one rank in float64, from the same parameters, compared with the mesh's.
#pragma once

#include <array>
#include <atomic>
#include <cmath>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "host/backend.hpp"
#include "trainer.hpp"

namespace train_moe {

/// Values by canonical parameter name, put together by all ranks of a mesh.
class Book {
 public:
  void clear() { pages_.clear(); }
  template <class A>
  void put(const std::string& name, const A* values, std::int64_t elems) {
    std::vector<double> page(values, values + elems);
    const std::lock_guard lock(mutex_);
    pages_[name] = std::move(page);
  }
  const std::vector<double>& at(const std::string& name) const { return pages_.at(name); }
  const std::map<std::string, std::vector<double>>& pages() const { return pages_; }

 private:
  std::mutex mutex_;
  std::map<std::string, std::vector<double>> pages_;
};

/// Calls `f(unit, param, first, elems, name)` for every parameter that a rank holds, each expert's on its
/// own: elements [first, first + elems) of what `load` and the exports see.
template <class ParametersType, class F>
void for_each_parameter(const ParametersType& parameters, F f) {
  for (int unit = 0; unit < static_cast<int>(parameters.units().size()); ++unit) {
    const pleat::fsdp::UnitSpec& spec = parameters.units()[static_cast<std::size_t>(unit)];
    for (int param = 0; param < static_cast<int>(spec.params.size()); ++param) {
      const std::int64_t elems = parameters.elems(unit, param);
      if (spec.kind == pleat::Param::dense) {
        f(unit, param, std::int64_t{0}, elems, parameter_name(spec, param));
        continue;
      }
      const std::int64_t one = elems / parameters.experts_local();
      for (int e = 0; e < parameters.experts_local(); ++e) {
        f(unit, param, e * one, one, parameter_name(spec, param, parameters.first_expert() + e));
      }
    }
  }
}

/// Writes a mesh's parameters or gradients into `book`; collective, `export_one(unit, param, out)` is what each rank
/// calls. One rank of the mesh writes each page.
template <class TrainerType, class Export>
void write_book(TrainerType& trainer, Book& book, Export export_one) {
  const pleat::Coordinate& me = trainer.groups().me;
  const auto& parameters = trainer.parameters();
  std::vector<typename TrainerType::A> values;
  for_each_parameter(
      parameters, [&](int unit, int param, std::int64_t first, std::int64_t elems, const std::string& name) {
        if (first == 0) {
          values.resize(static_cast<std::size_t>(parameters.elems(unit, param)));
          export_one(unit, param, values.data());
        }
        const bool dense = parameters.units()[static_cast<std::size_t>(unit)].kind == pleat::Param::dense;
        const bool writes = dense ? me.dp == 0 && me.cp == 0 : me.expert_dp == 0;
        if (writes) book.put(name, values.data() + first, elems);
      });
}
template <class TrainerType>
void write_parameters(TrainerType& trainer, Book& book) {
  write_book(trainer, book, [&](int u, int p, auto* out) { trainer.parameters().export_parameter(u, p, out); });
}
template <class TrainerType>
void write_gradients(TrainerType& trainer, Book& book) {
  write_book(trainer, book, [&](int u, int p, auto* out) { trainer.parameters().export_gradient(u, p, out); });
}

/// The experts that every token of a step took on the mesh, and a digest of them: the same for the same experts on any
/// mesh.
class RoutingRecord final : public RoutingWatch {
 public:
  RoutingRecord(const Options& o, int micro_batches)
      : top_k_(o.model.top_k),
        layers_(o.model.layers),
        batch_(o.batch),
        tokens_(static_cast<std::int64_t>(o.batch) / micro_batches * o.sequence),
        ids_(static_cast<std::size_t>(micro_batches * layers_ * tokens_ * top_k_)) {}

  void observe(int layer, const MicroBatch& batch, const std::int32_t* ids) override;
  /// The experts [top_k] of the t-th token of a micro-batch. Ranks write tokens of their own, so nothing is shared.
  std::int32_t* at(int layer, const MicroBatch& batch, std::size_t t) {
    return ids_.data() + row(layer, batch, t) * top_k_;
  }
  /// Of step `step`, counted from 0, once all ranks are through it; begins anew.
  std::uint64_t take_digest(std::int64_t step) { return digests_[static_cast<std::size_t>(step % 2)].exchange(0); }

 private:
  std::int64_t row(int layer, const MicroBatch& batch, std::size_t t) const {
    return (static_cast<std::int64_t>(batch.accumulation) * layers_ + layer) * tokens_ + batch.global[t];
  }

  int top_k_;
  int layers_;
  int batch_;
  std::int64_t tokens_;  // of a micro-batch, over all ranks
  std::vector<std::int32_t> ids_;
  std::array<std::atomic<std::uint64_t>, 2> digests_{};  // of steps in turn: no rank is two ahead of another
};

/// The reference's choice: its own, but the mesh's where two scores differ by less than `tie`, and where tokens take
/// experts in turn: in which turn depends on the mesh.
class RoutingFollower final : public RoutingWatch {
 public:
  RoutingFollower(const Options& o, RoutingRecord& record, double tie)
      : model_(o.model),
        record_(&record),
        is_forced_(o.force_balance),
        tie_(tie),
        router_(pleat::moe::bind(
            pleat::moe::plan(
                pleat::moe::RouterShape{.experts = model_.experts, .k = model_.top_k, .dtype = pleat::DType::f64},
                pleat::moe::RouterOptions{.renormalize = o.model.renormalize, .force_balance = o.force_balance}),
            pleat::HostExecutor{})) {}

  bool decides() const override { return true; }
  const std::int32_t* decide(int layer, const MicroBatch& batch, const pleat::TensorRef& logits) override;
  void observe(int, const MicroBatch&, const std::int32_t*) override {}
  std::int64_t ties() const { return ties_; }

 private:
  bool is_tie(const double* score, const std::int32_t* mine, const std::int32_t* theirs) const;

  ModelShape model_;
  RoutingRecord* record_;
  bool is_forced_;
  double tie_;
  pleat::moe::Router<pleat::HostExecutor> router_;
  std::vector<std::int32_t> ids_;      // [tokens, top_k]
  std::vector<double> weights_;        // [tokens, top_k]
  std::vector<double> probabilities_;  // [tokens, experts]
  std::int64_t ties_ = 0;
};

/// The largest relative differences from the reference over all steps so far; infinite where the reference is 0, there
/// is no floor, and the value is not.
///
/// A gradient that is 0 but for rounding (attention over equal tokens has such) cannot agree with itself: a dense
/// parameter's difference is taken relative to `floor` at least, so that what is below eight roundings of the norm of
/// the whole gradient passes. Experts have no floor.
struct Differences {
  double loss = 0, gradients = 0, norm = 0;
  std::string worst_gradient;

  bool within(double tolerance) const { return loss <= tolerance && gradients <= tolerance && norm <= tolerance; }
  void compare(const StepReport& mesh, const StepReport& reference);
  void compare(const std::string& name, const std::vector<double>& mesh, const std::vector<double>& reference,
               double floor = 0);
};

/// One rank in float64 on the union of all data ranks' micro-batches.
class Reference {
 public:
  Reference(const Options& mesh_options, const Text& text, RoutingRecord& record);

  /// Repeats step `step` from `parameters` and compares with what the mesh got.
  void compare_step(int step, const Book& parameters, const Book& gradients, const StepReport& mesh);

  const Differences& differences() const { return differences_; }
  std::int64_t ties() const { return follower_.ties(); }

 private:
  static Options options_of(const Options& mesh_options);

  pleat::DType mesh_dtype_;
  int batch_;
  pleat::ThreadComm self_ = pleat::single_rank();
  RoutingFollower follower_;
  pleat::MeshComms<pleat::FoldedMesh<1, 1, 1, 1>, pleat::ThreadComm> comms_;
  Trainer<HostBackend, double> trainer_;
  Differences differences_;
};

/// The tolerance of --check for a dtype.
inline double tolerance(pleat::DType dtype) {
  return dtype == pleat::DType::f64 ? 1e-9 : 1e-4;
}

}  // namespace train_moe
