// The planner: what a job takes on a mesh, on the rank that takes most, and how long a step takes at least.
#pragma once

#include <pleat/estimate/step_time.hpp>
#include <pleat/optim/step_norm.hpp>

namespace pleat::inline v0::estimate {

/// What takes memory on a rank. Host memory is not counted.
enum class Part : unsigned char {
  parameters,
  gradients,
  optimizer,
  slots,
  gradient_units,
  activations,
  workspaces,
  dispatch,
  ring,
  boundaries,
  communicators,
};
inline constexpr int part_count = 11;
constexpr const char* name_of(Part part) {
  constexpr const char* names[part_count] = {"parameters",     "gradients",   "optimizer",    "slots",
                                             "gradient units", "activations", "workspaces",   "dispatch",
                                             "ring",           "boundaries",  "communicators"};
  return names[static_cast<int>(part)];
}

/// Bytes on one rank.
struct Memory {
  std::array<double, part_count> bytes{};

  double& operator[](Part part) { return bytes[static_cast<std::size_t>(part)]; }
  double operator[](Part part) const { return bytes[static_cast<std::size_t>(part)]; }
  /// Bytes of all parts.
  double total() const { return std::accumulate(bytes.begin(), bytes.end(), 0.0); }
};

/// Whether a job fits a GPU's memory; tight: by less than estimates are exact.
enum class Verdict : unsigned char { fits, tight, too_large };
constexpr const char* name_of(Verdict verdict) {
  return verdict == Verdict::fits ? "fits" : verdict == Verdict::tight ? "tight" : "does not fit";
}
/// Above this share of a GPU's memory what fits is tight: estimates are meant to hold within 5 %.
inline constexpr double tight_share = 0.95;

/// What a job takes on a mesh.
struct Estimate {
  RuntimeMesh mesh = {};
  std::int64_t micro_batches = 0;
  /// The pipeline rank that takes most memory; all ranks of its stage take as much.
  int worst_stage = 0;
  Memory memory = {};    ///< of a rank of that stage
  Traffic traffic = {};  ///< of the rank that sends most
  StepTime time = {};
  Verdict verdict = Verdict::fits;

  /// A rank of the world that takes most memory.
  int worst_rank() const { return worst_stage * mesh.stage_size; }
};

/// Estimates meshes of one job. Asks the plans that a trainer would bind; schedules are made once each, and long ones
/// played for a few micro-batches. The job is borrowed.
class Planner {
 public:
  explicit Planner(const Job& job) : job_(job) { check_job(job); }

  /// Errors: shape_error N04 when the job cannot run on the mesh, and those of the plans.
  Estimate estimate(const RuntimeMesh& mesh) {
    if (mesh.world_size != job_.world) {
      fail<shape_error>("pleat[N04]: the job of ", job_.world, " ranks cannot run on ", mesh, ", which has ",
                        mesh.world_size, "; valid: meshes of ", job_.world, ", or a job of that world");
    }
    if (const char* const why = why_not(job_, mesh); why != nullptr) {
      fail<shape_error>("pleat[N04]: the job of ", job_.world, " ranks cannot run on ", mesh, ": ", why);
    }
    const MeshPlans all(job_, mesh);
    Estimate made{.mesh = mesh, .micro_batches = job_.micro_batches(mesh)};
    std::map<std::vector<Chunk>, ShardBytes, ChunkOrder> known;  // inner stages are alike
    std::vector<ShardBytes> shards;
    for (int stage = 0; stage < mesh.pp; ++stage) {
      const std::vector<Chunk> chunks = all.chunks(stage);
      const auto found = known.find(chunks);
      shards.push_back(found != known.end() ? found->second : known[chunks] = all.shards.bytes(chunks));
      const Memory memory = memory_of(all, stage, chunks, shards.back());
      if (stage == 0 || memory.total() > made.memory.total()) {
        made.worst_stage = stage;
        made.memory = memory;
      }
      const Traffic traffic = traffic_of(job_, all, schedules_, stage, chunks);
      if (stage == 0 || traffic.total().sum() > made.traffic.total().sum()) made.traffic = traffic;
    }
    made.time = StepClock(job_, all, schedules_).time(made.traffic.total(), shards);
    const double total = made.memory.total(), most = static_cast<double>(job_.gpu_bytes);
    made.verdict = total > most ? Verdict::too_large : total > tight_share * most ? Verdict::tight : Verdict::fits;
    return made;
  }

  /// What is planned for, and the schedules that were made for it.
  const Job& job() const { return job_; }
  const Schedules& schedules() const { return schedules_; }

 private:
  struct ChunkOrder {
    bool operator()(const std::vector<Chunk>& a, const std::vector<Chunk>& b) const {
      const auto key = [](const Chunk& c) {
        return std::tuple{c.dense_layers, c.moe_layers, c.has_embedding, c.has_head};
      };
      return std::lexicographical_compare(a.begin(), a.end(), b.begin(), b.end(),
                                          [&](const Chunk& x, const Chunk& y) { return key(x) < key(y); });
    }
  };

  Memory memory_of(const MeshPlans& all, int stage, std::span<const Chunk> chunks, const ShardBytes& shards) {
    const RuntimeMesh& mesh = all.mesh;
    const auto bytes = [](std::size_t n) { return static_cast<double>(n); };
    const std::int64_t micro_batches = Schedules::enough(mesh.pp, job_.micro_batches(mesh));
    const pipeline::Schedule& few = schedules_.get(job_.schedule_of(mesh), mesh.pp, static_cast<int>(micro_batches));
    const pipeline::Program& program = few.programs[static_cast<std::size_t>(stage)];
    const Places places = count_places(program);
    double held = 0;
    int layers = 0;
    bool has_head = false;
    for (std::size_t c = 0; c < chunks.size(); ++c) {
      held += places.held[c] * all.bytes_held(chunks[c]);
      held += places.deferred[c] * chunks[c].moe_layers * bytes(all.arrays.deferred_bytes(LayerKind::moe));
      layers += chunks[c].layers();
      has_head = has_head || chunks[c].has_head;
    }
    const int lanes_used = lanes(program);
    const Footprint experts = all.plans.experts.footprint(), balance = all.plans.balance.footprint();
    const optim::StepNormPlan norm =
        optim::plan_step_norm(mesh.world_size, lanes_used * all.plans.experts.dispatch.status_words());
    Memory memory;
    memory[Part::parameters] = shards.parameters;
    memory[Part::gradients] = shards.gradients;
    memory[Part::optimizer] = shards.adamw + shards.muon;
    memory[Part::slots] = shards.slots;
    memory[Part::gradient_units] = shards.gradient_units;
    memory[Part::activations] = held;
    memory[Part::workspaces] = shards.sums + bytes(all.arrays.attention_bytes() + norm.footprint().persistent) +
                               lanes_used * bytes(all.arrays.lane_bytes() + job_.machine.kernels_bytes) +
                               layers * bytes(balance.persistent) +
                               static_cast<double>(job_.micro_batches(mesh)) * bytes(all.arrays.batch_bytes()) +
                               (has_head ? bytes(all.arrays.head_bytes()) : 0);
    memory[Part::dispatch] =
        lanes_used * device_bytes(max_scratch(experts, balance)) - lanes_used * bytes(balance.persistent);
    memory[Part::ring] = device_bytes(all.plans.ring.footprint());
    const pipeline::Shape shape{job_.model.hidden, job_.compute,
                                std::vector<std::int64_t>(static_cast<std::size_t>(micro_batches), all.plans.tokens())};
    memory[Part::boundaries] = bytes(boundary_bytes(few, shape));
    memory[Part::communicators] =
        bytes(job_.machine.context_bytes) + communicators(mesh) * bytes(job_.machine.communicator_bytes);
    return memory;
  }
  /// What backward finds of the operation in a block per micro-batch is among the activations.
  static double device_bytes(const Footprint& f) { return static_cast<double>(f.scratch + f.symmetric + f.persistent); }
  std::size_t boundary_bytes(const pipeline::Schedule& of, const pipeline::Shape& shape) {
    const auto key = std::tuple{&of, shape.hidden, shape.rows.front()};
    const auto known = boundaries_.find(key);
    if (known != boundaries_.end()) return known->second;
    return boundaries_[key] = pipeline::plan(of, shape).footprint().scratch;
  }
  /// Communicators with other ranks, and that of the world.
  int communicators(const RuntimeMesh& mesh) const {
    if (mesh.world_size == 1) return 0;
    return 1 + plan_communicators(mesh, 0, {Lane::main, Lane::gather, Lane::reduce}).size();
  }

  const Job& job_;
  Schedules schedules_;
  std::map<std::tuple<const pipeline::Schedule*, std::int64_t, std::int64_t>, std::size_t> boundaries_;
};

}  // namespace pleat::inline v0::estimate
