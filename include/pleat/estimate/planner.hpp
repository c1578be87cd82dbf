// The planner: what a job takes on a mesh, on the rank that takes most, and how long a step takes at least.
#pragma once

#include <pleat/estimate/work.hpp>
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
  double total() const { return std::accumulate(bytes.begin(), bytes.end(), 0.0); }
};

/// What sends bytes in a step.
enum class Use : unsigned char { gathers, sums, ring, experts, stages };
inline constexpr int use_count = 5;
constexpr const char* name_of(Use use) {
  constexpr const char* names[use_count] = {"gathers", "sums", "ring", "experts", "stages"};
  return names[static_cast<int>(use)];
}
/// Bytes that one rank sends in a step.
struct Traffic {
  std::array<Bytes, use_count> bytes{};

  Bytes& operator[](Use use) { return bytes[static_cast<std::size_t>(use)]; }
  const Bytes& operator[](Use use) const { return bytes[static_cast<std::size_t>(use)]; }
  Bytes total() const { return std::accumulate(bytes.begin(), bytes.end(), Bytes{}); }
  friend Traffic operator+(const Traffic& a, const Traffic& b) { return combine(a, b, 1); }
  friend Traffic operator-(const Traffic& a, const Traffic& b) { return combine(a, b, -1); }
  friend Traffic operator*(double x, const Traffic& a) { return combine({}, a, x); }

 private:
  static Traffic combine(const Traffic& a, const Traffic& b, double x) {
    Traffic sum;
    for (std::size_t i = 0; i < use_count; ++i) sum.bytes[i] = a.bytes[i] + x * b.bytes[i];
    return sum;
  }
};

enum class Verdict : unsigned char { fits, tight, too_large };
constexpr const char* name_of(Verdict verdict) {
  return verdict == Verdict::fits ? "fits" : verdict == Verdict::tight ? "tight" : "does not fit";
}
/// Above this share of a GPU's memory what fits is tight: estimates are meant to hold within 5 %.
inline constexpr double tight_share = 0.95;

/// What bounds a step.
enum class Limit : unsigned char { passes, nvlink, network };
constexpr const char* name_of(Limit limit) {
  return limit == Limit::passes ? "passes" : limit == Limit::nvlink ? "NVLink" : "network";
}

struct Estimate {
  RuntimeMesh mesh = {};
  std::int64_t micro_batches = 0;
  /// The pipeline rank that takes most memory; all ranks of its stage take as much.
  int worst_stage = 0;
  Memory memory = {};    ///< of a rank of that stage
  Traffic traffic = {};  ///< of the rank that sends most
  double step_seconds = 0;
  Limit limit = Limit::passes;
  double bubble_share = 0;  ///< of the passes, on the rank that waits most
  Verdict verdict = Verdict::fits;

  int worst_rank() const { return worst_stage * mesh.stage_size; }
};

/// Estimates meshes of one job. Asks the plans that a trainer would bind; schedules are made once each, and long ones
/// played for a few micro-batches. The job is borrowed.
class Planner {
 public:
  explicit Planner(const Job& job) : job_(job) { check_job(job); }

  /// Errors: shape_error N04 when the job cannot run on the mesh, and those of the plans.
  Estimate estimate(const RuntimeMesh& mesh) {
    const char* const why = mesh.world_size != job_.world ? "its world is another" : why_not(job_, mesh);
    if (why != nullptr) {
      fail<shape_error>("pleat[N04]: the job of ", job_.world, " ranks cannot run on ", mesh, ": ", why);
    }
    const Rank all(job_, mesh);
    Estimate made{.mesh = mesh, .micro_batches = job_.micro_batches(mesh)};
    std::map<std::vector<Chunk>, ShardBytes, ChunkOrder> shards;  // inner stages are alike
    for (int stage = 0; stage < mesh.pp; ++stage) {
      const std::vector<Chunk> chunks = all.chunks(stage);
      const auto known = shards.find(chunks);
      const ShardBytes& bytes = known != shards.end() ? known->second : shards[chunks] = all.shards.bytes(chunks);
      const Memory memory = memory_of(all, stage, chunks, bytes);
      if (stage == 0 || memory.total() > made.memory.total()) {
        made.worst_stage = stage;
        made.memory = memory;
      }
      const Traffic traffic = traffic_of(all, stage, chunks);
      if (stage == 0 || traffic.total().sum() > made.traffic.total().sum()) made.traffic = traffic;
      updates_seconds_ = std::max(stage == 0 ? 0 : updates_seconds_, seconds_of_updates(bytes));
    }
    time(made, all);
    const double total = made.memory.total(), most = static_cast<double>(job_.gpu_bytes);
    made.verdict = total > most ? Verdict::too_large : total > tight_share * most ? Verdict::tight : Verdict::fits;
    return made;
  }

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

  /// What the ranks of a mesh have in common.
  struct Rank {
    Rank(const Job& job, const RuntimeMesh& of)
        : mesh(of),
          placement{of.pp, job.chunks_per_rank(of)},
          plans(plan_layer(job, of)),
          arrays(job, plans),
          shards(job, of),
          units(shards.unit_sizes()),
          work(job, of, plans) {
      int first = 0;
      for (const int layers : pipeline::layers_of_stages(job.model.layers, placement.stages())) {
        stages.push_back(chunk_of(job.model, first, layers));
        first += layers;
      }
    }
    Rank(const Rank&) = delete;
    Rank& operator=(const Rank&) = delete;

    std::vector<Chunk> chunks(int rank) const {
      std::vector<Chunk> held;
      for (int c = 0; c < placement.chunks_per_rank; ++c) {
        held.push_back(stages[static_cast<std::size_t>(placement.stage(rank, c))]);
      }
      return held;
    }

    RuntimeMesh mesh;
    pipeline::Placement placement;
    LayerPlans plans;
    LayerArrays arrays;
    ShardPlanner shards;
    UnitSizes units;
    LayerWork work;
    std::vector<Chunk> stages;
  };

  const pipeline::Schedule& schedule(const RuntimeMesh& mesh, std::int64_t micro_batches) {
    return schedules_.get(job_.schedule_of(mesh), mesh.pp, static_cast<int>(micro_batches));
  }
  /// f(schedule) for the step's micro-batches, where f grows by as much with each period that is added to a long step.
  template <class F>
  auto over_step(const RuntimeMesh& mesh, F f) {
    const std::int64_t count = job_.micro_batches(mesh), enough = Schedules::enough(mesh.pp, count);
    const auto last = f(schedule(mesh, enough));
    if (count == enough) return last;
    const std::int64_t period = Schedules::period(mesh.pp);
    const double periods = static_cast<double>(count - enough) / static_cast<double>(period);
    return last + periods * (last - f(schedule(mesh, enough - period)));
  }

  Memory memory_of(const Rank& all, int stage, std::span<const Chunk> chunks, const ShardBytes& shards) {
    const RuntimeMesh& mesh = all.mesh;
    const auto bytes = [](std::size_t n) { return static_cast<double>(n); };
    const std::int64_t micro_batches = Schedules::enough(mesh.pp, job_.micro_batches(mesh));
    const pipeline::Schedule& few = schedule(mesh, micro_batches);
    const pipeline::Program& program = few.programs[static_cast<std::size_t>(stage)];
    const Places places = count_places(program);
    double held = 0;
    int layers = 0;
    bool has_head = false;
    for (std::size_t c = 0; c < chunks.size(); ++c) {
      held += places.held[c] * bytes_held(all, chunks[c]);
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
    const bool has_pairs = mesh.pp > 1 && job_.schedule == pipeline::Kind::dualpipe_v;
    return 1 + (has_pairs ? plan_communicators(mesh, 0, {Lane::main, Lane::gather, Lane::reduce, Lane::overlap})
                          : plan_communicators(mesh, 0, {Lane::main, Lane::gather, Lane::reduce}))
                   .size();
  }
  /// A live micro-batch of a chunk.
  static double bytes_held(const Rank& all, const Chunk& chunk) {
    double held = chunk.has_head ? static_cast<double>(all.arrays.last_bytes()) : 0;
    for (int i = 0; i < chunk.layers(); ++i) {
      const LayerKind kind = i < chunk.dense_layers ? LayerKind::dense : LayerKind::moe;
      held += static_cast<double>(all.arrays.saved_bytes(kind, i > 0 || chunk.has_embedding));
    }
    return held;
  }

  Traffic traffic_of(const Rank& all, int stage, std::span<const Chunk> chunks) {
    const RankUnits units(chunks, all.units);
    const Links links(all.mesh, job_.domain);
    const auto micro_batches = static_cast<double>(job_.micro_batches(all.mesh));
    const auto part_of = [&](const UnitSize& unit, double bytes) {
      const int ranks = all.shards.groups().of(unit.kind);
      return links.to_all(unit.kind == Param::dense ? GroupUse::dense_shard : GroupUse::expert_shard,
                          bytes * unit.elems * (ranks - 1) / ranks);
    };
    Traffic traffic;
    const std::array<int, 2> slots = all.shards.slots(chunks);
    traffic[Use::gathers] = over_step(all.mesh, [&](const pipeline::Schedule& part) {
      const auto& program = part.programs[static_cast<std::size_t>(stage)];
      const auto counts = GatherReplay(units.sizes, slots, job_.prefetch).run(unit_uses(program, units));
      Bytes sum;
      for (std::size_t u = 0; u < counts.size(); ++u) {
        sum = sum +
              static_cast<double>(counts[u]) * part_of(units.sizes[u], static_cast<double>(size_bytes(job_.compute)));
      }
      return sum;
    });
    for (const UnitSize& unit : units.sizes) {
      const int ranks = all.shards.groups().of(unit.kind), replicas = all.mesh.replicas;
      traffic[Use::sums] = traffic[Use::sums] +
                           micro_batches * part_of(unit, static_cast<double>(size_bytes(job_.gradient))) +
                           links.to_all(GroupUse::replica, 4.0 * 2 * (replicas - 1) / replicas * unit.elems / ranks);
    }
    for (const Chunk& chunk : chunks) {
      const Passes passes = all.work.chunk(chunk);
      traffic[Use::ring] = traffic[Use::ring] + micro_batches * (passes.forward.ring + passes.input_gradient.ring);
      traffic[Use::experts] =
          traffic[Use::experts] + micro_batches * (passes.forward.experts + passes.input_gradient.experts);
    }
    traffic[Use::stages] = over_step(all.mesh, [&](const pipeline::Schedule& part) {
      return static_cast<double>(sends(part.programs[static_cast<std::size_t>(stage)])) * all.work.boundary();
    });
    return traffic;
  }

  /// Updates move 30 bytes per element of AdamW and 26 of Muon, which also multiplies. source: docs/benchmarks.md.
  double seconds_of_updates(const ShardBytes& shards) const {
    return (shards.adamw / 8 * 30 + shards.muon / 4 * 26) / job_.machine.memory + shards.muon_flops / job_.machine.gemm;
  }

  /// The passes of a chunk, with what they move in memory besides products: activations are written and read once;
  /// gradients are written as units, read by those that sum them, and added to shards.
  Passes passes_of(const Rank& all, const Chunk& chunk) const {
    Passes passes = all.work.chunk(chunk);
    const double rate = job_.machine.memory, held = bytes_held(all, chunk) / rate;
    passes.forward.compute += held;
    passes.input_gradient.compute += held;
    for (const UnitSize& unit : RankUnits({&chunk, 1}, all.units).sizes) {
      const int ranks = all.shards.groups().of(unit.kind);
      const auto unit_bytes = 2 * static_cast<double>(size_bytes(job_.gradient));
      const auto shard_bytes = 2 * static_cast<double>(size_bytes(accumulator(job_.compute))) / ranks;
      passes.weight_gradient.compute += unit.elems * (unit_bytes + shard_bytes) / rate;
    }
    return passes;
  }

  /// A step takes as long as its passes one after the other, or as a link needs for all that it carries.
  void time(Estimate& made, const Rank& all) {
    std::vector<std::vector<Passes>> passes;
    for (int stage = 0; stage < made.mesh.pp; ++stage) {
      std::vector<Passes>& of_chunks = passes.emplace_back();
      for (const Chunk& chunk : all.chunks(stage)) of_chunks.push_back(passes_of(all, chunk));
    }
    const Machine& machine = job_.machine;
    const auto cost = [&](int rank, const pipeline::Op& op) {
      const auto of = [&](const pipeline::Part& part) -> const Passes& {
        return passes[static_cast<std::size_t>(rank)][static_cast<std::size_t>(part.chunk)];
      };
      switch (op.kind) {
        case pipeline::OpKind::forward:
          return of(op.forward).forward.seconds(machine);
        case pipeline::OpKind::input_backward:
          return of(op.backward).input_gradient.seconds(machine);
        case pipeline::OpKind::weight_backward:
          return of(op.backward).weight_gradient.seconds(machine);
        case pipeline::OpKind::backward:
          return (of(op.backward).input_gradient + of(op.backward).weight_gradient).seconds(machine);
        case pipeline::OpKind::overlapped:
          break;
      }
      const Passes& backward = of(op.backward);
      return overlapped_seconds(of(op.forward).forward, backward.input_gradient + backward.weight_gradient, machine);
    };
    double bubble = 0;
    const double makespan = over_step(made.mesh, [&](const pipeline::Schedule& part) {
      const pipeline::Timeline run = simulate(part, cost, pipeline::TransferModel::instant);
      bubble = std::max(bubble, run.max_bubble());
      return run.makespan;
    });
    const Bytes sent = made.traffic.total();
    const double bounds[] = {makespan, sent.nvlink / machine.nvlink, sent.network / machine.network};
    const double* const longest = std::max_element(std::begin(bounds), std::end(bounds));
    made.limit = static_cast<Limit>(longest - bounds);
    made.step_seconds = *longest + updates_seconds_;
    made.bubble_share = makespan > 0 ? bubble / makespan : 0;
  }

  const Job& job_;
  Schedules schedules_;
  std::map<std::tuple<const pipeline::Schedule*, std::int64_t, std::int64_t>, std::size_t> boundaries_;
  double updates_seconds_ = 0;
};

}  // namespace pleat::inline v0::estimate
