// Which single change of a mesh or of a job takes memory from the rank that has most, and what it costs in time.
#pragma once

#include <pleat/estimate/planner.hpp>
#include <pleat/mesh/text.hpp>

namespace pleat::inline v0::estimate {

/// A change and what it makes of the rank that takes most.
struct Advice {
  std::string change;
  double total_bytes = 0;
  double step_seconds = 0;  ///< expected
  Verdict verdict = Verdict::fits;
};

/// The changes that take at least 1 % off, the one that takes most first. Each is estimated like any other mesh.
inline std::vector<Advice> advise(const Job& job, const Estimate& made) {
  std::vector<Advice> found;
  const auto consider = [&](const std::string& change, const Job& other, MeshDegrees degrees) {
    try {
      Planner planner(other);
      const Estimate changed = planner.estimate(RuntimeMesh(degrees));
      if (changed.memory.total() > 0.99 * made.memory.total()) return;
      found.push_back({change, changed.memory.total(), changed.time.seconds.expected, changed.verdict});
    } catch (const error&) {
      // The job cannot run that way, so it is no advice.
    }
  };
  const MeshDegrees now{made.mesh.pp, made.mesh.dp, made.mesh.cp, made.mesh.ep, made.mesh.replicas};
  const auto degrees = [&](auto change) {
    MeshDegrees changed = now;
    change(changed);
    return changed;
  };
  const auto number = [](const char* what, int value) { return v0::detail::text(what, value); };
  consider(number("ep", 2 * now.ep), job, degrees([](MeshDegrees& d) { d.ep *= 2; }));
  if (now.dp % 2 == 0) {
    consider(number("cp", 2 * now.cp), job, degrees([](MeshDegrees& d) { d.cp *= 2, d.dp /= 2; }));
    consider(number("pp", 2 * now.pp), job, degrees([](MeshDegrees& d) { d.pp *= 2, d.dp /= 2; }));
  }
  if (now.replicas > 1) consider("r1", job, degrees([](MeshDegrees& d) { d.replicas = 1; }));

  const auto consider_job = [&](const std::string& change, auto set) {
    Job other = job;
    set(other);
    consider(change, other, now);
  };
  if (job.micro_batch % 2 == 0) {
    consider_job(number("micro-batch ", job.micro_batch / 2), [](Job& j) { j.micro_batch /= 2; });
  }
  if (job.prefetch > 0) consider_job("prefetch 0", [](Job& j) { j.prefetch = 0; });
  if (job.capacity == 0 || job.capacity > 1.25) consider_job("capacity 1.25", [](Job& j) { j.capacity = 1.25; });
  if (job.gradient != job.compute) {
    consider_job(v0::detail::text("gradients ", job.compute), [](Job& j) { j.gradient = j.compute; });
  }
  if (job.optimizer == fsdp::Optimizer::adamw) {
    consider_job("muon", [](Job& j) { j.optimizer = fsdp::Optimizer::muon; });
  }
  for (const pipeline::Kind kind : pipeline::all_kinds) {
    if (now.pp > 1 && kind != job.schedule) consider_job(name_of(kind), [&](Job& j) { j.schedule = kind; });
  }
  std::stable_sort(found.begin(), found.end(),
                   [](const Advice& a, const Advice& b) { return a.total_bytes < b.total_bytes; });
  return found;
}

/// Those that fit first, the fastest of them first; then the tight ones alike; then the others, the smallest first.
inline void sort_estimates(std::vector<Estimate>& all) {
  std::stable_sort(all.begin(), all.end(), [](const Estimate& a, const Estimate& b) {
    if (a.verdict != b.verdict) return a.verdict < b.verdict;
    if (a.verdict == Verdict::too_large) return a.memory.total() < b.memory.total();
    return a.time.seconds.expected < b.time.seconds.expected;
  });
}

}  // namespace pleat::inline v0::estimate
