// A rank's program of a pipeline played through: what it holds at most, which units it gathers, and what it sends.
#pragma once

#include <map>
#include <tuple>

#include <pleat/estimate/shards.hpp>
#include <pleat/pipeline/plan.hpp>

namespace pleat::inline v0::estimate {

/// How many micro-batches of each chunk a rank holds at once, at most: places that are reused.
struct Places {
  std::array<int, 2> held{};      ///< from their forward to the pass that makes the gradients of weights
  std::array<int, 2> deferred{};  ///< from an input gradient alone to that of the weights
};
inline Places count_places(const pipeline::Program& program) {
  Places most, now;
  const auto count = [&](std::array<int, 2> Places::*of, int chunk, int change) {
    const auto c = static_cast<std::size_t>(chunk);
    (now.*of)[c] += change;
    (most.*of)[c] = std::max((most.*of)[c], (now.*of)[c]);
  };
  for (const pipeline::Op& op : program.ops) {
    if (op.has_forward()) count(&Places::held, op.forward.chunk, 1);
    if (op.kind == pipeline::OpKind::input_backward) count(&Places::deferred, op.backward.chunk, 1);
    if (op.kind == pipeline::OpKind::weight_backward) count(&Places::deferred, op.backward.chunk, -1);
    if (op.has_weight_gradient()) count(&Places::held, op.backward.chunk, -1);
  }
  return most;
}
/// Forward and backward of a pair run side by side: each has operations of its own.
inline int lanes(const pipeline::Program& program) {
  const bool pairs = std::any_of(program.ops.begin(), program.ops.end(),
                                 [](const pipeline::Op& op) { return op.kind == pipeline::OpKind::overlapped; });
  return pairs ? 2 : 1;
}

/// Tensors that a rank sends to other stages.
inline int sends(const pipeline::Program& program) {
  int count = 0;
  for (const pipeline::Batch& batch : program.batches) {
    for (const pipeline::Transfer& transfer : batch.transfers) count += transfer.is_send;
  }
  return count;
}

/// The units that a pass over a chunk reads, layer by layer, by their numbers in the rank's list.
struct ChunkUses {
  std::vector<std::vector<int>> forward, backward;
};
/// All units of a rank in the order of its chunks' forward passes. A backward pass begins with the head, whose forward
/// is a part of it, and ends without the embedding, whose gradient needs no parameters.
struct RankUnits {
  std::vector<UnitSize> sizes;
  std::vector<ChunkUses> chunks;

  RankUnits(std::span<const Chunk> all, const UnitSizes& of) {
    for (const Chunk& chunk : all) {
      ChunkUses uses;
      const int embedding = chunk.has_embedding ? add(of.embedding) : -1;
      for (int i = 0; i < chunk.layers(); ++i) {
        std::vector<int> units;
        for (const UnitSize& size : i < chunk.dense_layers ? of.dense_layer : of.moe_layer) units.push_back(add(size));
        uses.forward.push_back(units);
        std::rotate(units.begin(), units.begin() + 1, units.end());  // attention last
        uses.backward.insert(uses.backward.begin(), std::move(units));
      }
      if (embedding >= 0) uses.forward.front().insert(uses.forward.front().begin(), embedding);
      if (chunk.has_head) uses.backward.insert(uses.backward.begin(), {add(of.head)});
      chunks.push_back(std::move(uses));
    }
  }

 private:
  int add(const UnitSize& size) {
    sizes.push_back(size);
    return static_cast<int>(sizes.size()) - 1;
  }
};

/// The order in which a rank's program uses its units; the two halves of a pair take turns.
inline std::vector<int> unit_uses(const pipeline::Program& program, const RankUnits& units) {
  std::vector<int> uses;
  const auto append = [&](std::span<const std::vector<int>> steps, std::size_t i) {
    if (i < steps.size()) uses.insert(uses.end(), steps[i].begin(), steps[i].end());
  };
  for (const pipeline::Op& op : program.ops) {
    std::span<const std::vector<int>> forward, backward;
    if (op.has_forward()) forward = units.chunks[static_cast<std::size_t>(op.forward.chunk)].forward;
    if (op.has_input_gradient()) backward = units.chunks[static_cast<std::size_t>(op.backward.chunk)].backward;
    for (std::size_t i = 0; i < std::max(forward.size(), backward.size()); ++i) {
      append(forward, i);
      append(backward, i);
    }
  }
  return uses;
}

/// How often each unit is gathered when units are used in this order: what fsdp::Gatherer does with its slots.
class GatherReplay {
 public:
  GatherReplay(std::span<const UnitSize> units, std::array<int, 2> slots, int prefetch)
      : units_(units),
        prefetch_(static_cast<std::size_t>(prefetch)),
        counts_(units.size()),
        slot_of_(units.size(), -1) {
    for (const Param kind : {Param::dense, Param::expert}) {
      for (int i = 0; i < slots[static_cast<std::size_t>(kind)]; ++i) slots_.push_back({kind});
    }
  }

  /// Gathers of each unit [unit], for units used in the order `uses`.
  std::vector<std::int64_t> run(std::span<const int> uses) {
    find_next_uses(uses);
    for (std::size_t i = 0; i < uses.size(); ++i) {
      const int unit = uses[i];
      if (slot_of(unit) < 0) fetch(furthest(kind_of(unit), -1), unit, i);
      const int held = slot_of(unit);
      if (held >= 0) {
        Slot& slot = slots_[static_cast<std::size_t>(held)];
        slot.last_use = i + 1;
        slot.next_use = next_use_[i];
      }
      for (std::size_t ahead = i + 1; ahead < std::min(uses.size(), i + 1 + prefetch_); ++ahead) {
        if (slot_of(uses[ahead]) >= 0) continue;
        const int free = furthest(kind_of(uses[ahead]), held);
        if (free >= 0 && slots_[static_cast<std::size_t>(free)].next_use < ahead) break;
        fetch(free, uses[ahead], ahead);
      }
    }
    return counts_;
  }

 private:
  static constexpr std::size_t never = ~std::size_t{0};
  struct Slot {
    Param kind = Param::dense;
    int unit = -1;
    std::size_t next_use = never;
    std::size_t last_use = 0;
  };

  Param kind_of(int unit) const { return units_[static_cast<std::size_t>(unit)].kind; }
  int& slot_of(int unit) { return slot_of_[static_cast<std::size_t>(unit)]; }
  void find_next_uses(std::span<const int> uses) {
    next_use_.assign(uses.size(), never);
    std::vector<std::size_t> later(units_.size(), never);
    for (std::size_t i = uses.size(); i-- > 0;) {
      next_use_[i] = later[static_cast<std::size_t>(uses[i])];
      later[static_cast<std::size_t>(uses[i])] = i;
    }
  }
  /// The slot whose unit is needed last, but not `held`; of equals the one used longest ago.
  int furthest(Param kind, int held) const {
    int best = -1;
    for (int i = 0; i < static_cast<int>(slots_.size()); ++i) {
      const Slot& slot = slots_[static_cast<std::size_t>(i)];
      if (slot.kind != kind || i == held) continue;
      const auto key = [&](int of) {
        const Slot& s = slots_[static_cast<std::size_t>(of)];
        return std::pair{s.next_use, ~s.last_use};
      };
      if (best < 0 || key(i) > key(best)) best = i;
    }
    return best;
  }
  /// A group of one has no slots: its shards are used in place.
  void fetch(int into, int unit, std::size_t next_use) {
    if (into < 0) return;
    Slot& slot = slots_[static_cast<std::size_t>(into)];
    if (slot.unit >= 0) slot_of(slot.unit) = -1;
    slot.unit = unit;
    slot.next_use = next_use;
    slot_of(unit) = into;
    ++counts_[static_cast<std::size_t>(unit)];
  }

  std::span<const UnitSize> units_;
  std::size_t prefetch_;
  std::vector<std::int64_t> counts_;  // [units]
  std::vector<int> slot_of_;          // [units], -1 for none
  std::vector<Slot> slots_;
  std::vector<std::size_t> next_use_;  // [uses]
};

/// Schedules by kind, ranks and micro-batches, each made once.
class Schedules {
 public:
  /// The schedule, made when it is first asked for.
  const pipeline::Schedule& get(pipeline::Kind kind, int ranks, int micro_batches) {
    const auto key = std::tuple{kind, ranks, micro_batches};
    const auto found = made_.find(key);
    if (found != made_.end()) return found->second;
    return made_.emplace(key, pipeline::make_schedule(kind, ranks, micro_batches)).first->second;
  }
  /// As many micro-batches as say all about a step of `micro_batches`: all, or few and as many over a multiple of
  /// `period`.
  static std::int64_t enough(int ranks, std::int64_t micro_batches) {
    return std::min(micro_batches, 2 * period(ranks) + micro_batches % period(ranks));
  }
  /// Micro-batches that, added to enough of them, do what the same number before did.
  static std::int64_t period(int ranks) { return std::int64_t{2} * ranks; }
  /// f(schedule) for a step of `micro_batches`, where f grows by as much with each period that a long step has more.
  template <class F>
  auto over_step(pipeline::Kind kind, int ranks, std::int64_t micro_batches, F f) {
    const std::int64_t few = enough(ranks, micro_batches);
    const auto last = f(get(kind, ranks, static_cast<int>(few)));
    if (micro_batches == few) return last;
    const double periods = static_cast<double>(micro_batches - few) / static_cast<double>(period(ranks));
    return last + periods * (last - f(get(kind, ranks, static_cast<int>(few - period(ranks)))));
  }
  /// Of all schedules that were made.
  std::size_t ops() const {
    std::size_t count = 0;
    for (const auto& [key, schedule] : made_) {
      for (const pipeline::Program& program : schedule.programs) count += program.ops.size();
    }
    return count;
  }

 private:
  std::map<std::tuple<pipeline::Kind, int, int>, pipeline::Schedule> made_;
};

}  // namespace pleat::inline v0::estimate
