// The reference run and its comparisons.
#include "check.hpp"

#include <limits>

namespace train_moe {
namespace {

/// |a - b| / |b|; 0 must be met exactly.
double relative(double difference, double reference) {
  if (difference == 0) return 0;
  // A NaN on either side is a difference that no tolerance allows.
  const double ratio = reference == 0 ? std::numeric_limits<double>::infinity() : difference / reference;
  return std::isnan(ratio) ? std::numeric_limits<double>::infinity() : ratio;
}

}  // namespace

void RoutingRecord::observe(int layer, const MicroBatch& batch, const std::int32_t* ids) {
  std::uint64_t digest = 0;
  for (std::size_t t = 0; t < batch.tokens.size(); ++t) {
    std::copy_n(ids + t * static_cast<std::size_t>(top_k_), top_k_, at(layer, batch, t));
    for (int j = 0; j < top_k_; ++j) {  // a sum, so that neither order nor place count
      const std::int32_t expert = ids[t * static_cast<std::size_t>(top_k_) + static_cast<std::size_t>(j)];
      std::uint64_t z = static_cast<std::uint64_t>(row(layer, batch, t)) * 0x9e3779b97f4a7c15u +
                        static_cast<std::uint32_t>(expert) + 1;
      z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
      z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
      digest += z ^ (z >> 31);
    }
  }
  digests_[static_cast<std::size_t>(batch.first / batch_ % 2)] += digest;
}

bool RoutingFollower::is_tie(const double* score, const std::int32_t* mine, const std::int32_t* theirs) const {
  const int k = model_.top_k;
  const auto has = [&](const std::int32_t* ids, std::int32_t e) { return std::find(ids, ids + k, e) != ids + k; };
  double lowest_of_mine = 1;
  for (int j = 0; j < k; ++j) lowest_of_mine = std::min(lowest_of_mine, score[mine[j]]);
  for (int j = 0; j < k; ++j) {
    if (!has(mine, theirs[j]) && lowest_of_mine - score[theirs[j]] >= tie_) return false;
  }
  return true;
}

const std::int32_t* RoutingFollower::decide(int layer, const MicroBatch& batch, const pleat::TensorRef& logits) {
  const auto k = static_cast<std::size_t>(model_.top_k);
  const auto experts = static_cast<std::size_t>(model_.experts);
  const auto tokens = static_cast<std::int64_t>(batch.tokens.size());
  ids_.resize(batch.tokens.size() * k);
  weights_.resize(batch.tokens.size() * k);
  probabilities_.resize(batch.tokens.size() * experts);
  router_.choose({}, logits, pleat::TensorRef{ids_.data(), {tokens, model_.top_k}},
                 pleat::TensorRef{weights_.data(), {tokens, model_.top_k}},
                 pleat::TensorRef{probabilities_.data(), {tokens, model_.experts}});
  for (std::size_t t = 0; t < batch.tokens.size(); ++t) {
    std::int32_t* mine = ids_.data() + t * k;
    const std::int32_t* theirs = record_->at(layer, batch, t);
    if (!is_forced_) {
      if (std::is_permutation(mine, mine + k, theirs)) continue;
      if (!is_tie(probabilities_.data() + t * experts, mine, theirs)) continue;
      ++ties_;
    }
    std::copy_n(theirs, k, mine);
  }
  return ids_.data();
}

void Differences::compare(const StepReport& mesh, const StepReport& reference) {
  for (const auto& [mine, theirs] : {std::pair{mesh.loss, reference.loss}, {mesh.balance, reference.balance}}) {
    loss = std::max(loss, relative(std::abs(mine - theirs), std::abs(theirs)));
  }
  norm = std::max(norm, relative(std::abs(mesh.norm - reference.norm), reference.norm));
}

void Differences::compare(const std::string& name, const std::vector<double>& mesh,
                          const std::vector<double>& reference, double floor) {
  double difference = 0, size = 0;
  bool equal = true;  // squares of tiny numbers are 0
  for (std::size_t i = 0; i < reference.size(); ++i) {
    difference += (mesh.at(i) - reference[i]) * (mesh.at(i) - reference[i]);
    size += reference[i] * reference[i];
    equal = equal && mesh[i] == reference[i];
  }
  const double ratio = equal ? 0 : relative(std::max(std::sqrt(difference), 1e-300), std::max(std::sqrt(size), floor));
  if (ratio > gradients) {
    gradients = ratio;
    worst_gradient = name;
  }
}

Options Reference::options_of(const Options& mesh_options) {
  Options o = mesh_options;
  o.micro_batch = mesh_options.micro_batch * mesh_options.mesh.dp;
  o.mesh = {};
  o.schedule.reset();
  o.capacity = 0;
  o.perturb = false;
  o.dtype = pleat::DType::f64;
  return o;
}

Reference::Reference(const Options& mesh_options, const Text& text, RoutingRecord& record)
    : mesh_dtype_(mesh_options.dtype),
      batch_(mesh_options.batch),
      follower_(mesh_options, record, mesh_options.dtype == pleat::DType::f64 ? 0 : 1e-5),
      comms_({}, self_),
      trainer_(groups_of(comms_), options_of(mesh_options), text, &follower_) {}

void Reference::compare_step(int step, const Book& parameters, const Book& gradients, const StepReport& mesh) {
  auto& own = trainer_.parameters();
  std::vector<double> values;
  for_each_parameter(own, [&](int unit, int param, std::int64_t first, std::int64_t elems, const std::string& name) {
    const std::int64_t all = own.elems(unit, param);
    values.resize(static_cast<std::size_t>(all));
    const std::vector<double>& page = parameters.at(name);
    std::copy_n(page.begin(), elems, values.begin() + first);
    if (first + elems == all) own.load(unit, param, values.data());
  });
  trainer_.resume({.step = step, .position = static_cast<std::int64_t>(step) * batch_, .applied = 0, .skipped = 0});
  differences_.compare(mesh, trainer_.compute_gradients());
  Book reference;
  write_gradients(trainer_, reference);
  double squares = 0;
  for (const auto& [name, page] : reference.pages()) {
    for (const double g : page) squares += g * g;
  }
  const double rounding =
      mesh_dtype_ == pleat::DType::f64 ? std::numeric_limits<double>::epsilon() : std::numeric_limits<float>::epsilon();
  const double floor = 8 * rounding * std::sqrt(squares) / tolerance(mesh_dtype_);
  for (const auto& [name, page] : reference.pages()) {
    const bool is_expert = name.find(".experts.") != std::string::npos;
    differences_.compare(name, gradients.at(name), page, is_expert ? 0 : floor);
  }
}

}  // namespace train_moe
