// What is to be trained, on how many GPUs, and how: the question that an estimate answers; and the meshes that can run
// it.
#pragma once

#include <algorithm>

#include <pleat/estimate/machine.hpp>
#include <pleat/estimate/model.hpp>
#include <pleat/mesh/model_checks.hpp>
#include <pleat/mesh/runtime_mesh.hpp>
#include <pleat/pipeline/generate.hpp>

namespace pleat::inline v0::estimate {

/// What is to be trained, on how many GPUs of what size, and how.
struct Job {
  Model model;
  int world = 1;
  std::size_t gpu_bytes = std::size_t{80} << 30;
  /// GPUs that one NVLink fabric joins.
  int domain = 8;
  std::int64_t sequence = 4096;  ///< tokens
  int micro_batch = 1;           ///< sequences
  std::int64_t batch = 1024;     ///< sequences of a step, over all ranks
  pipeline::Kind schedule = pipeline::Kind::dualpipe_v;
  int prefetch = 1;
  /// Of the matrices; the rest stays with AdamW.
  fsdp::Optimizer optimizer = fsdp::Optimizer::adamw;
  /// Of parameters and activations; masters and the optimizer's state are of its accumulator.
  DType compute = DType::bf16;
  /// What gradients are written in and travel in.
  DType gradient = DType::f32;
  /// Rows of an expert start at multiples of this: what the grouped products of GPUs want.
  std::int64_t row_alignment = 16;
  /// Rows that a rank's experts have room for, as a multiple of those of balanced routing; 0: room for every routing.
  double capacity = 1.25;
  Machine machine;

  /// Micro-batches of a step on each rank of `mesh`.
  std::int64_t micro_batches(const RuntimeMesh& mesh) const { return batch / (std::int64_t{micro_batch} * mesh.dp); }
  /// Tokens of a micro-batch on one rank.
  std::int64_t local_tokens(const RuntimeMesh& mesh) const { return micro_batch * (sequence / mesh.cp); }
  int chunks_per_rank(const RuntimeMesh& mesh) const { return pipeline::chunks_per_rank(schedule_of(mesh)); }
  /// A mesh without a pipeline runs one micro-batch after the other, or in pairs.
  pipeline::Kind schedule_of(const RuntimeMesh& mesh) const {
    using pipeline::Kind;
    return mesh.pp == 1 && schedule != Kind::one_f_one_b_pairs ? Kind::one_f_one_b : schedule;
  }
};

/// Errors: shape_error N02 for the model, N03 for a number that cannot be.
inline void check_job(const Job& job) {
  check_model(job.model);
  const struct {
    const char* name;
    std::int64_t value, least, most;
  } sizes[] = {{"world", job.world, 1, 1 << 24},
               {"domain", job.domain, 1, 1 << 30},
               {"sequence", job.sequence, 1, std::int64_t{1} << 40},
               {"micro_batch", job.micro_batch, 1, 1 << 20},
               {"batch", job.batch, 1, std::int64_t{1} << 40},
               {"prefetch", job.prefetch, 0, 1 << 16},
               {"row_alignment", job.row_alignment, 1, 1 << 16}};
  for (const auto& size : sizes) {
    if (size.value < size.least || size.value > size.most) {
      fail<shape_error>("pleat[N03]: ", size.name, "=", size.value, " of a job; valid: ", size.least, " to ",
                        size.most);
    }
  }
  if (!(job.capacity == 0 || (job.capacity >= 1 && job.capacity <= 1 << 20))) {
    fail<shape_error>("pleat[N03]: the capacity of a job is ",
                      job.capacity < 1 ? "below" : "no number, or too far above",
                      " what balanced routing needs; valid: 0 for room for every routing, 1 to 2^20 times as much");
  }
  if (job.gpu_bytes < 1) fail<shape_error>("pleat[N03]: a GPU of 0 bytes; give the size of its memory");
  if ((job.compute != DType::bf16 && job.compute != DType::f32 && job.compute != DType::f64) ||
      (job.gradient != job.compute && job.gradient != accumulator(job.compute))) {
    fail<shape_error>("pleat[N03]: compute=", job.compute, " with gradients in ", job.gradient,
                      "; valid: bf16 f32 f64, gradients alike or in the accumulator");
  }
}

/// Why a job cannot run on a mesh; null when it can. The plans of the parts check the same and more.
inline const char* why_not(const Job& job, const RuntimeMesh& mesh) {
  const std::int64_t stages = std::int64_t{mesh.pp} * job.chunks_per_rank(mesh);
  if (stages > job.model.layers) return "there are fewer layers than stages";
  if (job.model.experts % mesh.ep != 0) return "ep does not divide the experts";
  if (job.sequence % (mesh.cp == 1 ? 1 : std::int64_t{2} * mesh.cp) != 0) return "2 * cp does not divide the sequence";
  if (job.batch % (std::int64_t{job.micro_batch} * mesh.dp) != 0) return "dp * micro_batch does not divide the batch";
  if (job.micro_batches(mesh) < pipeline::least_micro_batches(job.schedule_of(mesh), mesh.pp)) {
    return "the schedule needs more micro-batches: a larger batch, or a smaller dp";
  }
  return nullptr;
}

/// Degrees to keep to; 0 leaves one open.
struct Wanted {
  int pp = 0, dp = 0, cp = 0, ep = 0, replicas = 0;
};

/// Why a world has none of the degrees that are wanted.
inline std::string degrees_text(int world, const Wanted& wanted) {
  const std::pair<const char*, int> degrees[] = {
      {"pp", wanted.pp}, {"dp", wanted.dp}, {"cp", wanted.cp}, {"ep", wanted.ep}, {"replicas", wanted.replicas}};
  std::string text;
  for (const auto& [name, degree] : degrees) {
    if (degree == 0 || world % degree == 0) continue;
    text += message_of("; ", name, '=', degree, " does not divide it; valid: ", Divisors{world}).c_str();
  }
  if (!text.empty()) return text;
  return "; the degrees that were asked for do not go together; valid: pp * dp * cp is the world, and ep * replicas "
         "divides dp * cp";
}

/// All meshes of the job's world that can run it, pp first, replicas last. Errors: those of check_job; N04 when there
/// is none.
inline std::vector<RuntimeMesh> legal_meshes(const Job& job, const Wanted& wanted = {}) {
  check_job(job);
  std::vector<RuntimeMesh> meshes;
  std::vector<std::string> reasons;
  const auto for_each_divisor = [](int n, int wanted_one, int most, auto f) {
    if (wanted_one != 0) {
      if (n % wanted_one == 0) f(wanted_one);
      return;
    }
    for (int d = 1; d <= std::min(n, most); ++d) {
      if (n % d == 0) f(d);
    }
  };
  for_each_divisor(job.world, wanted.pp, job.model.layers, [&](int pp) {
    const int stage = job.world / pp;
    const auto most_cp = static_cast<int>(std::min<std::int64_t>(job.sequence, stage));
    for_each_divisor(stage, wanted.cp, most_cp, [&](int cp) {
      if (wanted.dp != 0 && wanted.dp != stage / cp) return;
      for_each_divisor(stage, wanted.ep, job.model.experts, [&](int ep) {
        for_each_divisor(stage / ep, wanted.replicas, stage / ep, [&](int replicas) {
          const RuntimeMesh mesh({.pp = pp, .dp = stage / cp, .cp = cp, .ep = ep, .replicas = replicas});
          const char* const why = why_not(job, mesh);
          if (why == nullptr) {
            meshes.push_back(mesh);
          } else if (std::find(reasons.begin(), reasons.end(), why) == reasons.end()) {
            reasons.emplace_back(why);
          }
        });
      });
    });
  });
  if (meshes.empty()) {
    std::string all = reasons.empty() ? degrees_text(job.world, wanted) : "";
    for (const std::string& reason : reasons) all += "; " + reason;
    fail<shape_error>("pleat[N04]: no mesh of ", job.world, " ranks can run the job", all);
  }
  return meshes;
}

}  // namespace pleat::inline v0::estimate
